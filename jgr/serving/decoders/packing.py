# SPDX-License-Identifier: Apache-2.0
"""From planned prompts to the arrays of one packed row: which tokens are new, which are cached, and where they stand.

Every token of a batch is described once, prompt after prompt, and then dealt to the two halves of the row. Padding has
request -1, and a new token that is not kept is written to a slot that the pool does not have.

An item with repaired tokens (BAT-15) stands in the row as these, in the prompt's request, followed by the tokens that
are as the cache has them. They are read from it without the repaired ones; or all of the item is computed in a request
of its own, as if it were alone, and the prompt's request sees it but for the repaired ones. In plain order that is done
with every item, repaired or not, at the place where it stands in the prompt.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jgr.models.packed import Asked, RepairChoice, Row
from jgr.models.packed_recommend import WholePrompts
from jgr.prompt.layouts import ITEM_PREFIX, LAYOUTS, REPAIRED_ITEM, Kind, Tokens
from jgr.prompt.segments import TOKEN_BYTES, segment_places
from jgr.serving.decoders.work import SegmentsWork
from jgr.serving.policies.jobs import Profile
from jgr.serving.policies.sources import Approximate, Compute, Repair

Int32 = npt.NDArray[np.int32]
_NOWHERE: tuple[int, ...] = ()


_ALONE = int(ITEM_PREFIX.bits[Kind.ITEM])
"""What an item's tokens see where it is computed alone."""


class UnservedSource(ValueError):
    """A plan has a source that the compiled programs cannot read: they do not rotate cached keys to other positions."""


class Packed(NamedTuple):
    """The arrays of one batch.

    asked: how candidates are scored (rank). prompts: where whole prompts stand in the row, and widths: [B] int32, of
    their beams (recommend). None where the program reads none.
    """

    row: Row
    asked: Asked | None
    prompts: WholePrompts | None
    widths: Int32 | None


class Kept(NamedTuple):
    """Where a batch's new KV is kept: slots of the pool [T, P], and by how many positions keys are rotated back, [T];
    None where the programs rotate none."""

    slots: Int32
    shift: Int32 | None


def blank(profile: Profile, parts: int, longest: int, repair: Repair, moves: bool = False) -> Packed:
    """The arrays that the batches of a profile have, all 0.

    parts: cells that all layers of a cell's tokens take. longest: the most tokens that a whole prompt has (recommend).
    repair: what the program repairs. moves: whether items are read at other places than where they were computed.
    """

    def zeros(*shape: int) -> Int32:
        return np.zeros(shape, np.int32)

    new, cached, batch = profile.tokens, profile.context, profile.batch
    row = Row(
        zeros(new),
        Tokens(*(zeros(new) for _ in Tokens._fields)),
        zeros(new),
        zeros(cached, parts),
        Tokens(*(zeros(cached) for _ in Tokens._fields)),
    )
    if profile.kind == "recommend":
        return Packed(
            row, None, WholePrompts(zeros(batch, longest), zeros(batch), zeros(batch)), zeros(batch)
        )
    if repair or moves:
        row = row._replace(seen_by=zeros(new))
    if moves:
        row = row._replace(shift=zeros(cached))
    if repair.share:
        ends = zeros(cached + new) if repair.last else None
        choice = RepairChoice(zeros(cached), zeros(new), zeros(new), zeros(cached + new), ends)
        row = row._replace(choice=choice)
    return Packed(row, Asked(*(zeros(profile.width) for _ in Asked._fields)), None, None)


class _Tokens(NamedTuple):
    """All tokens of a batch, in order, [n] each. place: in the row's cached tokens, or from C on in its new ones.

    sees: the bits of what each one sees; looks: the same in its prompt, where it is repaired. seen_by: the request that
    sees a token computed in another request, else -1. slot: [n, P], the slots of the pool, one in each part of a cell,
    that it is read from or written to; none of the pool's where it is neither. shift: how many positions lie between
    its place in the prompt and that in its entry. alone: computed in another request than the prompt's.
    """

    described: Tokens
    sees: Int32
    looks: Int32
    seen_by: Int32
    token: Int32
    slot: Int32
    place: Int32
    shift: Int32
    alone: npt.NDArray[np.bool_]


_COLUMNS = 13


class _Spans:
    """Tokens of one segment that have one source, for all segments of a batch.

    numbers: for each span these _COLUMNS integers: the request in which it is computed, and the prompt's own; number
    and kind of the segment; position of the first token; the bits of what its tokens see, and look at where they are
    repaired; how many of the first tokens the prompt's request does not see, where they are computed in another; by how
    many positions the entry is moved; whether they are cached; the first token's place in its entry; the number of
    tokens, and of the entry's cells, 0 where it is neither read nor kept. raw: its tokens. cells: of the entries, one
    entry after the other.
    """

    def __init__(self) -> None:
        self.numbers = array("i")
        self.raw: list[bytes] = []
        self.cells: list[int] = []


