# SPDX-License-Identifier: Apache-2.0
"""One beam step over the catalog's prefix tree (XGR-2, 7, 8): the best continuations that exist, and no others."""

from __future__ import annotations

from typing import NamedTuple

import jax

from jgr.ops.constrained_topk import reference, xla
from jgr.ops.dispatch import Implementation, dispatch

IMPLEMENTATIONS = (
    Implementation("xla", xla.constrained_topk),
    Implementation("reference", reference.constrained_topk),
)


class BeamStep(NamedTuple):
    """scores [B, width] float32, descending, -inf where dead; parents, nodes, codes [B, width] int32, 0 where dead."""

    scores: jax.Array
    parents: jax.Array
    nodes: jax.Array
    codes: jax.Array


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
    implementation: str = "auto",
) -> BeamStep:
    """The `width` best (beam, child) pairs by beam score + log-probability of the child. Exact.

    Args:
        logits: [B, W, V] float32, the columns of this level's vocabulary.
        beam_scores: [B, W] float32, -inf for dead beams, which stay dead.
        nodes: [B, W] int32, each beam's node in the prefix tree; clamped to the table.
        offsets: [N + 1] int32; node n's children are offsets[n] .. offsets[n + 1] - 1 in the next level.
        codes: [C] int32, the column of each child.
        max_degree: static bound of the number of children of a node.
        normalizer: [B, W] float32, what to subtract from the logits ("full": the log-sum-exp over the whole
            vocabulary). None: the log-sum-exp over the node's children ("valid").
        banned: [B, C] bool; children that must not be taken. They still count in the normalizer, so that a filter
            removes items and leaves the scores of the others alone.

    Returns:
        A BeamStep. Equal scores: the lower beam first, then the lower child.
    """
    step = dispatch(
        "constrained_topk",
        IMPLEMENTATIONS,
        implementation,
        logits,
        beam_scores,
        nodes,
        offsets,
        codes,
        max_degree=max_degree,
        width=width,
        normalizer=normalizer,
        banned=banned,
    )
    return BeamStep(*step)
