# SPDX-License-Identifier: Apache-2.0
"""FLAME's orchestrator under random requests and faults, against a naive model (FLAME-11, 12, 15)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec import structs

from jgr.serving.policies.jobs import Accepted, Committed, Job, Outcome, Rejected, Start, UserPart
from jgr.serving.policies.orchestration import USER_PART, Orchestrator
from jgr.serving.policies.ordering import Ordering
from tests.serving.policies.test_orchestration import PATIENCE_NS, make, place


@dataclass
class Naive:
    """A live job of the model: runs by (size, first, count), and which of them are on executors."""

    job: Job
    order: int
    runs: dict[tuple[int, int, int], str] = field(default_factory=dict)  # waiting, running, done
    lost: bool = False  # a run was refused; it has begun all the same
    held: bool = False

    @property
    def begun(self) -> bool:
        return self.lost or any(state != "waiting" for state in self.runs.values())

    def may_start(self) -> list[tuple[int, int, int]]:
        reading = self.runs.get((USER_PART, 0, 0), "done") != "done"
        return [
            run
            for run, state in self.runs.items()
            if state == "waiting" and (run[0] == USER_PART or not (reading or self.held))
        ]


class AgainstNaive(RuleBasedStateMachine):
    """Executors are counted by hand; what starts is searched for among everything that waits."""

    EXECUTORS = (USER_PART, 2, 2, 4, USER_PART)
    STREAMS = 4
    MAX_QUEUE = 2

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.real = Orchestrator(
            self.EXECUTORS, {USER_PART: 4.0, 2: 3.0, 4: 5.0}, max_queue=self.MAX_QUEUE, streams=self.STREAMS,
            whole={2: 6.0, 4: 10.0}, shorter={3: {USER_PART: 1.0, 2: 1.0, 4: 5.0}},
            ordering=Ordering("edf", PATIENCE_NS),
        )  # fmt: skip
        self.jobs: dict[int, Naive] = {}
        self.flying: dict[int, Start] = {}
        self.ids = itertools.count()
        self.ended: list[int] = []

    @rule(
        count=st.integers(0, 9),  # 0: the user's run alone
        patience=st.sampled_from((None, 1, 3, 9)),
        reads=st.booleans(),
        waits=st.booleans(),
        short=st.booleans(),
    )
    def submit(self, count: int, patience: int | None, reads: bool, waits: bool, short: bool) -> None:
        deadline, reads = None if patience is None else self.now + patience, reads or not count
        new, short = make(next(self.ids), count, self.now, deadline, reads, waits), short and reads
        if short:
            new = structs.replace(new, user=UserPart("somebody", within=3))
        verdict = self.real.submit(new, self.now)
        dated = patience is not None
        alike = [job for job in self.jobs.values() if (job.job.deadline_ns is not None) == dated]
        if sum(not job.begun for job in alike) >= self.MAX_QUEUE:
            assert verdict == Rejected("queue_full")
            return
        assert isinstance(verdict, Accepted)
        # Costs of 3 and 5: as many fours as fit; a rest of one or two is a two, one of three a four.
        fours, rest = divmod(count, 4)
        parts = [4] * (fours + (rest == 3)) + [2] * (0 < rest < 3)
        if short:  # 1 and 5: twos alone
            parts = [2] * -(-count // 2)
        naive = Naive(new, new.id, held=waits)
        if reads and (short or count > 4 or not count):  # one part has its user in it, if of any length
            naive.runs[USER_PART, 0, 0] = "waiting"
        for at, size in enumerate(parts):
            first = sum(parts[:at])
            naive.runs[size, first, min(size, count - first)] = "waiting"
        self.jobs[new.id] = naive

    @rule(pick=st.integers(0, 9))
    def ready(self, pick: int) -> None:
        self.real.ready(pick, self.now)
        if pick in self.jobs:
            self.jobs[pick].held = False

    @rule()
    def plan(self) -> None:
        late = [
            i for i, naive in self.jobs.items() if (d := naive.job.deadline_ns) is not None and d <= self.now
        ]
        plan = self.real.plan(self.now)
        assert sorted(plan.expired) == sorted(late)
        for job_id in late:
            self.end(job_id)
        for start in plan.starts:
            (job_id,) = start.jobs
            assert (job_id, *place(start), self.EXECUTORS[start.lane]) == self.next()
            run = next(r for r in self.jobs[job_id].runs if r[1:] == place(start))
            self.jobs[job_id].runs[run] = "running"
            assert start.run not in self.flying
            self.flying[start.run] = start
        assert self.next() is None

    def next(self) -> tuple[int, int, int, int] | None:
        """The first of all runs that may start, most urgent first, for which there is an idle executor."""
        if len(self.flying) >= self.STREAMS:
            return None
        busy = [start.lane for start in self.flying.values()]
        idle = [size for number, size in enumerate(self.EXECUTORS) if number not in busy]
        begun = [naive for naive in self.jobs.values() if naive.begun]
        holding = sum(not naive.held for naive in begun)
        full = holding >= len(self.EXECUTORS) or len(begun) >= 4 * len(self.EXECUTORS)

        def urgency(naive: Naive) -> tuple[int, int]:
            job = naive.job
            return (job.arrival_ns + PATIENCE_NS if job.deadline_ns is None else job.deadline_ns), naive.order

        for naive in sorted(self.jobs.values(), key=urgency):
            for size, first, count in sorted(naive.may_start(), key=lambda run: run[1:]):
                fitting = [s for s in idle if (s == USER_PART if size == USER_PART else s >= size)]
                if fitting and (naive.begun or not full):
                    return naive.job.id, first, count, min(fitting)
        return None

    @precondition(lambda self: self.flying)
    @rule(pick=st.integers(0, 9), outcome=st.sampled_from(("well", "well", "well", "failed", "lost")))
    def commit(self, pick: int, outcome: Outcome) -> None:
        run = sorted(self.flying)[pick % len(self.flying)]
        start = self.flying.pop(run)
        committed = self.real.commit(run, outcome, self.now)
        (job_id,) = start.jobs
        naive = self.jobs.get(job_id)
        if naive is None:
            assert committed == Committed()
            return
        deadline = naive.job.deadline_ns
        key = next(r for r in naive.runs if r[1:] == place(start))
        naive.runs[key] = "waiting" if outcome == "lost" else "done"
        naive.lost |= outcome == "lost"
        end = None
        if deadline is not None and deadline <= self.now:
            end = "expired"
        elif outcome == "failed":
            end = "failed"
        elif all(state == "done" for state in naive.runs.values()):
            end = "done"
        assert committed == (Committed() if end is None else Committed(**{end: (job_id,)}))
        if end is not None:
            self.end(job_id)

    @rule(pick=st.integers(0, 9))
    def cancel(self, pick: int) -> None:
        assert self.real.cancel(pick, self.now) == (pick in self.jobs)
        if pick in self.jobs:
            self.end(pick)

    @rule(steps=st.integers(1, 4))
    def wait(self, steps: int) -> None:
        self.now += steps

    def end(self, job_id: int) -> None:
        del self.jobs[job_id]
        assert job_id not in self.ended, "ended twice"
        self.ended.append(job_id)

    @invariant()
    def agrees(self) -> None:
        self.real.check()
        assert set(self.real.jobs) == set(self.jobs)
        assert self.real.queued == sum(not naive.begun for naive in self.jobs.values())
        for size in (USER_PART, 2, 4):
            busy = sum(self.EXECUTORS[start.lane] == size for start in self.flying.values())
            assert self.real.idle(size) == self.EXECUTORS.count(size) - busy
        deadlines = [d for naive in self.jobs.values() if (d := naive.job.deadline_ns) is not None]
        assert self.real.next_wakeup_ns() == min(deadlines, default=None)

    def teardown(self) -> None:
        """Whatever happened, everything ends, and every executor is idle again."""
        for naive in self.jobs.values():
            self.real.ready(naive.job.id, self.now)
            naive.held = False
        while self.jobs or self.flying:
            self.plan()
            while self.flying:
                self.commit(0, "well")
        self.agrees()
        assert [self.real.idle(size) for size in (USER_PART, 2, 4)] == [2, 2, 1]


TestAgainstNaive = AgainstNaive.TestCase
TestAgainstNaive.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
