# SPDX-License-Identifier: Apache-2.0
"""Layouts: in which order the segments of a prompt stand, and which kinds of token see which (BAT-2, MODEL-14).

One rule serves all of them. A query token sees a key token iff both belong to the same request and
  - they stand in the same segment, the key not later (`order`), or
  - the layout lets the query's kind see the key's (where it is ranked: and the key's segment is an earlier one),
optionally narrowed by a window, or widened for a repaired token. A layout is data only; nothing here needs jax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]

EARLIER = 16
"""Layout.bits holds kinds seen wherever they stand in its low half, kinds seen in earlier segments from this bit on."""


class Kind(IntEnum):
    """What a token is part of. At most 15 fit into Layout.bits."""

    PREAMBLE = 0  # before everything; a fixed lead-in
    INSTRUCTION = 1  # after everything
    USER = 2  # a user's text, or the history of a single_user_multi_item prompt
    ITEM = 3  # a candidate
    PROBE = 4  # asks about one item (BAT-1b): in the item's segment, with a later order
    CONTEXT = 5  # contextual slots (MODEL-14)


@dataclass(frozen=True)
class Layout:
    """sees: every kind that may occur, in the order of the prompt, and the kinds it sees beyond its own segment.

    ranked: only in segments with a smaller number than its own.
    """

    name: str
    sees: tuple[tuple[Kind, tuple[Kind, ...]], ...]
    ranked: bool = False

    @property
    def bits(self) -> npt.NDArray[np.int32]:
        """[len(Kind)] int32: what each kind sees, as one integer; `segment_attention` computes with bits[kind]."""
        table = np.zeros(len(Kind), np.int32)
        for kind, seen in self.sees:
            table[kind] = sum(1 << other for other in set(seen)) << (EARLIER if self.ranked else 0)
        return table


_PREAMBLE = (Kind.PREAMBLE, ())

CAUSAL = Layout("causal", tuple((kind, tuple(Kind)) for kind in Kind), ranked=True)
"""Plain language model order, of any kinds."""

USER_PREFIX = Layout(
    "user_prefix",
    (
        _PREAMBLE,
        (Kind.USER, (Kind.PREAMBLE,)),
        (Kind.ITEM, (Kind.PREAMBLE, Kind.USER)),
        (Kind.INSTRUCTION, (Kind.PREAMBLE, Kind.USER, Kind.ITEM)),
        (Kind.PROBE, (Kind.PREAMBLE, Kind.USER, Kind.INSTRUCTION)),
    ),
)
ITEM_PREFIX = Layout(
    "item_prefix",
    (
        _PREAMBLE,
        (Kind.ITEM, (Kind.PREAMBLE,)),
        (Kind.USER, (Kind.PREAMBLE, Kind.ITEM)),
        (Kind.INSTRUCTION, (Kind.PREAMBLE, Kind.ITEM, Kind.USER)),
        (Kind.PROBE, (Kind.PREAMBLE, Kind.USER, Kind.INSTRUCTION)),
    ),
)
SINGLE_USER_MULTI_ITEM = Layout(
    "single_user_multi_item",
    (
        (Kind.CONTEXT, (Kind.CONTEXT, Kind.USER)),
        (Kind.USER, (Kind.CONTEXT,)),
        (Kind.ITEM, (Kind.CONTEXT, Kind.USER)),
    ),
)
REPAIRED_ITEM = int(ITEM_PREFIX.bits[Kind.ITEM]) | 1 << Kind.ITEM + EARLIER
"""What a repaired item token of ITEM_PREFIX sees: besides, the items before its own (BAT-15)."""

LAYOUTS = {x.name: x for x in (CAUSAL, USER_PREFIX, ITEM_PREFIX, SINGLE_USER_MULTI_ITEM)}


class Segment(NamedTuple):
    """tokens: [t] int32; number: of the segment in its prompt; position: of the first token."""

    kind: Kind
    number: int
    position: int
    tokens: Int32


@dataclass(frozen=True, eq=False)
class SegmentedPrompt:
    """A prompt in any layout. user, behind, probe and each of items: [t] int32 tokens; probe may be empty.

    span: positions that the items take, whatever their lengths; 0 where there are none.
    """

    user: Int32
    behind: Int32
    items: Sequence[Int32] = ()
    probe: Int32 = field(default_factory=lambda: np.zeros(0, np.int32))
    span: int = 0

    @property
    def tokens(self) -> int:
        """Of the whole prompt."""
        items = sum(len(item) for item in self.items)
        return len(self.user) + items + len(self.behind) + len(self.probe) * len(self.items)

    def arrange(self, layout: Layout) -> list[Segment]:
        """The segments in the layout's order. The user's is number 0, the i-th item's and its probe's i + 1."""
        behind = len(self.user) + self.span
        at_items, at_user = (len(self.user), 0) if layout == USER_PREFIX else (0, self.span)
        user = Segment(Kind.USER, 0, at_user, self.user)
        items = [Segment(Kind.ITEM, 1 + i, at_items, item) for i, item in enumerate(self.items)]
        if layout == USER_PREFIX:
            prompt = [user, *items]
        elif layout == ITEM_PREFIX:
            prompt = [*items, user]
        else:
            raise ValueError(f"candidates have no place in layout {layout.name}")
        prompt.append(Segment(Kind.INSTRUCTION, len(items) + 1, behind, self.behind))
        if len(self.probe):
            asked = behind + len(self.behind)
            prompt += [Segment(Kind.PROBE, 1 + i, asked, self.probe) for i in range(len(items))]
        return prompt


class Tokens(NamedTuple):
    """Of each token five integers, as arrays of one shape: numpy's in a plan, jax's in a program.

    request: below 0 for padding. segment: its number within the request. kind: a Kind. order: decides what is earlier
    within a segment and what a window holds; below 2**30, by default the place in the prompt. position: for rope.
    """

    request: Any
    segment: Any
    kind: Any
    order: Any
    position: Any


def describe(
    kinds: Sequence[Kind], lengths: Sequence[int], starts: Sequence[int] | None = None, *, request: int = 0
) -> Tokens:
    """The tokens of a prompt whose segments have these kinds, lengths and (BAT-3) first positions; arrays [T] int32.

    starts: default one segment after the other. Raises ValueError where the lists differ in length.
    """
    order = np.arange(sum(lengths), dtype=np.int32)
    ends = np.cumsum(lengths, dtype=np.int32)
    first = ends - np.asarray(lengths, np.int32)
    begin = first if starts is None else np.asarray(starts, np.int32)
    if not len(kinds) == len(lengths) == len(begin):
        raise ValueError(f"{len(kinds)} kinds, {len(lengths)} lengths and {len(begin)} starts")
    segment = np.repeat(np.arange(len(kinds), dtype=np.int32), lengths)
    kind = np.asarray(kinds, np.int32)[segment]
    return Tokens(np.full_like(order, request), segment, kind, order, begin[segment] + order - first[segment])


def single_user(
    contextual: int,
    history: int,
    targets: int,
    *,
    max_attention: int = 0,
    full_rows: int = 0,
    request: int = 0,
) -> tuple[Tokens, npt.NDArray[np.int32] | None]:
    """MODEL-14: contextual slots, a history, and one token per target, each in a segment of its own.

    Returns the tokens, and where max_attention > 0 the window of each: rows see at most that far back, but for the last
    `full_rows` of the history, and targets where there are such rows.
    """
    kinds = [Kind.CONTEXT, Kind.USER, *[Kind.ITEM] * targets]
    tokens = describe(kinds, [contextual, history, *[1] * targets], request=request)
    target_id = history + 1 if contextual else history
    ids = np.clip(tokens.order - contextual + 1 if contextual else tokens.order, 0, target_id).astype(
        np.int32
    )
    tokens = tokens._replace(order=ids)
    if max_attention == 0:
        return tokens, None
    full = (full_rows > 0) & (ids >= target_id - full_rows)
    return tokens, np.where(full, np.int32(2**30), np.int32(max_attention))
