# SPDX-License-Identifier: Apache-2.0
"""Micro-batching: which jobs go to the device together, in which compiled shape, and when.

The one idea: a batch is a prefix of one kind's queue. The oldest job decides the kind; younger jobs of that
kind join in order of submission until the next one would fit no profile. So the order within a kind is kept,
the head always goes next, and nobody starves. What a batch costs is what its profile pads it to, `batch *
(tokens + width)`, and the token cap limits that.

A job's life is the table `TRANSITIONS`; an event that the table does not list raises and changes nothing.
Jobs that ended are forgotten (only counted), so memory is bounded by `max_queue` and the jobs in flight.

Pure: time is an argument in integer nanoseconds, ids are the caller's, equal calls give equal plans.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from jgr.config import ConfigError, ProfilesConfig

Kind = Literal["recommend", "rank"]
State = Literal["new", "queued", "running", "done", "cancelled", "expired", "rejected"]
Event = Literal["accept", "reject", "start", "finish", "cancel", "expire"]
Reason = Literal["queue_full", "too_large", "draining"]

KINDS: tuple[Kind, ...] = ("recommend", "rank")

TRANSITIONS: Mapping[State, Mapping[Event, State]] = {
    "new": {"accept": "queued", "reject": "rejected"},
    "queued": {"start": "running", "cancel": "cancelled", "expire": "expired"},
    "running": {"finish": "done", "cancel": "cancelled", "expire": "expired"},
    "done": {},
    "cancelled": {},
    "expired": {},
    "rejected": {},
}


class IllegalTransition(RuntimeError):
    """An event that the job's state does not allow. The state is unchanged."""


def advance(state: State, event: Event) -> State:
    """The state after `event`; IllegalTransition where the table has none."""
    after = TRANSITIONS[state].get(event)
    if after is None:
        raise IllegalTransition(f"a {state} job cannot {event}")
    return after


@dataclass(frozen=True)
class Profile:
    """One compiled shape. width: beam width (recommend) or number of candidates (rank).

    packed: not a row for each request, but one for all of them: tokens is the number of their new tokens, context that
    of their cached ones, and width of their candidates, all together (of beams: each).
    """

    kind: Kind
    batch: int
    tokens: int
    width: int
    packed: bool = False
    context: int = 0

    @property
    def cost_tokens(self) -> int:
        """Token positions the device works on, padding included."""
        return (1 if self.packed else self.batch) * (self.tokens + self.width)


def make_profiles(config: ProfilesConfig) -> tuple[Profile, ...]:
    """Every combination of the configured batch sizes, prompt lengths and widths, for both kinds."""
    widths: dict[Kind, tuple[int, ...]] = {"recommend": config.widths, "rank": config.candidates}
    return tuple(
        Profile(kind, *sizes)
        for kind in KINDS
        for sizes in itertools.product(config.batch, config.tokens, widths[kind])
    )


@dataclass(frozen=True)
class Job:
    """One request's size and times. tokens: prompt length; width: beam width or number of candidates.

    parts: what a Grouping must know besides, such as sources.UnplannedPrompt.
    """

    id: int
    kind: Kind
    tokens: int
    width: int
    arrival_ns: int
    deadline_ns: int | None
    parts: object = None


class Group(NamedTuple):
    """Jobs for one batch, in order, and their shape. prompts: a plan for each, and moves: of cached entries, to be made
    before; of types that only the Grouping and the executor know."""

    jobs: tuple[int, ...]
    profile: Profile
    prompts: tuple[Any, ...] = ()
    moves: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Batch:
    """Jobs that run together, in queue order, in one profile. prompts, moves: see Group."""

    id: int
    profile: Profile
    jobs: tuple[int, ...]
    prompts: tuple[Any, ...] = ()
    moves: tuple[Any, ...] = ()


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

    def check(self) -> None:
        """Nothing can be wrong."""

    def _first_fit(self, batch: int, tokens: int, width: int, start: int = 0) -> int | None:
        """Index of the cheapest profile, from `start` on, that takes `batch` jobs of this size."""
        for at in range(start, len(self._profiles)):
            profile = self._profiles[at]
            if profile.batch >= batch and profile.tokens >= tokens and profile.width >= width:
                return at
        return None


@dataclass(frozen=True)
class Plan:
    """What to do now: start `batch` (None: nothing), and tell the `expired` jobs that their time is up."""

    batch: Batch | None
    expired: tuple[int, ...]


@dataclass(frozen=True)
class Committed:
    """The jobs of a finished batch whose outcome somebody still waits for, in batch order.

    done: in time; expired: the deadline passed while they ran. Jobs that were cancelled, or that a plan has
    already reported as expired, are in neither.
    """

    done: tuple[int, ...]
    expired: tuple[int, ...]


