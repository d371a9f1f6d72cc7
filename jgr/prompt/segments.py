# SPDX-License-Identifier: Apache-2.0
"""A prompt is a tuple of segments: what it is made of, from the request's translation to the packed row.

A segment does not know its neighbours. `arrange` puts the segments of a prompt where a layout wants them (BAT-1 to
BAT-3, RcLLM):

    user_prefix   user at 0                    items, all at len(user)        instruction at len(user) + room
    item_prefix   items, all at 0              user at room                   instruction after the user
    causal        user at 0                    items, one after the other     instruction after the last item
                                               and each after its label

Probes come last, all at one position after the instruction. `room` is the number of positions that overlaid items take,
however short they are, so that neither a segment's tokens nor its position depend on the other items of a list, and its
keys and values can be reused.

Frozen plain data: equal prompts compare equal, and msgspec writes them as JSON and reads them back.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from jgr.prompt.layouts import Kind, Layout

Int32 = npt.NDArray[np.int32]
_TOKEN, TOKEN_BYTES = np.dtype("<i4"), 4


class Content(Struct, frozen=True, dict=True):
    """The tokens of a segment and their hashes. raw: the tokens as little-endian int32."""

    raw: bytes

    @classmethod
    def of(cls, tokens: Int32) -> Content:
        """The content of these tokens, [t] int32."""
        return cls(tokens.astype(_TOKEN, copy=False).tobytes())

    def __len__(self) -> int:
        return len(self.raw) // TOKEN_BYTES

    @cached_property
    def tokens(self) -> Int32:
        """The tokens, [t] int32, read-only."""
        return np.frombuffer(self.raw, _TOKEN)

    @cached_property
    def digest(self) -> bytes:
        """The hash of all tokens, 16 bytes."""
        return self.prefix(len(self))

    def prefix(self, count: int) -> bytes:
        """The hash of the first `count` tokens, 16 bytes."""
        return hashlib.blake2b(self.raw[: count * TOKEN_BYTES], digest_size=16).digest()


class Segment(Struct, frozen=True):
    """A part of a prompt whose keys and values may have a source of their own.

    key: what the cache knows it by: the name of a user's entry, an item's row; None: it is not cached. number: tells
    segments apart and orders them for a layout; a probe has the number of its item. room: positions that it takes where
    segments are overlaid, if they are more than its tokens. offset: the position of its first token, once it is
    arranged.
    """

    kind: Kind
    key: str | int | None
    content: Content
    number: int
    room: int = 0
    offset: int = 0

    @property
    def tokens(self) -> Int32:
        """The segment's tokens, [t] int32."""
        return self.content.tokens

    def __len__(self) -> int:
        return len(self.content.raw) // TOKEN_BYTES


Prompt = tuple[Segment, ...]

PartKind = Literal["instruction", "structure", "review", "item"]
"""What tokens of a prompt are to reuse beyond the prefix (RCLLM-5): only reviews and items are ever approximated."""


class Part(NamedTuple):
    """So many tokens of one kind."""

    kind: PartKind
    tokens: int


def make_prompt(
    user: Content,
    instruction: Int32,
    items: Iterable[tuple[int, Content]] = (),
    probe: Int32 | None = None,
    *,
    key: str | None = None,
    room: int = 0,
    labels: Sequence[Content] = (),
) -> Prompt:
    """A history, candidates in the caller's order, the instruction, and where there is a probe one for each candidate.

    instruction, probe: [t] int32, the probe not empty. items: catalog row and content of each candidate. key: of the
    user. room: positions that the candidates take where they are overlaid. labels: what stands before the candidates,
    none or as many as they are at least; layouts that overlay candidates have no place for them.
    """
    apart = 2 if labels else 1  # a label has the number before its candidate's
    listed = [Segment(Kind.ITEM, row, content, apart * i, room) for i, (row, content) in enumerate(items, 1)]
    told = [
        Segment(Kind.LABEL, None, label, item.number - 1) for label, item in zip(labels, listed, strict=False)
    ]
    last = Segment(Kind.INSTRUCTION, None, Content.of(instruction), apart * len(listed) + 1)
    probes: list[Segment] = []
    if probe is not None:
        asked = Content.of(probe)
        probes = [Segment(Kind.PROBE, None, asked, item.number) for item in listed]
    return (Segment(Kind.USER, key, user, 0), *told, *listed, last, *probes)


def of_kind(prompt: Prompt, kind: Kind) -> Prompt:
    """The segments of one kind, in order."""
    return tuple(segment for segment in prompt if segment.kind == kind)


def count_tokens(prompt: Prompt) -> int:
    """The number of tokens of the whole prompt."""
    return sum(map(len, prompt))


def segment_places(prompt: Prompt, layout: Layout) -> list[tuple[Segment, int]]:
    """The segments in the layout's order, each with the position of its first token. ValueError for a kind that has no
    place in the layout."""
    by_kind: list[list[Segment] | None] = [None] * len(Kind)
    for kind, _ in layout.sees:
        by_kind[kind] = []
    for segment in prompt:
        of_its_kind = by_kind[segment.kind]
        if of_its_kind is None:
            raise ValueError(f"a segment of kind {segment.kind.name} has no place in layout {layout.name}")
        of_its_kind.append(segment)
    if layout.ranked:  # where the first of these kinds stands, in the order of their numbers
        of_ranks = itertools.chain(*(by_kind[kind] or () for kind in layout.ranked))
        in_order = sorted(of_ranks, key=attrgetter("number"))
        for kind in layout.ranked:
            by_kind[kind] = []
        by_kind[layout.ranked[0]] = in_order
    placed: list[tuple[Segment, int]] = []
    at = 0
    for kind, _ in layout.sees:
        segments = by_kind[kind] or []
        if kind in layout.overlaid:
            placed += [(x, at) for x in segments]
            at += max([max(x.room, len(x)) for x in segments], default=0)
            continue
        for x in segments:
            placed.append((x, at))
            at += len(x)
    return placed


def arrange(prompt: Prompt, layout: Layout) -> Prompt:
    """The segments in the layout's order, with their offsets. ValueError as in `segment_places`."""
    return tuple(
        Segment(x.kind, x.key, x.content, x.number, x.room, at) for x, at in segment_places(prompt, layout)
    )
