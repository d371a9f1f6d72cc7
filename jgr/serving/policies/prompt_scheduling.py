# SPDX-License-Identifier: Apache-2.0
"""From waiting requests to a batch whose every segment has its sources (DESIGN idea 2, BAT-13, BAT-14).

A batch is one packed row. Requests are planned in the order of the queue: the layout is chosen, what is cached is
pinned, and what is not is given cells to be written to. The first one that would exceed a shape, or the cap on new
tokens, or for which a larger shape would cost more than a batch of its own, gives back what it was given and waits; a
single request may exceed the cap. An item that two requests of a batch miss is computed for both and written once.

What a batch writes can be read by the batches that are planned after it, since one lane dispatches all of them in the
order of their plans; for other engines over the same entries it is valid from `finished` on. Where a batch fails, those
that read what it did not write are named, so that nobody believes their answers.

Repaired item tokens (BAT-15) are planned as computed ones, and never written: an item that is missed is computed a
second time, alone, for the cache and for its other tokens. With the policy "blocks" (RcLLM) prompts stand in plain
order, and each item is what it is alone, moved to its place, whether it was cached or not: so an answer does not depend
on what the cache holds, though it approximates that of a prompt computed whole.

Pure, as `batching` is, which calls it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import replace
from itertools import chain

from msgspec import structs

from jgr.cache.entries import Content, Entry, Name
from jgr.cache.meta import CacheMeta
from jgr.prompt.layouts import LAYOUTS, Kind, LayoutName
from jgr.prompt.segments import Segment, count_tokens, of_kind, segment_places
from jgr.serving.policies.batching import Group, Loses
from jgr.serving.policies.jobs import Draft, Job, Profile
from jgr.serving.policies.lanes import Lane
from jgr.serving.policies.loads import Load, ShareLoad
from jgr.serving.policies.prefix_choice import (
    ITEMS_FIRST,
    KEEP_ITEMS,
    KEEP_USERS,
    CacheLayout,
    Policy,
    Rule,
    Situation,
    choose,
)
from jgr.serving.policies.prototypes import PrototypePlace
from jgr.serving.policies.run_costs import RATE, RunCosts
from jgr.serving.policies.sources import (
    Compute,
    Near,
    PlannedPrompt,
    PlannedSegment,
    Reuse,
    Source,
    UnplannedPrompt,
    entry_name,
    moved,
)

PLENTY = 4
"""Users like this one that must still find room before the cache counts as having room for it."""


class PromptScheduler:
    """Plans batches over packed profiles.

    profiles: of one kind. max_tokens: of new tokens in a batch of several requests. policy and rule: see prefix_choice;
    "none" neither reads nor writes the cache. lane: the same for all kinds of request of an engine; None: one of its
    own. prototypes: of a library, where there is one.
    """

    def __init__(
        self,
        profiles: Sequence[Profile],
        meta: CacheMeta,
        *,
        max_tokens: int,
        policy: Policy,
        hysteresis: float = 0.1,
        rule: Rule = "priced",
        lane: Lane | None = None,
        prototypes: PrototypePlace | None = None,
    ) -> None:
        self.profiles = sorted(profiles, key=lambda p: (p.tokens + p.context, p.batch, p.width))
        self.costs = RunCosts()  # those of the policy, once there is one
        self._lane = lane or Lane()
        self._computed_share = 1.0  # of the planned tokens that no kept user saved, those that were computed
        self._meta, self._max_tokens, self._prototypes = meta, max_tokens, prototypes
        self._policy, self._hysteresis, self._rule = policy, hysteresis, rule
        self._most_context = max((p.context for p in profiles), default=0)
        self._pinned = self._lane.pinned

    @property
    def max_width(self) -> int:
        return max((p.width for p in self.profiles), default=0)

    def fits(self, tokens: int, width: int) -> bool:
        """Whether a request of so many tokens, none of them cached, can be served alone."""
        return self.first_fit(1, tokens, 0, width) is not None

    def group(
        self,
        jobs: Iterable[Job],
        due: bool,
        now_ns: int,
        begin_ns: int | None = None,
        loses: Loses = lambda jobs, end_ns: 0,
    ) -> Group | None:
        """The batch of the first jobs, or None where they should wait for more."""
        if not due and not self.is_full(jobs := list(jobs)):
            return None
        return self.begin(self.draft(jobs, now_ns, begin_ns), now_ns)

    def draft(self, jobs: Iterable[Job], now_ns: int, begin_ns: int | None) -> Draft:
        """The batch of the first jobs, to be begun or put off before anything else is planned."""
        chosen, prompts = list[Job](), list[PlannedPrompt]()
        pins: list[tuple[list[Entry], list[Entry]]] = []
        used, profile = [0, 0, 0], None
        for job in jobs:
            prompt, read, written = self._plan(job.unplanned, now_ns)
            width = used[2] + job.width if job.kind == "rank" else max(used[2], job.width)
            need = [used[0] + prompt.computed_tokens, used[1] + prompt.cached_tokens, width]
            fitting = self.first_fit(len(chosen) + 1, *need)
            own = [prompt.computed_tokens, prompt.cached_tokens, job.width]
            if fitting is None or (
                profile and not self._joins(chosen, job, own, profile, fitting, need, begin_ns)
            ):
                self._give_back(read, written)
                break
            profile, used = fitting, need
            chosen.append(job)
            prompts.append(prompt)
            pins.append((read, written))
        assert profile is not None, "a job that fits no profile was accepted"
        return Draft(tuple(chosen), profile, tuple(prompts), pins)

    def begin(self, draft: Draft, now_ns: int) -> Group:
        """Make a draft the next batch that is dispatched: what is planned from now on may read what it writes."""
        for job in draft.jobs:
            self._count(job.unplanned, now_ns)
        for entry in chain.from_iterable(written for _, written in draft.pins):
            self._meta.planned(entry, self._lane)
        self._learn(draft.prompts)
        ids = tuple(job.id for job in draft.jobs)
        self._pinned[ids] = draft.pins
        return Group(ids, draft.profile, draft.prompts, tuple(self._meta.take_moves()))

    def put_off(self, draft: Draft) -> None:
        """Let a draft's jobs wait on. What was valid of their entries stays so."""
        for read, written in draft.pins:
            self._give_back(read, written)

    def finished(self, jobs: tuple[int, ...], well: bool) -> Set[tuple[int, ...]]:
        """A batch ended; well: what it computed is in the cells it was to be written to.

        Returns the batches in flight of this lane, of any kind, that read what was not written.
        """
        lost: set[Entry] = set()
        for read, written in self._pinned.pop(jobs):
            for entry in written:
                if well:
                    self._meta.settled(entry)
                else:
                    self._meta.spoiled(entry)
                    lost.add(entry)
                self._meta.release(entry)
            for entry in read:
                self._meta.release(entry)
        return self._lane.using(lost)

    def alone_ns(self, job: Job) -> int:
        """See Grouping."""
        return self.costs.ns(self._alone(job))

    def spread_ns(self, job: Job) -> int:
        """See Grouping."""
        return self.costs.spread_ns(self._alone(job))

    def share_ns(self, job: Job) -> int:
        """See Grouping. Of a prompt's tokens that no kept user saves, as many are computed as were lately."""
        tokens = (job.tokens - job.cached) * (1.0 if job.prompt is None else self._computed_share)
        width = job.width if job.kind == "rank" else 0
        return round(
            min(
                self.costs.ns(p) * max(tokens / min(p.tokens, self._max_tokens), width / p.width, 1 / p.batch)
                for p in self.profiles
            )
        )

    def keeps(self, name: Name, content: Content) -> bool:
        """Whether all of the content would be read from the cache. Changes nothing."""
        return self._meta.valid_tokens(name, content, self._lane) == len(content)

    def compute_ns(self, tokens: int) -> int:
        """What it takes to compute so many more tokens where many wait."""
        return round(min(self.costs.ns(p) * tokens / min(p.tokens, self._max_tokens) for p in self.profiles))

    def would_read_items(
        self, layout: str, user: str, user_tokens: int, item_tokens: int, now_ns: int
    ) -> bool:
        """Whether a prompt would be planned to read its items, if all of them were cached. layout: the one that the
        caller insists on; empty: the planner chooses. user: the name of the user's entry, whatever its content.
        Changes nothing."""
        if layout:
            return self._reads_items(layout)
        name = Name("user", user, "user_prefix")
        cached_user = min(user_tokens, self._meta.kept_tokens(name))
        at = self._situation(name, Situation(user_tokens, item_tokens, cached_user, item_tokens), now_ns)
        return self._reads_items(choose(self._policy, at, self._hysteresis, self._rule))

    def size_class(self, job: Job) -> Profile:
        """See Grouping."""
        return self._alone(job)

    def load(self, full: bool = False) -> Load:
        """See Grouping."""
        return ShareLoad(self.share_ns, self.alone_ns)

    def cached_user(self, unplanned: UnplannedPrompt, now_ns: int) -> int | None:
        """How many tokens of a hint's user need not be computed; None: the user is not to be kept. Changes nothing."""
        (user,) = of_kind(unplanned.prompt, Kind.USER)
        reads = self._policy in KEEP_USERS and self._meta.can_keep("user", len(user))
        if not reads or self._choose(unplanned, now_ns) == ITEMS_FIRST:
            return None
        return self._meta.valid_tokens(entry_name(user), user.content, self._lane)

    def informed(self, job: Job, hoped: bool = False) -> Job:
        """See Grouping."""
        if (unplanned := job.prompt) is None or unplanned.layout == ITEMS_FIRST or unplanned.near is not None:
            return job
        # What ends the prompt is computed in any case.
        cached = min(self.kept_of_user(job, hoped), self._most_context, job.tokens - 1)
        return structs.replace(job, cached=cached) if cached > 0 else job

    def kept_of_user(self, job: Job, hoped: bool = False) -> int:
        """How many tokens of a job's user need not be computed here. hoped: all that could be. Changes nothing."""
        unplanned = job.unplanned
        if unplanned.fresh or self._policy not in KEEP_USERS:
            return 0
        (user,) = of_kind(unplanned.prompt, Kind.USER)
        return len(user) if hoped else self._meta.valid_tokens(entry_name(user), user.content, self._lane)

    def forget(self, user: str) -> int:
        """Erase a user's entry; how many there were."""
        return int(self._meta.forget(Name("user", user, "user_prefix")))

    def renew(self, epoch: int) -> None:
        """The pool is of this epoch: forget what was cached before."""
        self._meta.renew(epoch)

    def check(self) -> None:
        """Audit: the entries of batches in flight are pinned. Other schedulers may pin entries of the same service."""
        self._meta.check()
        pins: dict[Entry, int] = {}
        for entry in chain.from_iterable(chain(*pair) for pairs in self._pinned.values() for pair in pairs):
            pins[entry] = pins.get(entry, 0) + 1
        assert all(entry.pins >= count for entry, count in pins.items()), "an entry of a batch is not pinned"

    def _joins(
        self,
        chosen: Sequence[Job],
        job: Job,
        own: Sequence[int],
        before: Profile,
        profile: Profile,
        need: Sequence[int],
        begin_ns: int | None,
    ) -> bool:
        """Whether a job joins the batch, which makes of its profile `before` another."""
        if need[0] > self._max_tokens:
            return False
        cost_ns = self.costs.ns(profile)
        alone = self.first_fit(1, *own)
        if alone is not None and cost_ns > self.costs.ns(before) + self.costs.ns(alone):
            return False
        if begin_ns is None:
            return True
        if job.deadline_ns is not None and begin_ns + cost_ns > job.deadline_ns:
            return False
        deadlines = [each.deadline_ns for each in chosen if each.deadline_ns is not None]
        return profile == before or not deadlines or begin_ns + cost_ns <= min(deadlines)

    def _learn(self, prompts: Sequence[PlannedPrompt]) -> None:
        computed = sum(prompt.computed_tokens for prompt in prompts)
        tokens = computed + sum(
            segment.cached for prompt in prompts for segment in prompt.segments if segment.kind != Kind.USER
        )
        if tokens:
            self._computed_share += RATE * (computed / tokens - self._computed_share)

    def _alone(self, job: Job) -> Profile:
        tokens = math.ceil((job.tokens - job.cached) * self._computed_share)
        found = self.first_fit(1, tokens, job.tokens - tokens, job.width) or self.first_fit(
            1, job.tokens, 0, job.width
        )
        assert found is not None, "a job that fits no profile was accepted"
        return found

    def is_full(self, jobs: Sequence[Job]) -> bool:
        """Whether waiting cannot fill a batch any further, if nothing were cached."""
        total = sum(job.tokens for job in jobs)
        return total >= self._max_tokens or self.first_fit(len(jobs) + 1, 0, 0, 0) is None

    def _count(self, unplanned: UnplannedPrompt, now_ns: int) -> None:
        """A request counts once it is planned: whoever comes for the first time would else be as hot as one who came
        a moment ago, and take the place of somebody who came before (BAT-10)."""
        if unplanned.fresh or unplanned.hint:
            return
        (user,) = of_kind(unplanned.prompt, Kind.USER)
        if self._meta.hotness is not None:
            self._meta.hotness.touch(entry_name(user), now_ns)
        if self._meta.frequencies is not None:
            rows = [int(item.key) for item in of_kind(unplanned.prompt, Kind.ITEM) if item.key is not None]
            self._meta.frequencies.touch(rows, len(user), now_ns)

    def _plan(
        self, unplanned: UnplannedPrompt, now_ns: int
    ) -> tuple[PlannedPrompt, list[Entry], list[Entry]]:
        read: list[Entry] = []
        written: list[Entry] = []
        prompt, chosen = unplanned.prompt, self._choose(unplanned, now_ns)
        layout = unplanned.layout or chosen
        if self._reads_items(layout):
            return self._plan_items(unplanned, layout, read, written), read, written
        reads = not unplanned.fresh and self._policy in KEEP_USERS
        segments: list[PlannedSegment] = []
        for segment, _ in segment_places(prompt, LAYOUTS[layout]):
            if segment.kind == Kind.USER and reads:
                ends = count_tokens(prompt) == len(segment)  # what ends the prompt is computed in any case
                segments.append(
                    self._user(segment, len(segment) - ends, chosen != ITEMS_FIRST, read, written)
                )
            else:
                segments.append(PlannedSegment(segment.kind, (Compute(len(segment)),)))
        return PlannedPrompt.of(layout, segments), read, written

    def _reads_items(self, layout: str) -> bool:
        """Whether items in this layout are what they are alone."""
        return layout == ITEMS_FIRST or (layout == "causal" and self._policy == "blocks")

    def _user(
        self, segment: Segment, most: int, keep: bool, read: list[Entry], written: list[Entry]
    ) -> PlannedSegment:
        spans, write = self._source(segment, min(self._most_context, most), keep, read, written)
        return PlannedSegment(segment.kind, spans, write)

    def _plan_items(
        self, unplanned: UnplannedPrompt, layout: LayoutName, read: list[Entry], written: list[Entry]
    ) -> PlannedPrompt:
        """A prompt whose items are what they are alone, but for their repaired tokens."""
        places, repair = segment_places(unplanned.prompt, LAYOUTS[layout]), unplanned.repair
        moves = layout != ITEMS_FIRST
        lengths = [len(item) for item in of_kind(unplanned.prompt, Kind.ITEM)]
        firsts, chosen = repair.firsts(lengths), repair.chosen(lengths)
        reads = not unplanned.fresh and self._policy in KEEP_ITEMS
        segments, cached, of_user, to_repair = list[PlannedSegment](), 0, 0, iter(firsts)
        wanted = unplanned.near if moves else None
        near = self._near(wanted, places[0]) if wanted is not None and wanted.runs else None
        for segment, place in places:
            length = len(segment)
            if segment.kind == Kind.USER and near is not None:
                segments.append(near)
                cached += near.cached
                continue
            if segment.kind == Kind.USER and moves and reads:
                segments.append(self._user(segment, length, True, read, written))
                of_user = segments[-1].cached
                cached += of_user
                continue
            first = next(to_repair) if segment.kind == Kind.ITEM else 0
            spans: tuple[Source, ...] = (Compute(length),)
            write = None
            if 0 < first == length:
                spans = ()
            elif segment.kind == Kind.ITEM and reads:
                most = self._most_context - cached + first
                if repair or moves:
                    most = 0 if most < length else most
                    self._drop_beginning(segment)
                spans, write = self._source(segment, most, True, read, written, first)
            repairs = segment.kind == Kind.ITEM and (0 < first < length or chosen > 0 or moves)
            alone = repairs and spans == (Compute(length),)
            if moves:
                spans = tuple(moved(span, place) for span in spans)
            segments.append(PlannedSegment(segment.kind, spans, write, first, alone))
            if spans and not isinstance(spans[0], Compute):
                cached += spans[0].tokens
        repaired = sum(firsts) + chosen if repair or moves else None
        if repaired is not None and wanted is not None and not of_user:
            repaired += wanted.selected
        return PlannedPrompt.of(layout, segments, chosen, repaired)

    def _drop_beginning(self, item: Segment) -> None:
        """Drop an item of which only the first tokens are cached: the others would see what this prompt has besides."""
        if 0 < self._meta.kept_tokens(entry_name(item)) < len(item):
            self._meta.drop(entry_name(item))

    def _near(self, near: Near, placed: tuple[Segment, int]) -> PlannedSegment | None:
        """A history of which a library stands for some tokens, which is not kept: it is not the history's own. None
        where the library is not there."""
        (segment, offset), prototypes = placed, self._prototypes
        cells = None if prototypes is None or segment.kind != Kind.USER else prototypes.cells()
        if prototypes is None or cells is None:
            return None
        spans: list[Source] = []
        at, left = 0, self._most_context
        for run in near.runs:
            if run.tokens > left:
                break
            if run.first > at:
                spans.append(Compute(run.first - at))
            spans.append(prototypes.span(run, cells, offset + run.first))
            at, left = run.first + run.tokens, left - run.tokens
        if at < len(segment):
            spans.append(Compute(len(segment) - at))
        return PlannedSegment(segment.kind, tuple(spans))

    def _choose(self, unplanned: UnplannedPrompt, now_ns: int) -> CacheLayout:
        meta, prompt = self._meta, unplanned.prompt
        (user,), items = of_kind(prompt, Kind.USER), of_kind(prompt, Kind.ITEM)
        at = Situation(len(user), count_tokens(items))
        if self._policy == "hotness":
            at = replace(
                at,
                cached_user=meta.valid_tokens(entry_name(user), user.content, self._lane),
                cached_items=sum(
                    meta.valid_tokens(entry_name(item), item.content, self._lane) for item in items
                ),
            )
            at = self._situation(entry_name(user), at, now_ns)
        return choose(self._policy, at, self._hysteresis, self._rule)

    def _situation(self, user: Name, at: Situation, now_ns: int) -> Situation:
        """The same with what the cache knows of the user, and has room for."""
        if self._policy != "hotness":
            return at
        meta, tokens = self._meta, at.user_tokens
        frequency = 0.0  # who can never be cached is not put first to be cached
        if meta.hotness is not None and meta.can_keep("user", tokens):
            frequency = meta.hotness.frequency(user, now_ns)
        return replace(
            at,
            room=meta.has_room("user", tokens, PLENTY if self._rule == "priced" else 1),
            frequency=frequency,
            coldest=meta.coldest_frequency(now_ns),
        )

    def _source(
        self,
        segment: Segment,
        most: int,
        keep: bool,
        read: list[Entry],
        written: list[Entry],
        repaired: int = 0,
    ) -> tuple[tuple[Source, ...], tuple[int, ...] | None]:
        """The spans of a segment that reuses at most `most` tokens, and the cells that keep the rest, None for none.

        keep: whether the rest should be kept. read, written: take the entries that are pinned. repaired: so many first
        tokens are not read from the cache.
        """
        meta, name, content = self._meta, entry_name(segment), segment.content
        entry = meta.find(name, content, self._lane)
        valid = cached = 0
        spans: tuple[Source, ...] = ()
        if entry is not None:
            valid, cached = entry.tokens, min(entry.tokens, most)
            meta.hold(entry)
            read.append(entry)
            if cached > repaired:
                cells = entry.cells[: meta.cells(name.kind, cached)]
                spans = (Reuse(cached - repaired, cells, repaired),)
        if cached < len(content):
            spans = (*spans, Compute(len(content) - cached))
        write = None
        if keep and cached == valid and cached < len(content):
            writer = meta.extend(name, content, self._lane)
            if writer is not None:
                written.append(writer)
                write = writer.cells
        return spans, write

    def _give_back(self, read: Iterable[Entry], written: Iterable[Entry]) -> None:
        for entry in written:
            self._meta.failed(entry)
            self._meta.release(entry)
        for entry in read:
            self._meta.release(entry)

    def first_fit(self, requests: int, tokens: int, context: int, width: int) -> Profile | None:
        """The cheapest profile that takes so much, the smallest one of equal ones."""
        fitting = (
            p
            for p in self.profiles
            if p.batch >= requests and p.tokens >= tokens and p.context >= context and p.width >= width
        )
        return min(fitting, key=self.costs.ns, default=None)
