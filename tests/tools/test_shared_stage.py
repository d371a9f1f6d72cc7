# SPDX-License-Identifier: Apache-2.0
"""The shared stage in Mosaic GPU and in Triton against a softmax in float64, each by its own interpreter; and that what
is compiled of them is the op that Pallas' kernel computes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jgr.ops.beam_attention.cases import OP
from tools import compile_gpu, machine_code, shared_stage
from tools.machine_code import Code
from tools.shared_stage import NOTHING, Tiles, mosaic

ROOT = Path(__file__).resolve().parents[2]
COMPILER = ROOT / "build" / f"gpu-compile-{Path(sys.prefix).name}"
"""Where `make installed` puts what compiles for a GPU, Triton with it."""
TILES = Tiles(rows=64, tokens=64, splits=2, stages=2)
ROWS, ROOM, DIM = 128, 256, 64
LENGTHS = (200, 64)  # a part that ends within a block, and one that is empty
Arrays = dict[str, np.ndarray]


def drawn() -> Arrays:
    rng = np.random.default_rng(0)
    shapes = {
        "q": (len(LENGTHS), 2, ROWS, DIM),
        "k": (len(LENGTHS), ROOM, 2, DIM),
        "v": (len(LENGTHS), ROOM, 2, DIM),
    }
    arrays = {name: rng.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}
    return arrays | {"lengths": np.array(LENGTHS, np.int32)}


def assert_right(arrays: Arrays, out: np.ndarray, lse: np.ndarray) -> None:
    """The parts, merged, are the softmax over the tokens before each request's length; an empty part is nothing."""
    q, k, v = (arrays[name].astype(np.float64) for name in "qkv")
    scores = np.einsum("bkrd,btkd->bkrt", q, k) / np.sqrt(DIM)
    weights = np.where(np.arange(ROOM) < arrays["lengths"][:, None, None, None], np.exp(scores), 0.0)
    exact = np.einsum("bkrt,btkd->bkrd", weights, v) / weights.sum(-1, keepdims=True)
    of_parts = np.exp2(lse.astype(np.float64))
    merged = (out * of_parts[..., None]).sum(0) / of_parts.sum(0)[..., None]
    assert np.linalg.norm(merged - exact) < 1e-3 * np.linalg.norm(exact)
    np.testing.assert_allclose(of_parts.sum(0), weights.sum(-1), rtol=1e-5)
    assert (lse[1, 1:] == np.float32(NOTHING)).all() and (out[1, 1:] == 0).all()


def test_mosaic_computes_the_softmax_of_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads, barriers, masks and stores as they are; jax interprets neither wgmma nor the layouts of its operands."""
    monkeypatch.setattr(
        mosaic, "product", lambda a, b, shape: jnp.dot(a[...], b[...].T, preferred_element_type=jnp.float32)
    )
    monkeypatch.setattr(
        mosaic, "plus_product", lambda out, a, b: out + jnp.dot(a, b[...], preferred_element_type=jnp.float32)
    )
    monkeypatch.setattr(plgpu, "layout_cast", lambda x, layout: x)
    monkeypatch.setattr(
        plgpu,
        "broadcasted_iota",
        lambda dtype, shape, axis, layout: jax.lax.broadcasted_iota(dtype, shape, axis),
    )
    arrays = drawn()
    given = (jnp.asarray(arrays[name]) for name in ("q", "k", "v", "lengths"))
    out, lse = mosaic.shared_stage(*given, TILES, interpret=_interpreter())
    assert_right(arrays, np.asarray(out), np.asarray(lse))


def _interpreter() -> Any:
    """That of Mosaic's kernels, which jax 0.10 has in a private module."""
    try:
        return plgpu.InterpretGPUParams()
    except AttributeError:
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

        return InterpretGPUParams()


