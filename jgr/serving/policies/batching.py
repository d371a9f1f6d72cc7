# SPDX-License-Identifier: Apache-2.0
"""Micro-batching: which jobs go to the device together, in which compiled shape, and when.

The one idea: the most urgent job decides the kind and the class of the next batch, and the shape is the one that is the
cheapest for each of its jobs. So short jobs are not padded to long ones, a program of eight rows is not run for two
jobs that are cheaper one after the other, and the most urgent job always goes next.

A lane may have several batches in flight: the next is dispatched while one runs, so that the device does not wait for
the host. It is dispatched late, shortly before the one before it should end, since until then more urgent jobs may
come, and more company; at once where no more jobs fit into it.

A job's life is that of `policy`. Pure, as all policies are.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from typing import NamedTuple, Protocol

from jgr.cache.entries import Fetch, Move
from jgr.config import ConfigError, ProfilesConfig
from jgr.serving.policies.jobs import KINDS, Job, Kind, Outcome, Profile, Reason, Request, Start
from jgr.serving.policies.live import Live, Returned
from jgr.serving.policies.loads import ClassLoad, KindsLoad, Load
from jgr.serving.policies.ordering import Key, Ordering
from jgr.serving.policies.policy import Policy
from jgr.serving.policies.run_costs import Cover, RunCosts
from jgr.serving.policies.sources import PlannedPrompt

LEAD_NS = 2_000_000
"""So long before a lane should be free, besides the mean error of that time, the next batch is planned for it. The
event loop may wake a millisecond late."""


def make_profiles(config: ProfilesConfig, kinds: Sequence[Kind] = KINDS) -> tuple[Profile, ...]:
    """Every combination of the configured batch sizes, prompt lengths and widths, for each of the kinds."""
    widths: dict[Kind, tuple[int, ...]] = {"recommend": config.widths, "rank": config.candidates}
    return tuple(
        Profile(kind, *sizes)
        for kind in kinds
        for sizes in itertools.product(config.batch, config.tokens, widths[kind])
    )


LOOKED_AT = 256
"""The first so many jobs are looked at to fill a batch."""
Loses = Callable[[Sequence[int], int], int]
"""(jobs of a batch, when it ends) -> how many other jobs, accepted in time, would then be late."""


class Group(NamedTuple):
    """Jobs for one batch, in order, and their shape.

    prompts: where the segments of each come from. moves: cached entries to be moved before; fetches: those to be copied
    from device to device before.
    """

    jobs: tuple[int, ...]
    profile: Profile
    prompts: tuple[PlannedPrompt, ...] = ()
    moves: tuple[Move, ...] = ()
    fetches: tuple[Fetch, ...] = ()


class Grouping(Protocol):
    """Decides which jobs of one kind's queue go together. costs: what runs take, given by the policy."""

    costs: RunCosts

    @property
    def max_width(self) -> int:
        """The widest job that some profile takes; 0 where there is none."""

    def fits(self, tokens: int, width: int) -> bool:
        """Whether some profile takes a job of this size alone."""

    def group(
        self, jobs: Iterable[Job], due: bool, now_ns: int, begin_ns: int | None, loses: Loses
    ) -> Group | None:
        """A batch of the first of the jobs, which are in their order; None: wait for more.

        due: they wait no longer. begin_ns: when the batch would begin; a job whose deadline it would miss is left out.
        None: nobody looks at deadlines. loses: what a batch would make late.
        """

    def finished(self, jobs: tuple[int, ...], well: bool) -> Set[tuple[int, ...]]:
        """The batch of such a group came back. well: without a failure.

        Returns the other batches in flight that read what it was to write and has not.
        """

    def informed(self, job: Job, hoped: bool) -> Job:
        """The job with what is cached of its user. hoped: with all that could be, since whose it is is not known."""

    def alone_ns(self, job: Job) -> int:
        """What the cheapest batch of the job alone takes."""

    def share_ns(self, job: Job) -> int:
        """What the job takes of the cheapest full batch."""

    def spread_ns(self, job: Job) -> int:
        """The mean error of `alone_ns`."""

    def size_class(self, job: Job) -> Hashable:
        """Jobs of one class take the same shapes."""

    def load(self, full: bool = False) -> Load:
        """Nothing that waits yet. full: until the device begins with the first of it, others will fill its batch."""

    def renew(self, epoch: int) -> None:
        """The pool is of this epoch: forget what was cached before."""

    def forget(self, user: str) -> int:
        """Erase what is cached of a user; how many entries there were."""

    def check(self) -> None:
        """Audit; AssertionError."""


