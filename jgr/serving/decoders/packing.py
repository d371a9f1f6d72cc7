# SPDX-License-Identifier: Apache-2.0
"""From planned prompts to the arrays of one packed row: which tokens are new, which are cached, and where they stand.

Every token of a batch is described once, prompt after prompt, and then dealt to the two halves of the row. Padding has
request -1, and a new token that is not kept is written to a slot that the pool does not have.

Of an item with repaired tokens (BAT-15) the row has these, which stand in the prompt's request, and behind them those
that are as the cache has them: read from it without the repaired ones; or all of them, computed in a request of their
own, as if the item were alone, which the prompt's request sees but for the repaired ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jgr.models.packed import Asked, Picks, Row, Whole
from jgr.prompt.layouts import ITEM_PREFIX, REPAIRED_ITEM, USER_PREFIX, Kind, Layout, Tokens
from jgr.serving.decoders.work import SegmentsWork
from jgr.serving.policies.batching import Profile
from jgr.serving.policies.prompt_scheduling import PlannedSegment, Repair

Int32 = npt.NDArray[np.int32]
_COMPUTED = PlannedSegment(0)
_NO_CELLS = np.zeros(0, np.int32)
LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (USER_PREFIX, ITEM_PREFIX)}


class Packed(NamedTuple):
    """keep: [T, P] int32 slots for the new tokens' KV. asked: of candidates (rank); whole: of prompts (recommend)."""

    row: Row
    keep: Int32
    asked: Asked
    whole: Whole


class _Tokens(NamedTuple):
    """All tokens of a batch, in order, [n] each. place: in the row's cached tokens, or from C on in its new ones.

    also: the request that sees a token computed in another, else -1. slot: [n, P], of each part of its cell.
    """

    described: Tokens
    sees: Int32
    also: Int32
    token: Int32
    slot: Int32
    place: Int32


def pack(
    works: Sequence[SegmentsWork],
    profile: Profile,
    *,
    cell_tokens: int,
    parts: int,
    slots: int,
    longest: int,
    repair: Repair,
) -> Packed:
    """parts: cells that all layers of a cell's tokens take. slots: of the pool. longest: tokens of a whole prompt
    (recommend); others: 0. repair: what the program is for."""
    tokens = _describe(works, profile, cell_tokens, parts, slots)
    new = tokens.place >= profile.context
    row = Row(
        _fill(profile.tokens, 0, tokens.token[new]),
        _take(tokens.described, new, profile.tokens),
        _fill(profile.tokens, 0, tokens.sees[new]),
        _fill_rows(profile.context, 0, tokens.slot[~new]),
        _take(tokens.described, ~new, profile.context),
    )
    if repair:
        row = row._replace(also=_fill(profile.tokens, -1, tokens.also[new]))
    if repair.share:
        row = row._replace(picks=_picks(works, tokens, new, profile))
    keep = _fill_rows(profile.tokens, slots, tokens.slot[new])
    return Packed(row, keep, _asked(works, tokens, profile), _whole(tokens, len(works), profile, longest))


def _pieces(works: Sequence[SegmentsWork]) -> tuple[list[tuple[int, ...]], list[Int32], list[Int32]]:
    """Of each piece of a segment eleven integers, its tokens, and the segment's cells.

    Request, segment, kind, the segment's position, what the kind sees; tokens, and the first of them within the
    segment; the segment's cached tokens, and its cells, below 0 where nothing is kept; whether it is computed alone,
    and from which token on others see it then.
    """
    columns: list[tuple[int, ...]] = []
    texts: list[Int32] = []
    cells: list[Int32] = []
    for request, work in enumerate(works):
        plan = work.plan
        assert plan is not None
        layout = LAYOUTS[plan.layout]
        bits = layout.bits.tolist()
        for segment in work.prompt.arrange(layout):
            kind, tokens = segment.kind, segment.tokens
            if kind == Kind.USER:
                source = plan.user
            else:
                source = plan.items[segment.number - 1] if kind == Kind.ITEM else _COMPUTED
            of = request, segment.number, kind, segment.position
            skipped, hidden, alone = 0, 0, kind == Kind.ITEM and plan.chosen > 0 and not source.cached
            if source.repaired:
                columns.append((*of, REPAIRED_ITEM, source.repaired, 0, 0, 0, 0, 0))
                texts.append(tokens[: source.repaired])
                cells.append(_NO_CELLS)
                alone = source.alone(len(tokens))
                hidden, skipped = (source.repaired, 0) if alone else (0, source.repaired)
                tokens = tokens[skipped:]
            own = np.array(source.read if source.write is None else source.write, np.int32)
            n_cells = -len(own) if source.write is None else len(own)
            columns.append((*of, bits[kind], len(tokens), skipped, source.cached, n_cells, alone, hidden))
            texts.append(tokens)
            cells.append(own)
    return columns, texts, cells


