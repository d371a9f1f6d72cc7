# SPDX-License-Identifier: Apache-2.0
"""Biased attention by the formula: every logit, one mask from the rule, biases gathered from the tables."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jgr.ops.biased_attention.bias import Bias, Problem, joined, spread
from jgr.ops.segment_attention.visibility import visible


def biased_attention(problem: Problem) -> jax.Array:
    """See jgr.ops.biased_attention."""
    source = joined(problem.sources)
    rows = jax.tree.map(lambda x: x[:, :, None], problem.queries)
    seen = visible(rows, jax.tree.map(lambda x: x[:, None], source.keys))[:, None]  # [B, 1, T, S]
    q, k, v = (x.astype(jnp.float32) for x in (problem.q, source.k, source.v))
    product, scale = jnp.einsum("bthd,bhsd->bhts", q, k), problem.scale[:, :, None, None]
    bias: Any = 0.0 if problem.bias is None else problem.bias
    if isinstance(problem.bias, Bias):
        bias = spread(problem.bias, problem.places, source.places)
    elif problem.targets and problem.bias is not None:  # the last is that of each target's own key
        last = jnp.repeat(problem.bias[..., -1:], problem.q.shape[1], axis=-1)
        bias = jnp.concatenate([problem.bias[..., :-1], last], axis=-1)
    if problem.activation == "silu":
        weights = jnp.where(seen, jax.nn.silu(product * scale + bias) / problem.divisor, 0.0)
    else:
        logits = jnp.where(seen, (product + bias) * scale, -jnp.inf)
        top = jax.lax.stop_gradient(logits.max(-1, keepdims=True, initial=-1e30))
        weights = jnp.exp(logits - top)
        total = weights.sum(-1, keepdims=True)
        weights = weights / jnp.where(total > 0, total, 1.0)
    return jnp.einsum("bhts,bhsd->bthd", weights, v).astype(problem.q.dtype)
