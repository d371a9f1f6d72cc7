# SPDX-License-Identifier: Apache-2.0
"""The life of a job, and the words in which every serving policy speaks of it (DESIGN idea 6).

A policy is told what happens (`submit`, `cancel`, `ready`, `commit`, `drain`) and asked what to do (`plan`). A plan is
a list of `Start`: run this work, in this compiled shape, on this lane (a device thread). Plans, jobs and events are
frozen plain data: equal plans compare equal, and all of them can be written as JSON and read back.

A job's life is the table `TRANSITIONS`; an event that the table does not list raises and changes nothing. Jobs that
ended are forgotten (only counted), so memory is bounded by `max_queue` and the jobs in flight.

Pure: time is an argument in integer nanoseconds, ids are the caller's, equal calls give equal plans.
"""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

from msgspec import Struct

from jgr.cache.entries import Move, Stored
from jgr.serving.policies.sources import PlannedPrompt, UnplannedPrompt

Kind = Literal["recommend", "rank"]
State = Literal["new", "queued", "running", "done", "failed", "cancelled", "expired", "rejected"]
Event = Literal["accept", "reject", "start", "requeue", "finish", "fail", "cancel", "expire"]
Reason = Literal["queue_full", "too_large", "draining"]
Outcome = Literal["well", "failed", "lost"]
"""How a run ended. lost: it was refused, because the memory that its plan names was lost before it started."""

AFTER: Mapping[Outcome, Event] = {"well": "finish", "failed": "fail", "lost": "requeue"}
"""What becomes of a job in time whose only work ended so."""

KINDS: tuple[Kind, ...] = ("recommend", "rank")

