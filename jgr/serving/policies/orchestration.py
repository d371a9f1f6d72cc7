# SPDX-License-Identifier: Apache-2.0
"""Which candidates of which request go to which executor, and when (FLAME's DSO: FLAME-11, 12, 14).

The one idea: an executor has one compiled number of candidates, its size, and does one part of one request at a time. A
request is split into parts that are the cheapest by measured costs; each waits for an idle executor of its size, or
takes a larger one that is idle. Parts know their place among the request's candidates, so whoever joins them needs no
order. Where the user's part is shared by all parts it is a run of its own before them, on an executor of size
USER_PART; but a request that is one part may be cheaper whole, with the user in it.

A job without candidates is its user's run alone, which is there for what it keeps.

The most urgent job goes first (`ordering`). A run that fails fails its request alone, and returns its executor; so does
a run whose request has ended meanwhile.

A job's life is that of `policy`; an executor is a lane. Pure, as all policies are.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec import structs

from jgr.serving.policies.jobs import Candidates, Event, Job, Kept, Outcome, Reason, Start, User, Work
from jgr.serving.policies.live import Live, Returned
from jgr.serving.policies.loads import Load, ShareLoad
from jgr.serving.policies.ordering import Key, Ordering
from jgr.serving.policies.policy import Policy
from jgr.serving.policies.run_costs import RunCosts

USER_PART = 0
"""The size of executors that compute, or fetch, a user's part."""
WHOLE = "whole"
KEPT: Kept = "kept"
GROWN: Kept = "grown"
"""In the names of runs' costs: a part that computes the user too, a user's part that is read, or is extended."""
REMEMBERED = 4096
"""Numbers of candidates whose parts are remembered."""
BEGUN_IN_ALL = 4
"""Jobs that may be begun, for each executor, with those that wait for `ready`."""


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


Place = tuple[Key, int, int, int]
"""What orders a waiting run: the key of its job, its first candidate; then its count, and its job."""


class Users(Protocol):
    """Which users' parts are kept on the device; `user_cache.UserCache` is one."""

    def find(self, user: Any) -> Any:
        """Where the part is kept or is to be kept, pinned, with `place`, `before` and `grown`; None: nowhere."""

    def kept(self, user: Any) -> Kept:
        """How much of the part `find` would find. Changes nothing."""

    def end(self, found: Any, well: bool) -> None:
        """Nobody reads or writes what was found any more. well: the run that did has not failed."""

    def forget(self, user: str) -> int:
        """Drop a user's entry; how many there were."""

    def renew(self, epoch: int) -> None:
        """The pool is of this epoch: forget what was kept before."""

    def check(self) -> None:
        """Audit; AssertionError."""


@dataclass
class _Live(Live):
    """waiting: its runs that may start. parts: those that may not yet. left: runs that have not ended well.

    reading: its parts wait for the user's part; held: they wait for `ready`. begun: a run of it was started.
    """

    parts: list[tuple[int, int, int]] = field(default_factory=list)  # size, first, count
    waiting: list[tuple[int, Place]] = field(default_factory=list)  # by size
    reading: bool = False
    held: bool = False
    begun: bool = False
    left: int = 0


