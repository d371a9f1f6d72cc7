# SPDX-License-Identifier: Apache-2.0
"""Prefill attention by the formula: every score, one dense mask."""

from __future__ import annotations

import jax
import jax.numpy as jnp

MASKED = -1e30  # finite, so that a row that sees nothing becomes uniform instead of NaN


def prefill_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array, mask: jax.Array | None = None
) -> jax.Array:
    """See jgr.ops.prefill_attention."""
    batch, tokens, heads, dim = q.shape
    groups = heads // k.shape[1]
    if mask is None:
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((tokens, tokens), bool)), (batch, tokens, tokens))
    real = jnp.arange(tokens) < lengths[:, None]
    mask = mask & real[:, None, :]
    k, v = (jnp.repeat(x, groups, axis=1).astype(jnp.float32) for x in (k, v))
    v = jnp.where(real[:, None, :, None], v, 0.0)
    scores = jnp.einsum("bthd,bhsd->bhts", q.astype(jnp.float32), k) / jnp.sqrt(jnp.float32(dim))
    weights = jax.nn.softmax(jnp.where(mask[:, None], scores, MASKED), axis=-1)
    return jnp.einsum("bhts,bhsd->bthd", weights, v).astype(q.dtype)
