# SPDX-License-Identifier: Apache-2.0
"""The beam step by the formula: every beam against every child of the level, log-softmax, sort everything."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jgr.ops.constrained_topk.children import Arguments, StepFilter

Step = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def constrained_topk(call: Arguments) -> Step:
    """See jgr.ops.constrained_topk."""
    hidden, head, beam_scores, nodes, level, width, normalizer, filters, _, approximate = call
    logits = jnp.einsum("bwd,vd->bwv", hidden, head, preferred_element_type=jnp.float32)
    children = level.codes.shape[0]
    nodes = jnp.clip(nodes, 0, level.offsets.shape[0] - 2)[..., None]
    child = jnp.arange(children)
    own = (child >= level.offsets[nodes]) & (child < level.offsets[nodes + 1])  # [B, W, C]
    own &= ~jnp.isneginf(beam_scores)[..., None]
    by_child = jnp.where(own, logits[..., level.codes], -jnp.inf)
    if normalizer is None:
        normalizer = jax.nn.logsumexp(by_child, axis=-1)
    by_child = jnp.where(own, by_child - normalizer[..., None], -jnp.inf)
    if filters is not None:
        by_child = jnp.where(_allowed(filters, children)[:, None], by_child, -jnp.inf)
    if approximate:
        rank = jnp.argsort(jnp.argsort(-by_child, axis=-1, stable=True), axis=-1)
        by_child = jnp.where(rank < approximate, by_child, -jnp.inf)
    flat = (beam_scores[..., None] + by_child).reshape(hidden.shape[0], -1)
    flat = jnp.pad(flat, ((0, 0), (0, max(0, width - flat.shape[1]))), constant_values=-jnp.inf)
    order = jnp.argsort(-flat, axis=-1, stable=True)[:, :width]
    scores = jnp.take_along_axis(flat, order, axis=-1)
    dead = jnp.isneginf(scores)
    chosen = jnp.where(dead, 0, order % children)
    parents = jnp.where(dead, 0, order // children)
    return scores, parents, chosen, jnp.where(dead, 0, level.codes[chosen])


def _allowed(filters: StepFilter, children: int) -> jax.Array:
    """Which children the filter leaves: [B, C] bool."""
    batch = jnp.arange(filters.children.shape[0])[:, None]
    given = jnp.arange(filters.children.shape[1]) < filters.counts[:, None]
    listed = jnp.zeros((filters.children.shape[0], children), bool)
    listed = listed.at[batch, jnp.where(given, filters.children, children)].set(True, mode="drop")
    allowed = listed == filters.only[:, None]
    if filters.segments is not None:
        child = jnp.arange(children)
        words = filters.segments[filters.segment][:, child // 32]
        allowed &= (words >> (child % 32).astype(jnp.uint32)) & 1 > 0
    return allowed
