# SPDX-License-Identifier: Apache-2.0
"""Which candidates of which request go to which executor, and when (FLAME's DSO: FLAME-11, 12, 14).

The one idea: an executor has one compiled number of candidates, its size, and does one part of one request at a time. A
request is split into parts that are the cheapest by measured costs; each waits for an idle executor of its size, or
takes a larger one that is idle. Parts know their place among the request's candidates, so whoever joins them needs no
order. Where the user's part is shared by all parts it is a run of its own before them, on an executor of size READS;
but a request that is one part may be cheaper whole, with the user in it.

Most urgent first: the earliest deadline; who names none is taken for one that has PATIENCE_NS. Among equals the first
come is the first served. A run that fails fails its request alone, and returns its executor; so do runs whose request
has ended meanwhile.

A job's life is the table `batching.TRANSITIONS`. Pure: time is an argument in integer nanoseconds, ids are the
caller's, equal calls give equal plans.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Literal

from jgr.serving.policies.batching import Accepted, Event, Reason, Rejected, State, advance

READS = 0
"""The size of executors that compute, or fetch, a user's part."""
PATIENCE_NS = 1_000_000_000
BEGUN_IN_ALL = 4
"""Jobs that may be begun, for each executor, with those that wait for `ready`."""

End = Literal["done", "failed", "expired"]


def split(n: int, sizes: Sequence[int], costs: Mapping[int, float]) -> tuple[int, ...]:
    """The sizes of the parts of n candidates, descending: the least cost, then the fewest parts, then the smallest ones
    (FLAME-11).

    FLAME fills the largest size first and pads the rest to the smallest that takes it. With costs in proportion to the
    sizes that is what comes out, but for a tail that one larger part takes as well; with measured ones 130 may be one
    part of 256, or two of 128. costs: of one run at each size, in any unit.
    """
    ordered = tuple(sorted(sizes, reverse=True))
    return _Cheapest.of(ordered, tuple(costs[size] for size in ordered)).split(n)


