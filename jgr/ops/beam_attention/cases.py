# SPDX-License-Identifier: Apache-2.0
"""Shapes of beam attention and of the re-ordering of beam keys and values, for tests, compile checks and timing.

lengths: the prompt tokens of each request; slots: the tokens generated so far; widths: the beams of each request, by
default as many as there are rows.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jgr.ops.beam_attention import beam_attention, reorder_beam_kv
from jgr.ops.testing import Case, OpCases, Work

_BENCH, _COMPILE = frozenset({"bench"}), frozenset({"compile"})
_QWEN3 = dict(slots=2, heads=16, kv_heads=8, dim=128)  # of 0.6 and 1.7 billion parameters

CASES = (
    Case("greedy", dict(tokens=5, lengths=(5,), width=1, slots=1, heads=2, kv_heads=1, dim=16)),
    Case("ragged", dict(tokens=19, lengths=(19, 7, 1), width=5, slots=2, heads=4, kv_heads=2, dim=16)),
    Case("no_prompt", dict(tokens=4, lengths=(0, 4), width=3, slots=2, heads=2, kv_heads=2, dim=32)),
    Case("deep", dict(tokens=33, lengths=(33, 20), width=8, slots=7, heads=6, kv_heads=2, dim=16)),
    Case(
        "widths",
        dict(tokens=70, lengths=(70, 64), width=9, slots=2, heads=4, kv_heads=2, dim=48, widths=(4, 9)),
    ),
    Case("qwen3_0.6b_1k_w128", dict(tokens=1024, lengths=(1024,), width=128, **_QWEN3), _BENCH | _COMPILE),
    Case("qwen3_0.6b_1k_w512", dict(tokens=1024, lengths=(1024,), width=512, **_QWEN3), _BENCH | _COMPILE),
    Case("qwen3_0.6b_3k_w256", dict(tokens=3072, lengths=(3072,), width=256, **_QWEN3), _BENCH),
    Case(
        "qwen3_0.6b_5k_b8_w256",
        dict(tokens=5000, lengths=(5000, 4000, 3000, 2000, 1000, 500, 60, 1), width=256, **_QWEN3),
        _COMPILE,
    ),
    Case(
        "qwen2_0.5b_w128",
        dict(tokens=700, lengths=(700,), width=128, slots=2, heads=14, kv_heads=2, dim=64),
        _COMPILE,
    ),
    Case(
        "head_32_f16",
        dict(tokens=512, lengths=(512,), width=64, slots=2, heads=8, kv_heads=8, dim=32, dtype="float16"),
        _COMPILE,
    ),
    Case(
        "head_96",
        dict(tokens=512, lengths=(512,), width=64, slots=2, heads=32, kv_heads=32, dim=96),
        _COMPILE,
    ),
    Case(
        "head_256_deep",
        dict(tokens=512, lengths=(512,), width=256, slots=7, heads=8, kv_heads=2, dim=256),
        _COMPILE,
    ),
    Case(
        "f32",
        dict(
            tokens=512, lengths=(512,) * 4, width=128, slots=2, heads=8, kv_heads=4, dim=64, dtype="float32"
        ),
        _COMPILE,
    ),
    Case(
        "f32_head_256",
        dict(tokens=512, lengths=(512,), width=128, slots=2, heads=8, kv_heads=4, dim=256, dtype="float32"),
        _COMPILE,
    ),
)

REORDER_CASES = (
    Case("one_row", dict(layers=1, batch=1, slots=1, width=1, kv_heads=1, dim=16)),
    Case("layers", dict(layers=2, batch=3, slots=2, width=13, kv_heads=3, dim=16)),
    Case(
        "qwen3_0.6b_w512",
        dict(layers=28, batch=1, slots=2, width=512, kv_heads=8, dim=128),
        _BENCH | _COMPILE,
    ),
)


def _shapes(case: Case, dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
    s = case.shape
    batch = len(s["lengths"])
    context = jax.ShapeDtypeStruct((batch, s["kv_heads"], s["tokens"], s["dim"]), dtype)
    own = jax.ShapeDtypeStruct((batch, s["slots"], s["width"], s["kv_heads"], s["dim"]), dtype)
    shapes = {
        "q": jax.ShapeDtypeStruct((batch, s["width"], s["heads"], s["dim"]), dtype),
        "context_k": context,
        "context_v": context,
        "lengths": jax.ShapeDtypeStruct((batch,), jnp.int32),
        "beam_k": own,
        "beam_v": own,
        "ancestors": jax.ShapeDtypeStruct((batch, s["slots"], s["width"]), jnp.int32),
    }
    return shapes | ({"widths": jax.ShapeDtypeStruct((batch,), jnp.int32)} if "widths" in s else {})


def _integers(case: Case, rng: np.random.Generator) -> dict[str, npt.NDArray[Any]]:
    s = case.shape
    ancestors = rng.integers(0, s["width"], (len(s["lengths"]), s["slots"], s["width"]))
    ancestors[:, -1] = np.arange(s["width"])
    given = {"lengths": np.array(s["lengths"]), "ancestors": ancestors}
    return given | ({"widths": np.array(s["widths"])} if "widths" in s else {})


def _work(case: Case, dtype: Any) -> Work:
    s, size = case.shape, jnp.dtype(dtype).itemsize
    seen = sum(s["lengths"]) + len(s["lengths"]) * s["slots"]  # keys of a beam, over the requests
    queries = len(s["lengths"]) * s["width"] * s["heads"] * s["dim"]
    own = len(s["lengths"]) * s["slots"] * s["width"] * s["kv_heads"] * s["dim"]
    flops = 4 * s["width"] * s["heads"] * s["dim"] * seen
    values = 2 * queries + 2 * sum(s["lengths"]) * s["kv_heads"] * s["dim"] + 2 * own
    return Work(flops, values * size)


def _reorder_shapes(case: Case, dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
    s = case.shape
    kv = tuple(s[axis] for axis in ("layers", "batch", "slots", "width", "kv_heads", "dim"))
    return {
        "kv": jax.ShapeDtypeStruct(kv, dtype),
        "parents": jax.ShapeDtypeStruct((s["batch"], s["width"]), jnp.int32),
    }


def _parents(case: Case, rng: np.random.Generator) -> dict[str, npt.NDArray[Any]]:
    s = case.shape
    return {"parents": np.sort(rng.integers(0, s["width"], (s["batch"], s["width"])), axis=1)}


def _reorder_work(case: Case, dtype: Any) -> Work:
    return Work(0, 2 * jnp.dtype(dtype).itemsize * float(np.prod(list(case.shape.values()))))


OP = OpCases(
    "beam_attention", beam_attention, CASES, _shapes, _integers, _work, timed=("pallas", "native", "xla")
)
REORDER = OpCases("reorder_beam_kv", reorder_beam_kv, REORDER_CASES, _reorder_shapes, _parents, _reorder_work)
