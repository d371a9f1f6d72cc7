# SPDX-License-Identifier: Apache-2.0
"""Batches of several rows, one for each device of a process (data parallelism).

The one idea: each device has a planner of its own, over its own cache, and they plan one batch together. A request goes
to the device that has the most of its user; where none has any, to the one with the least to do in this batch. All rows
are run by one program, so they have one shape: the smallest that takes every row. A row for which that shape would make
an accepted job late gives back what it was given, and its jobs wait.

Pure, as all policies are.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence, Set
from itertools import islice

from msgspec.structs import replace

from jgr.cache.neighbours import Neighbours
from jgr.serving.policies.batching import LOOKED_AT, Group, Loses
from jgr.serving.policies.jobs import Draft, Job, Profile
from jgr.serving.policies.loads import Load, ShareLoad
from jgr.serving.policies.prompt_scheduling import PromptScheduler
from jgr.serving.policies.run_costs import RunCosts
from jgr.serving.policies.sources import PlannedPrompt, UnplannedPrompt

Parts = dict[tuple[int, ...], list[tuple[PromptScheduler, tuple[int, ...]]]]


class PartedScheduler:
    """Plans batches with a row for each device. planners: one for each, of equal profiles; neighbours: their caches.
    parts: the rows of each batch in flight, by its jobs, the same for all kinds of request; None: there is one kind."""

    def __init__(
        self, planners: Sequence[PromptScheduler], neighbours: Neighbours, parts: Parts | None = None
    ) -> None:
        self._planners, self._neighbours = tuple(planners), neighbours
        self._parts: Parts = {} if parts is None else parts
        self._most = max(profile.batch for profile in planners[0].profiles)  # requests of a row
        self._next = 0  # the device that a new user goes to where all have equally much to do

    @property
    def costs(self) -> RunCosts:
        return self._planners[0].costs

    @costs.setter
    def costs(self, costs: RunCosts) -> None:
        for planner in self._planners:
            planner.costs = costs

    @property
    def max_width(self) -> int:
        return self._planners[0].max_width

    def fits(self, tokens: int, width: int) -> bool:
        """See Grouping."""
        return self._planners[0].fits(tokens, width)

    def group(
        self,
        jobs: Iterable[Job],
        due: bool,
        now_ns: int,
        begin_ns: int | None = None,
        loses: Loses = lambda jobs, end_ns: 0,
    ) -> Group | None:
        """See Grouping."""
        most = len(self._planners) * self._most
        looked_at = list(islice(jobs, max(LOOKED_AT, most)))
        self._neighbours.refresh(now_ns)
        rows = self._dealt(looked_at)
        if not due and not all(
            planner.is_full(row) for planner, row in zip(self._planners, rows, strict=True)
        ):
            return None
        order = sorted((row[0].arrival_ns, at) for at, row in enumerate(rows) if row)
        first = next(at for at, row in enumerate(rows) if row and row[0].id == looked_at[0].id)
        devices = [first, *(at for _, at in order if at != first)]
        profile, need = None, (0, 0, 0, 0)
        chosen: list[tuple[int, Draft]] = []
        for device in devices:
            planner = self._planners[device]
            own = planner.draft(rows[device], now_ns, begin_ns)
            wider = _union(need, _need(own))
            common = planner.first_fit(*wider)
            ends_ns = None if common is None or begin_ns is None else begin_ns + self.costs.ns(common)
            there = [job for _, draft in (*chosen, (device, own)) for job in draft.jobs]
            late = ends_ns is not None and any(_is_late(job, ends_ns) for job in there)
            if chosen and (common is None or (late and common != profile)):
                planner.put_off(own)
                continue
            profile, need = common or own.profile, wider
            chosen.append((device, own))
        assert profile is not None
        return self._whole(profile, [(at, self._planners[at].begin(own, now_ns)) for at, own in chosen])

    def finished(self, jobs: tuple[int, ...], well: bool) -> Set[tuple[int, ...]]:
        """See Grouping."""
        lost: set[tuple[int, ...]] = set()
        for planner, own in self._parts.pop(jobs):
            lost |= planner.finished(own, well)
        return {whole for whole, parts in self._parts.items() if not lost.isdisjoint(own for _, own in parts)}

    def informed(self, job: Job, hoped: bool = False) -> Job:
        """See Grouping; by the device that has the most of the user."""
        return max((planner.informed(job, hoped) for planner in self._planners), key=lambda each: each.cached)

    def alone_ns(self, job: Job) -> int:
        """See Grouping."""
        return max(planner.alone_ns(job) for planner in self._planners)

    def spread_ns(self, job: Job) -> int:
        """See Grouping."""
        return max(planner.spread_ns(job) for planner in self._planners)

    def share_ns(self, job: Job) -> int:
        """See Grouping. A batch has as many full rows as there are devices."""
        every = [planner.share_ns(job) for planner in self._planners]
        return sum(every) // len(every) ** 2

    def size_class(self, job: Job) -> Hashable:
        """See Grouping."""
        return self._planners[0].size_class(job)

    def load(self, full: bool = False) -> Load:
        """See Grouping."""
        return ShareLoad(self.share_ns, self.alone_ns)

    def cached_user(self, unplanned: UnplannedPrompt, now_ns: int) -> int | None:
        """See PromptScheduler; on the device that has the most."""
        found = [planner.cached_user(unplanned, now_ns) for planner in self._planners]
        return max((tokens for tokens in found if tokens is not None), default=None)

    def forget(self, user: str) -> int:
        """Erase a user's entries on all devices; how many there were."""
        return sum(planner.forget(user) for planner in self._planners)

    def renew(self, epoch: int) -> None:
        """See Grouping."""
        self._neighbours.renew(epoch)

    def check(self) -> None:
        """Audit; AssertionError."""
        for planner in self._planners:
            planner.check()
        self._neighbours.check()

    def _dealt(self, jobs: Sequence[Job]) -> list[list[Job]]:
        """Which jobs each device is offered, in their order. A job whose device is full waits."""
        left = len(self._planners) * self._most
        rows: list[list[Job]] = [[] for _ in self._planners]
        tokens = [0] * len(rows)
        for job in jobs:
            if not left:
                break
            kept = [planner.kept_of_user(job) for planner in self._planners]
            best = max(range(len(rows)), key=kept.__getitem__)
            if not kept[best]:
                turn = (*range(self._next, len(rows)), *range(self._next))
                best = min(turn, key=tokens.__getitem__)
            if len(rows[best]) == self._most:
                continue
            if not kept[best]:
                self._next = (best + 1) % len(rows)
            rows[best].append(job)
            left -= 1
            tokens[best] += job.tokens - kept[best]
        return rows

    def _whole(self, profile: Profile, chosen: Sequence[tuple[int, Group]]) -> Group:
        jobs = tuple(i for _, group in chosen for i in group.jobs)
        prompts: tuple[PlannedPrompt, ...] = tuple(
            replace(prompt, device=device) for device, group in chosen for prompt in group.prompts
        )
        self._parts[jobs] = [(self._planners[device], group.jobs) for device, group in chosen]
        # Here, and not as a batch ends: what is dropped may be another model's by its next plan, and until then nobody
        # would queue the copies of it.
        self._neighbours.tidy()
        return Group(jobs, profile, prompts, (), self._neighbours.take_fetches())


def _need(draft: Draft) -> tuple[int, int, int, int]:
    """What a row takes: requests, new tokens, cached ones, and width."""
    widths = [job.width for job in draft.jobs]
    return (
        len(widths),
        sum(prompt.computed_tokens for prompt in draft.prompts),
        sum(prompt.cached_tokens for prompt in draft.prompts),
        sum(widths) if draft.jobs[0].kind == "rank" else max(widths),
    )


def _union(one: tuple[int, int, int, int], other: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    a, b, c, d = map(max, one, other)
    return a, b, c, d


def _is_late(job: Job, ends_ns: int) -> bool:
    return job.deadline_ns is not None and ends_ns > job.deadline_ns
