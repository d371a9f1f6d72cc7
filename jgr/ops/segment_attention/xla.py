# SPDX-License-Identifier: Apache-2.0
"""Segment attention as an online softmax over the pairs (query block, key block) in which something is seen.

A loop has one turn for each pair of a list and visits no other block; only the scores of one pair exist at a time. The
list is known at trace time for causal prompts without context, and computed in the program otherwise. A mask is
computed only for pairs in which not everything is seen. Gradients exist where the list is known at trace time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jgr.ops import tuning
from jgr.ops.segment_attention.visibility import (
    ALL,
    NOTHING,
    Arguments,
    Keys,
    Queries,
    pad_tokens,
    prepare,
    relation,
    visible,
)

MOST_SCORE_BYTES = 8 << 20
MOST_SCATTERED = 128
_MASKED = -1e30  # finite, not -inf: a row that sees nothing yet must not become NaN


class Running(NamedTuple):
    """State of an online softmax, float32: weighted values [n, B, K, R, d], maximum and sum [n, B, K, R]."""

    out: jax.Array
    top: jax.Array
    total: jax.Array


Pairs = tuple[Any, Any, Any]
"""For each pair its query block, its key block, and whether a mask is needed; int32 [P] each."""


class Shape(NamedTuple):
    """What the choice of blocks may depend on. rows: query heads of one key/value head; triangle: plain causal."""

    batch: int
    kv_heads: int
    rows: int
    queries: int
    keys: int
    dim: int
    itemsize: int
    triangle: int


@dataclass(frozen=True)
class Blocks:
    """The most tokens that a block of queries, or of keys, may have."""

    most: int

    def of(self, tokens: int) -> int:
        """The block size for so many tokens: blocks are of equal size, so that the last is not mostly padding."""
        return -(-tokens // -(-tokens // self.most))


def candidates(shape: Shape) -> list[Blocks]:
    """The blocks to choose from. Smaller ones leave out more of what is not seen, larger ones are faster matmuls."""
    sizes = (32, 64, 96, 128, 192, 256, 384, 512)
    return [Blocks(n) for i, n in enumerate(sizes) if i == 0 or sizes[i - 1] < shape.keys]


def features(shape: Shape, blocks: Blocks) -> tuple[float, ...]:
    """What the time of a call depends on besides its size: bytes of one turn's scores, tokens of a block, blocks."""
    query_block, key_block = blocks.of(shape.queries), blocks.of(shape.keys)
    rows = shape.batch * shape.kv_heads * shape.rows
    return rows * query_block * key_block * 4, key_block, -(-shape.keys // key_block)


def heuristic(shape: Shape) -> Blocks:
    """The largest blocks with which one turn's scores fit into a core's caches (over 48 shapes 5 % off the best).

    Where the visible blocks are not known at trace time they have at most MOST_SCATTERED tokens: queries that are
    chosen from a prompt see a part of many blocks of keys, and large blocks hold much that is not seen.
    """
    if not shape.triangle:
        return Blocks(MOST_SCATTERED)
    fitting = [blocks for blocks in candidates(shape) if features(shape, blocks)[0] <= MOST_SCORE_BYTES]
    return fitting[-1] if fitting else candidates(shape)[0]


def causal_pairs(blocks: int) -> Pairs:
    """The pairs of a causal prompt. Blocks have one size, so a mask is needed on the diagonal only."""
    i, j = np.tril_indices(blocks)
    return i.astype(np.int32), j.astype(np.int32), i == j


def seen_pairs(queries: Queries, keys: Keys, query_block: int, key_block: int) -> tuple[Pairs, jax.Array]:
    """The pairs in which anything is seen in any row of the batch, and their number."""
    related = relation(queries, keys, query_block, key_block)
    seen, masked = (related != NOTHING).any(0), (related != ALL).any(0)
    (at,) = jnp.nonzero(seen.ravel(), size=seen.size, fill_value=0)
    return (at // seen.shape[1], at % seen.shape[1], masked.ravel()[at]), seen.sum(dtype=jnp.int32)


def _visit(
    q: jax.Array,  # [n, B, K, R, d], R = G x block, scaled
    k: jax.Array,  # [B, K, S, d]
    v: jax.Array,
    queries: Queries,
    keys: Keys,
    query_block: int,
    key_block: int,
) -> Callable[[Running, Pairs], Running]:
    groups = q.shape[3] // query_block

    def step(running: Running, pair: Pairs) -> Running:
        i, j, masked = pair

        def of_keys(x: jax.Array, axis: int) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, j * key_block, key_block, axis)

        def mask(scores: jax.Array) -> jax.Array:
            rows = jax.tree.map(
                lambda x: jax.lax.dynamic_slice_in_dim(x, i * query_block, query_block, 1)[:, :, None],
                queries,
            )
            seen = visible(rows, jax.tree.map(lambda x: of_keys(x, 1)[:, None], keys))
            return jnp.where(jnp.tile(seen, (1, groups, 1))[:, None], scores, _MASKED)

        scores = jnp.einsum("bktd,bksd->bkts", q[i], of_keys(k, 2), preferred_element_type=jnp.float32)
        scores = jax.lax.cond(masked, mask, lambda scores: scores, scores)
        old = jax.tree.map(lambda x: x[i], running)
        top = jnp.maximum(old.top, scores.max(-1))
        shrink = jnp.exp(old.top - top)
        weights = jnp.exp(scores - top[..., None])
        out = jnp.einsum(
            "bkts,bksd->bktd", weights.astype(v.dtype), of_keys(v, 2), preferred_element_type=jnp.float32
        )
        new = Running(old.out * shrink[..., None] + out, top, old.total * shrink + weights.sum(-1))
        return jax.tree.map(lambda x, y: x.at[i].set(y), running, new)  # type: ignore[no-any-return]

    return step


def run(call: Arguments, blocks: Blocks | None = None) -> jax.Array:
    """See jgr.ops.segment_attention. blocks: None for the measured choice, or else the heuristic's."""
    q = call.q
    batch, count, heads, dim = q.shape
    kv_heads = call.k.shape[1]
    queries, sources = prepare(call)
    all_keys: Any = jax.tree.map(lambda *parts: jnp.concatenate(parts, 1), *(s.keys for s in sources))
    k, v = (jnp.concatenate([getattr(s, name) for s in sources], 2) for name in ("k", "v"))
    v = jnp.where(all_keys.request[:, None, :, None] >= 0, v, jnp.zeros((), v.dtype))
    if blocks is None:
        shape = Shape(
            batch, kv_heads, heads // kv_heads, count, k.shape[2], dim, q.dtype.itemsize, int(call.triangle)
        )
        blocks = tuning.choose("segment_attention", shape, candidates(shape), heuristic(shape), features)
    query_block, key_block = blocks.of(count), blocks.of(k.shape[2])

    queries, all_keys = pad_tokens(queries, query_block), pad_tokens(all_keys, key_block)
    query_blocks = queries.request.shape[1] // query_block
    q = jnp.pad(q * jnp.asarray(dim**-0.5, q.dtype), ((0, 0), (0, -count % query_block), (0, 0), (0, 0)))
    q = q.reshape(batch, query_blocks, query_block, kv_heads, heads // kv_heads, dim)
    q = q.transpose(1, 0, 3, 4, 2, 5).reshape(query_blocks, batch, kv_heads, -1, dim)
    k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % key_block), (0, 0))) for x in (k, v))

    step = _visit(q, k, v, queries, all_keys, query_block, key_block)
    zeros = jnp.zeros(q.shape[:-1], jnp.float32)
    running = Running(jnp.zeros(q.shape, jnp.float32), zeros + _MASKED, zeros)
    if call.triangle:
        running, _ = jax.lax.scan(lambda r, pair: (step(r, pair), None), running, causal_pairs(query_blocks))
    else:
        pairs, number = seen_pairs(queries, all_keys, query_block, key_block)
        running = jax.lax.fori_loop(
            0, number, lambda at, r: step(r, jax.tree.map(lambda x: x[at], pairs)), running
        )
    saw = running.top > 0.5 * _MASKED
    out = jnp.where(saw[..., None], running.out / jnp.where(saw, running.total, 1.0)[..., None], 0.0)
    out = out.astype(q.dtype).reshape(query_blocks, batch, kv_heads, heads // kv_heads, query_block, dim)
    out = out.transpose(1, 0, 4, 2, 3, 5).reshape(batch, -1, heads, dim)
    real = queries.request >= 0
    return jnp.where(real[:, :, None, None], out, jnp.zeros((), out.dtype))[:, :count]


def segment_attention(call: Arguments) -> jax.Array:
    """See jgr.ops.segment_attention."""
    return run(call)
