# SPDX-License-Identifier: Apache-2.0
"""The life of a job, and the words in which every serving policy speaks of it (DESIGN idea 6).

A plan is a list of `Start`: run this work, in this compiled shape, on this lane (a device thread). Plans, jobs and
events are frozen plain data: equal plans compare equal, and all of them can be written as JSON and read back.

A job's life is the table `TRANSITIONS`; an event that the table does not list raises and changes nothing. What all
policies do with it is in `policy`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from msgspec import Struct

from jgr.cache.entries import Entry, Fetch, Move, Stored
from jgr.serving.policies.sources import PlannedPrompt, UnplannedPrompt

Kind = Literal["recommend", "rank"]
State = Literal["new", "queued", "running", "done", "failed", "cancelled", "expired", "rejected"]
Event = Literal["accept", "reject", "start", "requeue", "finish", "fail", "cancel", "expire"]
Reason = Literal["queue_full", "too_large", "draining", "too_late"]
"""Why a job was not taken. too_late: its predicted end is past its deadline, or it would make an accepted job late."""
REASONS: tuple[Reason, ...] = ("queue_full", "too_large", "draining", "too_late")
Priority = Literal["interactive", "batch"]
"""batch: gives way to every interactive job."""
PRIORITIES: tuple[Priority, ...] = ("interactive", "batch")
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


Kept = Literal["", "kept", "grown"]


class UserPart(Struct, frozen=True):
    """A user whose part of a scorer's request may be a run of its own. name: of the user's cache entry. key: all that
    the part depends on; None: it is not kept. within: runs are those of users of at most so many events, which take
    less time; 0: those of all users. kept: what of it was kept when the job came, all of it, or what it grew from; a
    policy finds out."""

    name: str
    key: bytes | None = None
    within: int = 0
    kept: Kept = ""


class Job(Struct, frozen=True):
    """One request's size and times. tokens: new tokens that the device computes at most; width: beam width or number of
    candidates, 0 where only the user's part is computed, to be kept.

    deadline_ns: when its last run must have ended; None: any time will do. prompt: the segments that a decoder reads,
    where they may be cached. user: what a scorer reads of the user, where that may be a run of its own. waits: its
    candidates wait for `ready`, as for their features. cached: of the tokens, those of the user that were kept when the
    job came; a policy finds out.
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
    priority: Priority = "interactive"
    cached: int = 0

    @property
    def unplanned(self) -> UnplannedPrompt:
        """The prompt, of a job that has one."""
        assert self.prompt is not None
        return self.prompt


class Draft(NamedTuple):
    """A batch whose entries are pinned, and have the cells that it will write; nobody reads those yet."""

    jobs: tuple[Job, ...]
    profile: Profile
    prompts: tuple[PlannedPrompt, ...]
    pins: list[tuple[list[Entry], list[Entry]]]


Sort = Literal["dated", "undated", "batch"]
"""Jobs that wait side by side: interactive ones with a deadline, and without one, and batch jobs. No sort takes the
room of another, since only the first goes away by itself."""
SORTS: tuple[Sort, ...] = ("dated", "undated", "batch")


def sort_of(job: Job) -> Sort:
    if job.priority == "batch":
        return "batch"
    return "undated" if job.deadline_ns is None else "dated"


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
    that the plan names cells of; a pool of another epoch refuses the run. fetches: cached entries to be copied from
    device to device before it."""

    run: int
    lane: int
    shape: Profile | int
    work: tuple[Work, ...]
    moves: tuple[Move, ...] = ()
    epoch: int = 0
    fetches: tuple[Fetch, ...] = ()

    @property
    def jobs(self) -> tuple[int, ...]:
        return tuple(work.job for work in self.work)

    @property
    def keeps(self) -> bool:
        """Whether the run may write to the cache."""
        return bool(self.moves or self.fetches) or any(
            work.plan is not None
            if isinstance(work, Request)
            else isinstance(work, User) and work.place is not None
            for work in self.work
        )


class Plan(Struct, frozen=True):
    """What to start now, in order, and the jobs to tell that their time is up."""

    starts: tuple[Start, ...] = ()
    expired: tuple[int, ...] = ()


class Committed(Struct, frozen=True):
    """What became of a run's jobs that somebody still waits for, in the run's order.

    done: all their work is done, in time; failed: the run failed; expired: the deadline passed while they ran. A job
    that has more work to do, that was cancelled, or that a plan reported as expired is in none of them. again: those
    that have not ended, and wait anew, since the run was in vain.
    """

    done: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()
    expired: tuple[int, ...] = ()
    again: tuple[int, ...] = ()


class Accepted(Struct, frozen=True):
    """depth: queued jobs, this one included. ready_by_ns: when a job that waits should be ready at the latest.
    predicted_ns: when the job should end, where that was asked."""

    depth: int
    ready_by_ns: int | None = None
    predicted_ns: int | None = None


class Rejected(Struct, frozen=True):
    """predicted_ns: when the job might have ended, with what predictions are wrong by, where that is why.
    for_others: not its own deadline would have been missed, but that of one that was accepted before it."""

    reason: Reason
    predicted_ns: int | None = None
    for_others: bool = False
