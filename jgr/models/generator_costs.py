# SPDX-License-Identifier: Apache-2.0
"""The works of which a generator's programs are made, and what a beam step costs (MODEL-30, SIM-10). Imports no jax.

    recommend = Prefill, BeamStep, then Decode and BeamStep for each further level
    rank      = the same, with the candidates in the beams' place, and every level's logits computed for all columns

Works are of the compiled shapes, padding included, since that is what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from jgr.models.costs import Cost


class Prefill(NamedTuple):
    """Prompts that are read, of all requests together.

    new: tokens that are computed. cached: tokens whose keys and values are read. pairs: in a layer, queries with the
    keys that they see. read: places whose hidden states are asked for, which alone go through the whole last layer;
    read_pairs: the pairs of these.
    """

    new: int
    cached: int
    pairs: int
    read: int
    read_pairs: int


class Decode(NamedTuple):
    """One more token for each of `width` beams of each request, which sees `context` tokens of the prompt and the
    `step` tokens that were generated before."""

    requests: int
    width: int
    context: int
    step: int


class BeamStep(NamedTuple):
    """The choice among the continuations of `beams` beams of each request.

    columns: of the level's output head. children: those of a request's beams together; 0: all columns' logits are
    computed, else only theirs. normalizer: tokens whose logits give the log-sum-exp, 0 where it is over children.
    """

    requests: int
    beams: int
    columns: int
    children: int = 0
    normalizer: int = 0


Work = Prefill | Decode | BeamStep


class Level(NamedTuple):
    """A level of the prefix tree: columns of its output head, its nodes, their children, and the largest degree."""

    columns: int
    nodes: int
    children: int
    largest: int


def prefill(prompts: int, new: int, cached: int = 0) -> Prefill:
    """Causal prompts of `new` tokens each after `cached` ones, of which the last token's hidden state is asked for."""
    pairs = new * cached + new * (new + 1) // 2
    return Prefill(prompts * new, prompts * cached, prompts * pairs, prompts, prompts * (cached + new))


def search(
    requests: int,
    width: int,
    context: int,
    levels: Sequence[Level],
    capacity: Callable[[int, int], int],
    vocabulary: int = 0,
) -> tuple[Work, ...]:
    """The works after the prompt of a search with `width` beams for each request.

    context: tokens of a prompt. capacity: from a width and a level's columns to the most children whose output rows are
    gathered (`constrained_topk.packed_capacity`). vocabulary: tokens of the normalizer with normalize="full".
    """
    works: list[Work] = [BeamStep(requests, 1, levels[0].columns, 0, vocabulary)]
    for step, level in enumerate(levels[1:]):
        children = min(min(width, level.nodes) * level.largest, level.children)
        gathered = children if children <= capacity(width, level.columns) else 0
        works.append(Decode(requests, width, context, step))
        works.append(BeamStep(requests, width, level.columns, gathered, vocabulary))
    return tuple(works)


def score(
    requests: int, candidates: int, context: int, levels: Sequence[Level], vocabulary: int = 0
) -> tuple[Work, ...]:
    """The works after the prompt of ranking `candidates` leaves of each request by their likelihood."""
    works: list[Work] = [BeamStep(requests, 1, levels[0].columns, 0, vocabulary)]
    for step, level in enumerate(levels[1:]):
        works.append(Decode(requests, candidates, context, step))
        works.append(BeamStep(requests, candidates, level.columns, 0, vocabulary))
    return tuple(works)


def beam_step(hidden: int, work: BeamStep, itemsize: int) -> Cost:
    """The cost of a beam step behind hidden states of `hidden` numbers, of any generator."""
    chosen = work.requests * (work.children or work.beams * work.columns)
    rows = work.requests * work.children or work.columns
    normalized = work.requests * work.beams * work.normalizer
    return Cost(
        products=2 * hidden * (chosen + normalized),
        bytes=itemsize * hidden * (rows + work.normalizer),
        choices=chosen + normalized,
        dispatches=1,
    )
