# SPDX-License-Identifier: Apache-2.0
"""The compile check: what it compiles, that all of it lowers for a GPU from here, and that it can fail.

Compiling itself needs the CUDA plugin, which tests run without: `make compile-gpu` is that part, with two controls.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jgr.ops.beam_attention import beam_attention
from jgr.ops.beam_attention.cases import OP, REORDER
from jgr.ops.testing import all_ops
from tools import compile_gpu
from tools.compile_gpu import Outcome, Program

# jax 0.11 says at each lowering that the dialect is deprecated; it is the one that both lines compile.
TRITON = pytest.mark.filterwarnings("ignore:.*Triton:DeprecationWarning")


def test_every_op_with_a_kernel_is_compiled() -> None:
    names = {(p.name, p.case) for p in compile_gpu.kernels(all_ops())}
    assert {("beam_attention", case.name) for case in OP.tagged("compile")} <= names
    assert ("reorder_beam_kv", "qwen3_0.6b_w512") in names


@TRITON
@pytest.mark.parametrize("op", [OP, REORDER], ids=lambda op: op.name)
def test_auto_takes_the_kernel_on_a_gpu(op: Any) -> None:
    for program in list(compile_gpu.kernels([op]))[:3]:
        text = compile_gpu.lower(program.call, program.arguments).as_text()
        assert "__gpu$xla.gpu.triton" in text, program.case
        assert f'name = "{op.name}"' in text


@TRITON
def test_the_engine_lowers_with_the_kernel_inside() -> None:
    programs = {p.name: p for p in compile_gpu.engine()}
    assert programs.keys() == {"recommend", "rank", "packed_rank", "climber", "hstu"}
    text = compile_gpu.lower(programs["rank"].call, programs["rank"].arguments).as_text()
    assert "__gpu$xla.gpu.triton" in text


@TRITON
def test_on_a_gpu_what_the_kernel_cannot_run_falls_to_xla() -> None:
    case = OP.tagged("compile")[0]
    shapes = OP.shapes(case, jnp.bfloat16)
    shapes["beam_k"] = shapes["beam_k"].update(dtype=jnp.float32)  # type: ignore[no-untyped-call]
    text = compile_gpu.lower(lambda x: beam_attention(**x), [shapes]).as_text()
    assert "triton" not in text


class _Compiled:
    def memory_analysis(self) -> None:
        return None


def _compile(program: Program) -> _Compiled:
    if program.arguments[0] == "too large":
        raise ValueError("RESOURCE_EXHAUSTED: Shared memory size limit exceeded:\n  requested 589824")
    return _Compiled()


@pytest.mark.parametrize(
    ("argument", "refused", "error"),
    [
        ("fits", "", ""),
        ("too large", "", "RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 589824"),
        ("too large", "Shared memory size", ""),
        ("too large", "spilling", "must be refused with 'spilling', but: RESOURCE_EXHAUSTED"),
        ("fits", "Shared memory size", "must be refused with 'Shared memory size', but: was compiled"),
    ],
)
def test_a_refusal_is_reported_and_a_control_must_be_refused(
    argument: str, refused: str, error: str, tmp_path: Path
) -> None:
    program = Program("op", "case", lambda x: x, (argument,), refused)
    outcome = compile_gpu.attempt(program, _compile, tmp_path)
    assert outcome.error.startswith(error)
    assert bool(outcome.error) == bool(error)


def test_the_controls_are_the_real_kernel_with_impossible_tiles() -> None:
    assert [(p.case, p.refused) for p in compile_gpu.controls()] == [
        ("shared_memory", "Shared memory size limit exceeded"),
        ("registers", "register spilling"),
    ]


def test_the_table_shows_failures() -> None:
    outcomes = [
        Outcome("op", "a", 1.25, 2_000_000, "op 96 KiB", ""),
        Outcome("op", "bb", 0.5, 0, "", "spilt"),
    ]
    assert compile_gpu.table(outcomes).splitlines() == [
        "program  case  s    temp MB  registers and shared memory",
        "op       a     1.2  2.0      op 96 KiB",
        "op       bb    0.5  0.0      FAILED: spilt",
    ]


def test_shared_memory_is_read_from_the_compilers_dump(tmp_path: Path) -> None:
    dumped = tmp_path / "module_0001.jit_f.thunk_sequence.txt"
    dumped.write_text(
        "001: kCustomKernel [source | next=002 (1)] attend grid: [8, 16, 1] threads: [256, 1, 1]  "
        "shared_memory: 98304 bytes\n"
        "002: kCustomKernel [sink] loop_fusion grid: [1] threads: [8, 1, 1]  shared_memory: 0 bytes\n"
    )
    assert compile_gpu._kernels({dumped}) == "attend 96 KiB"