def pack(
    out: Packed,
    works: Sequence[SegmentsWork],
    profile: Profile,
    *,
    cell_tokens: int,
    slots: int,
    last: int = 0,
) -> Kept:
    """Write all of a batch into arrays as `blank` makes them; returns where the new tokens' KV is kept.

    slots: number of slots in the pool. last: so many last tokens of items are repaired. UnservedSource for a plan that
    moves cached tokens where the arrays have no place for it.
    """
    row, parts = out.row, out.row.slots.shape[1]
    tokens = _describe(works, profile, cell_tokens, parts, slots)
    is_new = tokens.place >= profile.context
    new, old = np.flatnonzero(is_new), np.flatnonzero(~is_new)
    _fill(row.tokens, 0, tokens.token[new])
    _fill(row.sees, 0, tokens.sees[new])
    _fill(row.slots, 0, tokens.slot[old])
    for described, which in ((row.described, new), (row.cached, old)):
        for part, values, padding in zip(described, tokens.described, (-1, 0, 0, 0, 0), strict=True):
            _fill(part, padding, values[which])
    if row.seen_by is not None:
        _fill(row.seen_by, -1, tokens.seen_by[new])
    shift = tokens.shift
    if row.shift is not None:
        _fill(row.shift, 0, shift[old])
    elif (moved := shift[tokens.slot[:, 0] < slots]).any():
        raise UnservedSource(f"a plan moves cached tokens by up to {moved.max()} positions")
    if row.choice is not None:
        _write_choice(row.choice, works, tokens, is_new, last)
    if out.asked is not None:
        _write_asked(out.asked, works, tokens, profile)
    if out.prompts is not None:
        _write_prompts(out.prompts, tokens, len(works))
    if out.widths is not None:
        _fill(out.widths, 0, np.array([work.beam_width for work in works], np.int32))
    keep = Kept(np.full((profile.tokens, parts), slots, np.int32), None)
    keep.slots[: len(new)] = tokens.slot[new]
    if row.shift is not None:
        back = np.zeros(profile.tokens, np.int32)
        _fill(back, 0, shift[new])
        keep = keep._replace(shift=back)
    return keep


def _add_spans(spans: _Spans, own: int, alone: int, work: SegmentsWork) -> None:
    """A prompt in the layout's order. own: its number in the batch; alone: the request of items computed alone."""
    plan = work.plan
    assert plan is not None
    layout = LAYOUTS[plan.layout]
    bits = layout.bits.tolist()
    repaired_bits = REPAIRED_ITEM if layout is ITEM_PREFIX else bits[Kind.ITEM]
    add_numbers, add_raw = spans.numbers.extend, spans.raw.append
    for (segment, offset), planned in zip(segment_places(work.prompt, layout), plan.segments, strict=True):
        raw, number, kind, at = segment.content.raw, segment.number, segment.kind, planned.repaired
        request, hidden, sees = own, 0, bits[kind]
        looks = repaired_bits if kind == Kind.ITEM else sees
        if at:
            add_raw(raw[: at * TOKEN_BYTES])
            add_numbers((own, own, number, kind, offset, looks, looks, 0, 0, False, 0, at, 0))
        if planned.alone:
            request, hidden, at, sees = alone, at, 0, _ALONE
        for span in planned.spans:
            tokens, cached, first, shift, cells = span.tokens, False, at, offset, planned.write or _NOWHERE
            if not isinstance(span, Compute):
                cached, first, cells = True, span.first, span.cells
                shift = span.shift if isinstance(span, Approximate) else 0
            add_raw(raw[at * TOKEN_BYTES : (at + tokens) * TOKEN_BYTES])
            position, count = offset + at, len(cells)
            add_numbers((
                request, own, number, kind, position, sees, looks, hidden, shift, cached, first, tokens, count,
            ))  # fmt: skip
            spans.cells += cells
            at += tokens