class _Cheapest:
    """The cheapest cover of every number of candidates, by the last part of each; grows on demand."""

    def __init__(self, sizes: tuple[int, ...], costs: tuple[float, ...]) -> None:
        self._unit = math.gcd(*sizes)
        self._parts = [(size // self._unit, cost) for size, cost in zip(sizes, costs, strict=True)]
        self._best: list[tuple[float, int, int]] = [
            (0.0, 0, 0)
        ]  # by units: cost, parts, the smallest part's units

    @staticmethod
    @functools.lru_cache(maxsize=16)
    def of(sizes: tuple[int, ...], costs: tuple[float, ...]) -> _Cheapest:
        return _Cheapest(sizes, costs)

    def split(self, n: int) -> tuple[int, ...]:
        best, units = self._best, -(-n // self._unit)
        for at in range(len(best), units + 1):
            choices = ((best[max(0, at - part)], part, cost) for part, cost in self._parts)
            best.append(min((before[0] + cost, before[1] + 1, part) for before, part, cost in choices))
        found = []
        while units > 0:
            part = best[units][2]
            found.append(part * self._unit)
            units -= part
        return tuple(sorted(found, reverse=True))


@dataclass(frozen=True)
class Job:
    """A request to rank `count` candidates. reads: its user's part may be a run of its own, before the parts.

    waits: its parts wait for `ready`, as for features.
    """

    id: int
    count: int
    arrival_ns: int
    deadline_ns: int | None
    reads: bool = False
    waits: bool = False


@dataclass(frozen=True)
class Start:
    """Run the candidates [first, first + count) of a job on an executor; count 0: the user's part."""

    run: int
    job: int
    executor: int
    first: int
    count: int


@dataclass(frozen=True)
class Plan:
    """What to start now, in order, and the jobs to tell that their time is up."""

    starts: tuple[Start, ...]
    expired: tuple[int, ...]


@dataclass(frozen=True)
class Committed:
    """job: of the run; None where nobody waits for it. end: how the job has ended with it; None: it goes on."""

    job: int | None
    end: End | None = None


Place = tuple[int, int, int, int, int]
"""Of a waiting run, in order: urgency, order of submission, first candidate; its count, and its job."""


@dataclass
class _Live:
    """waiting: its runs that may start. parts: those that may not yet. left: runs that have not ended well."""

    job: Job
    order: int
    state: State = "new"
    parts: list[tuple[int, int, int]] = field(default_factory=list)  # size, first, count
    waiting: list[tuple[int, Place]] = field(default_factory=list)  # by size
    reading: bool = False
    held: bool = False
    left: int = 0

    @property
    def urgency_ns(self) -> int:
        job = self.job
        return job.arrival_ns + PATIENCE_NS if job.deadline_ns is None else job.deadline_ns


class Orchestrator:
    """Assigns parts to executors.

    executors: the size of each, by its number. costs: of a run at each size. max_queue: bound on jobs none of whose
    runs has started. streams: bound on runs at a time; None: as many as there are executors. whole: costs by size of a
    part that computes the user too, to be compared with READS and the parts; None: there are no such parts.

    No more jobs are begun than there are executors, since each of them holds a user's state; those that wait for
    `ready` do not count until they are as many times more as BEGUN_IN_ALL says, for they keep no executor from anybody.
    """

    def __init__(
        self,
        executors: Sequence[int],
        costs: Mapping[int, float],
        *,
        max_queue: int,
        streams: int | None = None,
        whole: Mapping[int, float] | None = None,
    ) -> None:
        self._size_of = tuple(executors)
        self._sizes = sorted({size for size in executors if size != READS})
        if not self._sizes or max_queue < 1 or (streams is not None and streams < 1):
            raise ValueError("there must be an executor with candidates, and max_queue and streams >= 1")
        self._costs, self._whole = costs, whole or {}
        self._max_queue = max_queue
        self._streams = streams or len(executors)
        self._idle: dict[int, deque[int]] = {size: deque() for size in {*self._sizes, READS}}
        for number, size in enumerate(executors):
            self._idle[size].append(number)
        self._waiting: dict[int, list[Place]] = {size: [] for size in self._idle}
        self._live: dict[int, _Live] = {}
        self._running: dict[int, Start] = {}
        self._deadlines: list[tuple[int, int]] = []  # of live jobs, ascending
        self._queued = self._submitted = self._started = 0
        self._begun_held = 0  # running jobs that wait for `ready`
        self._now_ns: int | None = None
        self._draining = False

    @property
    def queued(self) -> int:
        """Jobs none of whose runs has started."""
        return self._queued

    @property
    def full(self) -> bool:
        """Whether a job would be refused now."""
        return self._queued >= self._max_queue

    @property
    def jobs(self) -> Set[int]:
        """The live ones, whose scores somebody waits for."""
        return self._live.keys()

    @property
    def in_flight(self) -> int:
        """Runs started and not yet committed."""
        return len(self._running)

    def state(self, job_id: int) -> State | None:
        """The state of a live job; None for one that is unknown or has ended."""
        entry = self._live.get(job_id)
        return entry.state if entry else None

    def idle(self, size: int) -> int:
        """Executors of a size that do nothing."""
        return len(self._idle[size])

    def parts(self, count: int, reads: bool) -> tuple[bool, tuple[int, ...]]:
        """Whether the user's part is a run of its own, given that it may be, and the sizes of the parts."""
        sizes = split(count, self._sizes, self._costs)
        fitting = [size for size in self._whole if size >= count]
        if reads and fitting:
            best = min(fitting, key=lambda size: (self._whole[size], size))
            if self._whole[best] <= self._costs[READS] + sum(self._costs[size] for size in sizes):
                return False, (best,)
        return reads, sizes

    def submit(self, job: Job, now_ns: int) -> Accepted | Rejected:
        """Queue a job. Overload is a value, not an error; an id that is still live raises ValueError."""
        if job.id in self._live:
            raise ValueError(f"job {job.id} is already {self.state(job.id)}")
        if job.count < 1 or (job.reads and READS not in self._size_of):
            raise ValueError(f"there is no executor for {job}")
        self._advance_clock(now_ns)
        reason: Reason | None = "draining" if self._draining else None
        if self.full:
            reason = reason or "queue_full"
        if reason is not None:
            return Rejected(reason)
        reads, sizes = self.parts(job.count, job.reads)
        entry = _Live(job, self._submitted, reading=reads, held=job.waits)
        self._submitted += 1
        self._live[job.id] = entry
        self._move(entry, "accept")
        first = 0
        for size in sizes:
            entry.parts.append((size, first, min(size, job.count - first)))
            first += size
        entry.left = len(entry.parts) + reads
        if reads:
            self._wait(entry, READS, 0, 0)
        self._release(entry)
        if job.deadline_ns is not None:
            bisect.insort(self._deadlines, (job.deadline_ns, job.id))
        return Accepted(self._queued)

    def ready(self, job_id: int) -> None:
        """What a job with `waits` waited for is there. Nothing happens where it has ended."""
        entry = self._live.get(job_id)
        if entry is not None and entry.held:
            self._begun_held -= entry.state == "running"
            entry.held = False
            self._release(entry)

    def cancel(self, job_id: int, now_ns: int) -> bool:
        """Forget a job; what waits never runs. False where it is unknown or has already ended."""
        self._advance_clock(now_ns)
        entry = self._live.get(job_id)
        if entry is None:
            return False
        self._move(entry, "cancel")
        return True

    def plan(self, now_ns: int) -> Plan:
        """Expire what is late, and give idle executors to waiting runs, the most urgent first."""
        self._advance_clock(now_ns)
        expired, starts = [], []
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            expired.append(self._deadlines[0][1])
            self._move(self._live[expired[-1]], "expire")
        while len(self._running) < self._streams and (found := self._next()) is not None:
            place, size, executor_size = found
            *_, first, count, job_id = place
            entry = self._live[job_id]
            entry.waiting.remove((size, place))
            self._leave(size, place)
            if entry.state == "queued":
                self._move(entry, "start")
            start = Start(self._started, job_id, self._idle[executor_size].popleft(), first, count)
            self._started += 1
            self._running[start.run] = start
            starts.append(start)
        return Plan(tuple(starts), tuple(expired))

    def commit(self, run: int, now_ns: int, well: bool = True) -> Committed:
        """A run came back, well or with a failure: its executor is idle. KeyError where it is not in flight."""
        start = self._running[run]
        self._advance_clock(now_ns)
        del self._running[run]
        self._idle[self._size_of[start.executor]].append(start.executor)
        entry = self._live.get(start.job)
        if entry is None:
            return Committed(None)
        job = entry.job
        if job.deadline_ns is not None and now_ns >= job.deadline_ns:
            self._move(entry, "expire")
            return Committed(job.id, "expired")
        if not well:
            self._move(entry, "finish")
            return Committed(job.id, "failed")
        entry.left -= 1
        if start.count == 0:
            entry.reading = False
            self._release(entry)
        if entry.left:
            return Committed(job.id)
        self._move(entry, "finish")
        return Committed(job.id, "done")

    def next_wakeup_ns(self) -> int | None:
        """When a plan could do something by time alone; None: never."""
        return self._deadlines[0][0] if self._deadlines else None

    def drain(self) -> None:
        """Refuse every later submit. What was accepted still runs."""
        self._draining = True

    def check(self) -> None:
        """Audit the invariants; AssertionError names the broken one."""
        busy = [start.executor for start in self._running.values()]
        idle = [number for numbers in self._idle.values() for number in numbers]
        assert sorted([*busy, *idle]) == list(range(len(self._size_of))), "an executor is lost or doubled"
        for size, numbers in self._idle.items():
            assert all(self._size_of[number] == size for number in numbers), "an executor changed its size"
        assert len(busy) <= self._streams, "too many runs"
        waiting = sorted((size, place) for size, places in self._waiting.items() for place in places)
        assert waiting == sorted(w for entry in self._live.values() for w in entry.waiting), (
            "queues and jobs disagree"
        )
        assert all(places == sorted(places) for places in self._waiting.values()), "a queue is out of order"
        states = [entry.state for entry in self._live.values()]
        assert states.count("queued") == self._queued <= self._max_queue, "queued jobs are miscounted"
        assert states.count("running") == len(states) - self._queued, "an ended job is remembered"
        held = sum(entry.held for entry in self._live.values() if entry.state == "running")
        assert held == self._begun_held, "begun jobs that wait are miscounted"
        assert states.count("running") <= BEGUN_IN_ALL * len(self._size_of), "too many jobs are begun"
        for entry in self._live.values():
            running = sum(start.job == entry.job.id for start in self._running.values())
            assert entry.left == len(entry.parts) + len(entry.waiting) + running > 0, "a run is lost"
        watched = [(e.job.deadline_ns, i) for i, e in self._live.items() if e.job.deadline_ns is not None]
        assert sorted(watched) == self._deadlines, "a deadline is unwatched"

    def _next(self) -> tuple[Place, int, int] | None:
        """The most urgent run with an idle executor, its size and the executor's."""
        begun, most = len(self._live) - self._queued, len(self._size_of)
        full = begun - self._begun_held >= most or begun >= BEGUN_IN_ALL * most
        found: tuple[Place, int, int] | None = None
        for size, places in self._waiting.items():
            executor_size = self._idle_size(size)
            if executor_size is None:
                continue
            may = (p for p in places if not full or self._live[p[-1]].state == "running")
            place = next(may, None)
            if place is not None and (found is None or place < found[0]):
                found = place, size, executor_size
        return found

    def _idle_size(self, size: int) -> int | None:
        if size == READS:
            return READS if self._idle[READS] else None
        larger = self._sizes[bisect.bisect_left(self._sizes, size) :]
        return next((other for other in larger if self._idle[other]), None)

    def _release(self, entry: _Live) -> None:
        """Its parts may start, unless they wait for the user's part or for `ready`."""
        if not entry.reading and not entry.held:
            for size, first, count in entry.parts:
                self._wait(entry, size, first, count)
            entry.parts.clear()

    def _wait(self, entry: _Live, size: int, first: int, count: int) -> None:
        place = (entry.urgency_ns, entry.order, first, count, entry.job.id)
        entry.waiting.append((size, place))
        bisect.insort(self._waiting[size], place)

    def _leave(self, size: int, place: Place) -> None:
        """A search from the front would take seconds of the event loop where many long requests wait."""
        places = self._waiting[size]
        del places[bisect.bisect_left(places, place)]

    def _move(self, entry: _Live, event: Event) -> None:
        """The only place where a job changes state: table, queues and counters change together."""
        before, entry.state = entry.state, advance(entry.state, event)
        self._queued += (entry.state == "queued") - (before == "queued")
        if entry.held:
            self._begun_held += (entry.state == "running") - (before == "running")
        if entry.state in ("queued", "running"):
            return
        job = entry.job
        del self._live[job.id]
        for size, place in entry.waiting:
            self._leave(size, place)
        if job.deadline_ns is not None:
            del self._deadlines[bisect.bisect_left(self._deadlines, (job.deadline_ns, job.id))]

    def _advance_clock(self, now_ns: int) -> None:
        if self._now_ns is not None and now_ns < self._now_ns:
            raise ValueError(f"time went back from {self._now_ns} to {now_ns} ns")
        self._now_ns = now_ns
