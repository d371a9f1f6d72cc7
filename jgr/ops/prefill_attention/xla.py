# SPDX-License-Identifier: Apache-2.0
"""Prefill attention in blocks of query rows, so that T x T scores never exist and half of them are never computed.

Block i of a causal prompt needs keys 0..end(i) only: the block loop is unrolled, so each block is one matmul of
static size over exactly those keys. Right padding needs no mask of its own: a real row sees earlier, real keys.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jgr.ops.prefill_attention.reference import MASKED

BLOCK_ROWS = 128


def supports(
    q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, mask: jax.Array | None = None
) -> str | None:
    """Causal prompts only: an arbitrary mask leaves no block to drop."""
    return None if mask is None else "a dense mask is given"


def prefill_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, mask: jax.Array | None = None
) -> jax.Array:
    """See jgr.ops.prefill_attention."""
    batch, tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    groups = heads // kv_heads
    scale = dim**-0.5
    q = (
        (q * jnp.asarray(scale, q.dtype))
        .reshape(batch, tokens, kv_heads, groups, dim)
        .transpose(0, 2, 3, 1, 4)
    )
    real = jnp.arange(tokens) < lengths[:, None]
    v = jnp.where(real[:, None, :, None], v, jnp.zeros((), v.dtype))  # 0 x NaN of the padding would be NaN
    blocks = []
    for start in range(0, tokens, BLOCK_ROWS):
        end = min(start + BLOCK_ROWS, tokens)
        rows = q[:, :, :, start:end].reshape(batch, kv_heads, groups * (end - start), dim)
        scores = jnp.einsum("bktd,bksd->bkts", rows, k[:, :, :end], preferred_element_type=jnp.float32)
        visible = jnp.arange(start, end)[:, None] >= jnp.arange(end)
        scores = jnp.where(jnp.tile(visible, (groups, 1)), scores, MASKED)
        weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
        total = weights.sum(axis=-1, keepdims=True)
        out = jnp.einsum(
            "bkts,bksd->bktd", weights.astype(v.dtype), v[:, :, :end], preferred_element_type=jnp.float32
        )
        blocks.append((out / total).reshape(batch, kv_heads, groups, end - start, dim))
    out = jnp.concatenate(blocks, axis=3).transpose(0, 3, 1, 2, 4)
    return out.reshape(batch, tokens, heads, dim).astype(q.dtype)