@dataclass(frozen=True)
class Accepted:
    """depth: queued jobs, this one included."""

    depth: int


@dataclass(frozen=True)
class Rejected:
    reason: Reason


@dataclass
class _Live:
    """A job that has not ended. order: sequence number of its submission."""

    job: Job
    order: int
    state: State


class Batcher:
    """FIFO micro-batching over a fixed set of profiles.

    profiles: the compiled shapes. max_tokens: cap on a batch's padded cost, see FixedShapes. groupings: of a kind whose
    batches are made otherwise. max_wait_ns: how long the oldest job may wait for company. max_queue: bound on queued
    jobs. max_in_flight: bound on batches started and not yet committed.
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
    ) -> None:
        if max_wait_ns < 0 or max_queue < 1 or max_in_flight < 1:
            raise ValueError("max_wait_ns must be >= 0, max_queue and max_in_flight >= 1")
        self._groupings: dict[Kind, Grouping] = {
            kind: FixedShapes([p for p in profiles if p.kind == kind and not p.packed], max_tokens)
            for kind in KINDS
        }
        self._groupings.update(groupings or {})
        self._max_wait_ns = max_wait_ns
        self._max_queue = max_queue
        self._max_in_flight = max_in_flight
        self._live: dict[int, _Live] = {}
        self._queues: dict[Kind, OrderedDict[int, Job]] = {kind: OrderedDict() for kind in KINDS}
        self._flights: dict[int, Batch] = {}
        self._deadlines: list[tuple[int, int]] = []  # heap of (deadline_ns, id); entries of ended jobs linger
        self._counts: dict[State, int] = dict.fromkeys(TRANSITIONS, 0)  # entries into each state, ever
        self._batches = 0
        self._now_ns: int | None = None
        self._draining = False

    @property
    def queued(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    @property
    def full(self) -> bool:
        """Whether a job would be refused now, whatever its size."""
        return self.queued >= self._max_queue

    @property
    def live(self) -> int:
        """Jobs queued or running whose outcome somebody waits for."""
        return len(self._live)

    @property
    def in_flight(self) -> int:
        """Batches started and not yet committed."""
        return len(self._flights)

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def counts(self) -> Mapping[State, int]:
        """How many jobs ever entered each state; rejected ones were never queued."""
        return dict(self._counts)

    def state(self, job_id: int) -> State | None:
        """The state of a live job; None for one that is unknown or has ended."""
        entry = self._live.get(job_id)
        return entry.state if entry else None

    def max_width(self, kind: Kind) -> int:
        """The widest job of `kind` that some profile takes; 0 where there is none."""
        return self._groupings[kind].max_width

    def fits(self, kind: Kind, tokens: int, width: int) -> bool:
        """Whether some profile takes a job of this size alone."""
        return self._groupings[kind].fits(tokens, width)

    def submit(self, job: Job, now_ns: int) -> Accepted | Rejected:
        """Queue a job. Overload is a value, not an error; an id that is still live raises ValueError."""
        if job.id in self._live:
            raise ValueError(f"job {job.id} is already {self.state(job.id)}")
        self._advance_clock(now_ns)
        reason = self._refusal(job)
        if reason is not None:
            self._counts[advance("new", "reject")] += 1
            return Rejected(reason)
        self._live[job.id] = _Live(job, self._counts["queued"], "new")
        self._move(job.id, "accept")
        self._queues[job.kind][job.id] = job
        if job.deadline_ns is not None:
            heapq.heappush(self._deadlines, (job.deadline_ns, job.id))
        return Accepted(self.queued)

    def cancel(self, job_id: int, now_ns: int) -> bool:
        """Forget a job; a queued one never runs. False where it is unknown or has already ended."""
        self._advance_clock(now_ns)
        if job_id not in self._live:
            return False
        self._move(job_id, "cancel")
        return True

    def plan(self, now_ns: int) -> Plan:
        """Expire what is late, then start at most one batch. Call again until `batch` is None."""
        self._advance_clock(now_ns)
        expired = self._expire(now_ns)
        head = self._head()
        if head is None or self.in_flight >= self._max_in_flight:
            return Plan(None, expired)
        due = self._draining or now_ns >= head.arrival_ns + self._max_wait_ns
        group = self._groupings[head.kind].group(self._queues[head.kind].values(), due, now_ns)
        if group is None:
            return Plan(None, expired)
        for job_id in group.jobs:
            self._move(job_id, "start")
        batch = Batch(self._batches, group.profile, group.jobs, group.prompts, group.moves)
        self._batches += 1
        self._flights[batch.id] = batch
        return Plan(batch, expired)

    def commit(self, batch_id: int, now_ns: int, well: bool = True) -> Committed:
        """A batch came back, well or with a failure. KeyError, changing nothing, where it is not in flight."""
        batch = self._flights[batch_id]
        self._advance_clock(now_ns)
        del self._flights[batch_id]
        self._groupings[batch.profile.kind].finished(batch.jobs, well)
        done: list[int] = []
        expired: list[int] = []
        for job_id in batch.jobs:
            if job_id not in self._live:
                continue
            deadline_ns = self._live[job_id].job.deadline_ns
            late = deadline_ns is not None and now_ns >= deadline_ns
            self._move(job_id, "expire" if late else "finish")
            (expired if late else done).append(job_id)
        return Committed(tuple(done), tuple(expired))

    def next_wakeup_ns(self) -> int | None:
        """After a plan without a batch: when another one could do something by time alone; None: never."""
        while self._deadlines and not self._watched(*self._deadlines[0]):
            heapq.heappop(self._deadlines)
        times = [self._deadlines[0][0]] if self._deadlines else []
        head = self._head()
        if head is not None and self.in_flight < self._max_in_flight:
            times.append(head.arrival_ns + (0 if self._draining else self._max_wait_ns))
        return min(times, default=None)

    def drain(self) -> None:
        """Refuse every later submit. What was accepted still runs, without waiting for company."""
        self._draining = True

    def check(self) -> None:
        """Audit the invariants; AssertionError names the broken one."""
        states = {job_id: entry.state for job_id, entry in self._live.items()}
        queued = [job_id for queue in self._queues.values() for job_id in queue]
        running = [job_id for batch in self._flights.values() for job_id in batch.jobs]
        assert len(set(queued)) == len(queued), "a job is queued twice"
        assert len(set(running)) == len(running), "a job is in two batches"
        assert {i for i, s in states.items() if s == "queued"} == set(queued), "queues and states disagree"
        assert {i for i, s in states.items() if s == "running"} <= set(running), "a job runs in no batch"
        assert set(states.values()) <= {"queued", "running"}, "an ended job is remembered"
        assert len(queued) <= self._max_queue, "the queue is over its bound"
        assert len(self._flights) <= self._max_in_flight, "too many batches in flight"
        for queue in self._queues.values():
            orders = [self._live[job_id].order for job_id in queue]
            assert orders == sorted(orders), "a queue is out of order"
        ended = sum(self._counts[s] for s in ("done", "cancelled", "expired"))
        assert self._counts["queued"] == len(states) + ended, "a job was lost or counted twice"
        for job_id, entry in self._live.items():
            deadline_ns = entry.job.deadline_ns
            assert deadline_ns is None or (deadline_ns, job_id) in self._deadlines, "a deadline is unwatched"
        assert len(self._deadlines) <= _lingering(len(self._live)), "ended jobs' deadlines pile up"
        for grouping in self._groupings.values():
            grouping.check()

    def _refusal(self, job: Job) -> Reason | None:
        if self._draining:
            return "draining"
        if not self.fits(job.kind, job.tokens, job.width):
            return "too_large"
        return "queue_full" if self.full else None

    def _move(self, job_id: int, event: Event) -> None:
        """The only place where a live job changes state: table, containers and counters change together."""
        entry = self._live[job_id]
        after = advance(entry.state, event)
        if entry.state == "queued":
            del self._queues[entry.job.kind][job_id]
        entry.state = after
        self._counts[after] += 1
        if not TRANSITIONS[after]:
            del self._live[job_id]
            if len(self._deadlines) > _lingering(len(self._live)):
                self._deadlines = [watch for watch in self._deadlines if self._watched(*watch)]
                heapq.heapify(self._deadlines)

    def _head(self) -> Job | None:
        """The oldest queued job of either kind."""
        heads = [next(iter(queue.values())) for queue in self._queues.values() if queue]
        return min(heads, key=lambda job: self._live[job.id].order, default=None)

    def _expire(self, now_ns: int) -> tuple[int, ...]:
        """End every live job whose deadline is not after `now_ns`, earliest first."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            deadline_ns, job_id = heapq.heappop(self._deadlines)
            if self._watched(deadline_ns, job_id):
                self._move(job_id, "expire")
                expired.append(job_id)
        return tuple(expired)

    def _watched(self, deadline_ns: int, job_id: int) -> bool:
        """Whether a heap entry still means something: its job has not ended."""
        entry = self._live.get(job_id)
        return entry is not None and entry.job.deadline_ns == deadline_ns

    def _advance_clock(self, now_ns: int) -> None:
        if self._now_ns is not None and now_ns < self._now_ns:
            raise ValueError(f"time went back from {self._now_ns} to {now_ns} ns")
        self._now_ns = now_ns


def _lingering(live: int) -> int:
    """How long the deadline heap may grow before ended jobs are swept out of it."""
    return 2 * live + 64
