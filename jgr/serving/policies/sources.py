# SPDX-License-Identifier: Apache-2.0
"""Where the keys and values of a prompt's tokens come from (DESIGN idea 2): what a planner decides and packing follows.

All of it is frozen plain data: equal plans compare equal, and msgspec writes them as JSON and reads them back. A cell
is a number in the pool of pages; an entry's n-th token stands in its cell n // cell_tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct

from jgr.cache.entries import Name
from jgr.config import CacheConfig
from jgr.prompt.layouts import Kind, LayoutName
from jgr.prompt.segments import Prompt, Segment, count_tokens, of_kind


class Compute(Struct, frozen=True, tag=True):
    """So many tokens are computed."""

    tokens: int


class Reuse(Struct, frozen=True, tag=True):
    """So many tokens are read from an entry's cells, from its token `first` on: they are exactly what is needed."""

    tokens: int
    cells: tuple[int, ...]
    first: int = 0


class Approximate(Struct, frozen=True, tag=True):
    """So many tokens are read from an entry that is not exactly what is needed, such as a block that was computed at
    another place. shift: by how many positions its keys must be rotated on (PIC-1, RCLLM-12).
    """

    tokens: int
    cells: tuple[int, ...]
    shift: int
    first: int = 0


Source = Compute | Reuse | Approximate


def entry_name(segment: Segment) -> Name:
    """What the segment's entry is called: by the layout in which it is a prefix, which is where its KV is exact."""
    assert segment.key is not None
    if segment.kind == Kind.USER:
        return Name("user", segment.key, "user_prefix")
    return Name("item", segment.key, "item_prefix")


def moved(span: Source, place: int) -> Source:
    """The span of an item that begins at this position of its prompt."""
    return Approximate(span.tokens, span.cells, place, span.first) if isinstance(span, Reuse) else span


class Repair(Struct, frozen=True):
    """Which item tokens see what stands before their item, which cached ones do not (BAT-15, RCLLM-11).

    first: the number of repaired tokens at the start of each item (PIC-4). last: the number at its end, which the
    program chooses before all others. share: the share of a prompt's item tokens that it chooses to repair beside these
    (PIC-3). Where all are 0 nothing is repaired. of_all: the first ones also of the list's first item, before which
    stands nothing only where the items come first.
    """

    first: int = 0
    share: float = 0.0
    of_all: bool = False
    last: int = 0

    @classmethod
    def of(cls, cache: CacheConfig) -> Repair:
        """The repair that the configuration asks for."""
        of_all = cache.policy == "blocks"
        return cls(cache.repair_tokens, cache.repair_share, of_all, cache.repair_last_tokens)

    def __bool__(self) -> bool:
        return self.first > 0 or self.share > 0 or self.last > 0

    def firsts(self, lengths: Sequence[int]) -> list[int]:
        """For each item, how many of its first tokens are repaired. lengths: tokens of the items."""
        return [min(self.first, n) if i or self.of_all else 0 for i, n in enumerate(lengths)]

    def chosen(self, lengths: Sequence[int]) -> int:
        """How many tokens the program chooses. lengths: tokens of the items."""
        total, firsts = sum(lengths), self.firsts(lengths)
        lasts = sum(min(self.last, n - first) for n, first in zip(lengths, firsts, strict=True))
        return min(lasts + part_of(self.share, total), total - sum(firsts))


def part_of(share: float, tokens: int) -> int:
    """The share of so many tokens, rounded up; what a float has beyond a whole number is no token."""
    return math.ceil(share * tokens - 1e-9)


NO_REPAIR = Repair()
ALL_ITEM_TOKENS = Repair(first=2**30, of_all=True)
"""Plain causal order among the items: what a repair is measured against."""


class Run(Struct, frozen=True):
    """Tokens of a history, from `first` on, that may take the keys and values of consecutive prototypes of a library.

    prototype: the number of the first one. place: its place in its own review, for which its keys stand rotated.
    """

    first: int
    tokens: int
    prototype: int
    place: int