@pytest.mark.parametrize(
    ("dtype", "rows", "problem"),
    [
        (np.float16, 128, None),
        (np.float32, 128, "queries are float32"),
        (np.float16, 96, "of (96, 64) rows and"),
    ],
)
def test_mosaic_says_what_it_cannot_run(dtype: Any, rows: int, problem: str | None) -> None:
    q = jax.ShapeDtypeStruct((1, 2, rows, 64), dtype)
    found = mosaic.supports(q, TILES)
    assert found is None if problem is None else found is not None and found.startswith(problem)


@pytest.mark.gpu_compiler
def test_triton_computes_the_softmax_of_each_part(tmp_path: Path) -> None:
    arrays = drawn()
    parts = (TILES.splits, len(LENGTHS), 2, ROWS)
    results = {"out": np.zeros((*parts, DIM), np.float32), "lse": np.zeros(parts, np.float32)}
    np.savez(tmp_path / "in.npz", **arrays, **results)
    path = os.pathsep.join([str(ROOT), str(COMPILER)])
    command = [
        sys.executable,
        "-m",
        "tests.tools.triton_interpreted",
        tmp_path / "in.npz",
        tmp_path / "out.npz",
    ]
    subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"}, cwd=ROOT, check=True
    )
    with np.load(tmp_path / "out.npz") as got:
        assert_right(arrays, got["out"], got["lse"])


def test_all_three_dialects_are_compiled_for_one_call() -> None:
    pallas, *others = compile_gpu.dialects()
    assert [p.case for p in (pallas, *others)] == ["pallas_triton", "mosaic_gpu", "jax_triton"]
    assert all(p.kernel for p in others)
    q, k, _, lengths = shared_stage.arguments()
    call = OP.shapes(shared_stage.CASE, jnp.bfloat16)
    batch, width, heads, dim = call["q"].shape
    kv_heads, tokens = call["context_k"].shape[1:3]
    assert q.shape == (batch, kv_heads, width * heads // kv_heads, dim)
    assert k.shape == (batch, tokens, kv_heads, dim) and lengths.shape == (batch,)


def test_a_dialect_that_is_missing_fails(tmp_path: Path) -> None:
    """Here jax-triton is not installed: that is an error, and no reason to leave its program out."""
    program = next(p for p in compile_gpu.dialects() if p.case == "jax_triton")
    outcome = compile_gpu.attempt(program, lambda p: p.call(*p.arguments), tmp_path)
    assert "jax_triton" in outcome.error


PTXAS = """ptxas info    : Compiling entry function 'merge' for 'sm_90a'
    0 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers
ptxas info    : Compiling entry function 'attend' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers
"""
LISTING = """
\t.section\t.text.merge,"ax",@progbits
.text.merge:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
\t.section\t.text.attend,"ax",@progbits
.text.attend:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 UTMALDG.5D [UR8], [UR6], desc[URZ] ;
        /*0020*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], !UPT ;
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24 ;
"""


def test_the_code_of_one_kernel_is_counted() -> None:
    attend = machine_code.parse("attend", PTXAS, LISTING, 2048)
    assert attend == Code(168, 0, 2048, Counter(LDC=1, UTMALDG=1, HGMMA=2, all=4))
    assert str(attend) == "168 regs 2 KiB, 2 wgmma, 1 TMA of 4 instructions"
    assert attend.problem == ""
    assert machine_code.parse("merge", PTXAS, LISTING, 0).problem == "register spilling: 40 bytes"
    assert attend._replace(counts=Counter(all=4)).problem == "there is no wgmma in it"
    with pytest.raises(ValueError, match="names no registers"):
        machine_code.parse("other", PTXAS, LISTING, 0)


def test_a_kernel_that_left_nothing_fails(tmp_path: Path) -> None:
    old = tmp_path / "old.ptx"
    old.write_text(".entry attend(")
    with pytest.raises(ValueError, match="0 kernels named attend"):
        machine_code.newest(tmp_path, {old}, "attend")
