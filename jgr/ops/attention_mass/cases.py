# SPDX-License-Identifier: Apache-2.0
"""Shapes of attention mass for tests and timing: prompts as in the cases of segment attention."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jgr.ops.attention_mass import attention_mass
from jgr.ops.segment_attention.cases import OP as SEGMENTS
from jgr.ops.segment_attention.cases import batch, items_first, tokens_of, user_first
from jgr.ops.testing import Case, OpCases, Work
from jgr.prompt.layouts import LAYOUTS

_BENCH, _COMPILE = frozenset({"bench"}), frozenset({"compile"})
_SMALL = dict(heads=4, kv_heads=2, dim=32)
_QWEN3 = dict(heads=16, kv_heads=8, dim=128)
FIELDS = ("request", "segment", "kind", "order")

CASES = (
    Case("one_token", dict(layout="causal", prompts=((user_first(1, ()),),), **_SMALL)),
    Case(
        "packed",
        dict(
            layout="causal",
            prompts=((user_first(9, (3, 1, 4), 2), user_first(30, (5,) * 4, 3)), (user_first(1, (2,), 1),)),
            **_SMALL,
        ),
    ),
    Case("items_first", dict(layout="item_prefix", prompts=((items_first(20, (5,) * 9, 3),),), **_SMALL)),
    Case(
        "long",
        dict(layout="causal", prompts=((user_first(300, (9,) * 20, 5),),), heads=8, kv_heads=8, dim=16),
    ),
    Case(
        "books_2k",
        dict(layout="causal", prompts=((user_first(518, (15,) * 100, 30),),), **_QWEN3),
        _BENCH | _COMPILE,
    ),
    Case(
        "f32",
        dict(
            layout="causal",
            prompts=((user_first(300, (9,) * 20, 5),),),
            heads=8,
            kv_heads=4,
            dim=64,
            dtype="float32",
        ),
        _COMPILE,
    ),
    Case(
        "head_96",
        dict(layout="item_prefix", prompts=((items_first(300, (9,) * 20, 5),),), heads=8, kv_heads=8, dim=96),
        _COMPILE,
    ),
    Case(
        "books_4k", dict(layout="causal", prompts=((user_first(1066, (30,) * 100, 30),),), **_QWEN3), _BENCH
    ),
)


def _integers(case: Case, rng: np.random.Generator) -> dict[str, npt.NDArray[Any]]:
    tokens, _ = batch(case)
    return {name: getattr(tokens, name) for name in FIELDS}


def _shapes(case: Case, dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
    shapes = SEGMENTS.shapes(case, dtype)
    del shapes["v"]
    return shapes


def _flat(
    q: jax.Array, k: jax.Array, *, layout: str, implementation: str = "auto", **vectors: jax.Array
) -> jax.Array:
    """attention_mass with each array as an argument of its own, as OpCases calls it."""
    tokens: Any = tokens_of(vectors)
    return attention_mass(q, k, tokens, LAYOUTS[layout], implementation=implementation)


def _work(case: Case, dtype: Any) -> Work:
    """The products of queries and keys; half of what attention multiplies."""
    flops, _ = SEGMENTS.work(case, dtype)
    moved = sum(int(np.prod(x.shape)) for x in _shapes(case, dtype).values() if x.dtype != jnp.int32)
    return Work(flops / 2, float(moved * jnp.dtype(dtype).itemsize))


OP = OpCases(
    "attention_mass",
    _flat,
    CASES,
    _shapes,
    _integers,
    _work,
    lambda case: {"layout": case.shape["layout"]},
)