def _describe(
    works: Sequence[SegmentsWork], profile: Profile, cell_tokens: int, parts: int, slots: int
) -> _Tokens:
    spans = _Spans()
    for request, work in enumerate(works):
        _add_spans(spans, request, request + profile.batch, work)
    columns = np.frombuffer(spans.numbers, np.int32).reshape(-1, _COLUMNS).T
    length, cells = columns[-2:]
    at = np.repeat(np.arange(len(length), dtype=np.int32), length)
    request, own, number, kind, position, sees, looks, hidden, shift, cached, first = columns[:-2, at]
    place = np.arange(len(at), dtype=np.int32)
    within = place - (np.cumsum(length) - length).astype(np.int32)[at]
    begin = np.searchsorted(own, np.arange(len(works))).astype(np.int32)  # own requests stand in order
    described = Tokens(request, number, kind, place - begin[own], position + within)
    seen_by = np.where((request != own) & (within >= hidden), own, -1).astype(np.int32)

    flat = np.array(spans.cells or [0] * parts, np.int32).reshape(-1, parts)
    count = cells // parts
    has_slot, entry = count[at] > 0, first + within
    cell = flat[np.where(has_slot, (np.cumsum(count) - count)[at] + entry // cell_tokens, 0)]
    in_cell = (entry % cell_tokens)[:, None]
    slot = np.where(has_slot[:, None], cell * cell_tokens + in_cell, slots).astype(np.int32)
    in_row = np.where(cached, np.cumsum(cached) - 1, profile.context + np.cumsum(1 - cached) - 1)
    text = np.frombuffer(b"".join(spans.raw), "<i4").astype(np.int32, copy=False)
    return _Tokens(
        described, sees, looks, seen_by, text, slot, in_row.astype(np.int32), shift, request != own
    )


def _write_choice(
    out: RepairChoice,
    works: Sequence[SegmentsWork],
    tokens: _Tokens,
    new: npt.NDArray[np.bool_],
    last: int,
) -> None:
    """The places after the new tokens, which the program fills with as many item tokens a prompt as were planned.

    In a prompt whose items come first only they go through the first layer in plain order, for they see no others.
    """
    cached_items = ~new & (tokens.described.kind == Kind.ITEM)
    request = np.where(cached_items, tokens.described.request, tokens.seen_by)
    items = np.bincount(request[request >= 0], minlength=len(works))
    chosen = [0 if work.plan is None else work.plan.chosen for work in works]
    places = [
        np.arange(start, start + n)
        for start, n in zip((np.cumsum(items) - items).tolist(), chosen, strict=True)
    ]
    items_first = np.array([work.plan is None or work.plan.layout == ITEM_PREFIX.name for work in works])
    own = tokens.described.request
    left_out = tokens.alone | (items_first[np.where(tokens.alone, 0, own)] & (tokens.looks != REPAIRED_ITEM))
    prompts = np.where(tokens.seen_by >= 0, tokens.seen_by, np.where(left_out, -1, own))
    _fill(out.cached_tokens, 0, tokens.token[~new])
    _fill(out.ranks, -1, np.concatenate([np.full(int(new.sum()), -1), *places]))
    _fill(out.prompts, -1, prompts[new])
    context = len(out.cached_tokens)
    _fill(out.looks[:context], 0, tokens.looks[~new])
    _fill(out.looks[context:], 0, tokens.looks[new])
    if out.ends is not None:
        ends = _ends(tokens.described, last)
        _fill(out.ends[:context], 0, ends[~new])
        _fill(out.ends[context:], 0, ends[new])


def _ends(described: Tokens, last: int) -> Int32:
    """1 for so many last tokens of each item, 0 for others: those behind which so many of their segment do not come."""
    follows = np.zeros(len(described.kind), bool)
    if last < len(follows):
        follows[:-last] = (described.kind[last:] == described.kind[:-last]) & (
            described.segment[last:] == described.segment[:-last]
        )
    ends: Int32 = ((described.kind == Kind.ITEM) & ~follows).astype(np.int32)
    return ends


def _write_asked(out: Asked, works: Sequence[SegmentsWork], tokens: _Tokens, profile: Profile) -> None:
    """A probe's last token asks about its item, else the last one of the instruction about all.

    A work without candidates asks nothing, and has neither.
    """
    if not any(len(work.columns) for work in works):
        for part in out:
            part.fill(0)
        return
    described, place = tokens.described, tokens.place - profile.context
    probing = any(segment.kind == Kind.PROBE for work in works for segment in work.prompt)
    kind = Kind.PROBE if probing else Kind.INSTRUCTION
    ends = np.flatnonzero(described.kind == kind)
    following = np.append(described.segment[ends][1:] != described.segment[ends][:-1], True)
    following |= np.append(described.request[ends][1:] != described.request[ends][:-1], True)
    places = place[ends[following]]
    if not probing:
        places = np.repeat(places, [len(work.columns) for work in works if len(work.columns)])
    columns = np.concatenate([work.columns for work in works])
    negative = [
        np.full(len(work.columns), -1) if work.negative_columns is None else work.negative_columns
        for work in works
    ]
    for part, values in zip(out, (places, columns, np.concatenate(negative)), strict=True):
        _fill(part, 0, values)


def _write_prompts(out: WholePrompts, tokens: _Tokens, requests: int) -> None:
    for part, padding in zip(out, (0, 1, 1), strict=True):
        part.fill(padding)
    for request in range(requests):
        own = np.flatnonzero(tokens.described.request == request)
        out.lengths[request] = len(own)
        out.tokens[request, : len(own)] = tokens.place[own]
        out.start[request] = tokens.described.position[own[-1]] + 1


def _fill(out: Int32, padding: int, values: npt.NDArray[np.integer]) -> None:
    """Write the values and then `padding`; ValueError where they are more."""
    if len(values) > len(out):
        raise ValueError(f"{len(values)} values in a profile of {len(out)}")
    out[: len(values)] = values
    out[len(values) :] = padding