TRANSITIONS: Mapping[State, Mapping[Event, State]] = {
    "new": {"accept": "queued", "reject": "rejected"},
    "queued": {"start": "running", "cancel": "cancelled", "expire": "expired"},
    "running": {
        "requeue": "queued",
        "finish": "done",
        "fail": "failed",
        "cancel": "cancelled",
        "expire": "expired",
    },
    "done": {},
    "failed": {},
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


class Profile(Struct, frozen=True):
    """One compiled shape of a decoder. width: beam width (recommend) or number of candidates (rank).

    packed: the batch is one row for all its requests rather than a row for each. Then tokens is the number of their new
    tokens together, context that of their cached tokens, and width that of all their candidates (or each one's beams).
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


class UserPart(Struct, frozen=True):
    """A user whose part of a scorer's request may be a run of its own. name: of the user's cache entry. key: all that
    the part depends on; None: it is not kept."""

    name: str
    key: bytes | None = None


class Job(Struct, frozen=True):
    """One request's size and times. tokens: new tokens that the device computes at most; width: beam width or number of
    candidates.

    prompt: the segments that a decoder reads, where they may be cached. user: what a scorer reads of the user, where
    that may be a run of its own. waits: its candidates wait for `ready`, as for their features.
    """

    id: int
    kind: Kind
    tokens: int
    width: int
    arrival_ns: int
    deadline_ns: int | None
    prompt: UnplannedPrompt | None = None
    user: UserPart | None = None
    waits: bool = False


class Request(Struct, frozen=True, tag="request"):
    """A whole request as one row, or one part of a row, of a decoder's batch. plan: where each segment comes from."""

    job: int
    plan: PlannedPrompt | None = None


class User(Struct, frozen=True, tag="user"):
    """The user's part of a scorer's request. place: where it is kept on the device, or is to be kept; None: nowhere.

    before: where the part of the user with `grown` fewer events is, from which it can be computed; None: nowhere.
    """

    job: int
    place: Stored | None = None
    before: Stored | None = None
    grown: int = 0


class Candidates(Struct, frozen=True, tag="candidates"):
    """The candidates [first, first + count) of a scorer's request."""

    job: int
    first: int
    count: int


Work = Request | User | Candidates


class Start(Struct, frozen=True):
    """Run this work now. run: its number; lane: the number of the device thread; shape: the compiled shape, a decoder's
    profile or a scorer's number of candidates. moves: cached entries to be moved before it. epoch: of the memory pool
    that the plan names cells of; a pool of another epoch refuses the run."""

    run: int
    lane: int
    shape: Profile | int
    work: tuple[Work, ...]
    moves: tuple[Move, ...] = ()
    epoch: int = 0

    @property
    def jobs(self) -> tuple[int, ...]:
        return tuple(work.job for work in self.work)


class Plan(Struct, frozen=True):
    """What to start now, in order, and the jobs to tell that their time is up."""

    starts: tuple[Start, ...] = ()
    expired: tuple[int, ...] = ()


class Committed(Struct, frozen=True):
    """The jobs that ended with a run and that somebody still waits for, in the run's order.

    done: all their work is done, in time; failed: the run failed; expired: the deadline passed while they ran. A job
    that has more work to do, that was cancelled, or that a plan reported as expired is in none of them.
    """

    done: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()
    expired: tuple[int, ...] = ()


class Accepted(Struct, frozen=True):
    """depth: queued jobs, this one included. ready_by_ns: when a job that waits should be ready at the latest."""

    depth: int
    ready_by_ns: int | None = None


class Rejected(Struct, frozen=True):
    reason: Reason


@dataclass
class Live:
    """A job that has not ended. order: sequence number of its submission. requeued: it was started in vain."""

    job: Job
    order: int
    state: State = "new"
    requeued: bool = False


L = TypeVar("L", bound=Live)


class Returned(NamedTuple, Generic[L]):
    """A live job whose work came back, and what becomes of the job."""

    entry: L
    work: Work
    event: Event


class Policy(ABC, Generic[L]):
    """What all policies share: the table of live jobs, their deadlines, the bound on the queue, the drain.

    max_queue: the most jobs that may be queued. ValueError where that is below 1.
    """

    def __init__(self, max_queue: int) -> None:
        if max_queue < 1:
            raise ValueError("max_queue must be >= 1")
        self.max_queue = max_queue
        self.queued = 0
        """Jobs none of whose work has started; where they are `max_queue`, every job is refused, whatever its size."""
        self._live: dict[int, L] = {}
        self._flights: dict[int, Start] = {}
        self._deadlines: list[tuple[int, int]] = []  # (deadline_ns, id) of live jobs, ascending
        self._counts: dict[State, int] = dict.fromkeys(TRANSITIONS, 0)  # entries into each state, ever
        self._runs = self._epoch = 0
        self._now_ns: int | None = None
        self._draining = False

    @property
    def live(self) -> int:
        """Jobs queued or running whose outcome somebody waits for."""
        return len(self._live)

    @property
    def in_flight(self) -> int:
        """Runs started and not yet committed."""
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

    def submit(self, job: Job, now_ns: int) -> Accepted | Rejected:
        """Queue a job. Overload is a value, not an error; an id that is still live raises ValueError."""
        if job.id in self._live:
            raise ValueError(f"job {job.id} is already {self.state(job.id)}")
        self._advance_clock(now_ns)
        reason = self._refusal(job)
        if self._draining:
            reason = "draining"
        elif reason is None and self.queued >= self.max_queue:
            reason = "queue_full"
        if reason is not None:
            self._counts[advance("new", "reject")] += 1
            return Rejected(reason)
        entry = self._live[job.id] = self._enter(job, self._counts["queued"])
        self._move(entry, "accept")
        if job.deadline_ns is not None:
            bisect.insort(self._deadlines, (job.deadline_ns, job.id))
        return Accepted(self.queued, self._ready_by_ns(job, now_ns) if job.waits else None)

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
        """Expire what is late, and start what can start."""
        self._advance_clock(now_ns)
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            entry = self._live[self._deadlines[0][1]]
            self._withdraw(entry)
            self._move(entry, "expire")
            expired.append(entry.job.id)
        starts = self._choose(now_ns) if self._live else []
        for start in starts:
            self._flights[start.run] = start
            for work in start.work:
                if (entry := self._live[work.job]).state == "queued":
                    self._move(entry, "start")
        self._runs += len(starts)
        return Plan(tuple(starts), tuple(expired))

    def commit(self, run: int, outcome: Outcome, now_ns: int) -> Committed:
        """A run came back. KeyError, changing nothing, where it is not in flight."""
        start = self._flights[run]
        self._advance_clock(now_ns)
        del self._flights[run]
        returned = []
        for work in start.work:
            entry = self._live.get(work.job)
            if entry is not None:
                deadline_ns = entry.job.deadline_ns
                late = deadline_ns is not None and now_ns >= deadline_ns
                returned.append(Returned(entry, work, "expire" if late else AFTER[outcome]))
        ended: dict[State, list[int]] = {"done": [], "failed": [], "expired": []}
        for entry, work, event in self._take_back(start, outcome, returned):
            state = self._move(entry, event)
            if state in ended:
                ended[state].append(work.job)
        return Committed(tuple(ended["done"]), tuple(ended["failed"]), tuple(ended["expired"]))

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
        return self._deadlines[0][0] if self._deadlines else None

    def drain(self, now_ns: int) -> None:
        """Refuse every later submit. What was accepted still runs, without waiting for company."""
        self._advance_clock(now_ns)
        self._draining = True

    def check(self) -> None:
        """Audit the invariants; AssertionError names the broken one."""
        states = [entry.state for entry in self._live.values()]
        assert set(states) <= {"queued", "running"}, "an ended job is remembered"
        assert states.count("queued") == self.queued, "queued jobs are miscounted"
        first_time = [e for e in self._live.values() if e.state == "queued" and not e.requeued]
        assert len(first_time) <= self.max_queue, "the queue is over its bound"
        ended = sum(self._counts[s] for s in ("done", "failed", "cancelled", "expired"))
        assert self._counts["new"] == 0 and self._counts["queued"] == len(states) + ended, "a job was lost"
        watched = [(e.job.deadline_ns, i) for i, e in self._live.items() if e.job.deadline_ns is not None]
        assert sorted(watched) == self._deadlines, "a deadline is unwatched"

    @abstractmethod
    def _refusal(self, job: Job) -> Reason | None:
        """Why no compiled shape takes the job; None: one does. ValueError where nothing could ever run it."""

    @abstractmethod
    def _enter(self, job: Job, order: int) -> L:
        """The entry of a new job, which stands in the policy's own queues from now on."""

    def _ready_by_ns(self, job: Job, now_ns: int) -> int | None:
        """See Accepted; of a job that waits."""
        return None

    def _release(self, entry: L) -> None:
        """The job waits for nothing any more but its turn."""

    @abstractmethod
    def _choose(self, now_ns: int) -> list[Start]:
        """The runs to start now, numbered from `_runs` on; their work has left the policy's own queues."""

    @abstractmethod
    def _take_back(self, start: Start, outcome: Outcome, returned: list[Returned[L]]) -> list[Returned[L]]:
        """A run came back. returned: its live jobs, and what would become of each if it had no other work.

        Returns what becomes of them now. Jobs that end have left the policy's own queues, others stand in them again.
        """

    @abstractmethod
    def _withdraw(self, entry: L) -> None:
        """A job ends before its work came back: it leaves the policy's own queues."""

    def _move(self, entry: L, event: Event) -> State:
        """The only place where a live job changes state: table, queue and counters change together."""
        before, after = entry.state, advance(entry.state, event)
        entry.state = after
        if event == "requeue":
            entry.requeued = True
        else:
            self._counts[after] += 1
        self.queued += (after == "queued") - (before == "queued")
        if after not in ("queued", "running"):
            del self._live[entry.job.id]
            if entry.job.deadline_ns is not None:
                watched = (entry.job.deadline_ns, entry.job.id)
                del self._deadlines[bisect.bisect_left(self._deadlines, watched)]
        return after

    def _advance_clock(self, now_ns: int) -> None:
        if self._now_ns is not None and now_ns < self._now_ns:
            raise ValueError(f"time went back from {self._now_ns} to {now_ns} ns")
        self._now_ns = now_ns
