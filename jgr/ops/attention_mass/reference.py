# SPDX-License-Identifier: Apache-2.0
"""Attention mass by the formula: every weight."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jgr.ops.segment_attention.visibility import Arguments, prepare, visible


def attention_mass(call: Arguments) -> jax.Array:
    """See jgr.ops.attention_mass."""
    queries, (source,) = prepare(call)
    rows = jax.tree.map(lambda x: x[:, :, None], queries)
    seen = visible(rows, jax.tree.map(lambda x: x[:, None], source.keys))
    k = jnp.where(source.keys.request[:, None, :, None] >= 0, source.k, 0).astype(jnp.float32)
    k = jnp.repeat(k, call.q.shape[2] // k.shape[1], 1)
    scores = jnp.einsum("bthd,bhsd->bhts", call.q.astype(jnp.float32), k) / jnp.sqrt(jnp.float32(k.shape[3]))
    scores = jnp.where(seen[:, None], scores, -jnp.inf)
    weights = jnp.where(seen[:, None], jnp.exp(scores - scores.max(-1, keepdims=True, initial=-1e30)), 0.0)
    total = weights.sum(-1, keepdims=True)
    weights /= jnp.where(total > 0, total, 1.0)
    return weights.sum((1, 2)) / jnp.maximum(seen.sum(1), 1)