class FixedShapes:
    """Batches with a row for each job. An option is a shape with the most urgent jobs of a class that it takes, and
    then with shorter ones. The one that makes the fewest accepted jobs late is used; of several the one that costs the
    least for its jobs: in proportion to what they would take in full batches of their own. Where nobody looks at
    deadlines, the most urgent job's class goes next.

    max_tokens: profiles that cost more are never used. ConfigError where that leaves a size that nothing serves.
    """

    def __init__(self, profiles: Sequence[Profile], max_tokens: int, costs: RunCosts | None = None) -> None:
        self.costs = costs or RunCosts()
        self._profiles = sorted(
            {p for p in profiles if p.cost_tokens <= max_tokens},
            key=lambda p: (p.cost_tokens, p.batch, p.tokens, p.width),
        )
        self._tokens = sorted({p.tokens for p in self._profiles})
        self._widths = sorted({p.width for p in self._profiles})
        self._fitting = {  # the profiles that take a class, the smallest first
            (tokens, width): [p for p in self._profiles if p.tokens >= tokens and p.width >= width]
            for tokens in self._tokens
            for width in self._widths
        }
        self._covers: dict[tuple[int, int], Cover] = {}
        self._shares: dict[tuple[int, int], float] = {}
        self._revision = -1
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
        at, to = bisect_left(self._tokens, tokens), bisect_left(self._widths, width)
        within = at < len(self._tokens) and to < len(self._widths)
        return within and bool(self._fitting[self._tokens[at], self._widths[to]])

    def group(
        self, jobs: Iterable[Job], due: bool, now_ns: int, begin_ns: int | None, loses: Loses
    ) -> Group | None:
        jobs = list(itertools.islice(jobs, LOOKED_AT))
        if not due and len(jobs) < self._full(self._tokens[-1]):
            return None
        smallest = self._alone(jobs[0])
        if len(jobs) == 1 and due:
            return Group((jobs[0].id,), smallest)
        classes = [self.size_class(job) for job in jobs]
        first = jobs[0].priority
        # Another class than the first job's may go first, where nobody is late for it. Jobs that give way fill what
        # those before them leave free, and have no say in what runs.
        urgent = [of for of, job in zip(classes, jobs, strict=True) if job.priority == first]
        heads = urgent[:1] if begin_ns is None else dict.fromkeys(urgent)
        found: dict[tuple[int, ...], Group] = {}  # of the shapes for the same jobs, the smallest
        for of in heads:
            others = [(job.priority != first, each != of) for each, job in zip(classes, jobs, strict=True)]
            for p in self._fitting[of]:
                group = self._filled(p, jobs, others, begin_ns)
                found.setdefault(group.jobs, group)
        found.pop((), None)
        # The first job is tried although it is late, where all are.
        options = list(found.values()) or [Group((jobs[0].id,), smallest)]
        takes = {
            job.id: self._share(of) if job.priority == first else 0.0
            for job, of in zip(jobs, classes, strict=True)
        }

        def rank(group: Group) -> tuple[float, int, int]:
            done = sum(map(takes.__getitem__, group.jobs))
            return -done / self._weight(group.profile), -len(group.jobs), group.profile.cost_tokens

        options.sort(key=rank)
        best = options[0]
        if begin_ns is not None and len(options) > 1:
            best = _least(options, lambda group: loses(group.jobs, begin_ns + self.costs.ns(group.profile)))
        return best if due or len(best.jobs) >= self._full(best.profile.tokens) else None

    def _full(self, tokens: int) -> int:
        """The jobs of a batch that no more such jobs fit into."""
        return max(p.batch for p in self._profiles if p.tokens >= tokens)

    def _filled(
        self, profile: Profile, jobs: Sequence[Job], others: Sequence[tuple[bool, bool]], begin_ns: int | None
    ) -> Group:
        """A batch of the first jobs that it is in time for. others: whether a job is of another priority, and of
        another class, than those that go first."""
        end_ns = None if begin_ns is None else begin_ns + self.costs.ns(profile)
        fit = [
            at
            for at, job in enumerate(jobs)
            if profile.tokens >= job.tokens and profile.width >= job.width and _in_time(job, end_ns)
        ]
        if len(fit) > profile.batch:
            fit = sorted(sorted(fit, key=others.__getitem__)[: profile.batch])
        return Group(tuple(jobs[at].id for at in fit), profile)

    def finished(self, jobs: tuple[int, ...], well: bool) -> Set[tuple[int, ...]]:
        """Nothing is remembered of batches."""
        return frozenset()

    def informed(self, job: Job, hoped: bool) -> Job:
        """Nothing is cached."""
        return job

    def alone_ns(self, job: Job) -> int:
        return self.costs.ns(self._alone(job))

    def share_ns(self, job: Job) -> int:
        return int(self._share(self.size_class(job)))

    def spread_ns(self, job: Job) -> int:
        return self.costs.spread_ns(self._alone(job))

    def load(self, full: bool = False) -> Load:
        return ClassLoad(self.size_class, self.cover, full)

    def size_class(self, job: Job) -> tuple[int, int]:
        """The least tokens and width of profiles that take the job; jobs of a class fit the same profiles."""
        tokens, widths = self._tokens, self._widths
        return tokens[bisect_left(tokens, job.tokens)], widths[bisect_left(widths, job.width)]

    def cover(self, of: tuple[int, int]) -> Cover:
        """What any number of jobs of a class takes."""
        self._renew_costs()
        found = self._covers.get(of)
        if found is None:
            found = self._covers[of] = Cover([(p.batch, self.costs.ns(p)) for p in self._fitting[of]])
        return found

    def renew(self, epoch: int) -> None:
        """Nothing is cached."""

    def forget(self, user: str) -> int:
        """Nothing is cached."""
        return 0

    def check(self) -> None:
        """Nothing can be wrong."""

    def _alone(self, job: Job) -> Profile:
        return self._fitting[self.size_class(job)][0]

    def _share(self, of: tuple[int, int]) -> float:
        """What a job of a class takes of the cheapest full batch, in ns: of two batches, the one that does more of this
        is better."""
        self._renew_costs()
        found = self._shares.get(of)
        if found is None:
            found = self._shares[of] = min(self._weight(p) / p.batch for p in self._fitting[of])
        return found

    def _renew_costs(self) -> None:
        """Forget what was made of costs that were corrected since."""
        if self._revision != self.costs.revision:
            self._covers.clear()
            self._shares.clear()
            self._revision = self.costs.revision

    def _weight(self, profile: Profile) -> int:
        """What a run takes; as good as nothing where it was not measured."""
        return self.costs.ns(profile) or 1


