# SPDX-License-Identifier: Apache-2.0
"""What all serving policies share: the life of a job from `submit` to its end, deadlines, and the promise to keep them.

A policy is told what happens (`submit`, `cancel`, `ready`, `commit`, `drain`) and asked what to do (`plan`). Jobs that
ended are forgotten (only counted), so memory is bounded by `max_queue` and the jobs in flight.

With the order "deadline" (`ordering`) a policy predicts. A job that comes is placed among those that wait, and is
refused where its predicted end is past its deadline, or where it would make one late that was accepted before it. A
queued job that can no longer finish ends then. Predictions are sums of what runs take (`run_costs`), which are
corrected by every run that ends; so that a wrong one does not last, an idle policy tries two jobs a second that it
would refuse.

Pure: time is an argument in integer nanoseconds, ids are the caller's, equal calls give equal plans.
"""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Generic

from jgr.serving.policies.admission import Admission
from jgr.serving.policies.jobs import (
    AFTER,
    PRIORITIES,
    SORTS,
    TRANSITIONS,
    Accepted,
    Committed,
    Event,
    Job,
    Outcome,
    Plan,
    Reason,
    Rejected,
    Sort,
    Start,
    State,
    advance,
    sort_of,
)
from jgr.serving.policies.live import Flight, L, Returned, Span
from jgr.serving.policies.loads import Load
from jgr.serving.policies.ordering import Key, Ordering, Queue
from jgr.serving.policies.run_costs import RunCosts

TRIAL_NS = 500_000_000
"""How often an idle policy accepts a job that it predicts to be late."""


