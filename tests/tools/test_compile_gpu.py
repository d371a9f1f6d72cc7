# SPDX-License-Identifier: Apache-2.0
"""The compile check: what it compiles, that all of it lowers for a GPU from here, and that it can fail.

Compiling itself needs the CUDA plugin, which tests run without: `make compile-gpu` is that part, with two controls.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import pytest

from jgr.ops.beam_attention import beam_attention
from jgr.ops.beam_attention.cases import OP, REORDER
from jgr.ops.testing import all_ops
from tools import compile_gpu, machine_code
from tools.compile_gpu import Outcome, Program
from tools.compiled_text import large_copies, matrices_apart

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


STACKED = """HloModule jit_rank, is_scheduled=true, entry_computation_layout={(bf16[28,2048,6144]{2,1,0})->bf16[8]{0}}

%copied (param_0: bf16[28,2048,6144], param_1: s32[]) -> bf16[1,2048,6144] {
  %param_0 = bf16[28,2048,6144]{2,1,0} parameter(0)
  %param_1 = s32[] parameter(1)
  %constant = s32[] constant(0)
  %at = s32[] add(%param_1, %constant)
  %slice = bf16[1,2048,6144]{2,1,0} dynamic-slice(%param_0, %at, %constant), dynamic_slice_sizes={1,2048,6144}
  ROOT %copy.3 = bf16[1,2048,6144]{2,1,0} copy(%slice)
}

%turned (param_0.1: bf16[2048,6144]) -> bf16[6144,2048] {
  %param_0.1 = bf16[2048,6144]{1,0} parameter(0)
  ROOT %transpose = bf16[6144,2048]{1,0} transpose(%param_0.1), dimensions={1,0}
}

%body (state: (s32[], bf16[28,2048,6144])) -> (s32[], bf16[28,2048,6144]) {
  %state = (s32[], bf16[28,2048,6144]{2,1,0}) parameter(0)
  %weights = bf16[28,2048,6144]{2,1,0} get-tuple-element(%state), index=1
  %fusion = bf16[1,2048,6144]{2,1,0} fusion(%weights, %at), kind=kLoop, calls=%copied
  %out = f32[2048,2048]{1,0} custom-call(%fusion), custom_call_target="__cublas$gemm"
  ROOT %tuple = (s32[], bf16[28,2048,6144]{2,1,0}) tuple(%at, %weights)
}

ENTRY %main (weights.1: bf16[28,2048,6144]) -> bf16[8] {
  %weights.1 = bf16[28,2048,6144]{2,1,0} parameter(0)
  %copy-start = (bf16[2500000]{0}, bf16[2500000]{0}, u32[]) copy-start(%flat)
  %few.1 = f32[2500000]{0} slice(%other), slice={[0:2500000]}
  %fusion.1 = bf16[6144,2048]{1,0} fusion(%one), kind=kLoop, calls=%turned
  ROOT %sum = bf16[8]{0} add(%a, %b)
}
"""
APART = STACKED.replace("copy(%slice)", "negate(%slice)").replace("copy-start(%flat)", "infeed(%flat)")


class _Compiled(NamedTuple):
    text: str = ""

    def memory_analysis(self) -> None:
        return None

    def as_text(self) -> str:
        return self.text


def _compile(program: Program) -> _Compiled:
    if program.arguments[0] == "too large":
        raise ValueError("RESOURCE_EXHAUSTED: Shared memory size limit exceeded:\n  requested 589824")
    return _Compiled({"stacked": STACKED, "apart": APART, "small": SMALL}.get(program.arguments[0], ""))


def test_a_large_copy_is_found_by_what_the_compiled_program_moves() -> None:
    """In loops too, in fusions of copies alone; neither small ones nor a transposition nor a fusion's inside count."""
    assert large_copies(STACKED) == [
        "fusion bf16[1,2048,6144]{2,1,0}",
        "copy-start (bf16[2500000]{0}, bf16[2500000]{0}, u32[])",
    ]
    assert large_copies(APART) == []


BESIDE = """HloModule jit_recommend

%wrapped_concatenate (param_0: bf16[2048,6144], param_1: bf16[2048,6144]) -> bf16[2048,12288] {
  %param_0 = bf16[2048,6144]{1,0} parameter(0)
  %param_1 = bf16[2048,6144]{1,0} parameter(1)
  ROOT %concatenate = bf16[2048,12288]{1,0} concatenate(%param_0, %param_1), dimensions={1}
}

ENTRY %main (gate: bf16[2048,6144], up: bf16[2048,6144]) -> bf16[2048,12288] {
  %gate = bf16[2048,6144]{1,0} parameter(0)
  %up = bf16[2048,6144]{1,0} parameter(1)
  %made = bf16[2048,6144]{1,0} custom-call(%gate, %up), custom_call_target="kernel"
  %beside = bf16[2048,12288]{1,0} fusion(%gate, %up), kind=kLoop, calls=%wrapped_concatenate
  ROOT %of_what_is_made = bf16[2048,12288]{1,0} fusion(%made, %up), kind=kLoop, calls=%wrapped_concatenate
}
"""