def _describe(
    works: Sequence[SegmentsWork],
    profile: Profile,
    cell_tokens: int,
    parts: int,
    slots: int,
) -> _Tokens:
    columns, texts, cells = _pieces(works)
    of = np.array(columns, np.int32).T
    request, number, kind, position, sees, length, begin, cached, with_cells, alone, hidden = of
    at = np.repeat(np.arange(len(texts), dtype=np.int32), length)
    place = np.arange(len(at), dtype=np.int32)
    within = place - np.repeat(np.cumsum(length) - length - begin, length).astype(np.int32)
    first = np.cumsum(np.bincount(request, weights=length, minlength=len(works))).astype(np.int32)
    order = place - np.concatenate([[0], first[:-1]])[request[at]].astype(np.int32)
    computed_as = (request + profile.batch * alone)[at]
    described = Tokens(computed_as, number[at], kind[at], order, position[at] + within)
    also = np.where((alone[at] > 0) & (within >= hidden[at]), request[at], -1).astype(np.int32)

    is_cached = within < cached[at]
    has_slot = is_cached | (with_cells[at] > 0)
    count = np.abs(with_cells) // parts
    flat = np.concatenate([*cells, np.zeros(parts, np.int32)]).reshape(-1, parts)
    cell = flat[np.where(has_slot, (np.cumsum(count) - count)[at] + within // cell_tokens, -1)]
    in_cell = (within % cell_tokens)[:, None]
    slot = np.where(has_slot[:, None], cell * cell_tokens + in_cell, slots).astype(np.int32)
    in_row = np.where(is_cached, np.cumsum(is_cached) - 1, profile.context + np.cumsum(~is_cached) - 1)
    return _Tokens(described, sees[at], also, np.concatenate(texts), slot, in_row.astype(np.int32))


def _picks(
    works: Sequence[SegmentsWork], tokens: _Tokens, new: npt.NDArray[np.bool_], profile: Profile
) -> Picks:
    """The places behind the new tokens, which the program fills with as many of each prompt's items as were planned."""
    cached_items = ~new & (tokens.described.kind == Kind.ITEM)
    request = np.where(cached_items, tokens.described.request, tokens.also)
    items = np.bincount(request[request >= 0], minlength=len(works))
    chosen = [0 if work.plan is None else work.plan.chosen for work in works]
    places = [
        np.arange(start, start + n)
        for start, n in zip((np.cumsum(items) - items).tolist(), chosen, strict=True)
    ]
    filled = np.concatenate([np.full(int(new.sum()), -1), *places])
    return Picks(_fill(profile.context, 0, tokens.token[~new]), _fill(profile.tokens, -1, filled))


def _asked(works: Sequence[SegmentsWork], tokens: _Tokens, profile: Profile) -> Asked:
    """A probe's last token asks about its item, else the last one of the instruction about all."""
    if profile.kind != "rank":
        nothing = np.zeros(profile.width, np.int32)
        return Asked(nothing, nothing, nothing)
    described, place = tokens.described, tokens.place - profile.context
    probing = len(works[0].prompt.probe) > 0
    kind = Kind.PROBE if probing else Kind.INSTRUCTION
    ends = np.flatnonzero(described.kind == kind)
    following = np.append(described.segment[ends][1:] != described.segment[ends][:-1], True)
    following |= np.append(described.request[ends][1:] != described.request[ends][:-1], True)
    places = place[ends[following]]
    if not probing:
        places = np.repeat(places, [len(work.columns) for work in works])
    columns = [work.columns for work in works]
    less = [np.full(len(work.columns), -1) if work.less is None else work.less for work in works]
    return Asked(
        *(_fill(profile.width, 0, x) for x in (places, np.concatenate(columns), np.concatenate(less)))
    )


def _whole(tokens: _Tokens, requests: int, profile: Profile, longest: int) -> Whole:
    whole = np.zeros((profile.batch, longest), np.int32)
    lengths = np.ones(profile.batch, np.int32)
    start = np.ones(profile.batch, np.int32)
    if longest:
        for request in range(requests):
            own = np.flatnonzero(tokens.described.request == request)
            lengths[request] = len(own)
            whole[request, : len(own)] = tokens.place[own]
            start[request] = tokens.described.position[own[-1]] + 1
    return Whole(whole, lengths, start)


def _take(tokens: Tokens, which: npt.NDArray[np.bool_], size: int) -> Tokens:
    request, *others = tokens
    return Tokens(_fill(size, -1, request[which]), *(_fill(size, 0, x[which]) for x in others))


def _fill_rows(size: int, fill: int, rows: Int32) -> Int32:
    """As `_fill`, of rows [n, P]."""
    return np.stack([_fill(size, fill, column) for column in rows.T], axis=1)


def _fill(size: int, fill: int, values: npt.NDArray[np.integer]) -> Int32:
    """[size] int32: the values and then `fill`; ValueError where they are more."""
    out = np.full(size, fill, np.int32)
    if len(values) > size:
        raise ValueError(f"{len(values)} values in a profile of {size}")
    out[: len(values)] = values
    return out
