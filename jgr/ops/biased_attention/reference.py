# SPDX-License-Identifier: Apache-2.0
"""Biased attention by the formula: every logit, one mask from the rule, biases gathered from the tables."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jgr.ops.biased_attention.bias import Bias, Places, Problem, bucket, entry, joined, look_up
from jgr.ops.segment_attention.visibility import visible


def biased_attention(problem: Problem) -> jax.Array:
    """See jgr.ops.biased_attention."""
    source = joined(problem.sources)
    rows = jax.tree.map(lambda x: x[:, :, None], problem.queries)
    seen = visible(rows, jax.tree.map(lambda x: x[:, None], source.keys))[:, None]  # [B, 1, T, S]
    q, k, v = (x.astype(jnp.float32) for x in (problem.q, source.k, source.v))
    product, scale = jnp.einsum("bthd,bhsd->bhts", q, k), problem.scale[:, :, None, None]
    bias = 0.0 if problem.bias is None else _bias(problem.bias, problem.places, source.places)
    if problem.activation == "silu":
        weights = jnp.where(seen, jax.nn.silu(product * scale + bias) / problem.divisor, 0.0)
    else:
        logits = jnp.where(seen, (product + bias) * scale, -jnp.inf)
        top = jax.lax.stop_gradient(logits.max(-1, keepdims=True, initial=-1e30))
        weights = jnp.exp(logits - top)
        total = weights.sum(-1, keepdims=True)
        weights = weights / jnp.where(total > 0, total, 1.0)
    return jnp.einsum("bhts,bhsd->bthd", weights, v).astype(problem.q.dtype)


def _bias(tables: Bias, rows: Places, columns: Places) -> jax.Array:
    """[B, K, T, S] float32."""
    positions, times = tables
    found = look_up(
        positions, entry(rows.position[:, :, None], columns.position[:, None], positions.shape[2])
    )
    if times is not None and rows.time is not None and columns.time is not None:
        found += look_up(times, bucket(rows.time[:, :, None] - columns.time[:, None], times.shape[2]))
    return found
