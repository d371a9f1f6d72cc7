# SPDX-License-Identifier: Apache-2.0
"""How an answer of a decoder came about: the levels of its search, and the sources of its prompt's spans.

Pure functions of what the executor and the planner left behind: no device, no clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby, islice, repeat
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import UNSET

from jgr.cache.entries import Move
from jgr.catalog.prefix_tree import PrefixTree
from jgr.models.beam import Levels
from jgr.prompt.layouts import Kind
from jgr.prompt.segments import Part, Prompt, Segment
from jgr.serving.explanations import ExplainedBeam, ExplainedLevel, ExplainedSpan, Source, SpanKind
from jgr.serving.policies.sources import Approximate, Compute, PlannedPrompt, PlannedSegment

Int32 = npt.NDArray[np.int32]

KINDS: Mapping[Kind, SpanKind] = {
    Kind.PREAMBLE: "preamble",
    Kind.INSTRUCTION: "instruction",
    Kind.USER: "user",
    Kind.ITEM: "item",
    Kind.PROBE: "probe",
    Kind.CONTEXT: "context",
    Kind.LABEL: "structure",
}


def explain_levels(
    tree: PrefixTree,
    symbols: Sequence[Sequence[str | int]],
    found: Levels,
    answered: Mapping[int, list[str]],
) -> list[ExplainedLevel]:
    """A search, level by level.

    symbols: the token of each code, by level. found: of one request. answered: the answer's item ids by their leaves.
    ValueError for a score that is not a number: an executor's fault.
    """
    if not (np.isfinite(found.scores) | np.isneginf(found.scores)).all():
        raise ValueError("the executor returned a score that is not finite")
    counts = (~np.isneginf(found.scores)).sum(axis=1).tolist()  # dead beams sort last
    told: list[ExplainedLevel] = []
    nodes = np.zeros(1, np.int32)
    for level, count in enumerate(counts):
        offsets = tree.offsets[level]
        candidates = int((offsets[nodes + 1] - offsets[nodes]).sum())
        nodes = found.nodes[level, :count]
        codes, items = _below(tree, level, nodes)
        last = level + 1 == tree.depth
        ids = [answered.get(leaf, []) for leaf in nodes.tolist()] if last else []
        if last:
            kept = [bool(own) for own in ids]
        else:
            followed = found.parents[level + 1, : counts[level + 1]]
            kept = np.isin(np.arange(count), followed).tolist()
        columns = zip(
            codes.tolist(), found.scores[level].tolist(), found.parents[level].tolist(), items.tolist(), kept,
            strict=False,
        )  # fmt: skip
        beams = [
            ExplainedBeam(
                prefix=prefix,
                token=symbols[level][prefix[-1]],
                score=score,
                parent=parent if level else None,
                items=below,
                kept=goes_on,
                item_ids=ids[at] if last and ids[at] else UNSET,
            )
            for at, (prefix, score, parent, below, goes_on) in enumerate(columns)
        ]
        told.append(ExplainedLevel(level=level, candidates=candidates, beams=beams))
    return told


def _below(tree: PrefixTree, level: int, nodes: Int32) -> tuple[Int32, npt.NDArray[Any]]:
    """The codes [m, level + 1] that lead to nodes [m] after a level, and how many items [m] lie below each."""
    first, end = nodes, nodes + 1
    for offsets in tree.offsets[level + 1 :]:
        first, end = offsets[first], offsets[end]
    path = tree.paths[first, : level + 1]
    codes = [of_level[path[:, at]] for at, of_level in enumerate(tree.codes[: level + 1])]
    return np.stack(codes, axis=1), tree.leaf_offsets[end] - tree.leaf_offsets[first]


def unplanned_spans(user: int, instruction: int, parts: Sequence[Part] = ()) -> list[ExplainedSpan]:
    """The spans of a prompt that no cache is asked for: so many tokens of the history, and of what follows it. parts:
    of the history, where it has texts of its own."""
    told = [
        *_parted("history", [(user, "computed")], parts),
        _span("instruction", "instruction", instruction, "computed"),
    ]
    return [span for span in told if span.tokens]


def planned_spans(
    placed: Prompt,
    plan: PlannedPrompt,
    moves: Sequence[Move],
    item_ids: Sequence[str],
    parts: Sequence[Part] = (),
) -> list[ExplainedSpan]:
    """The spans of a prompt as it was planned. placed: in the plan's layout. moves: those of its batch. item_ids: by
    catalog row. parts: as of `unplanned_spans`."""
    brought = {cell for move in moves if move.direction == "to_device" for cell in move.device}
    names = {x.number: item_ids[x.key] for x in placed if x.kind == Kind.ITEM and isinstance(x.key, int)}
    told: list[ExplainedSpan] = []
    for segment, planned in zip(placed, plan.segments, strict=True):
        kind = KINDS[segment.kind]
        if kind == "user":
            told += _parted("history", list(_sources(segment, planned, brought)), parts)
            continue
        name = names.get(segment.number, kind)
        told += [_span(kind, name, *one) for one in _sources(segment, planned, brought)]
    return told


def _parted(
    name: str, sources: Sequence[tuple[int, Source]], parts: Sequence[Part]
) -> Iterator[ExplainedSpan]:
    """The spans of a history whose tokens came from these sources, in order, by its parts, where it has any."""
    kinds: Sequence[tuple[SpanKind, int]] = [(part.kind, part.tokens) for part in parts]
    kinds = kinds or [("user", sum(tokens for tokens, _ in sources))]
    each = chain.from_iterable(repeat(kind, tokens) for kind, tokens in kinds)
    for tokens, source in sources:
        for kind, run in groupby(islice(each, tokens)):
            yield _span(kind, name, len(list(run)), source)


def _sources(segment: Segment, planned: PlannedSegment, brought: set[int]) -> Iterator[tuple[int, Source]]:
    """How many tokens of a segment came from where, in order."""
    # Repaired tokens are not among the spans, unless the item is computed alone as well.
    repaired = len(segment) - sum(span.tokens for span in planned.spans)
    if repaired:
        yield repaired, "computed"
    for span in planned.spans:
        if isinstance(span, Compute):
            if span.tokens:
                yield span.tokens, "computed"
        elif isinstance(span, Approximate) and segment.kind == Kind.USER:
            yield span.tokens, "library"
        else:
            yield span.tokens, "device" if brought.isdisjoint(span.cells) else "host"


def _span(kind: SpanKind, name: str, tokens: int, source: Source) -> ExplainedSpan:
    cached = 0 if source == "computed" else tokens
    return ExplainedSpan(kind=kind, name=name, tokens=tokens, cached_tokens=cached, source=source)
