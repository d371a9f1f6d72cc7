# SPDX-License-Identifier: Apache-2.0
"""Micro-batching: which jobs go to the device together, in which compiled shape, and when.

The one idea: a batch is a prefix of one kind's queue. The oldest job decides the kind; younger jobs of that kind join
in order of submission until the next one would fit no profile. So the order within a kind is kept, the head always goes
next, and nobody starves. What a batch costs is what its profile pads it to, `batch * (tokens + width)`, and the token
cap limits that.

A job's life and the words of a plan are those of `jobs`. Pure, as all policies are.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from jgr.cache.entries import Move
from jgr.config import ConfigError, ProfilesConfig
from jgr.serving.policies.jobs import (
    KINDS,
    Job,
    Kind,
    Live,
    Outcome,
    Policy,
    Profile,
    Reason,
    Request,
    Returned,
    Start,
)
from jgr.serving.policies.sources import PlannedPrompt


def make_profiles(config: ProfilesConfig) -> tuple[Profile, ...]:
    """Every combination of the configured batch sizes, prompt lengths and widths, for both kinds."""
    widths: dict[Kind, tuple[int, ...]] = {"recommend": config.widths, "rank": config.candidates}
    return tuple(
        Profile(kind, *sizes)
        for kind in KINDS
        for sizes in itertools.product(config.batch, config.tokens, widths[kind])
    )


class Group(NamedTuple):
    """Jobs for one batch, in order, and their shape.

    prompts: where the segments of each come from. moves: cached entries to be moved before.
    """

    jobs: tuple[int, ...]
    profile: Profile
    prompts: tuple[PlannedPrompt, ...] = ()
    moves: tuple[Move, ...] = ()


class Grouping(Protocol):
    """Decides which jobs of one kind's queue go together."""

    @property
    def max_width(self) -> int:
        """The widest job that some profile takes; 0 where there is none."""

    def fits(self, tokens: int, width: int) -> bool:
        """Whether some profile takes a job of this size alone."""

    def group(self, jobs: Iterable[Job], due: bool, now_ns: int) -> Group | None:
        """The first of the queued jobs, at least one, in order; None: wait for more. due: they wait no longer."""

    def finished(self, jobs: tuple[int, ...], well: bool) -> None:
        """The batch of such a group came back; well: without a failure."""

    def renew(self, epoch: int) -> None:
        """The pool is of this epoch: forget what was cached before."""

    def forget(self, user: str) -> int:
        """Erase what is cached of a user; how many entries there were."""

    def check(self) -> None:
        """Audit; AssertionError."""


class FixedShapes:
    """Jobs join in order until the next one would fit no profile; the cheapest profile that takes them is used.

    max_tokens: profiles that cost more are never used. ConfigError where that leaves a size that nothing serves.
    """

    def __init__(self, profiles: Sequence[Profile], max_tokens: int) -> None:
        self._profiles = sorted(
            {p for p in profiles if p.cost_tokens <= max_tokens},
            key=lambda p: (p.cost_tokens, p.batch, p.tokens, p.width),
        )
        for lost in profiles:
            if not self.fits(lost.tokens, lost.width):
                raise ConfigError(
                    f"batching.max_tokens={max_tokens} leaves no profile for {lost.kind} of {lost.tokens} "
                    f"tokens and width {lost.width}; raise it, or have that size in a smaller batch too"
                )

    @property
    def max_width(self) -> int:
        return max((p.width for p in self._profiles), default=0)

    def fits(self, tokens: int, width: int) -> bool:
        return self._first_fit(1, tokens, width) is not None

    def group(self, jobs: Iterable[Job], due: bool, now_ns: int) -> Group | None:
        chosen: list[int] = []
        tokens = width = at = 0
        closed = False
        for job in jobs:
            tokens, width = max(tokens, job.tokens), max(width, job.width)
            # What fits a larger need fits every smaller one, so the first fit only moves up.
            found = self._first_fit(len(chosen) + 1, tokens, width, at)
            if found is None:
                closed = True
                break
            at = found
            chosen.append(job.id)
        closed = closed or self._first_fit(len(chosen) + 1, tokens, width, at) is None
        return Group(tuple(chosen), self._profiles[at]) if due or closed else None

    def finished(self, jobs: tuple[int, ...], well: bool) -> None:
        """Nothing is remembered of batches."""

    def renew(self, epoch: int) -> None:
        """Nothing is cached."""

    def forget(self, user: str) -> int:
        """Nothing is cached."""
        return 0

    def check(self) -> None:
        """Nothing can be wrong."""

    def _first_fit(self, batch: int, tokens: int, width: int, start: int = 0) -> int | None:
        """Index of the cheapest profile, from `start` on, that takes `batch` jobs of this size."""
        for at in range(start, len(self._profiles)):
            profile = self._profiles[at]
            if profile.batch >= batch and profile.tokens >= tokens and profile.width >= width:
                return at
        return None