class Orchestrator(Policy[_Live]):
    """Assigns parts to executors.

    executors: the size of each, by its number. costs: seconds of a run at each size. max_queue: bound on jobs none of
    whose runs has started. streams: bound on runs at a time; None: as many as there are executors. whole: costs by size
    of a part that computes a user of any length too, to be compared with USER_PART and the parts; None: there are none.
    shorter: as costs, of users of at most so many events (`UserPart.within`). users: which users' parts are kept; None:
    none are. ordering: see Policy.

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
        shorter: Mapping[int, Mapping[int, float]] | None = None,
        users: Users | None = None,
        ordering: Ordering | None = None,
    ) -> None:
        super().__init__(max_queue, ordering, _run_costs(costs, whole or {}, shorter or {}))
        self._size_of = tuple(executors)
        self._sizes = sorted({size for size in executors if size != USER_PART})
        if not self._sizes or (streams is not None and streams < 1):
            raise ValueError("there must be an executor with candidates, and streams >= 1")
        self._sizes_s = {0: costs, **(shorter or {})}  # by `UserPart.within`
        self._whole, self._users = whole or {}, users
        self._streams = streams or len(executors)
        takes = {size: [n for n, of in enumerate(executors) if of >= size] for size in self._sizes}
        takes[USER_PART] = [n for n, of in enumerate(executors) if of == USER_PART]
        # The executors that take runs of a size, where there are fewer of them than streams: these are what they wait
        # for, and so many of them run at a time.
        self._few = {size: lanes for size, lanes in takes.items() if 0 < len(lanes) < self._streams}
        self._idle: dict[int, deque[int]] = {size: deque() for size in {*self._sizes, USER_PART}}
        for number, size in enumerate(executors):
            self._idle[size].append(number)
        self._waiting: dict[int, list[Place]] = {size: [] for size in self._idle}
        self._found: dict[int, Any] = {}  # what runs read or write of kept users
        self._parts: dict[tuple[int, bool, int], tuple[bool, tuple[int, ...]]] = {}
        self._begun = self._begun_held = 0  # jobs that are begun, and those of them that wait for `ready`

    @property
    def jobs(self) -> Set[int]:
        """The live ones, whose scores somebody waits for."""
        return self._live.keys()

    def idle(self, size: int) -> int:
        """Executors of a size that do nothing."""
        return len(self._idle[size])

    def parts(self, count: int, reads: bool, within: int = 0) -> tuple[bool, tuple[int, ...]]:
        """Whether the user's part is a run of its own, given that it may be, and the sizes of the parts."""
        found = self._parts.get((count, reads, within))
        if found is None:
            if len(self._parts) >= REMEMBERED:
                self._parts.clear()
            found = self._parts[count, reads, within] = self._cheapest(count, reads, within)
        return found

    def _parts_of(self, job: Job) -> tuple[bool, tuple[int, ...]]:
        return self.parts(job.width, job.user is not None, self._within(job))

    def _within(self, job: Job) -> int:
        """The length of the job's user, `UserPart.within`, where the costs of such users are known; else 0."""
        within = 0 if job.user is None else job.user.within
        return within if within in self._sizes_s else 0

    def renew(self, epoch: int, now_ns: int) -> None:
        """See Policy."""
        super().renew(epoch, now_ns)
        if self._users is not None:
            self._users.renew(epoch)

    def forget(self, user: str, now_ns: int) -> int:
        """See Policy."""
        return super().forget(user, now_ns) + (0 if self._users is None else self._users.forget(user))

    def check(self) -> None:
        """Audit the invariants; AssertionError names the broken one."""
        super().check()
        busy = [flight.start.lane for flight in self._flights.values()]
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
        running = [entry for entry in self._live.values() if entry.begun]
        assert running == [e for e in self._live.values() if e.state == "running"], "a job began otherwise"
        assert len(running) == self._begun, "begun jobs are miscounted"
        assert sum(entry.held for entry in running) == self._begun_held, "begun jobs that wait are miscounted"
        assert len(running) <= BEGUN_IN_ALL * len(self._size_of), "too many jobs are begun"
        for entry in self._live.values():
            runs = sum(flight.start.jobs[0] == entry.job.id for flight in self._flights.values())
            assert entry.left == len(entry.parts) + len(entry.waiting) + runs > 0, "a run is lost"
        assert self._found.keys() <= self._flights.keys(), "a kept user is held by no run"
        if self._users is not None:
            self._users.check()

    def _cheapest(self, count: int, reads: bool, within: int) -> tuple[bool, tuple[int, ...]]:
        costs = self._sizes_s[within]
        sizes = split(count, self._sizes, costs)
        fitting = [size for size in self._whole if size >= count > 0]
        if reads and fitting:
            best = min(fitting, key=lambda size: (self._whole[size], size))
            apart_s = costs[USER_PART] + sum(costs[size] for size in sizes)
            # One part and its user are the same work in one run or two, whatever noise has been measured: unless the
            # user is short, for `whole` is of the longest.
            if (len(sizes) == 1 and not within) or self._whole[best] <= apart_s:
                return False, (best,)
        return reads, sizes

    def _refusal(self, job: Job) -> Reason | None:
        if job.width < (job.user is None) or (job.user is not None and USER_PART not in self._size_of):
            raise ValueError(f"there is no executor for {job}")
        return None

    def _enter(self, job: Job, key: Key) -> _Live:
        reads, sizes = self._parts_of(job)
        entry = _Live(job, key, reading=reads, held=job.waits, left=len(sizes) + reads)
        first = 0
        for size in sizes:
            entry.parts.append((size, first, min(size, job.width - first)))
            first += size
        if reads:
            self._wait(entry, USER_PART, 0, 0)
        self._begin_parts(entry)
        return entry

    def _ready_by_ns(self, job: Job, now_ns: int) -> int | None:
        """Half of the time that the deadline leaves beside the parts is for what the job waits for."""
        if job.deadline_ns is None:
            return None
        within = self._within(job)
        parts_s = sum(self._sizes_s[within][size] for size in self.parts(job.width, False, within)[1])
        return now_ns + (job.deadline_ns - now_ns - round(parts_s * 1e9)) // 2

    def _release(self, entry: _Live) -> None:
        if entry.held:
            self._begun_held -= entry.begun
            entry.held = False
            self._begin_parts(entry)

    def _share_ns(self, job: Job) -> int:
        return self._together_ns(self._runs_of(job))

    def _together_ns(self, runs: Iterable[tuple[Hashable, int]]) -> int:
        """What runs, with their sizes, take of the device, as many at a time as there may be."""
        found: dict[int, int] = {}
        for run, size in runs:
            abreast = len(self._few.get(size, ())) or self._streams
            found[abreast] = found.get(abreast, 0) + self.costs.ns(run)
        return sum(ns // abreast for abreast, ns in found.items())

    def _alone_ns(self, job: Job) -> int:
        """The user's part, and then the others, as many at a time as there may be."""
        reads, *_ = self._parts_of(job)
        runs = self._runs_of(job)
        user_ns = self.costs.ns(runs.pop(0)[0]) if reads else 0
        longest_ns = max((self.costs.ns(run) for run, _ in runs), default=0)
        return user_ns + max(longest_ns, self._together_ns(runs))

    def _runs_of(self, job: Job) -> list[tuple[Hashable, int]]:
        """The names of the runs' costs of a job that has not begun, and their sizes."""
        reads, sizes = self._parts_of(job)
        if reads:
            return [(self._run_of(job, size), size) for size in (USER_PART, *sizes)]
        return [(size if job.user is None else (WHOLE, size), size) for size in sizes]

    def _run_of(self, job: Job, size: int) -> Hashable:
        """The name of a run's cost: of the user's part, as it was kept when the job came."""
        kept = job.user.kept if job.user is not None and size == USER_PART else ""
        return _named(kept or size, self._within(job))

    def _informed(self, job: Job, hoped: bool = False) -> Job:
        if self._users is None or job.user is None:
            return job
        kept: Kept = KEPT if hoped else self._users.kept(job.user)
        if kept == GROWN and not self.costs.ns(_named(GROWN, self._within(job))):
            return job  # nobody knows yet what that takes: no more than the whole part
        return structs.replace(job, user=structs.replace(job.user, kept=kept)) if kept else job

    def _class_of(self, job: Job) -> Hashable:
        return self._parts_of(job), self._within(job)

    def _load(self, full: bool = False) -> Load:
        return ShareLoad(self._share_ns, self._alone_ns)

    def _begins_ns(self, now_ns: int, *jobs: Job) -> int:
        ends = self._lane_ends_ns(now_ns)
        at_ns = min(ends.values()) if len(ends) >= self._streams else now_ns
        if not self._few:
            return at_ns
        # Of the first job alone: a run that waits for its executor keeps nobody from an idle one.
        lanes = [self._few[size] for _, size in self._runs_of(jobs[0]) if size in self._few]
        return max([at_ns, *(min(ends.get(lane, now_ns) for lane in some) for some in lanes)])

    def _begun_ns(self) -> int:
        return self._together_ns(of for e in self._live.values() if e.begun for of in self._left_of(e))

    def _left_of(self, entry: _Live) -> list[tuple[Hashable, int]]:
        sizes = [size for size, *_ in entry.parts] + [size for size, _ in entry.waiting]
        return [(self._run_of(entry.job, size), size) for size in sizes]

    def _cost_of(self, start: Start) -> Hashable:
        (work,) = start.work
        job = self._live[work.job].job
        within = self._within(job)
        if isinstance(work, User):
            if work.place is not None and not work.place.new:
                return _named(KEPT, within)
            return _named(GROWN if work.grown else USER_PART, within)
        whole = job.user is not None and not self._parts_of(job)[0]
        return (WHOLE, start.shape) if whole else _named(start.shape, within)

    def _choose(self, now_ns: int) -> Start | None:
        """The most urgent run that an idle executor takes."""
        if len(self._flights) >= self._streams or (found := self._most_urgent()) is None:
            return None
        place, size, executor_size = found
        *_, first, count, job_id = place
        entry = self._live[job_id]
        if not entry.begun and self._gives_way(entry.job, now_ns):
            return None
        entry.waiting.remove((size, place))
        self._leave(size, place)
        if not entry.begun:
            entry.begun = True
            self._begun += 1
            self._begun_held += entry.held
        work: Work = Candidates(job_id, first, count) if count else self._user(entry.job, self._runs)
        lane = self._idle[executor_size].popleft()
        return Start(self._runs, lane, executor_size, (work,), epoch=self._epoch)

    def _user(self, job: Job, run: int) -> User:
        found = None if self._users is None else self._users.find(job.user)
        if found is None:
            return User(job.id)
        self._found[run] = found
        return User(job.id, found.place, found.before, found.grown)

    def _take_back(
        self, start: Start, outcome: Outcome, returned: list[Returned[_Live]]
    ) -> list[Returned[_Live]]:
        self._idle[self._size_of[start.lane]].append(start.lane)
        found = self._found.pop(start.run, None)
        if found is not None and self._users is not None:
            self._users.end(found, outcome == "well")
        return [one for one in returned if self._ends(*one)]

    def _ends(self, entry: _Live, work: Work, event: Event) -> bool:
        """Whether the job ends, now that this work of it came back."""
        if event == "requeue":  # the other runs of the job go on
            first, count = (work.first, work.count) if isinstance(work, Candidates) else (0, 0)
            size = min((s for s in self._sizes if s >= count), default=0) if count else USER_PART
            self._wait(entry, size, first, count)
            return False
        if event == "finish":
            entry.left -= 1
            if isinstance(work, User):
                entry.reading = False
                self._begin_parts(entry)
            if entry.left:
                return False
        self._withdraw(entry)
        return True

    def _withdraw(self, entry: _Live) -> None:
        if entry.begun:
            self._begun -= 1
            self._begun_held -= entry.held
        for size, place in entry.waiting:
            self._leave(size, place)

    def _most_urgent(self) -> tuple[Place, int, int] | None:
        """The most urgent run with an idle executor, its size and the executor's."""
        most = len(self._size_of)
        full = self._begun - self._begun_held >= most or self._begun >= BEGUN_IN_ALL * most
        found: tuple[Place, int, int] | None = None
        for size, places in self._waiting.items():
            executor_size = self._idle_size(size)
            if executor_size is None:
                continue
            may = (p for p in places if not full or self._live[p[-1]].begun)
            place = next(may, None)
            if place is not None and (found is None or place < found[0]):
                found = place, size, executor_size
        return found

    def _idle_size(self, size: int) -> int | None:
        if size == USER_PART:
            return USER_PART if self._idle[USER_PART] else None
        larger = self._sizes[bisect.bisect_left(self._sizes, size) :]
        return next((other for other in larger if self._idle[other]), None)

    def _begin_parts(self, entry: _Live) -> None:
        """Its parts may start, unless they wait for the user's part or for `ready`."""
        if not entry.reading and not entry.held:
            for size, first, count in entry.parts:
                self._wait(entry, size, first, count)
            entry.parts.clear()

    def _wait(self, entry: _Live, size: int, first: int, count: int) -> None:
        place = (entry.key, first, count, entry.job.id)
        entry.waiting.append((size, place))
        bisect.insort(self._waiting[size], place)

    def _leave(self, size: int, place: Place) -> None:
        """A search from the front would take seconds of the event loop where many long requests wait."""
        places = self._waiting[size]
        del places[bisect.bisect_left(places, place)]


def _named(of: Hashable, within: int) -> Hashable:
    """The name of a run's cost, of a user of at most so many events; 0: of any user."""
    return (of, within) if within else of


def _run_costs(
    costs: Mapping[int, float], whole: Mapping[int, float], shorter: Mapping[int, Mapping[int, float]]
) -> RunCosts:
    named: dict[Hashable, float] = {(WHOLE, size): seconds for size, seconds in whole.items()}
    for within, of in {0: costs, **shorter}.items():
        named |= {_named(size, within): seconds for size, seconds in of.items()}
    return RunCosts(named)
