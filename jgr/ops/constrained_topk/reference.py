# SPDX-License-Identifier: Apache-2.0
"""The beam step by the formula: scatter each beam's legal children into a dense mask, log-softmax, sort everything."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Step = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def constrained_topk(
    logits: jax.Array,
    beam_scores: jax.Array,
    nodes: jax.Array,
    offsets: jax.Array,
    codes: jax.Array,
    *,
    max_degree: int,
    width: int,
    normalizer: jax.Array | None = None,
    banned: jax.Array | None = None,
) -> Step:
    """See jgr.ops.constrained_topk."""
    batch, beams, vocabulary = logits.shape
    children = codes.shape[0]
    nodes = jnp.clip(nodes, 0, offsets.shape[0] - 2)
    child = jnp.arange(children)
    of_beam = (child >= offsets[nodes][..., None]) & (child < offsets[nodes + 1][..., None])  # [B, W, C]
    hits = jnp.zeros((batch, beams, vocabulary), jnp.int32).at[..., codes].add(of_beam.astype(jnp.int32))
    masked = jnp.where(hits > 0, logits, -jnp.inf)
    if normalizer is None:
        normalizer = jax.nn.logsumexp(masked, axis=-1)
    by_child = jnp.where(of_beam, logits[..., codes] - normalizer[..., None], -jnp.inf)
    if banned is not None:
        by_child = jnp.where(banned[:, None], -jnp.inf, by_child)
    flat = (beam_scores[..., None] + by_child).reshape(batch, -1)
    flat = jnp.pad(flat, ((0, 0), (0, max(0, width - flat.shape[1]))), constant_values=-jnp.inf)
    order = jnp.argsort(-flat, axis=-1, stable=True)[:, :width]
    scores = jnp.take_along_axis(flat, order, axis=-1)
    dead = jnp.isneginf(scores)
    chosen = jnp.where(dead, 0, order % children)
    parents = jnp.where(dead, 0, order // children)
    return scores, parents, chosen, jnp.where(dead, 0, codes[chosen])
