# SPDX-License-Identifier: Apache-2.0
"""Biased attention with a bias that is looked up already: a block of queries takes all keys that it may see at once.

In a history these are the keys up to the block's end; for candidates they are the context and, computed apart, their
own keys. Softmax is divided by its sum after the product with the values, which has fewer numbers. Gradients are JAX's
own.

XLA:CPU computes products quickly, and elementwise functions too as long as it does not fuse them into a product. The
selects between them, which the mask needs anyway, keep them apart.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jgr.ops.biased_attention.bias import Problem, joined
from jgr.ops.exponential import exp_negative
from jgr.ops.segment_attention.visibility import visible

QUERIES = 128
MOST_BLOCKS = 8
"""The queries of a block, and the most blocks of a program: for more queries, the blocks are larger."""
MOST_LOGIT_BYTES = 1 << 20
_MASKED = -1e30  # finite: a difference of two is no NaN, and SiLU of it is 0


class _Row(NamedTuple):
    """One row of the batch: q [H, T, dq], k [H, S, dq], v [H, S, dv], bias [1 or H, 1 or T, S] or None.

    scale: [1 or H]. seen: [1, 1 or T, S], or None for a triangle. own_k [H, T, dq], own_v [H, T, dv] and
    own_bias [1 or H, 1] are the targets' own keys, values and bias; None without targets.
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
    size = max(QUERIES, -(-count // MOST_BLOCKS))
    blocks = []
    for start in range(0, count, size):
        block = _cut(rows, start, min(start + size, count), problem.triangle)
        attend = functools.partial(_attend, problem=problem, start=start)
        logits = 4 * heads * block.q.shape[2] * block.k.shape[2]
        at_once = max(1, MOST_LOGIT_BYTES // logits)
        if batch <= at_once:
            blocks.append(jax.vmap(attend)(block))
        else:  # a loop also keeps XLA from computing the logits of all blocks before it uses any
            blocks.append(jax.lax.map(attend, block, batch_size=at_once if at_once > 1 else None))
    out = jnp.concatenate(blocks, axis=2).transpose(0, 2, 1, 3)
    return jnp.where(problem.queries.request[:, :, None, None] >= 0, out, 0.0).astype(problem.q.dtype)


def _rows(problem: Problem) -> _Row:
    """All rows of the batch: every array has a leading axis B."""
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
        split = (None, None) if bias is None else (bias[..., :-1], bias[..., -1])
        return _Row(q, context.k, v, split[0], scale, there[:, None, None], own.k, own.v, split[1])
    source, seen = joined(problem.sources), None
    if not problem.triangle:
        queries = jax.tree.map(lambda x: x[:, :, None], problem.queries)
        seen = visible(queries, jax.tree.map(lambda x: x[:, None], source.keys))[:, None]
    return _Row(q, source.k, source.v, bias, scale, seen, None, None, None)


def _cut(rows: _Row, start: int, stop: int, triangle: bool) -> _Row:
    """The rows with only the queries from start to stop, and the keys that these may see."""
    keys = slice(stop if triangle else None)

    def queries(x: jax.Array | None) -> jax.Array | None:
        return x if x is None or x.shape[2] == 1 else x[:, :, start:stop]

    bias, seen = queries(rows.bias), queries(rows.seen)
    return _Row(
        rows.q[:, :, start:stop],
        rows.k[:, :, keys],
        rows.v[:, :, keys],
        None if bias is None else bias[..., keys],
        rows.scale,
        seen,
        queries(rows.own_k),
        queries(rows.own_v),
        rows.own_bias,
    )


def _attend(row: _Row, problem: Problem, start: int) -> jax.Array:
    """Attention of one row: [H, T, dv] float32. In a triangle its first query is number `start`."""
    seen = row.seen
    if seen is None:
        seen = jnp.asarray(np.tri(row.q.shape[1], row.k.shape[1], start, dtype=bool))[None]
    q, v, scale = row.q, row.v, row.scale[:, None, None]
    product = jnp.einsum("htd,hsd->hts", q, row.k, preferred_element_type=jnp.float32)
    logits = jnp.where(seen, _logits(product, row.bias, scale, problem), _MASKED)
    own = None
    if row.own_k is not None:
        own = (q.astype(jnp.float32) * row.own_k.astype(jnp.float32)).sum(-1)
        own = _logits(own, row.own_bias, scale[..., 0], problem)
    if problem.activation == "silu":
        weights, own = jax.nn.silu(logits), None if own is None else jax.nn.silu(own)
        total = jnp.full(q.shape[:2], problem.divisor)
    else:
        top = jax.lax.stop_gradient(logits.max(-1))
        top = jnp.where(top > 0.5 * _MASKED, top, 0.0) if own is None else jnp.maximum(top, own)
        weights, own = exp_negative(logits - top[..., None]), None if own is None else jnp.exp(own - top)
        total = weights.sum(-1) if own is None else weights.sum(-1) + own
    out = jnp.einsum("hts,hsd->htd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    if own is not None and row.own_v is not None:
        out += own[..., None] * row.own_v.astype(jnp.float32)
    out = out / total[..., None]
    return out if own is not None else jnp.where(seen.any(-1)[..., None], out, 0.0)


def _logits(product: jax.Array, bias: jax.Array | None, scale: jax.Array, problem: Problem) -> jax.Array:
    added = 0.0 if bias is None else bias
    return (product + added) * scale if problem.activation == "softmax" else product * scale + added
