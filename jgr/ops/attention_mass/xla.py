# SPDX-License-Identifier: Apache-2.0
"""Attention mass, some queries at a time: only their weights exist."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jgr.ops.segment_attention.visibility import Arguments, Queries, pad_tokens, prepare, visible

MOST_SCORE_BYTES = 8 << 20
"""Weights that exist at a time; they should fit into a core's caches."""
_MASKED = -1e30


def attention_mass(call: Arguments) -> jax.Array:
    """See jgr.ops.attention_mass."""
    q = call.q
    batch, count, heads, dim = q.shape
    queries, (source,) = prepare(call)
    keys = jax.tree.map(lambda x: x[:, None], source.keys)
    k = jnp.where(source.keys.request[:, None, :, None] >= 0, source.k, jnp.zeros((), source.k.dtype))
    kv_heads = k.shape[1]
    block = max(1, min(count, MOST_SCORE_BYTES // (4 * batch * heads * max(1, count))))
    queries = pad_tokens(queries, block)
    q = jnp.pad(q * jnp.asarray(dim**-0.5, q.dtype), ((0, 0), (0, -count % block), (0, 0), (0, 0)))
    q = q.reshape(batch, -1, block, kv_heads, heads // kv_heads, dim).transpose(1, 0, 3, 4, 2, 5)

    def cut(x: jax.Array) -> jax.Array:
        return x.reshape(batch, -1, block).swapaxes(0, 1)

    def step(
        found: tuple[jax.Array, jax.Array], xs: tuple[jax.Array, Queries]
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        mass, seen_by = found
        some, described = xs
        seen = visible(jax.tree.map(lambda x: x[:, :, None], described), keys)  # [B, block, T]
        mask = seen[:, None, None]
        scores = jnp.einsum("bkgtd,bksd->bkgts", some, k, preferred_element_type=jnp.float32)
        scores = jnp.where(mask, scores, _MASKED)
        weights = jnp.where(mask, jnp.exp(scores - scores.max(-1, keepdims=True)), 0.0)
        total = weights.sum(-1, keepdims=True)
        weights = weights / jnp.where(total > 0, total, 1.0)
        return (mass + weights.sum((1, 2, 3)), seen_by + seen.sum(1)), None

    start = jnp.zeros((batch, count), jnp.float32), jnp.zeros((batch, count), jnp.int32)
    (mass, seen_by), _ = jax.lax.scan(step, start, (q, jax.tree.map(cut, queries)))
    return mass / jnp.maximum(seen_by, 1)
