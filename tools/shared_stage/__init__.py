# SPDX-License-Identifier: Apache-2.0
"""The shared stage of beam attention in two other dialects than Pallas' Triton one, which jax 0.11 declares deprecated.

The rows of a key/value head, its beams and query heads, attend to the prompt, of which each of `splits` programs has a
part: the first kernel of jgr/ops/beam_attention/pallas_triton.py, to be put in its place. Nothing serves by them: they
are here so that `make compile-gpu` shows what each dialect makes of the same op.

Letters: B requests, K key/value heads, R rows, T prompt tokens, d head size.

    shared_stage(q [B, K, R, d], k [B, T, K, d], v [B, T, K, d], lengths [B] int32, tiles)

gives out [splits, B, K, R, d] and lse [splits, B, K, R], both float32: each part's softmax(q k^T / sqrt(d)) v over its
tokens before the request's length, and log2 of the sum of 2^score, where scores are in units of log2. A part without
tokens gives zeros, and NOTHING. Values of tokens after a request's length must be finite.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jgr.ops.testing import Case

NOTHING = -1e30
"""A running maximum before the first score; finite, so that differences are never NaN."""


@dataclass(frozen=True)
class Tiles:
    """rows: rows of a program, or in Mosaic of each of its two warpgroups; tokens: prompt tokens of a step; splits:
    parts of a prompt; stages: steps whose keys and values are under way at once; warps: Triton's num_warps."""

    rows: int = 64
    tokens: int = 64
    splits: int = 2
    stages: int = 3
    warps: int = 4


class Form(NamedTuple):
    """A dialect that it is written in. module: imported when it is called, since not everybody has what it needs.
    kernel: the name of its kernel in the PTX."""

    name: str
    module: str
    kernel: str

    def call(self, *arrays: Any) -> tuple[jax.Array, jax.Array]:
        """The op as it is compiled for an H200. Raises ImportError where the dialect's package is missing."""
        module = importlib.import_module(f"{__name__}.{self.module}")
        return module.shared_stage(*arrays, Tiles())  # type: ignore[no-any-return]


FORMS = (
    Form("mosaic_gpu", "mosaic", "anonymous_mosaic_gpu_kernel"),
    Form("jax_triton", "jax_triton_form", "shared_stage"),
)

CASE = Case(
    "qwen3_1k_w256", dict(tokens=1024, lengths=(1024,), width=256, slots=2, heads=16, kv_heads=8, dim=128)
)
"""The call of beam attention that all three are compiled for."""


def arguments() -> tuple[jax.ShapeDtypeStruct, ...]:
    """q, k, v and lengths of CASE, in bfloat16."""
    s = CASE.shape
    batch, kv_heads = len(s["lengths"]), s["kv_heads"]
    rows = s["width"] * s["heads"] // kv_heads
    context = jax.ShapeDtypeStruct((batch, s["tokens"], kv_heads, s["dim"]), jnp.bfloat16)
    q = jax.ShapeDtypeStruct((batch, kv_heads, rows, s["dim"]), jnp.bfloat16)
    return q, context, context, jax.ShapeDtypeStruct((batch,), jnp.int32)


def parts_of(length: Any, split: Any, room: int, tiles: Tiles) -> tuple[Any, Any]:
    """Where the split-th part of a prompt of `length` tokens, of at most `room`, starts and stops: int32 scalars."""
    length = jnp.minimum(length, room)
    part = pl.cdiv(pl.cdiv(length, tiles.splits), tiles.tokens) * tiles.tokens
    start = split * part
    return start, jnp.maximum(start, jnp.minimum(start + part, length))
