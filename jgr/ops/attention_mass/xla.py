# SPDX-License-Identifier: Apache-2.0
"""Attention mass, a block of queries at a time over the blocks of keys in which they see something.

A query's weights are known when all of its scores are. So the scores of a block's queries are kept, as many as there
are keys, and all are turned into weights at once.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jgr.ops.segment_attention.visibility import NOTHING, Arguments, pad_tokens, prepare, relation, visible

BLOCK = 128
"""Tokens of a block. Smaller ones leave out more of what is not seen, larger ones are faster products."""
_MASKED = -1e30


def attention_mass(call: Arguments) -> jax.Array:
    """See jgr.ops.attention_mass."""
    q = call.q
    batch, count, heads, dim = q.shape
    queries, (source,) = prepare(call)
    k = jnp.where(source.keys.request[:, None, :, None] >= 0, source.k, jnp.zeros((), source.k.dtype))
    kv_heads, block = k.shape[1], min(BLOCK, count)
    queries, keys = pad_tokens(queries, block), pad_tokens(source.keys, block)
    q = jnp.pad(q * jnp.asarray(dim**-0.5, q.dtype), ((0, 0), (0, -count % block), (0, 0), (0, 0)))
    k = jnp.pad(k, ((0, 0), (0, 0), (0, -count % block), (0, 0)))
    q = q.reshape(batch, -1, block, kv_heads, heads // kv_heads, dim).transpose(1, 0, 3, 4, 2, 5)
    q = q.reshape(len(q), batch, kv_heads, -1, dim)
    groups = heads // kv_heads
    seen_pairs = (relation(queries, keys, block, block) != NOTHING).any(0)  # [query blocks, key blocks]

    def cut(x: jax.Array, at: Any, axis: int) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, at * block, block, axis)

    def of_queries(
        found: tuple[jax.Array, jax.Array], i: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        rows = jax.tree.map(lambda x: cut(x, i, 1)[:, :, None], queries)
        (blocks,) = jnp.nonzero(seen_pairs[i], size=len(q), fill_value=0)
        number = seen_pairs[i].sum(dtype=jnp.int32)

        def score(at: jax.Array, so_far: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            scores, seen_by = so_far
            j = blocks[at]
            seen = visible(rows, jax.tree.map(lambda x: cut(x, j, 1)[:, None], keys))  # [B, t, s]
            new = jnp.einsum("bkrd,bksd->bkrs", q[i], cut(k, j, 2), preferred_element_type=jnp.float32)
            new = jnp.where(jnp.tile(seen, (1, groups, 1))[:, None], new, _MASKED)
            return scores.at[at].set(new), seen_by.at[j].add(seen.sum(1, dtype=jnp.int32))

        shape = (len(q), batch, kv_heads, groups * block)
        scores, seen_by = jax.lax.fori_loop(
            0, number, score, (jnp.full((*shape, block), _MASKED, jnp.float32), found[1])
        )
        top = scores.max((0, -1))

        def weigh(at: jax.Array, so_far: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            weights, total = so_far
            new = jnp.exp(weights[at] - top[..., None])
            return weights.at[at].set(new), total + new.sum(-1)

        weights, total = jax.lax.fori_loop(0, number, weigh, (scores, jnp.zeros_like(top)))
        share = jnp.where(top > 0.5 * _MASKED, 1 / jnp.maximum(total, 1e-30), 0.0)

        def give(at: jax.Array, mass: jax.Array) -> jax.Array:
            return mass.at[blocks[at]].add(jnp.einsum("bkr,bkrs->bs", share, weights[at]))

        return (jax.lax.fori_loop(0, number, give, found[0]), seen_by), None

    shape = (len(q), batch, block)
    start = jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.int32)
    (mass, seen_by), _ = jax.lax.scan(of_queries, start, jnp.arange(len(q)))
    found: jax.Array = (mass / jnp.maximum(seen_by, 1)).swapaxes(0, 1)
    return found.reshape(batch, -1)[:, :count]
