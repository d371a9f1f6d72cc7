# SPDX-License-Identifier: Apache-2.0
"""One beam step over the catalog's prefix tree (XGR-2, 7, 8, 10): the best continuations that exist, and no others."""

from __future__ import annotations

from typing import NamedTuple

import jax

from jgr.ops.constrained_topk import reference, xla
from jgr.ops.constrained_topk.children import Arguments, StepFilter, TreeLevel
from jgr.ops.dispatch import Implementation, dispatch

__all__ = ["BeamStep", "StepFilter", "TreeLevel", "constrained_topk", "packed_capacity"]

IMPLEMENTATIONS = (
    Implementation("xla", xla.constrained_topk),
    Implementation("reference", reference.constrained_topk),
)

DENSE_OVER_PACKED = 64
"""How many times as much a gathered output row costs as a column of the matmul (measured)."""


class BeamStep(NamedTuple):
    """The best continuations: scores [B, width] float32, descending; parents, nodes, codes [B, width] int32.

    A beam without a continuation is dead: its score is -inf, and its other numbers are 0.
    """

    scores: jax.Array
    parents: jax.Array
    nodes: jax.Array
    codes: jax.Array


def packed_capacity(beams: int, vocabulary: int) -> int:
    """The most children (of all beams of a request) for which gathering output rows beats the matmul; 0: never."""
    capacity = beams * vocabulary // DENSE_OVER_PACKED
    return capacity if capacity >= 2 * beams else 0


def constrained_topk(
    hidden: jax.Array,
    head: jax.Array,
    beam_scores: jax.Array,
    nodes: jax.Array,
    level: TreeLevel,
    *,
    width: int,
    normalizer: jax.Array | None = None,
    filters: StepFilter | None = None,
    packed: int = 0,
    approximate: int = 0,
    implementation: str = "auto",
) -> BeamStep:
    """The `width` best (beam, child) pairs by beam score + log-probability of the child. Exact unless `approximate`.

    Args:
        hidden: [B, W, D], the beams' last hidden states; head: [V, D], the output rows of the level's columns.
        beam_scores: [B, W] float32, -inf for dead beams, which stay dead.
        nodes: [B, W] int32, each beam's node in the prefix tree, clamped to the table. With filters, the nodes of a
            request's live beams are distinct.
        level: the children of the level's nodes.
        normalizer: [B, W] float32, what to subtract from the logits ("full": the log-sum-exp over the whole
            vocabulary). None: the log-sum-exp over the node's children ("valid").
        filters: which children may be taken. The others still count in the normalizer, so that a filter removes items
            and leaves the scores of the rest alone.
        packed: static; where no request's beams have more children than this, only the children's output rows are
            gathered, and the matmul with the whole head is left out. 0: never.
        approximate: static; the most children of one beam that are taken (K < BW in XGR-2). 0: exact.

    Returns:
        A BeamStep. Of equal scores the lower beam comes first, then the lower child.
    """
    call = Arguments(hidden, head, beam_scores, nodes, level, width, normalizer, filters, packed, approximate)
    return BeamStep(*dispatch("constrained_topk", IMPLEMENTATIONS, implementation, call))