class Policy(ABC, Generic[L]):
    """What all policies share: the table of live jobs, their order, their deadlines, the bound on the queue, the drain.

    max_queue: the most jobs of a sort (`Sort`) that may be queued. ordering: which of them goes first; None: the
    default. costs: what runs take; None: nothing. ValueError where max_queue is below 1.
    """

    def __init__(
        self, max_queue: int, ordering: Ordering | None = None, costs: RunCosts | None = None
    ) -> None:
        if max_queue < 1:
            raise ValueError("max_queue must be >= 1")
        self.max_queue = max_queue
        self.costs = costs or RunCosts()
        self._ordering = ordering or Ordering()
        # One for each priority: that jobs which give way are late, and refused more often, is no fault of the others.
        self._admissions = {priority: Admission() for priority in PRIORITIES}
        self._live: dict[int, L] = {}
        self._flights: dict[int, Flight] = {}
        self._ended_ns: dict[int, int] = {}  # when the last run of each lane ended
        self._queue = Queue(
            self._ordering, self._load, lambda job_id: self._live[job_id].job, lambda: self.costs.revision
        )
        self._deadlines: list[tuple[int, int]] = []  # (deadline_ns, id) of live jobs, ascending
        self._latest: list[tuple[int, int]] = []  # (latest_ns, id) of queued jobs that have one, ascending
        self._counts: dict[State, int] = dict.fromkeys(TRANSITIONS, 0)  # entries into each state, ever
        self._runs = self._epoch = 0
        self._now_ns: int | None = None
        self._trial_ns: int | None = None  # when a job was tried last
        self._tried: int | None = None  # and which one
        self._draining = False

    @property
    def queued(self) -> int:
        """Jobs none of whose work has started."""
        return len(self._queue.order)

    @property
    def predicts(self) -> bool:
        """Whether jobs that would be late are refused."""
        return self._ordering.predicts

    def full(self, sort: Sort) -> bool:
        """Whether as many jobs of a sort wait as may, so that the next one is refused, whatever its size."""
        return self.waiting(sort) >= self.max_queue

    def waiting(self, sort: Sort) -> int:
        """Queued jobs of a sort."""
        return self._queue.of_sort[sort]

    @property
    def live(self) -> int:
        """Jobs queued or running whose outcome somebody waits for."""
        return len(self._live)

    @property
    def in_flight(self) -> int:
        """Runs started and not yet committed."""
        return len(self._flights)

    @property
    def flights(self) -> list[tuple[int, int]]:
        """Since when each of these is in flight, and what it should take."""
        return [(flight.at_ns, self.costs.ns(flight.cost)) for flight in self._flights.values()]

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

    def need_ns(self, job: Job) -> int:
        """What the device needs for a job where many wait; 0: that is not known, or no shape takes it."""
        return 0 if self._refusal(job) else self._share_ns(job)

    def submit(self, job: Job, now_ns: int) -> Accepted | Rejected:
        """Queue a job. Overload is a value, not an error; an id that is still live raises ValueError."""
        if job.id in self._live:
            raise ValueError(f"job {job.id} is already {self.state(job.id)}")
        self._advance_clock(now_ns)
        job = self._informed(job)
        reason, predicted_ns = self._refusal(job), None
        if self._draining:
            reason = "draining"
        elif reason is None and self.full(sort_of(job)):
            reason = "queue_full"
        share_ns = self._share_ns(job) if self._ordering.shares(job) and reason is None else 0
        key = self._ordering.key(job, self._counts["queued"], share_ns)
        rejected = None if reason is None else Rejected(reason)
        if rejected is None and self._ordering.predicts and job.deadline_ns is not None:
            predicted_ns, rejected = self._forecast(job, key, now_ns)
            if rejected is not None and self._may_try(job, now_ns):
                rejected = None
            self._decided(job, rejected, now_ns)
        if rejected is not None:
            self._counts[advance("new", "reject")] += 1
            return rejected
        entry = self._live[job.id] = self._enter(job, key)
        if predicted_ns is not None and job.deadline_ns is not None and predicted_ns <= job.deadline_ns:
            entry.latest_ns, entry.accepted_ns = job.deadline_ns - self._alone_ns(job), now_ns
            entry.idle_until_ns = now_ns + (job.deadline_ns - predicted_ns) // 2
        self._move(entry, "accept")
        if job.deadline_ns is not None:
            bisect.insort(self._deadlines, (job.deadline_ns, job.id))
        ready_by_ns = self._ready_by_ns(job, now_ns) if job.waits else None
        return Accepted(self.queued, ready_by_ns, predicted_ns)

    def refuses(self, job: Job, now_ns: int) -> Rejected | None:
        """Refuse a job that would be too late, as one of that size and deadline; None: it is to be submitted to know.
        Its id is nobody's."""
        self._advance_clock(now_ns)
        if not self._ordering.predicts or job.deadline_ns is None or not (self._live or self._flights):
            return None
        job = self._informed(job, hoped=True)
        key = self._ordering.key(job, self._counts["queued"], 0)
        _, late = self._forecast(job, key, now_ns)
        if late is not None:
            self._decided(job, late, now_ns)
            self._counts[advance("new", "reject")] += 1
        return late

    def _decided(self, job: Job, late: Rejected | None, now_ns: int) -> None:
        self._admissions[job.priority].decided(self._class_of(job), late is not None)
        if late is not None:
            self._ordering.refused(job, now_ns + self._alone_ns(job), now_ns)

    def _gives_way(self, job: Job, now_ns: int) -> bool:
        return job.priority == "batch" and self._ordering.gives_way(now_ns) and not self._draining

    def _first(self) -> Job:
        """The most urgent queued job."""
        return self._live[self._queue.order[0][1]].job

    def cancel(self, job_id: int, now_ns: int) -> bool:
        """Forget a job; what waits never runs. False where it is unknown or has already ended."""
        self._advance_clock(now_ns)
        entry = self._live.get(job_id)
        if entry is None:
            return False
        self._withdraw(entry)
        self._move(entry, "cancel")
        return True

    def ready(self, job_id: int, now_ns: int) -> None:
        """What a job with `waits` waited for is there. Nothing happens where it has ended."""
        self._advance_clock(now_ns)
        entry = self._live.get(job_id)
        if entry is not None:
            self._release(entry)

    def plan(self, now_ns: int) -> Plan:
        """End what is late or will be, and start what can start."""
        self._advance_clock(now_ns)
        expired, starts = self._expire_past(now_ns), list[Start]()
        while self._live:
            expired += self._expire_hopeless(now_ns)
            start = self._choose(now_ns)
            if start is None:
                break
            starts.append(start)
            self._flights[start.run] = Flight(start, now_ns, self._cost_of(start))
            self._runs += 1
            self._queue.known = 0  # a policy learns from what it starts
            for work in start.work:
                if (entry := self._live[work.job]).state == "queued":
                    self._move(entry, "start")
        return Plan(tuple(starts), tuple(expired))

    def commit(self, run: int, outcome: Outcome, now_ns: int, span: Span | None = None) -> Committed:
        """A run came back. span: when its lane began and ended it; None: from its plan until now. KeyError, changing
        nothing, where it is not in flight."""
        flight = self._flights[run]
        self._advance_clock(now_ns)
        outcome = self._believed(run, outcome)
        del self._flights[run]
        start, lane = flight.start, flight.start.lane
        begin_ns, end_ns = span or (flight.at_ns, now_ns)
        if outcome == "well":
            took_ns = max(0, end_ns - max(begin_ns, self._ended_ns.get(lane, 0)))
            self.costs.observe(flight.cost, took_ns, any(work.job == self._tried for work in start.work))
        self._ended_ns[lane] = end_ns
        returned = []
        for work in start.work:
            entry = self._live.get(work.job)
            if entry is not None:
                deadline_ns = entry.job.deadline_ns
                late = deadline_ns is not None and now_ns >= deadline_ns
                returned.append(Returned(entry, work, "expire" if late else AFTER[outcome]))
        ended: dict[State, list[int]] = {"done": [], "failed": [], "expired": [], "queued": []}
        for entry, work, event in self._take_back(start, outcome, returned):
            state = self._move(entry, event)
            if state in ended:
                ended[state].append(work.job)
        return Committed(*map(tuple, ended.values()))

    def renew(self, epoch: int, now_ns: int) -> None:
        """The pool was lost and is of this epoch now: forget what is cached. Runs planned before will be lost."""
        self._advance_clock(now_ns)
        self._epoch = epoch

    def forget(self, user: str, now_ns: int) -> int:
        """Erase what is cached of a user, by its entry's name; how many entries there were."""
        self._advance_clock(now_ns)
        return 0

    def shadow(self, now_ns: int) -> bool:
        """An answer reused cached segments: whether to compute it again without them now."""
        return False

    def next_wakeup_ns(self) -> int | None:
        """When a plan could do something by time alone; None: never."""
        times = [self._deadlines[0][0]] if self._deadlines else []
        if self._latest:
            times.append(self._latest[0][0] + 1)
        if self._queue.order and self._ordering.order == "codel":
            oldest_ns = min(self._live[i].job.arrival_ns for _, i in self._queue.order)
            times.append(self._ordering.too_long_at_ns(oldest_ns))
        if self._queue.order and self._gives_way(self._first(), self._now_ns or 0):
            times.append(self._ordering.way_until_ns)
        return min(times, default=None)

    def drain(self, now_ns: int) -> None:
        """Refuse every later submit. What was accepted still runs, without waiting for company."""
        self._advance_clock(now_ns)
        self._draining = True

    def check(self) -> None:
        """Audit the invariants; AssertionError names the broken one."""
        entries = self._live.values()
        assert {e.state for e in entries} <= {"queued", "running"}, "an ended job is remembered"
        queued = [e for e in entries if e.state == "queued"]
        self._queue.check((e.key, e.job) for e in queued)
        for sort in SORTS:
            new = [e for e in queued if sort_of(e.job) == sort and not e.requeued]
            assert len(new) <= self.max_queue, "the queue is over its bound"
        ended = sum(self._counts[s] for s in ("done", "failed", "cancelled", "expired"))
        assert self._counts["new"] == 0 and self._counts["queued"] == len(entries) + ended, "a job was lost"
        watched = [(e.job.deadline_ns, e.job.id) for e in entries if e.job.deadline_ns is not None]
        assert sorted(watched) == self._deadlines, "a deadline is unwatched"
        sharing = sorted(e.key[1:] for e in queued if self._ordering.shares(e.job))
        assert sharing == self._ordering.line, "jobs without a deadline are lost"
        latest = [(e.latest_ns, e.job.id) for e in queued if e.latest_ns is not None]
        assert sorted(latest) == self._latest, "a latest start is unwatched"

    @abstractmethod
    def _refusal(self, job: Job) -> Reason | None:
        """Why no compiled shape takes the job; None: one does. ValueError where nothing could ever run it."""

    @abstractmethod
    def _enter(self, job: Job, key: Key) -> L:
        """The entry of a new job, which stands in the policy's own queues from now on."""

    @abstractmethod
    def _share_ns(self, job: Job) -> int:
        """What the device needs for the job where many wait."""

    @abstractmethod
    def _alone_ns(self, job: Job) -> int:
        """The least time from the job's first start to its end."""

    @abstractmethod
    def _class_of(self, job: Job) -> Hashable:
        """The class of the job's size: classes are refused alike under overload."""

    @abstractmethod
    def _load(self, full: bool = False) -> Load:
        """Nothing that waits yet. full: until the device begins with the first of it, others will fill its batch."""

    @abstractmethod
    def _begins_ns(self, now_ns: int, *jobs: Job) -> int:
        """When a run of each of these jobs could begin on the device, if it were started next."""

    def _informed(self, job: Job, hoped: bool = False) -> Job:
        """The job with what is known of its runs when it comes. hoped: whose it is is not known; the best case."""
        return job

    def _begun_ns(self) -> int:
        """How long the device needs for work of begun jobs that has not started."""
        return 0

    def _ready_by_ns(self, job: Job, now_ns: int) -> int | None:
        """See Accepted; of a job that waits."""
        return None

    def _release(self, entry: L) -> None:
        """The job waits for nothing any more but its turn."""

    def _cost_of(self, start: Start) -> Hashable:
        """The name of a run's time in the costs."""
        return start.shape

    def _believed(self, run: int, outcome: Outcome) -> Outcome:
        """What a run's outcome is worth."""
        return outcome

    @abstractmethod
    def _choose(self, now_ns: int) -> Start | None:
        """The run to start now, of the number `_runs`; its work has left the policy's own queues. None: there is
        none."""

    @abstractmethod
    def _take_back(self, start: Start, outcome: Outcome, returned: list[Returned[L]]) -> list[Returned[L]]:
        """A run came back. returned: its live jobs, and what would become of each if it had no other work.

        Returns what becomes of them now. Jobs that end have left the policy's own queues, others stand in them again.
        """

    @abstractmethod
    def _withdraw(self, entry: L) -> None:
        """A job ends before its work came back: it leaves the policy's own queues."""

    def _forecast(self, job: Job, key: Key, now_ns: int) -> tuple[int, Rejected | None]:
        """When a new job would end; and how it is refused, where that is too late for it or for one that was accepted
        before it."""
        order, backlog = self._queue.order, self._queue.backlog()
        at = bisect.bisect(order, (key, job.id))
        begin_ns = self._begins_ns(now_ns, job, self._first() if at else job) + self._begun_ns()
        load = backlog.before(at)
        end_ns = begin_ns + load.add(job)
        room_ns = 0  # where nothing else is on its way, nothing can come between
        if job.deadline_ns is not None:
            if self._live or self._flights:
                admission = self._admissions[job.priority]
                room_ns = admission.room_ns(self._class_of(job), job.deadline_ns - now_ns)
            if end_ns + room_ns > job.deadline_ns:
                return end_ns, Rejected("too_late", end_ns + room_ns)
        last_ns = self._deadlines[-1][0] if self._deadlines else 0
        for place in range(at, len(order)):
            behind = self._live[order[place][1]]
            then_ns = begin_ns + backlog.end_ns(place)
            if then_ns > last_ns or behind.key[0] > key[0]:  # who gives way has no say
                break
            late_ns = begin_ns + load.add(behind.job)
            deadline_ns = behind.job.deadline_ns or 0
            if behind.latest_ns is not None and then_ns <= deadline_ns < late_ns:
                return end_ns, Rejected("too_late", end_ns + room_ns, for_others=True)
        return end_ns, None

    def _loses(self, done: Sequence[int], begin_ns: int) -> int:
        """How many accepted jobs would be late if the device began with the queue then, without these jobs; all, where
        the first of the queue, which has waited for as long as it may, is not among them."""
        first, first_id = self._queue.order[0]
        if first_id not in done and self._ordering.overdue(first, self._now_ns or 0):
            return self.queued
        if not self._latest:
            return 0
        last_ns = self._deadlines[-1][0] if self._deadlines else 0
        load, lost, ids = self._load(full=True), 0, set(done)
        for key, job_id in self._queue.order:
            if key[0] > first[0]:  # who gives way has no say
                break
            if job_id in ids:
                continue
            entry = self._live[job_id]
            if entry.latest_ns is None:
                end_ns = begin_ns + load.add(entry.job)
            else:
                deadline_ns = entry.job.deadline_ns or 0
                end_ns = begin_ns + load.add(entry.job, deadline_ns - begin_ns)
                lost += end_ns > deadline_ns
            if end_ns > last_ns:
                break
        return lost

    def _may_try(self, job: Job, now_ns: int) -> bool:
        """Whether a job is accepted that is predicted to be late, to see whether that is so."""
        last = self._trial_ns
        if self._live or self._flights or (last is not None and now_ns - last < TRIAL_NS):
            return False
        self._trial_ns, self._tried = now_ns, job.id
        return True

    def _expire_past(self, now_ns: int) -> list[int]:
        """End the jobs whose deadline has passed, and those that have waited for too long."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            late.append(self._expire(self._deadlines[0][1]))
        if self._ordering.order == "codel":
            waits_ns = self._ordering.waits_ns(self.queued, now_ns)
            old = [i for _, i in self._queue.order if now_ns - self._live[i].job.arrival_ns > waits_ns]
            late += map(self._expire, old)
        return late

    def _expire_hopeless(self, now_ns: int) -> list[int]:
        """End the queued jobs that could not finish in time if they were started next."""
        hopeless, latest = list[int](), self._latest
        while latest and latest[0][0] < self._begins_ns(now_ns, self._live[latest[0][1]].job):
            hopeless.append(self._expire(latest[0][1]))
        return hopeless

    def _expire(self, job_id: int) -> int:
        entry = self._live[job_id]
        self._withdraw(entry)
        self._move(entry, "expire")
        return job_id

    def _lane_ends_ns(self, now_ns: int) -> dict[int, int]:
        """When each busy lane has done what was started on it, as far as can be told."""
        ends: dict[int, int] = {}
        for flight in self._flights.values():
            lane = flight.start.lane
            begin_ns = max(flight.at_ns, ends.get(lane, self._ended_ns.get(lane, 0)))
            ends[lane] = max(now_ns, begin_ns + self.costs.ns(flight.cost))
        return ends

    def _move(self, entry: L, event: Event) -> State:
        """The only place where a live job changes state: table, queue and counters change together."""
        job, before = entry.job, entry.state
        after, sort = advance(before, event), sort_of(job)
        entry.state = after
        if event == "requeue":
            entry.requeued = True
        else:
            self._counts[after] += 1
        if entry.latest_ns is not None and after == "done":
            self._admissions[job.priority].in_time()
        elif entry.latest_ns is not None and after == "expired":
            self._admissions[job.priority].late(entry.accepted_ns, self._now_ns or 0)
        if before == "queued":
            self._queue.remove(job, sort, entry.key, after == "running", self._now_ns or 0)
            if entry.latest_ns is not None:
                _remove(self._latest, (entry.latest_ns, job.id))
        if after == "queued":
            self._queue.add(job, sort, entry.key)
            if entry.latest_ns is not None:
                bisect.insort(self._latest, (entry.latest_ns, job.id))
        elif after != "running":
            del self._live[job.id]
            if job.deadline_ns is not None:
                _remove(self._deadlines, (job.deadline_ns, job.id))
        return after

    def _advance_clock(self, now_ns: int) -> None:
        if self._now_ns is not None and now_ns < self._now_ns:
            raise ValueError(f"time went back from {self._now_ns} to {now_ns} ns")
        self._now_ns = now_ns


def _remove(ordered: list[Any], value: Any) -> None:
    del ordered[bisect.bisect_left(ordered, value)]