def test_weights_that_are_put_side_by_side_are_a_copy() -> None:
    assert large_copies(BESIDE) == ["beside bf16[2048,12288]{1,0}"]


SMALL = """HloModule jit_rank

%gemm_fusion_dot.1_computation (parameter_0: bf16[8,1024], parameter_1: s8[1024,3072]) -> bf16[8,3072] {
  ROOT %dot = bf16[8,3072]{1,0} dot(%parameter_0, %parameter_1)
}

%fused_convert (param_0: s8[1024,3072]) -> bf16[1024,3072] {
  ROOT %convert = bf16[1024,3072]{1,0} convert(%param_0)
}

ENTRY %main (p: s8[1024,3072], q: u8[3072,1024]) -> bf16[8,3072] {
  ROOT %dot = bf16[8,3072]{1,0} fusion(%p), kind=kCustom, calls=%gemm_fusion_dot.1_computation
}
"""


def test_a_matrix_in_8_bits_that_is_made_floats_apart_from_its_product_is_found() -> None:
    assert matrices_apart(SMALL) == 1
    assert matrices_apart(APART) == matrices_apart(SMALL.replace("%fused_convert", "%gemm_fusion_dot.2")) == 0


@pytest.mark.parametrize(
    ("argument", "refused", "error"),
    [
        ("fits", "", ""),
        ("too large", "", "RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 589824"),
        ("too large", "Shared memory size", ""),
        ("too large", "spilling", "must be refused with 'spilling', but: RESOURCE_EXHAUSTED"),
        ("fits", "Shared memory size", "must be refused with 'Shared memory size', but: was compiled"),
        ("stacked", "", "2 copies above 10 MB: fusion bf16[1,2048,6144]"),
        ("stacked", "above 10 MB", ""),
        ("apart", "", ""),
        ("small", "", "1 matrices in 8 bits are read outside their products, there should be 0"),
    ],
)
def test_a_refusal_is_reported_and_a_control_must_be_refused(
    argument: str, refused: str, error: str, tmp_path: Path
) -> None:
    program = Program("op", "case", lambda x: x, (argument,), refused)
    outcome = compile_gpu.attempt(program, _compile, tmp_path)
    assert outcome.error.startswith(error)
    assert bool(outcome.error) == bool(error)
    assert outcome.copies == (2 if argument == "stacked" else 0)
    op = compile_gpu.attempt(program._replace(is_op=True, refused=""), _compile, tmp_path)
    assert op.copies == 0


def test_the_engine_holds_layers_apart_and_a_control_in_a_stack() -> None:
    def layers(program: Program) -> list[Any]:
        given = program.arguments[0]
        return [getattr(given, name, None) for name in ("layers", "plain")]

    *_, control = compile_gpu.controls()
    assert [type(x).__name__ for x in layers(control)] == ["LayerParams", "NoneType"]
    generating = [p for p in compile_gpu.engine() if p.name in ("recommend", "rank", "packed_rank")]
    assert len(generating) == 5 and not any(program.is_op for program in generating)
    for program in generating:
        assert any(isinstance(x, tuple) and len(x) == compile_gpu.LAYERS for x in layers(program)), (
            program.case
        )


def test_the_controls_are_the_real_kernel_with_impossible_tiles() -> None:
    assert [(p.case, p.refused) for p in compile_gpu.controls()] == [
        ("shared_memory", "Shared memory size limit exceeded"),
        ("registers", "register spilling"),
        ("copies", "above 10 MB"),
    ]


def test_the_table_shows_failures() -> None:
    outcomes = [
        Outcome("op", "a", 1.25, 2_000_000, 0, "op 96 KiB", ""),
        Outcome("op", "bb", 0.5, 0, 3, "", "spilt"),
    ]
    assert compile_gpu.table(outcomes).splitlines() == [
        "program  case  s    temp MB  copies  registers and shared memory",
        "op       a     1.2  2.0      0       op 96 KiB",
        "op       bb    0.5  0.0      3       FAILED: spilt",
    ]


def test_shared_memory_is_read_from_the_compilers_dump(tmp_path: Path) -> None:
    dumped = tmp_path / "module_0001.jit_f.thunk_sequence.txt"
    dumped.write_text(
        "001: kCustomKernel [source | next=002 (1)] attend grid: [8, 16, 1] threads: [256, 1, 1]  "
        "shared_memory: 98304 bytes\n"
        "002: kCustomKernel [sink] loop_fusion grid: [1] threads: [8, 1, 1]  shared_memory: 0 bytes\n"
    )
    assert machine_code.pallas_kernels({dumped}) == "attend 96 KiB"
