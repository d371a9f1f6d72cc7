# SPDX-License-Identifier: Apache-2.0
"""Shapes of the heads before an attention, for tests, compile checks and timing."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jgr.ops.testing import Case, OpCases, Work
from jgr.ops.turned_heads import turned_heads

_BENCH, _COMPILE = frozenset({"bench"}), frozenset({"compile"})
_QWEN3 = dict(heads=16, kv_heads=8, head=128, with_=("q_norm", "k_norm"))

CASES = (
    Case("prompt", dict(batch=2, tokens=37, heads=4, kv_heads=2, head=32, with_=("q_norm", "k_norm"))),
    Case("beams", dict(batch=2, tokens=5, heads=3, kv_heads=1, head=64, with_=("bias",))),
    Case("plain", dict(batch=1, tokens=33, heads=2, kv_heads=2, head=32, with_=())),
    Case("qwen3_1.7b_b8_1k", dict(batch=8, tokens=1000, **_QWEN3), _BENCH | _COMPILE),
    Case("qwen3_1.7b_w256", dict(batch=1, tokens=256, **_QWEN3), _BENCH | _COMPILE),
    Case(
        "qwen2_f32",
        dict(batch=2, tokens=500, heads=14, kv_heads=2, head=64, with_=("bias",), dtype="float32"),
        _COMPILE,
    ),
)


def _shapes(case: Case, dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
    s = case.shape
    batch, tokens, dim = s["batch"], s["tokens"], s["head"]
    width = (s["heads"] + 2 * s["kv_heads"]) * dim
    turn = jax.ShapeDtypeStruct((batch, tokens, 1, dim // 2), jnp.float32)
    optional = {"bias": width, "q_norm": dim, "k_norm": dim}
    return {
        "x": jax.ShapeDtypeStruct((batch, tokens, width), dtype),
        "cos": turn,
        "sin": turn,
        **{name: jax.ShapeDtypeStruct((optional[name],), dtype) for name in s["with_"]},
    }


def _turns(case: Case, rng: np.random.Generator) -> dict[str, npt.NDArray[Any]]:
    angles = rng.uniform(0, 6, _shapes(case, np.float32)["cos"].shape)
    return {"cos": np.cos(angles), "sin": np.sin(angles)}


def _options(case: Case) -> dict[str, Any]:
    s = case.shape
    return {
        "kv_heads": s["kv_heads"],
        "head": s["head"],
        "eps": 1e-6,
    }


def _work(case: Case, dtype: Any) -> Work:
    numbers = float(np.prod(_shapes(case, dtype)["x"].shape))
    return Work(10 * numbers, 2 * numbers * np.dtype(dtype).itemsize)


OP = OpCases(
    "turned_heads",
    turned_heads,
    CASES,
    _shapes,
    _turns,
    _work,
    _options,
    timed=("pallas", "reference"),
)