def _least(groups: Sequence[Group], loses: Callable[[Group], int]) -> Group:
    """The first group of those that lose the least."""
    best, least = groups[0], -1
    for group in groups:
        lost = loses(group)
        if lost == 0:
            return group
        if least < 0 or lost < least:
            best, least = group, lost
    return best


def _in_time(job: Job, end_ns: int | None) -> bool:
    return end_ns is None or job.deadline_ns is None or end_ns <= job.deadline_ns


class Batcher(Policy[Live]):
    """Micro-batching over a fixed set of profiles.

    profiles: the compiled shapes. max_tokens: cap on a batch's padded cost, see FixedShapes. groupings: for kinds whose
    batches are made otherwise; these run on lane 0. max_wait_ns: how long the most urgent job may wait for company.
    max_queue: bound on queued jobs. streams: number of lanes. in_flight: bound on batches of a lane that are started
    and not yet committed. shadow_share: the share of reused answers that are computed again without the cache while
    nobody waits. ordering, costs: see Policy.
    """

    def __init__(
        self,
        profiles: Sequence[Profile],
        *,
        max_tokens: int,
        max_wait_ns: int,
        max_queue: int,
        streams: int = 1,
        in_flight: int = 1,
        groupings: Mapping[Kind, Grouping] | None = None,
        shadow_share: float = 0.0,
        ordering: Ordering | None = None,
        costs: RunCosts | None = None,
    ) -> None:
        super().__init__(max_queue, ordering, costs)
        if max_wait_ns < 0 or in_flight < 1 or streams < 1:
            raise ValueError("max_wait_ns must be >= 0, streams and in_flight >= 1")
        self._groupings: dict[Kind, Grouping] = {
            kind: FixedShapes(
                [p for p in profiles if p.kind == kind and not p.packed], max_tokens, self.costs
            )
            for kind in KINDS
        }
        self._groupings.update(groupings or {})
        for grouping in self._groupings.values():
            grouping.costs = self.costs
        self._bound: Set[Kind] = frozenset(groupings or ())  # kinds that run on lane 0
        self._max_wait_ns = max_wait_ns
        self._streams, self._in_flight = streams, in_flight
        self._doomed: set[int] = set()  # runs in flight that read what was not written
        self._shadow_share, self._shadow_due = shadow_share, 0.0
        # When waiting for more jobs was best: it still is while nothing changes, as with jobs that are refused.
        self._waits_in: tuple[int, int, int, int | None] | None = None

    def max_width(self, kind: Kind) -> int:
        """The widest job of `kind` that some profile takes; 0 where there is none."""
        return self._groupings[kind].max_width

    def fits(self, kind: Kind, tokens: int, width: int) -> bool:
        """Whether some profile takes a job of this size alone."""
        return self._groupings[kind].fits(tokens, width)

    def next_wakeup_ns(self) -> int | None:
        """When another plan could do something by time alone; None: never."""
        times = [super().next_wakeup_ns()]
        now_ns = self._now_ns
        if self._queue.order and now_ns is not None and not self._gives_way(self._first(), now_ns):
            times += [max(at_ns, now_ns) for at_ns in self._due_ns(self._first(), now_ns).values()]
        return min((at_ns for at_ns in times if at_ns is not None), default=None)

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
        starts = [flight.start for flight in self._flights.values()]
        running = [job_id for start in starts for job_id in start.jobs]
        assert len(set(running)) == len(running), "a job is in two batches"
        assert {i for i, e in self._live.items() if e.state == "running"} <= set(running), (
            "a job runs in no batch"
        )
        for lane in range(self._streams):
            flights = sum(start.lane == lane for start in starts)
            assert flights <= self._in_flight, "too many batches in flight"
        assert self._doomed <= self._flights.keys(), "a batch is discarded that is not in flight"
        for grouping in self._groupings.values():
            grouping.check()

    def _refusal(self, job: Job) -> Reason | None:
        return None if self.fits(job.kind, job.tokens, job.width) else "too_large"

    def _enter(self, job: Job, key: Key) -> Live:
        return Live(job, key)

    def _informed(self, job: Job, hoped: bool = False) -> Job:
        return self._groupings[job.kind].informed(job, hoped)

    def _share_ns(self, job: Job) -> int:
        return self._groupings[job.kind].share_ns(job)

    def _alone_ns(self, job: Job) -> int:
        return self._groupings[job.kind].alone_ns(job)

    def _class_of(self, job: Job) -> Hashable:
        return job.kind, self._groupings[job.kind].size_class(job)

    def _load(self, full: bool = False) -> Load:
        return KindsLoad({kind: grouping.load(full) for kind, grouping in self._groupings.items()})

    def _begins_ns(self, now_ns: int, *jobs: Job) -> int:
        ends = self._lane_ends_ns(now_ns)
        return max(min(ends.get(lane, now_ns) for lane in self._lanes_of(job.kind)) for job in jobs)

    def _lanes_of(self, kind: Kind) -> Sequence[int]:
        """The lanes that batches of a kind run on."""
        return (0,) if kind in self._bound else range(self._streams)

    def _choose(self, now_ns: int) -> Start | None:
        if not self._queue.order or self._gives_way(head := self._first(), now_ns):
            return None
        due_ns = self._due_ns(head, now_ns)
        if not due_ns:
            return None
        ends = self._lane_ends_ns(now_ns)
        lane = min(due_ns, key=lambda lane: ends.get(lane, now_ns))
        begin_ns = ends.get(lane, now_ns) if self._ordering.predicts else None
        due = now_ns >= due_ns[lane]
        situation = (self._queue.changes, self.costs.revision, lane, begin_ns)
        if not due and situation == self._waits_in:
            return None
        jobs = (self._live[i].job for _, i in self._queue.order)
        group = self._groupings[head.kind].group(
            (job for job in jobs if job.kind == head.kind),
            due,
            now_ns,
            begin_ns,
            self._loses,
        )
        if group is None:
            self._waits_in = situation
            return None
        plans = group.prompts or (None,) * len(group.jobs)
        work = tuple(Request(job_id, plan) for job_id, plan in zip(group.jobs, plans, strict=True))
        return Start(self._runs, lane, group.profile, work, group.moves, self._epoch, group.fetches)

    def _believed(self, run: int, outcome: Outcome) -> Outcome:
        doomed = run in self._doomed
        self._doomed.discard(run)
        return "lost" if doomed else outcome

    def _take_back(
        self, start: Start, outcome: Outcome, returned: list[Returned[Live]]
    ) -> list[Returned[Live]]:
        assert isinstance(start.shape, Profile)
        doomed = self._groupings[start.shape.kind].finished(start.jobs, outcome == "well")
        self._doomed |= {run for run, flight in self._flights.items() if flight.start.jobs in doomed}
        return returned

    def _withdraw(self, entry: Live) -> None:
        """A job stands in no other queue than the policy's."""

    def _due_ns(self, head: Job, now_ns: int) -> dict[int, int]:
        """From when on a batch of the most urgent job waits for no more company, by lanes that take another batch."""
        flights = [0] * self._streams
        for flight in self._flights.values():
            flights[flight.start.lane] += 1
        grouping, lead_ns, ends = self._groupings[head.kind], LEAD_NS, {}
        if any(flights):
            ends = self._lane_ends_ns(now_ns)
            lead_ns += 2 * grouping.spread_ns(head)
        waits_ns = 0 if self._draining else self._max_wait_ns
        due_ns = head.arrival_ns + waits_ns
        if head.deadline_ns is not None and waits_ns:  # company is not worth a deadline
            latest_ns = head.deadline_ns - grouping.alone_ns(head)
            # The other half is for what nobody foresees: who waits until the last moment is late by any delay.
            half_ns = head.arrival_ns + (latest_ns - head.arrival_ns) // 2
            due_ns = min(due_ns, half_ns, latest_ns - lead_ns)
        if waits_ns:  # nor is it worth the deadlines of those behind the first, who run after it
            promised = (self._live[i] for _, i in self._queue.order[:LOOKED_AT])
            due_ns = min([due_ns, *(e.idle_until_ns for e in promised if e.latest_ns is not None)])
        return {
            lane: max(due_ns, ends[lane] - lead_ns) if lane in ends else due_ns
            for lane in self._lanes_of(head.kind)
            if flights[lane] < self._in_flight
        }
