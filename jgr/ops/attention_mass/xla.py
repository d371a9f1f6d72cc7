# SPDX-License-Identifier: Apache-2.0
"""Attention mass, a block of queries at a time over the blocks of keys in which they see something.

A query's weights are known when all of its scores are. So the scores of a block of queries are computed twice, first
for the sum over each query's exponentials, then for what each key gets of them. They cost little beside the
exponentials, and no more than one pair of blocks exists at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jgr.ops.segment_attention.visibility import (
    ALL,
    NOTHING,
    Arguments,
    pad_tokens,
    prepare,
    relation,
    visible,
)

BLOCK = 256
"""Tokens of a block. Smaller ones leave out more of what is not seen, larger ones are faster products."""
_MASKED = -1e30
_NOTHING_SEEN = 1e30


class _Gained(NamedTuple):
    """What the keys of n blocks got so far, [n, B, block]: mass, and the number of queries that see them."""

    mass: jax.Array
    seen_by: jax.Array


def attention_mass(call: Arguments) -> jax.Array:
    """See jgr.ops.attention_mass."""
    batch, count, heads, dim = call.q.shape
    queries, (source,) = prepare(call)
    q = jnp.where(queries.request[:, :, None, None] >= 0, call.q, jnp.zeros((), call.q.dtype))
    k = jnp.where(source.keys.request[:, None, :, None] >= 0, source.k, jnp.zeros((), source.k.dtype))
    kv_heads, block = k.shape[1], min(BLOCK, count)
    groups = heads // kv_heads
    queries, keys = pad_tokens(queries, block), pad_tokens(source.keys, block)
    q = jnp.pad(q * jnp.asarray(dim**-0.5, q.dtype), ((0, 0), (0, -count % block), (0, 0), (0, 0)))
    q = q.reshape(batch, -1, block, kv_heads, groups, dim).transpose(1, 0, 3, 4, 2, 5)
    q = q.reshape(len(q), batch, kv_heads, -1, dim)
    k = jnp.pad(k, ((0, 0), (0, 0), (0, -count % block), (0, 0)))
    k = k.reshape(batch, kv_heads, -1, block, dim).transpose(2, 0, 1, 3, 4)
    related = relation(queries, keys, block, block)  # [B, query blocks, key blocks]
    seen_pairs, masked_pairs = (related != NOTHING).any(0), (related != ALL).any(0)
    real = (queries.request >= 0).reshape(batch, -1, block)

    def cut(x: jax.Array, at: Any) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, at * block, block, 1)

    def scores_of(i: jax.Array, j: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The scores [B, K, R, block] of a pair of blocks, and the number of queries that see each key [B, block]."""

        def mask(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
            rows = jax.tree.map(lambda x: cut(x, i)[:, :, None], queries)
            seen = visible(rows, jax.tree.map(lambda x: cut(x, j)[:, None], keys))  # [B, t, s]
            shown = jnp.where(jnp.tile(seen, (1, groups, 1))[:, None], scores, _MASKED)
            return shown, seen.sum(1, dtype=jnp.int32)

        def keep(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
            number = real[:, i].sum(-1, keepdims=True, dtype=jnp.int32)
            return scores, jnp.broadcast_to(number, (batch, block))

        scores = jnp.einsum("bkrd,bksd->bkrs", q[i], k[j], preferred_element_type=jnp.float32)
        found: tuple[jax.Array, jax.Array] = jax.lax.cond(masked_pairs[i, j], mask, keep, scores)
        return found

    def of_queries(gained: _Gained, i: jax.Array) -> tuple[_Gained, None]:
        (blocks,) = jnp.nonzero(seen_pairs[i], size=len(k), fill_value=0)
        number = seen_pairs[i].sum(dtype=jnp.int32)

        def weigh(at: jax.Array, so_far: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            old, total = so_far
            scores, _ = scores_of(i, blocks[at])
            top = jnp.maximum(old, scores.max(-1))
            return top, total * jnp.exp(old - top) + jnp.exp(scores - top[..., None]).sum(-1)

        none = jnp.zeros(q.shape[1:-1], jnp.float32)
        top, total = jax.lax.fori_loop(0, number, weigh, (none + _MASKED, none))
        saw = (top > 0.5 * _MASKED) & jnp.tile(real[:, i], (1, groups))[:, None]
        log_total = jnp.where(saw, top + jnp.log(jnp.where(saw, total, 1.0)), _NOTHING_SEEN)

        def give(at: jax.Array, gained: _Gained) -> _Gained:
            scores, seers = scores_of(i, blocks[at])
            weights = jnp.exp(scores - log_total[..., None])
            return _Gained(
                gained.mass.at[blocks[at]].add(weights.sum((1, 2))), gained.seen_by.at[blocks[at]].add(seers)
            )

        return jax.lax.fori_loop(0, number, give, gained), None

    shape = (len(k), batch, block)
    start = _Gained(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.int32))
    gained, _ = jax.lax.scan(of_queries, start, jnp.arange(len(q)))
    found: jax.Array = (gained.mass / jnp.maximum(gained.seen_by, 1)).swapaxes(0, 1)
    return found.reshape(batch, -1)[:, :count]
