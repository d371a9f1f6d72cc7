# SPDX-License-Identifier: Apache-2.0
"""Segment attention by the formula: every score, one mask from the rule."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jgr.ops.segment_attention.visibility import Arguments, prepare, visible


def segment_attention(call: Arguments) -> jax.Array:
    """See jgr.ops.segment_attention."""
    q = call.q
    queries, sources = prepare(call)
    rows = jax.tree.map(lambda x: x[:, :, None], queries)
    mask = jnp.concatenate([visible(rows, jax.tree.map(lambda x: x[:, None], s.keys)) for s in sources], 2)
    real = jnp.concatenate([s.keys.request >= 0 for s in sources], 1)[:, None, :, None]
    groups = q.shape[2] // call.k.shape[1]
    k, v = (jnp.concatenate([getattr(s, name) for s in sources], 2) for name in ("k", "v"))
    # Padding may hold NaN, which a weight of zero does not remove.
    k, v = (jnp.repeat(jnp.where(real, x, 0), groups, 1).astype(jnp.float32) for x in (k, v))
    scores = jnp.einsum("bthd,bhsd->bhts", q.astype(jnp.float32), k) / jnp.sqrt(jnp.float32(q.shape[3]))
    scores = jnp.where(mask[:, None], scores, -jnp.inf)
    top = scores.max(-1, keepdims=True, initial=-1e30)
    weights = jnp.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    weights = jnp.where(mask[:, None], weights / jnp.where(total > 0, total, 1.0), 0.0)
    return jnp.einsum("bhts,bhsd->bthd", weights, v).astype(q.dtype)