class Batcher(Policy[Live]):
    """FIFO micro-batching over a fixed set of profiles, on one lane.

    profiles: the compiled shapes. max_tokens: cap on a batch's padded cost, see FixedShapes. groupings: for kinds whose
    batches are made otherwise. max_wait_ns: how long the oldest job may wait for company. max_queue: bound on queued
    jobs. max_in_flight: bound on batches started and not yet committed. shadow_share: the share of reused answers that
    are computed again without the cache while nobody waits.
    """

    def __init__(
        self,
        profiles: Sequence[Profile],
        *,
        max_tokens: int,
        max_wait_ns: int,
        max_queue: int,
        max_in_flight: int = 1,
        groupings: Mapping[Kind, Grouping] | None = None,
        shadow_share: float = 0.0,
    ) -> None:
        super().__init__(max_queue)
        if max_wait_ns < 0 or max_in_flight < 1:
            raise ValueError("max_wait_ns must be >= 0, max_in_flight >= 1")
        self._groupings: dict[Kind, Grouping] = {
            kind: FixedShapes([p for p in profiles if p.kind == kind and not p.packed], max_tokens)
            for kind in KINDS
        }
        self._groupings.update(groupings or {})
        self._max_wait_ns = max_wait_ns
        self._max_in_flight = max_in_flight
        self._queues: dict[Kind, OrderedDict[int, Job]] = {kind: OrderedDict() for kind in KINDS}
        self._shadow_share, self._shadow_due = shadow_share, 0.0

    def max_width(self, kind: Kind) -> int:
        """The widest job of `kind` that some profile takes; 0 where there is none."""
        return self._groupings[kind].max_width

    def fits(self, kind: Kind, tokens: int, width: int) -> bool:
        """Whether some profile takes a job of this size alone."""
        return self._groupings[kind].fits(tokens, width)

    def next_wakeup_ns(self) -> int | None:
        """When another plan could do something by time alone; None: never."""
        times = [self._deadlines[0][0]] if self._deadlines else []
        head = self._head()
        if head is not None and len(self._flights) < self._max_in_flight:
            times.append(head.arrival_ns + (0 if self._draining else self._max_wait_ns))
        return min(times, default=None)

    def renew(self, epoch: int, now_ns: int) -> None:
        """See Policy."""
        super().renew(epoch, now_ns)
        for grouping in self._groupings.values():
            grouping.renew(epoch)

    def forget(self, user: str, now_ns: int) -> int:
        """See Policy."""
        return super().forget(user, now_ns) + sum(g.forget(user) for g in self._groupings.values())

    def shadow(self, now_ns: int) -> bool:
        """An answer reused cached segments: whether to compute it again without them, now that nobody waits."""
        self._advance_clock(now_ns)
        self._shadow_due = min(1.0, self._shadow_due + self._shadow_share)  # a busy time is not made up for
        if self._shadow_due < 1 or self.queued or self._draining:
            return False
        self._shadow_due -= 1
        return True

    def check(self) -> None:
        """Audit the invariants; AssertionError names the broken one."""
        super().check()
        states = {job_id: entry.state for job_id, entry in self._live.items()}
        queued = [job_id for queue in self._queues.values() for job_id in queue]
        running = [job_id for start in self._flights.values() for job_id in start.jobs]
        assert len(set(queued)) == len(queued), "a job is queued twice"
        assert len(set(running)) == len(running), "a job is in two batches"
        assert {i for i, s in states.items() if s == "queued"} == set(queued), "queues and states disagree"
        assert {i for i, s in states.items() if s == "running"} <= set(running), "a job runs in no batch"
        assert len(self._flights) <= self._max_in_flight, "too many batches in flight"
        for queue in self._queues.values():
            orders = [self._live[job_id].order for job_id in queue]
            assert orders == sorted(orders), "a queue is out of order"
        for grouping in self._groupings.values():
            grouping.check()

    def _refusal(self, job: Job) -> Reason | None:
        return None if self.fits(job.kind, job.tokens, job.width) else "too_large"

    def _enter(self, job: Job, order: int) -> Live:
        self._queues[job.kind][job.id] = job
        return Live(job, order)

    def _choose(self, now_ns: int) -> list[Start]:
        starts: list[Start] = []
        while len(self._flights) + len(starts) < self._max_in_flight and (head := self._head()) is not None:
            queue = self._queues[head.kind]
            due = self._draining or now_ns >= head.arrival_ns + self._max_wait_ns
            group = self._groupings[head.kind].group(queue.values(), due, now_ns)
            if group is None:
                break
            plans = group.prompts or (None,) * len(group.jobs)
            work = tuple(Request(job_id, plan) for job_id, plan in zip(group.jobs, plans, strict=True))
            for job_id in group.jobs:
                del queue[job_id]
            run = self._runs + len(starts)
            starts.append(Start(run, 0, group.profile, work, group.moves, self._epoch))
        return starts

    def _take_back(
        self, start: Start, outcome: Outcome, returned: list[Returned[Live]]
    ) -> list[Returned[Live]]:
        assert isinstance(start.shape, Profile)
        kind = start.shape.kind
        self._groupings[kind].finished(tuple(work.job for work in start.work), outcome == "well")
        again = [entry.job for entry, _, event in returned if event == "requeue"]
        if again:  # they go on where they stood
            queue = self._queues[kind]
            queue.update((job.id, job) for job in again)
            for job_id in sorted(queue, key=lambda job_id: self._live[job_id].order):
                queue.move_to_end(job_id)
        return returned

    def _withdraw(self, entry: Live) -> None:
        self._queues[entry.job.kind].pop(entry.job.id, None)

    def _head(self) -> Job | None:
        """The oldest queued job of either kind."""
        heads = [next(iter(queue.values())) for queue in self._queues.values() if queue]
        return min(heads, key=lambda job: self._live[job.id].order, default=None)
