# SPDX-License-Identifier: Apache-2.0
"""The shared stage through jax-triton, which hands XLA a kernel that Triton itself has compiled."""

from __future__ import annotations

import inspect
import math

import jax
import jax.numpy as jnp
import jax_triton

from tools.shared_stage import Tiles, triton_kernel

HOPPER = 90


def shared_stage(
    q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, tiles: Tiles
) -> tuple[jax.Array, jax.Array]:
    """See tools.shared_stage."""
    batch, kv_heads, rows, dim = q.shape
    types = (
        jax.ShapeDtypeStruct((tiles.splits, *q.shape), jnp.float32),
        jax.ShapeDtypeStruct((tiles.splits, batch, kv_heads, rows), jnp.float32),
    )
    named = "out_type" if "out_type" in inspect.signature(jax_triton.triton_call).parameters else "out_shape"
    out, lse = jax_triton.triton_call(
        q, k, v, lengths,
        kernel=triton_kernel.shared_stage, grid=(-(-rows // tiles.rows), kv_heads * tiles.splits, batch),
        compute_capability=HOPPER, num_warps=tiles.warps, num_stages=tiles.stages, **{named: types},
        batch=batch, kv_heads=kv_heads, all_rows=rows, room=k.shape[1], dim=dim,
        rows=tiles.rows, tokens=tiles.tokens, splits=tiles.splits, scale=math.log2(math.e) / math.sqrt(dim),
    )  # fmt: skip
    return out, lse
