# SPDX-License-Identifier: Apache-2.0
"""The beam step over gathered children: work is beams x max_degree, whatever the vocabulary and the catalog hold.

The children of a node are consecutive, so a beam's candidates are `offsets[node] + 0..max_degree - 1`, and the index
of a winner is at once the beam's node in the next level. No vocabulary-wide mask exists.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jgr.ops.constrained_topk.reference import Step


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
    child, own = children_of(nodes, offsets, codes.shape[0], max_degree)  # [B, W, D]
    values = jnp.where(own, jnp.take_along_axis(logits, codes[child], axis=-1), -jnp.inf)
    if normalizer is None:
        normalizer = jax.nn.logsumexp(values, axis=-1)
    values = beam_scores[..., None] + (values - normalizer[..., None])
    if banned is not None:
        hit = jnp.take_along_axis(banned, child.reshape(child.shape[0], -1), axis=-1).reshape(child.shape)
        values = jnp.where(hit, -jnp.inf, values)
    flat = values.reshape(values.shape[0], -1)
    flat = jnp.pad(flat, ((0, 0), (0, max(0, width - flat.shape[1]))), constant_values=-jnp.inf)
    scores, index = jax.lax.top_k(flat, width)
    dead = jnp.isneginf(scores)
    index = jnp.where(dead, 0, index)
    chosen = jnp.where(dead, 0, jnp.take_along_axis(child.reshape(child.shape[0], -1), index, axis=-1))
    return scores, index // max_degree, chosen, jnp.where(dead, 0, codes[chosen])


def children_of(
    nodes: jax.Array, offsets: jax.Array, n_children: int, max_degree: int
) -> tuple[jax.Array, jax.Array]:
    """Child nodes [..., max_degree] of each node, clamped to the table, and which of them are its own."""
    nodes = jnp.clip(nodes, 0, offsets.shape[0] - 2)
    first = offsets[nodes]
    degree = offsets[nodes + 1] - first
    slot = jnp.arange(max_degree, dtype=jnp.int32)
    child = jnp.minimum(first[..., None] + slot, n_children - 1)
    return child, slot < degree[..., None]
