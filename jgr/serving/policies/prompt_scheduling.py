# SPDX-License-Identifier: Apache-2.0
"""From waiting requests to a batch whose every segment has a source (DESIGN idea 2, BAT-13, BAT-14).

A batch is one packed row. Requests are planned in the order of the queue: the layout is chosen, what is cached is
pinned, and what is not is given cells to be written to. The first one that would exceed a shape, or the cap on new
tokens, gives back what it was given and waits; a single request may exceed the cap. What a batch writes is valid from
its `finished` on. An item that two requests of a batch miss is computed for both and written once.

Repaired item tokens (BAT-15) are planned as computed ones, and never written: an item that is missed is computed alone
besides, for the cache and for its other tokens.

Pure, as `batching` is, which calls it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from jgr.cache.entries import Content, Entry, Name
from jgr.cache.meta import CacheMeta
from jgr.config import CacheConfig
from jgr.serving.policies.batching import Group, Job, Profile
from jgr.serving.policies.prefix_choice import LayoutName, Policy, Situation, choose

PLENTY = 4
"""Room for so many users like this one is plenty: what others that went left over, in a full cache, is less."""


@dataclass(frozen=True)
class Repair:
    """Which item tokens of an item_prefix prompt see the items before theirs (BAT-15), which cached ones do not.

    first: so many of each item but the list's first (PIC-4). share: of a prompt's item tokens, to be chosen by the
    program (PIC-3). At most one is above 0; both 0: none, and no answer is an approximation.
    """

    first: int = 0
    share: float = 0.0

    @classmethod
    def of(cls, cache: CacheConfig) -> Repair:
        """As configured."""
        return cls(cache.repair_tokens, cache.repair_share)

    def __bool__(self) -> bool:
        return self.first > 0 or self.share > 0

    def firsts(self, lengths: Sequence[int]) -> list[int]:
        """Of each item, the number of its first tokens that are repaired."""
        return [min(self.first, length) if i else 0 for i, length in enumerate(lengths)]

    def chosen(self, lengths: Sequence[int]) -> int:
        """How many tokens the program chooses."""
        return math.ceil(self.share * sum(lengths))


NO_REPAIR = Repair()
ALL_ITEM_TOKENS = Repair(first=2**30)
"""Plain causal order among the items: what a repair is measured against."""


@dataclass(frozen=True, eq=False)
class Parts:
    """What a prompt is made of. user: its entry's id; behind: tokens of the instruction and of all probes.

    layout: where the caller insists on one. fresh: compute all of it, for comparison. repair: where items come first.
    """

    user: str
    history: Content
    items: Sequence[tuple[Name, Content]]
    behind: int
    layout: LayoutName | None = None
    fresh: bool = False
    repair: Repair = NO_REPAIR

    @property
    def computed_at_most(self) -> int:
        """Tokens, with nothing cached: of the prompt, and second copies of those that are repaired."""
        lengths = [len(content) for _, content in self.items]
        firsts = self.repair.firsts(lengths)
        copies = sum(n for n, length in zip(firsts, lengths, strict=True) if n < length)
        return len(self.history) + sum(lengths) + self.behind + copies + self.repair.chosen(lengths)


@dataclass(frozen=True, eq=False)
class PlannedSegment:
    """The first `cached` tokens stand in the cells `read`; the others are computed, and kept where there are `write`
    cells, which are those of the whole segment.

    repaired: so many first tokens of an item are computed seeing the items before it, and nobody else sees those that
    are computed or cached in their place. Such an item is cached wholly or not at all.
    """

    cached: int
    read: tuple[int, ...] = ()
    write: tuple[int, ...] | None = None
    repaired: int = 0

    @property
    def reused(self) -> int:
        """Cached tokens that the row reads."""
        return max(0, self.cached - self.repaired)

    def alone(self, tokens: int) -> bool:
        """Whether a repaired item of so many tokens is computed as it is cached besides."""
        return not self.cached and 0 < self.repaired < tokens


@dataclass(frozen=True, eq=False)
class PlannedPrompt:
    """The source of each segment; what stands behind them is computed.

    chosen: item tokens that the program chooses to repair. repaired_tokens: all that are; None: it is no repaired
    prompt.
    """

    layout: LayoutName
    user: PlannedSegment
    items: tuple[PlannedSegment, ...]
    computed_tokens: int
    cached_tokens: int
    chosen: int = 0
    repaired_tokens: int | None = None


class PromptScheduler:
    """Plans batches over packed profiles.

    profiles: of one kind. max_tokens: of new tokens in a batch of several requests. policy: see prefix_choice; "none"
    neither reads nor writes the cache.
    """

    def __init__(
        self,
        profiles: Sequence[Profile],
        meta: CacheMeta,
        *,
        max_tokens: int,
        policy: Policy,
        hysteresis: float = 0.1,
    ) -> None:
        self._profiles = sorted(profiles, key=lambda p: (p.tokens + p.context, p.batch, p.width))
        self._meta, self._max_tokens, self._policy, self._hysteresis = meta, max_tokens, policy, hysteresis
        self._most_context = max((p.context for p in profiles), default=0)
        self._pinned: dict[tuple[int, ...], list[tuple[list[Entry], list[Entry]]]] = {}

    @property
    def max_width(self) -> int:
        return max((p.width for p in self._profiles), default=0)

    def fits(self, tokens: int, width: int) -> bool:
        """Whether a request of so many tokens, none of them cached, can be served alone."""
        return self._first_fit(1, tokens, 0, width) is not None

    def group(self, jobs: Iterable[Job], due: bool, now_ns: int) -> Group | None:
        """The batch of the first jobs, or None where they should wait for more."""
        jobs = iter(jobs)
        if not due and not self._are_many(ahead := list(jobs)):
            return None
        jobs = jobs if due else iter(ahead)
        chosen: list[int] = []
        prompts: list[PlannedPrompt] = []
        pins: list[tuple[list[Entry], list[Entry]]] = []
        used = [0, 0, 0]
        profile = None
        for job in jobs:
            prompt, read, written = self._plan(_parts(job), now_ns)
            width = used[2] + job.width if job.kind == "rank" else max(used[2], job.width)
            need = [used[0] + prompt.computed_tokens, used[1] + prompt.cached_tokens, width]
            fitting = self._first_fit(len(chosen) + 1, *need)
            if fitting is None or (chosen and need[0] > self._max_tokens):
                self._end(read, written, well=False)
                break
            profile, used = fitting, need
            self._count(_parts(job), now_ns)
            chosen.append(job.id)
            prompts.append(prompt)
            pins.append((read, written))
        assert profile is not None, "a job that fits no profile was accepted"
        self._pinned[tuple(chosen)] = pins
        return Group(tuple(chosen), profile, tuple(prompts), tuple(self._meta.take_moves()))

    def finished(self, jobs: tuple[int, ...], well: bool) -> None:
        """A batch ended; well: what it computed is in the cells it was to be written to."""
        for read, written in self._pinned.pop(jobs):
            self._end(read, written, well)

    def check(self) -> None:
        """Audit: the entries of batches in flight are pinned. Other schedulers may pin entries of the same service."""
        self._meta.check()
        pins: dict[Entry, int] = {}
        for entry in chain.from_iterable(chain(*pair) for pairs in self._pinned.values() for pair in pairs):
            pins[entry] = pins.get(entry, 0) + 1
        assert all(entry.pins >= count for entry, count in pins.items()), "an entry of a batch is not pinned"

    def _are_many(self, jobs: Sequence[Job]) -> bool:
        """Whether waiting cannot fill a batch any further, if nothing were cached."""
        total = sum(job.tokens for job in jobs)
        return total >= self._max_tokens or self._first_fit(len(jobs) + 1, 0, 0, 0) is None

    def _count(self, parts: Parts, now_ns: int) -> None:
        """A request counts once it is planned: whoever comes for the first time would else be as hot as one who came
        a moment ago, and take the place of somebody who came before (BAT-10)."""
        if self._meta.hotness is not None and not parts.fresh:
            self._meta.hotness.touch(_user_name(parts), now_ns)

    def _plan(self, parts: Parts, now_ns: int) -> tuple[PlannedPrompt, list[Entry], list[Entry]]:
        name = _user_name(parts)
        chosen = self._layout(name, parts, now_ns)
        layout = parts.layout or chosen
        read: list[Entry] = []
        written: list[Entry] = []
        if layout == "item_prefix":
            return self._items_first(parts, read, written), read, written
        user = PlannedSegment(0)
        if not parts.fresh and self._policy in ("user", "cache_agnostic", "hotness"):
            # What ends the prompt is computed in any case.
            most = min(self._most_context, len(parts.history) - (parts.behind == 0))
            user = self._source(name, parts.history, most, chosen == layout, read, written)
        total = len(parts.history) + sum(len(content) for _, content in parts.items) + parts.behind
        items = (PlannedSegment(0),) * len(parts.items)
        return PlannedPrompt(layout, user, items, total - user.cached, user.cached), read, written

    def _items_first(self, parts: Parts, read: list[Entry], written: list[Entry]) -> PlannedPrompt:
        lengths = [len(content) for _, content in parts.items]
        repair, firsts = parts.repair, parts.repair.firsts(lengths)
        reads = not parts.fresh and self._policy in ("item", "cache_agnostic", "hotness")
        items: list[PlannedSegment] = []
        cached = copies = 0
        for (name, content), length, first in zip(parts.items, lengths, firsts, strict=True):
            item = PlannedSegment(0, repaired=first)
            if reads and not 0 < first == length:
                most = self._most_context - cached + first
                most = 0 if repair and most < length else most
                item = self._source(name, content, most, True, read, written, first)
                assert not repair or item.cached in (0, length)
            items.append(item)
            cached += item.reused
            copies += first if item.alone(length) else 0
        chosen = repair.chosen(lengths)
        total = len(parts.history) + sum(lengths) + parts.behind
        return PlannedPrompt(
            "item_prefix",
            PlannedSegment(0),
            tuple(items),
            total - cached + copies + chosen,
            cached,
            chosen,
            sum(firsts) + chosen if repair else None,
        )

    def _layout(self, name: Name, parts: Parts, now_ns: int) -> LayoutName:
        meta, history = self._meta, parts.history
        at = Situation(len(history), sum(len(content) for _, content in parts.items))
        if self._policy == "hotness":
            frequency = 0.0  # of who can never be cached, and is not put first to be
            if meta.hotness is not None and meta.can_keep("user", len(history)):
                frequency = meta.hotness.frequency(name, now_ns)
            at = replace(
                at,
                cached_user=meta.valid_tokens(name, history),
                cached_items=sum(meta.valid_tokens(*item) for item in parts.items),
                room=meta.has_room("user", PLENTY * len(history)),
                frequency=frequency,
                coldest=meta.coldest_frequency(now_ns),
            )
        return choose(self._policy, at, self._hysteresis)

    def _source(
        self,
        name: Name,
        content: Content,
        most: int,
        keep: bool,
        read: list[Entry],
        written: list[Entry],
        repaired: int = 0,
    ) -> PlannedSegment:
        """Reuse at most so many tokens, and where it is asked for and possible keep the rest."""
        meta = self._meta
        entry = meta.find(name, content)
        cached = 0
        cells: tuple[int, ...] = ()
        if entry is not None:
            cached = min(entry.tokens, most)
            cells = entry.cells[: meta.cells(name.kind, cached)]
            meta.hold(entry)
            read.append(entry)
        write = None
        if keep and cached == (0 if entry is None else entry.tokens) and cached < len(content):
            writer = meta.extend(name, content)
            if writer is not None:
                written.append(writer)
                write = writer.cells
        return PlannedSegment(cached, cells, write, repaired)

    def _end(self, read: Iterable[Entry], written: Iterable[Entry], well: bool) -> None:
        for entry in written:
            if well:
                self._meta.written(entry)
            else:
                self._meta.failed(entry)
            self._meta.release(entry)
        for entry in read:
            self._meta.release(entry)

    def _first_fit(self, requests: int, tokens: int, context: int, width: int) -> Profile | None:
        for p in self._profiles:
            if p.batch >= requests and p.tokens >= tokens and p.context >= context and p.width >= width:
                return p
        return None


def _parts(job: Job) -> Parts:
    assert isinstance(job.parts, Parts)
    return job.parts


def _user_name(parts: Parts) -> Name:
    return Name("user", parts.user, "user_prefix")
