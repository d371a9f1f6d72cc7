# SPDX-License-Identifier: Apache-2.0
"""Attention mass, a block of queries at a time over the blocks of keys in which they see something.

A query's weights are known when all of its scores are. So the weights of a block's queries are kept relative to the
greatest score so far, as in an online softmax, and each block of them is put right when it is summed over the queries.
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

BLOCK = 128
"""Tokens of a block. Smaller ones leave out more of what is not seen, larger ones are faster products."""
_MASKED = -1e30


class _Rows(NamedTuple):
    """A block of queries, at n blocks of keys: weights [n, B, K, R, block], each relative to a maximum of its row in
    tops [n, B, K, R]; the rows' maximum and sum [B, K, R] so far. seen_by: [n, B, block], queries of all blocks that
    see a key."""

    weights: jax.Array
    tops: jax.Array
    top: jax.Array
    total: jax.Array
    seen_by: jax.Array


def attention_mass(call: Arguments) -> jax.Array:
    """See jgr.ops.attention_mass."""
    batch, count, heads, dim = call.q.shape
    queries, (source,) = prepare(call)
    q = jnp.where(queries.request[:, :, None, None] >= 0, call.q, jnp.zeros((), call.q.dtype))
    k = jnp.where(source.keys.request[:, None, :, None] >= 0, source.k, jnp.zeros((), source.k.dtype))
    kv_heads, block = k.shape[1], min(BLOCK, count)
    queries, keys = pad_tokens(queries, block), pad_tokens(source.keys, block)
    q = jnp.pad(q * jnp.asarray(dim**-0.5, q.dtype), ((0, 0), (0, -count % block), (0, 0), (0, 0)))
    k = jnp.pad(k, ((0, 0), (0, 0), (0, -count % block), (0, 0)))
    q = q.reshape(batch, -1, block, kv_heads, heads // kv_heads, dim).transpose(1, 0, 3, 4, 2, 5)
    q = q.reshape(len(q), batch, kv_heads, -1, dim)
    groups = heads // kv_heads
    related = relation(queries, keys, block, block)  # [B, query blocks, key blocks]
    seen_pairs, masked_pairs = (related != NOTHING).any(0), (related != ALL).any(0)
    real = (queries.request >= 0).reshape(batch, -1, block)

    def cut(x: jax.Array, at: Any, axis: int) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, at * block, block, axis)

    def of_queries(
        found: tuple[jax.Array, jax.Array, jax.Array], i: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array, jax.Array], None]:
        mass, seen_by, room = found
        rows = jax.tree.map(lambda x: cut(x, i, 1)[:, :, None], queries)
        (blocks,) = jnp.nonzero(seen_pairs[i], size=len(q), fill_value=0)
        number = seen_pairs[i].sum(dtype=jnp.int32)

        def weigh(at: jax.Array, so_far: _Rows) -> _Rows:
            j = blocks[at]

            def mask(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
                seen = visible(rows, jax.tree.map(lambda x: cut(x, j, 1)[:, None], keys))  # [B, t, s]
                shown = jnp.where(jnp.tile(seen, (1, groups, 1))[:, None], scores, _MASKED)
                return shown, seen.sum(1, dtype=jnp.int32)

            def keep(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
                number = real[:, i].sum(-1, keepdims=True, dtype=jnp.int32)
                return scores, jnp.broadcast_to(number, (batch, block))

            scores = jnp.einsum("bkrd,bksd->bkrs", q[i], cut(k, j, 2), preferred_element_type=jnp.float32)
            scores, seers = jax.lax.cond(masked_pairs[i, j], mask, keep, scores)
            top = jnp.maximum(so_far.top, scores.max(-1))
            weights = jnp.exp(scores - top[..., None])
            return _Rows(
                so_far.weights.at[at].set(weights),
                so_far.tops.at[at].set(top),
                top,
                so_far.total * jnp.exp(so_far.top - top) + weights.sum(-1),
                so_far.seen_by.at[j].add(seers),
            )

        none = jnp.zeros(room.shape[1:-1], jnp.float32)
        begin = _Rows(room, jnp.zeros(room.shape[:-1], jnp.float32), none + _MASKED, none, seen_by)
        done = jax.lax.fori_loop(0, number, weigh, begin)
        saw = (done.top > 0.5 * _MASKED) & jnp.tile(real[:, i], (1, groups))[:, None]
        share = jnp.where(saw, 1 / jnp.maximum(done.total, 1e-30), 0.0)

        def give(at: jax.Array, mass: jax.Array) -> jax.Array:
            part = share * jnp.exp(done.tops[at] - done.top)
            return mass.at[blocks[at]].add(jnp.einsum("bkr,bkrs->bs", part, done.weights[at]))

        return (jax.lax.fori_loop(0, number, give, mass), done.seen_by, done.weights), None

    shape = (len(q), batch, block)
    room = jnp.zeros((*q.shape[:-1], block), jnp.float32)  # of one block of queries: as many blocks of keys
    start = jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.int32), room
    (mass, seen_by, _), _ = jax.lax.scan(of_queries, start, jnp.arange(len(q)))
    found: jax.Array = (mass / jnp.maximum(seen_by, 1)).swapaxes(0, 1)
    return found.reshape(batch, -1)[:, :count]
