# SPDX-License-Identifier: Apache-2.0
"""The batcher under random traffic, against a naive model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jgr.serving.policies.batching import LEAD_NS
from jgr.serving.policies.jobs import (
    Accepted,
    Committed,
    Job,
    Kind,
    Outcome,
    Priority,
    Profile,
    Rejected,
    sort_of,
)
from jgr.serving.policies.ordering import Ordering
from jgr.serving.policies.run_costs import RunCosts
from tests.serving.policies.test_batching import ALL, LONG, PAIR, RANK, SMALL, WIDE, batcher


class Fixed(RunCosts):
    """Costs that no run changes."""

    def observe(self, shape: Any, took_ns: int, tried: bool = False) -> None: ...


@dataclass
class Naive:
    """The same policy, written for clearness: one list of queued jobs, and every batch tried."""

    profiles: tuple[Profile, ...]
    costs: dict[Profile, int]
    max_wait_ns: int
    in_flight: int

    def __post_init__(self) -> None:
        self.queue: list[Job] = []
        self.running: dict[int, list[Job]] = {}

    def fitting(self, jobs: tuple[Job, ...]) -> list[Profile]:
        return [
            p
            for p in self.profiles
            if p.kind == jobs[0].kind
            and p.batch >= len(jobs)
            and all(p.tokens >= j.tokens and p.width >= j.width for j in jobs)
        ]

    def urgency(self, job: Job) -> tuple[bool, int, int]:
        due = job.arrival_ns + PATIENCE if job.deadline_ns is None else job.deadline_ns
        return job.priority == "batch", due, job.id

    def ordered(self) -> list[Job]:
        return sorted(self.queue, key=self.urgency)

    def expire(self, now: int) -> list[int]:
        late = [j for j in self.everyone() if j.deadline_ns is not None and j.deadline_ns <= now]
        self.drop({j.id for j in late})
        return [j.id for j in sorted(late, key=lambda j: (j.deadline_ns or 0, j.id))]

    def everyone(self) -> list[Job]:
        return self.queue + [j for jobs in self.running.values() for j in jobs]

    def drop(self, ids: set[int]) -> None:
        self.queue = [j for j in self.queue if j.id not in ids]
        self.running = {b: [j for j in jobs if j.id not in ids] for b, jobs in self.running.items()}

    def size_class(self, job: Job) -> tuple[int, int]:
        fitting = self.fitting((job,))
        return min(p.tokens for p in fitting), min(p.width for p in fitting)

    def share(self, job: Job) -> float:
        return min(self.costs[p] / p.batch for p in self.fitting((job,)))

    def group(self) -> tuple[list[Job], Profile, bool]:
        """Of one batch for each profile that takes the most urgent job the one that does the most for its cost; and
        whether it is full. Jobs of its priority go first, and of them those of its class; others only fill what is
        free."""
        head = self.ordered()[0]
        alike = [j for j in self.ordered() if j.kind == head.kind]
        found: dict[tuple[int, ...], tuple[tuple[float, int, int], list[Job], Profile]] = {}
        for p in sorted(self.fitting((head,)), key=lambda p: p.cost_tokens):
            fit = [j for j in alike if p in self.fitting((j,))]
            fit.sort(key=lambda j: (j.priority != head.priority, self.size_class(j) != self.size_class(head)))
            jobs = sorted(fit[: p.batch], key=self.urgency)
            done = sum(self.share(j) for j in jobs if j.priority == head.priority)
            score = (-done / self.costs[p], -len(jobs), p.cost_tokens)
            found.setdefault(tuple(j.id for j in jobs), (score, jobs, p))
        _, jobs, profile = min(found.values(), key=lambda of: of[0])
        return jobs, profile, len(jobs) >= max(p.batch for p in self.fitting((head,)))

    def due(self, now: int, draining: bool) -> bool:
        if not self.queue or len(self.running) >= self.in_flight:
            return False
        head = self.ordered()[0]
        at = head.arrival_ns + self.max_wait_ns
        if head.deadline_ns is not None:
            at = min(at, head.deadline_ns - min(self.costs[p] for p in self.fitting((head,))) - LEAD_NS)
        return draining or now >= at or self.group()[2]


PATIENCE = 20
COSTS = {SMALL: 12, PAIR: 20, LONG: 60, WIDE: 44, RANK: 24}
"""Two short jobs go together, three are cheaper in the wide shape, and a long one is dear."""


class Machine(RuleBasedStateMachine):
    """Random traffic; the batcher must agree with the naive model at every step and pass its own audit."""

    def __init__(self) -> None:
        super().__init__()
        costs = Fixed({profile: ns / 1e9 for profile, ns in COSTS.items()})
        self.batcher = batcher(
            max_wait_ns=6, max_queue=3, in_flight=2, costs=costs, ordering=Ordering("edf", PATIENCE)
        )
        self.naive = Naive(ALL, COSTS, 6, 2)
        self.now = 0
        self.ids = 0
        self.seen: dict[int, str] = {}
        self.asleep_until: int | None = None  # the last plan said: nothing before this

    @rule(
        kind=st.sampled_from(["recommend", "rank"]),
        tokens=st.sampled_from([1, 8, 9, 32, 33]),
        width=st.sampled_from([1, 4, 5, 16]),
        patience=st.none() | st.integers(0, 12),
        age=st.integers(0, 3),
        priority=st.sampled_from(["interactive", "interactive", "batch"]),
    )
    def submit(
        self, kind: Kind, tokens: int, width: int, patience: int | None, age: int, priority: Priority
    ) -> None:
        self.ids += 1
        deadline = None if patience is None else self.now + patience
        new = Job(self.ids, kind, tokens, width, self.now - age, deadline, priority=priority)
        verdict = self.batcher.submit(new, self.now)
        if self.batcher.draining:
            assert verdict == Rejected("draining")
        elif not self.naive.fitting((new,)):
            assert verdict == Rejected("too_large")
        elif sum(sort_of(j) == sort_of(new) for j in self.naive.queue) >= 3:
            assert verdict == Rejected("queue_full")
        else:
            self.naive.queue.append(new)
            assert verdict == Accepted(len(self.naive.queue))
            self.seen[new.id] = "queued"
        self.asleep_until = self.now

    @rule(ns=st.integers(0, 7))
    def pass_time(self, ns: int) -> None:
        self.now += ns

    @rule()
    def plan(self) -> None:
        expired = self.naive.expire(self.now)
        due = self.naive.due(self.now, self.batcher.draining)
        if self.asleep_until is None or self.now < self.asleep_until:
            assert not expired and not due, "next_wakeup_ns was too late"
        plan = self.batcher.plan(self.now)
        assert sorted(plan.expired) == sorted(expired)
        for job_id in expired:
            assert self.seen[job_id] in ("queued", "running")
            self.seen[job_id] = "expired"
        for start in plan.starts:
            assert self.naive.due(self.now, self.batcher.draining)
            jobs, profile, _ = self.naive.group()
            assert start.jobs == tuple(j.id for j in jobs)
            assert start.shape == profile
            self.naive.drop(set(start.jobs))
            self.naive.running[start.run] = jobs
            for job_id in start.jobs:
                assert self.seen[job_id] == "queued"
                self.seen[job_id] = "running"
        assert not self.naive.due(self.now, self.batcher.draining)
        self.asleep_until = self.batcher.next_wakeup_ns()
        assert self.asleep_until is None or self.asleep_until > self.now

    @precondition(lambda self: self.naive.running)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(sorted(self.naive.running)))
        outcome: Outcome = data.draw(st.sampled_from(("well", "well", "failed", "lost")))
        jobs = self.naive.running.pop(run)
        late = [j.id for j in jobs if j.deadline_ns is not None and j.deadline_ns <= self.now]
        rest = [j for j in jobs if j.id not in late]
        ids = tuple(j.id for j in rest)
        committed = self.batcher.commit(run, outcome, self.now)
        self.seen |= dict.fromkeys(late, "expired")
        if outcome == "lost":
            assert committed == Committed(expired=tuple(late), again=ids)
            self.naive.queue = sorted([*self.naive.queue, *rest], key=lambda j: j.id)
            self.seen |= dict.fromkeys(ids, "queued")
        elif outcome == "failed":
            assert committed == Committed(failed=ids, expired=tuple(late))
            self.seen |= dict.fromkeys(ids, "failed")
        else:
            assert committed == Committed(ids, expired=tuple(late))
            self.seen |= dict.fromkeys(ids, "done")
        self.asleep_until = self.now

    @precondition(lambda self: self.ids)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        job_id = data.draw(st.integers(1, self.ids))
        live = self.seen.get(job_id) in ("queued", "running")
        assert self.batcher.cancel(job_id, self.now) == live
        if live:
            self.naive.drop({job_id})
            self.seen[job_id] = "cancelled"
        self.asleep_until = self.now

    @rule()
    def drain(self) -> None:
        self.batcher.drain(self.now)
        self.asleep_until = self.now

    @invariant()
    def agrees(self) -> None:
        self.batcher.check()
        assert self.batcher.queued == len(self.naive.queue)
        assert self.batcher.in_flight == len(self.naive.running)
        assert self.batcher.live == len(self.naive.everyone())
        ended = [state for state in self.seen.values() if state not in ("queued", "running")]
        assert len(self.seen) == len(ended) + self.batcher.live, "a job was lost"
        for state in ("done", "failed", "cancelled", "expired"):
            assert self.batcher.counts[state] == ended.count(state)


TestAgainstNaive = Machine.TestCase
TestAgainstNaive.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