class Near(Struct, frozen=True):
    """Which tokens of a history a library stands for (RCLLM-9), in order. selected: so many others have prototypes too,
    and are computed all the same: the farthest from theirs."""

    runs: tuple[Run, ...]
    selected: int = 0


class UnplannedPrompt(Struct, frozen=True):
    """A prompt and how it may be planned. layout: the one that the caller insists on; None: the planner chooses.

    fresh: compute all of it, for a comparison. hint: nobody came yet; it only says that the user will. repair: what is
    repaired where the items stand first. near: what a library stands for, where the prompt is planned in plain order.
    """

    prompt: Prompt
    layout: LayoutName | None = None
    fresh: bool = False
    repair: Repair = NO_REPAIR
    hint: bool = False
    near: Near | None = None

    @property
    def computed_at_most(self) -> int:
        """Tokens that are computed where nothing is cached: the prompt's, and second copies of repaired ones."""
        lengths = [len(item) for item in of_kind(self.prompt, Kind.ITEM)]
        firsts = self.repair.firsts(lengths)
        copies = sum(n for n, length in zip(firsts, lengths, strict=True) if n < length)
        return count_tokens(self.prompt) + copies + self.repair.chosen(lengths)


class PlannedSegment(Struct, frozen=True):
    """The sources of one segment.

    spans: where its tokens come from, in order; without the `repaired` ones where those are not computed alone too.
    write: cells for the whole segment, which keep what is computed; None: nothing is kept. repaired: so many first
    tokens of an item are computed seeing the items before it (BAT-15). alone: the item is computed as if no other one
    stood in the prompt, which is how it is cached; the prompt sees that but for the repaired tokens.
    """

    kind: Kind
    spans: tuple[Source, ...]
    write: tuple[int, ...] | None = None
    repaired: int = 0
    alone: bool = False

    @property
    def cached(self) -> int:
        """Tokens that are read from the cache."""
        return sum(span.tokens for span in self.spans if not isinstance(span, Compute))


class PlannedPrompt(Struct, frozen=True):
    """The sources of a prompt's segments, in the order in which its layout has them.

    chosen: item tokens that the program chooses to repair. repaired_tokens: all that are repaired; None: prompts of
    this layout, or on this server, are not repaired. device: which of the devices that part a batch runs it.
    """

    layout: LayoutName
    segments: tuple[PlannedSegment, ...]
    computed_tokens: int
    cached_tokens: int
    chosen: int = 0
    repaired_tokens: int | None = None
    device: int = 0

    @classmethod
    def of(
        cls,
        layout: LayoutName,
        segments: Sequence[PlannedSegment],
        chosen: int = 0,
        repaired: int | None = None,
    ) -> PlannedPrompt:
        """The plan of these segments, with its tokens counted."""
        computed, cached = chosen, 0
        for segment in segments:
            computed += segment.repaired
            for span in segment.spans:
                if isinstance(span, Compute):
                    computed += span.tokens
                else:
                    cached += span.tokens
        return cls(layout, tuple(segments), computed, cached, chosen, repaired)

    @property
    def approximate_tokens(self) -> int:
        """Item tokens that are as where the item stands alone, in a layout in which it sees what stands before it; and
        tokens of the history that are as a prototype of a library."""
        if self.layout != "causal":
            return 0
        near = sum(span.tokens for span in self.user.spans if isinstance(span, Approximate))
        alone = [x for x in self.items if x.alone or any(isinstance(span, Approximate) for span in x.spans)]
        tokens = sum(span.tokens for x in alone for span in x.spans)
        return near + tokens - sum(x.repaired for x in alone if x.alone) - self.chosen

    @property
    def user(self) -> PlannedSegment:
        """The history's sources."""
        return next(segment for segment in self.segments if segment.kind == Kind.USER)

    @property
    def items(self) -> tuple[PlannedSegment, ...]:
        """The candidates' sources, in the caller's order."""
        return tuple(segment for segment in self.segments if segment.kind == Kind.ITEM)
