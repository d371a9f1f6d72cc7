# SPDX-License-Identifier: Apache-2.0
"""Layouts: in which order the segments of a prompt stand, and which kinds of token see which (BAT-2, MODEL-14).

One rule serves all of them. A query token sees a key token iff both belong to the same request and
  - they stand in the same segment, the key not later (`order`), or
  - the layout lets the query's kind see the key's (where the kind is ranked: and the key's segment is an earlier one),
optionally narrowed by a window, or widened for a repaired token. A layout is data only; nothing here needs jax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

LayoutName = Literal["causal", "user_prefix", "item_prefix", "single_user_multi_item"]

EARLIER = 16
"""The bit of Layout.bits from which on kinds are seen in earlier segments only; the lower bits: wherever they stand."""


class Kind(IntEnum):
    """What a token is part of. At most 15 fit into Layout.bits."""

    PREAMBLE = 0  # before everything; a fixed lead-in
    INSTRUCTION = 1  # after everything
    USER = 2  # a user's text, or the history of a single_user_multi_item prompt
    ITEM = 3  # a candidate
    PROBE = 4  # asks about one item (BAT-1b): in the item's segment, with a later order
    CONTEXT = 5  # contextual slots (MODEL-14)
    LABEL = 6  # stands before a candidate and says which one it is


@dataclass(frozen=True)
class Layout:
    """Where the segments of a prompt stand, and what they see; `jgr.prompt.segments.arrange` follows it.

    sees: every kind that may occur, in the order in which the kinds stand in the prompt, each with the kinds that its
    tokens see beyond their own segment. ranked: the kinds that see only segments of a smaller number than their own,
    and stand in the order of their numbers. overlaid: the kinds whose segments all begin at one position; others follow
    each other.
    """

    name: LayoutName
    sees: tuple[tuple[Kind, tuple[Kind, ...]], ...]
    ranked: tuple[Kind, ...] = ()
    overlaid: tuple[Kind, ...] = ()

    @cached_property
    def bits(self) -> npt.NDArray[np.int32]:
        """What each kind sees, as one integer each: [len(Kind)] int32. `segment_attention` computes with bits[kind]."""
        table = np.zeros(len(Kind), np.int32)
        for kind, seen in self.sees:
            table[kind] = sum(1 << other for other in set(seen)) << (EARLIER if kind in self.ranked else 0)
        table.setflags(write=False)
        return table


_PREAMBLE = (Kind.PREAMBLE, ())
_TEXT = (Kind.PREAMBLE, Kind.CONTEXT, Kind.USER, Kind.LABEL, Kind.ITEM, Kind.INSTRUCTION)
_ASKS = (Kind.PROBE, (Kind.PREAMBLE, Kind.USER, Kind.INSTRUCTION))
"""A probe asks about one item: it sees that item, which stands in its segment, and no other one."""

CAUSAL = Layout("causal", (*((kind, _TEXT) for kind in _TEXT), _ASKS), ranked=_TEXT, overlaid=(Kind.PROBE,))
"""Plain language model order: a segment sees all that stands before it. Items stand one after the other (RcLLM)."""

USER_PREFIX = Layout(
    "user_prefix",
    (
        _PREAMBLE,
        (Kind.USER, (Kind.PREAMBLE,)),
        (Kind.ITEM, (Kind.PREAMBLE, Kind.USER)),
        (Kind.INSTRUCTION, (Kind.PREAMBLE, Kind.USER, Kind.ITEM)),
        _ASKS,
    ),
    overlaid=(Kind.ITEM, Kind.PROBE),
)
ITEM_PREFIX = Layout(
    "item_prefix",
    (
        _PREAMBLE,
        (Kind.ITEM, (Kind.PREAMBLE,)),
        (Kind.USER, (Kind.PREAMBLE, Kind.ITEM)),
        (Kind.INSTRUCTION, (Kind.PREAMBLE, Kind.ITEM, Kind.USER)),
        _ASKS,
    ),
    overlaid=(Kind.ITEM, Kind.PROBE),
)
SINGLE_USER_MULTI_ITEM = Layout(
    "single_user_multi_item",
    (
        (Kind.CONTEXT, (Kind.CONTEXT, Kind.USER)),
        (Kind.USER, (Kind.CONTEXT,)),
        (Kind.ITEM, (Kind.CONTEXT, Kind.USER)),
    ),
    overlaid=(Kind.ITEM,),
)
REPAIRED_ITEM = int(ITEM_PREFIX.bits[Kind.ITEM]) | 1 << Kind.ITEM + EARLIER
"""What a repaired item token of ITEM_PREFIX sees: what others see, and the items before its own (BAT-15)."""

LAYOUTS: dict[str, Layout] = {x.name: x for x in (CAUSAL, USER_PREFIX, ITEM_PREFIX, SINGLE_USER_MULTI_ITEM)}


class Tokens(NamedTuple):
    """Five integers for each token, as arrays of one shape: numpy's in a plan, jax's in a program.

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
