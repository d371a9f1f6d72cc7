# SPDX-License-Identifier: Apache-2.0
"""Biased attention with a bias that is looked up already: a block of queries with all the keys that it may see at once.

Those are, of a history, the keys up to the block's end, and of candidates the context and, apart from it, their own. A
softmax is divided by its sum after the product with the values, which has fewer numbers. Gradients are JAX's own.

XLA:CPU computes the products quickly, and every function quickly that it does not make part of a product: the selects
between them, which the mask needs anyway, keep them apart.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jgr.ops.biased_attention.bias import Problem, joined
from jgr.ops.exponential import exp_negative
from jgr.ops.segment_attention.visibility import visible

QUERIES = 128
MOST_BLOCKS = 8
"""Queries of a block, and blocks that a program is made of: of more queries, blocks are larger."""
MOST_LOGIT_BYTES = 4 << 20
_MASKED = -1e30  # finite: no difference of two is not-a-number, and SiLU of it is 0


class _Row(NamedTuple):
    """A row of the batch: q [H, T, dq], k [H, S, dq], v [H, S, dv], bias [1 or H, 1 or T, S] or None, scale [1 or H].

    own_k, own_v, own_bias: of targets, of each query itself; or None. seen: [1, 1 or T, S], or None of a triangle.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    bias: jax.Array | None
    scale: jax.Array
    seen: jax.Array | None
    own_k: jax.Array | None
    own_v: jax.Array | None
    own_bias: jax.Array | None


def run(problem: Problem) -> jax.Array:
    """See jgr.ops.biased_attention."""
    rows = _rows(problem)
    batch, count, heads, _ = problem.q.shape

    def attend(row: _Row) -> jax.Array:
        return _attend(row, problem)

    logits = 4 * heads * min(count, QUERIES) * rows.k.shape[2]
    at_once = max(1, MOST_LOGIT_BYTES // logits)
    out = jax.vmap(attend)(rows) if batch <= at_once else jax.lax.map(attend, rows, batch_size=at_once)
    out = out.transpose(0, 2, 1, 3)
    return jnp.where(problem.queries.request[:, :, None, None] >= 0, out, 0.0).astype(problem.q.dtype)


def _rows(problem: Problem) -> _Row:
    """With a leading axis B on every array."""
    batch = len(problem.q)

    def every(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x, (batch, *x.shape[1:]))

    q, bias = problem.q.transpose(0, 2, 1, 3), problem.bias
    assert bias is None or isinstance(bias, jax.Array)
    bias, scale = None if bias is None else every(bias), every(problem.scale)
    if problem.targets:
        context, own = problem.sources
        there = context.keys.request >= 0
        v = jnp.where(there[:, None, :, None], context.v, jnp.zeros((), context.v.dtype))
        cached = context.k.shape[2]
        split = (None, None) if bias is None else (bias[..., :cached], bias[..., 0, cached:])
        return _Row(q, context.k, v, split[0], scale, there[:, None, None], own.k, own.v, split[1])
    source, seen = joined(problem.sources), None
    if not problem.triangle:
        queries = jax.tree.map(lambda x: x[:, :, None], problem.queries)
        seen = visible(queries, jax.tree.map(lambda x: x[:, None], source.keys))[:, None]
    return _Row(q, source.k, source.v, bias, scale, seen, None, None, None)


def _attend(row: _Row, problem: Problem) -> jax.Array:
    """[H, T, dv] float32 of one row, without a batch axis."""
    count = row.q.shape[1]
    size = max(QUERIES, -(-count // MOST_BLOCKS))
    blocks = []
    for start in range(0, count, size):
        stop = min(start + size, count)
        keys = stop if problem.triangle else row.k.shape[1]
        seen = row.seen
        if seen is None:
            seen = jnp.asarray(np.tri(stop - start, keys, start, dtype=bool))[None]
        elif seen.shape[1] > 1:
            seen = seen[:, start:stop]
        blocks.append(_block(row, slice(start, stop), keys, seen, problem))
    return jnp.concatenate(blocks, axis=1)


def _block(row: _Row, at: slice, keys: int, seen: jax.Array, problem: Problem) -> jax.Array:
    """[H, r, dv] of the queries `at`."""
    q, scale, bias = row.q[:, at], row.scale[:, None, None], row.bias
    if bias is not None:
        bias = bias[:, at if bias.shape[1] > 1 else slice(None), :keys]
    product = jnp.einsum("htd,hsd->hts", q, row.k[:, :keys], preferred_element_type=jnp.float32)
    logits = jnp.where(seen, _logits(product, bias, scale, problem), _MASKED)
    own = None
    if row.own_k is not None:
        own = (q.astype(jnp.float32) * row.own_k[:, at].astype(jnp.float32)).sum(-1)
        own = _logits(own, None if row.own_bias is None else row.own_bias[:, at], scale[..., 0], problem)
    if problem.activation == "silu":
        weights, own = jax.nn.silu(logits), None if own is None else jax.nn.silu(own)
        total = jnp.full(q.shape[:2], problem.divisor)
    else:
        top = jax.lax.stop_gradient(logits.max(-1))
        top = jnp.where(top > 0.5 * _MASKED, top, 0.0) if own is None else jnp.maximum(top, own)
        weights, own = exp_negative(logits - top[..., None]), None if own is None else jnp.exp(own - top)
        total = weights.sum(-1) if own is None else weights.sum(-1) + own
    v = row.v[:, :keys]
    out = jnp.einsum("hts,hsd->htd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    if own is not None and row.own_v is not None:
        out += own[..., None] * row.own_v[:, at].astype(jnp.float32)
    out = out / total[..., None]
    return out if own is not None else jnp.where(seen.any(-1)[..., None], out, 0.0)


def _logits(product: jax.Array, bias: jax.Array | None, scale: jax.Array, problem: Problem) -> jax.Array:
    added = 0.0 if bias is None else bias
    return (product + added) * scale if problem.activation == "softmax" else product * scale + added
