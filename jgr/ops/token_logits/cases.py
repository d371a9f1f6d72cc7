# SPDX-License-Identifier: Apache-2.0
"""Shapes of logits for tests and timing: `rows` hidden states, and a vocabulary of `tokens`."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jgr.ops.testing import Case, OpCases, Work
from jgr.ops.token_logits import token_logits

_BENCH = frozenset({"bench"})
CASES = (
    Case("one_row", dict(rows=(1,), tokens=100, size=64)),
    Case("panels", dict(rows=(3, 13), tokens=1037, size=96)),
    Case("few_tokens", dict(rows=(2,), tokens=16, size=32)),
    Case("odd_size", dict(rows=(5,), tokens=40, size=47)),
    Case("beams_25k", dict(rows=(1, 128), tokens=25_000, size=256), _BENCH),
)


def _shapes(case: Case, dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
    rows, tokens, size = (case.shape[name] for name in ("rows", "tokens", "size"))
    return {
        "hidden": jax.ShapeDtypeStruct((*rows, size), dtype),
        "head": jax.ShapeDtypeStruct((tokens, size), dtype),
    }


def _work(case: Case, dtype: Any) -> Work:
    rows, tokens, size = np.prod(case.shape["rows"]), case.shape["tokens"], case.shape["size"]
    read = (rows + tokens) * size * np.dtype(dtype).itemsize
    return Work(float(2 * rows * tokens * size), float(read + 4 * rows * tokens))


OP = OpCases(
    "token_logits",
    token_logits,
    CASES,
    _shapes,
    lambda case, rng: {},
    _work,
    timed=("reference",),
)
