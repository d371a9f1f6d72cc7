# SPDX-License-Identifier: Apache-2.0
"""Shapes of the sum with its norm for tests, compile checks and timing."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jgr.ops.add_norm import add_norm
from jgr.ops.testing import Case, OpCases, Work

_BENCH, _COMPILE = frozenset({"bench"}), frozenset({"compile"})

CASES = (
    Case("one_row", dict(rows=1, width=16)),
    Case("pieces", dict(rows=37, width=896)),
    Case("no_sum", dict(rows=5, width=48, is_sum=False)),
    Case("qwen3_1.7b_8k", dict(rows=8000, width=2048), _BENCH | _COMPILE),
    Case("wide_f32", dict(rows=1000, width=5120, dtype="float32"), _COMPILE),
)


def _shapes(case: Case, dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
    rows, width = case.shape["rows"], case.shape["width"]
    whole = jax.ShapeDtypeStruct((rows, width), dtype)
    given = {"x": whole, "scale": jax.ShapeDtypeStruct((width,), dtype)}
    return given | ({"added": whole} if case.shape.get("is_sum", True) else {})


def _work(case: Case, dtype: Any) -> Work:
    numbers = case.shape["rows"] * case.shape["width"]
    return Work(6.0 * numbers, 4.0 * numbers * np.dtype(dtype).itemsize)


OP = OpCases(
    "add_norm",
    add_norm,
    CASES,
    _shapes,
    lambda case, rng: {},
    _work,
    lambda case: {"eps": 1e-6} | ({} if case.shape.get("is_sum", True) else {"added": None}),
    timed=("pallas", "reference"),
)
