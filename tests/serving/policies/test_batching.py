# SPDX-License-Identifier: Apache-2.0
"""The batcher: exact plans at toy size, its state table, and a state machine against a naive model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jgr.config import ConfigError, ProfilesConfig
from jgr.serving.policies.batching import LEAD_NS, Batcher, FixedShapes, make_profiles
from jgr.serving.policies.jobs import (
    TRANSITIONS,
    Accepted,
    Committed,
    IllegalTransition,
    Job,
    Kind,
    Outcome,
    Plan,
    Priority,
    Profile,
    Rejected,
    Request,
    Start,
    advance,
    sort_of,
)
from jgr.serving.policies.ordering import Ordering
from jgr.serving.policies.run_costs import RunCosts

SMALL = Profile("recommend", 1, 8, 4)
PAIR = Profile("recommend", 2, 8, 4)
LONG = Profile("recommend", 2, 32, 4)
WIDE = Profile("recommend", 4, 8, 16)
RANK = Profile("rank", 2, 8, 4)
ALL = (SMALL, PAIR, LONG, WIDE, RANK)
MS = 1_000_000


def batch(run: int, profile: Profile, jobs: tuple[int, ...]) -> Start:
    return Start(run, 0, profile, tuple(Request(job_id) for job_id in jobs))


def batcher(profiles: tuple[Profile, ...] = ALL, **settings: Any) -> Batcher:
    """Nothing is predicted, unless an ordering says so."""
    plain = {"max_tokens": 1000, "max_wait_ns": 0, "max_queue": 100, "ordering": Ordering("edf")}
    return Batcher(profiles, **{**plain, **settings})


def job(
    id: int,
    tokens: int = 8,
    width: int = 4,
    kind: Kind = "recommend",
    at: int = 0,
    deadline: int | None = None,
) -> Job:
    return Job(id, kind, tokens, width, at, deadline)


def fill(b: Batcher, *jobs: Job) -> Batcher:
    for one in jobs:
        assert isinstance(b.submit(one, one.arrival_ns), Accepted)
    return b


def test_the_cheapest_profile_that_fits_wins() -> None:
    assert fill(batcher(), job(1)).plan(0) == Plan((batch(0, SMALL, (1,)),))
    assert fill(batcher(), job(1), job(2)).plan(0).starts == (batch(0, PAIR, (1, 2)),)
    assert fill(batcher(), job(1, tokens=9)).plan(0).starts == (batch(0, LONG, (1,)),)
    assert fill(batcher(), job(1, width=5)).plan(0).starts == (batch(0, WIDE, (1,)),)
    alone = Profile("recommend", 1, 32, 4)  # costs 36, PAIR 24
    assert fill(batcher((alone, PAIR)), job(1)).plan(0).starts == (batch(0, PAIR, (1,)),)


def test_the_most_urgent_job_decides_the_class_of_a_batch() -> None:
    b = fill(batcher(), job(1, tokens=9), job(2, tokens=3))
    assert b.plan(0).starts == (batch(0, LONG, (1, 2)),), "who fits in goes along"
    costs = RunCosts({profile: profile.cost_tokens * 1e-9 for profile in ALL})
    b = fill(batcher(in_flight=2, costs=costs), job(1), job(2), job(3, width=9))
    assert b.plan(0).starts == (batch(0, PAIR, (1, 2)), batch(1, WIDE, (3,))), "nobody is padded to others"


def test_a_job_that_does_not_fit_the_batch_lets_others_pass() -> None:
    # Four may go together when short, two when long, and nothing is both wide and long.
    b = fill(batcher(in_flight=9), job(1, tokens=9), job(2, width=5), job(3))
    assert b.plan(0).starts == (batch(0, LONG, (1, 3)), batch(1, WIDE, (2,)))
    assert b.plan(0) == Plan()


def test_the_shape_is_the_cheapest_for_each_job_in_it() -> None:
    eight = Profile("recommend", 8, 8, 4)
    costs = {SMALL: 12e-3, eight: 26e-3}  # two alone take 24 ms, three 36 ms
    for waiting, first in ((1, SMALL), (2, SMALL), (3, eight), (8, eight)):
        b = batcher((SMALL, eight), costs=RunCosts(costs))
        (start,) = fill(b, *(job(i) for i in range(waiting))).plan(0).starts
        assert start.shape == first
        assert len(start.jobs) == (1 if first is SMALL else waiting)


def test_jobs_of_another_kind_are_stepped_over_and_lead_the_next_batch() -> None:
    b = fill(
        batcher(in_flight=9),
        job(1),
        job(2, kind="rank"),
        job(3),
        job(4, kind="rank"),
        job(5, kind="rank"),
    )
    assert b.plan(0).starts == (batch(0, PAIR, (1, 3)), batch(1, RANK, (2, 4)), batch(2, RANK, (5,)))


def test_the_cap_counts_padded_tokens_and_widths() -> None:
    # WIDE costs 4 * (8 + 16) = 96 and PAIR 2 * (8 + 4) = 24.
    profiles = (SMALL, PAIR, msgspec.structs.replace(WIDE, width=4, batch=4))
    four = (job(1), job(2), job(3), job(4))
    assert fill(batcher(profiles, max_tokens=48), *four).plan(0).starts == (
        batch(0, profiles[2], (1, 2, 3, 4)),
    )
    assert fill(batcher(profiles, max_tokens=47), *four).plan(0).starts == (batch(0, PAIR, (1, 2)),)


def test_a_cap_that_leaves_a_compiled_size_unserved_is_refused() -> None:
    batcher((SMALL, LONG), max_tokens=72)
    with pytest.raises(ConfigError, match=r"batching.max_tokens=71 .* recommend of 32 tokens and width 4"):
        batcher((SMALL, LONG), max_tokens=71)


def test_the_oldest_job_waits_for_company_at_most_max_wait() -> None:
    b = fill(batcher(max_wait_ns=10), job(1, at=5))
    assert b.plan(14) == Plan()
    assert b.next_wakeup_ns() == 15
    assert b.plan(15).starts == (batch(0, SMALL, (1,)),)
    assert b.next_wakeup_ns() is None


def test_a_full_batch_does_not_wait() -> None:
    b = fill(batcher((SMALL, PAIR), max_wait_ns=10), job(1), job(2))
    assert b.plan(0).starts == (batch(0, PAIR, (1, 2)),)


def test_nobody_waits_for_company_until_it_is_late() -> None:
    late = 3 * LEAD_NS
    b = batcher((PAIR,), max_wait_ns=10 * LEAD_NS, costs=RunCosts({PAIR: LEAD_NS / 1e9}))
    fill(b, job(1, deadline=late))
    assert b.plan(0) == Plan()
    assert b.next_wakeup_ns() == LEAD_NS
    assert b.plan(LEAD_NS).starts == (batch(0, PAIR, (1,)),)


def test_company_has_at_most_half_of_the_time_that_the_deadline_leaves() -> None:
    b = batcher((PAIR,), max_wait_ns=100 * LEAD_NS, costs=RunCosts({PAIR: LEAD_NS / 1e9}))
    fill(b, job(1, deadline=21 * LEAD_NS))
    assert b.plan(0) == Plan()
    assert b.next_wakeup_ns() == 10 * LEAD_NS
    assert b.plan(10 * LEAD_NS).starts == (batch(0, PAIR, (1,)),)


def test_nobody_waits_for_company_until_those_behind_are_late() -> None:
    long = Profile("recommend", 4, 32, 4)
    b = batcher(
        (WIDE, long), max_wait_ns=20 * MS, costs=RunCosts({WIDE: 0.001, long: 0.06}), ordering=Ordering()
    )
    fill(b, job(1, deadline=65 * MS), job(2, tokens=32, deadline=70 * MS))
    assert b.plan(0) == Plan()
    at_ns = b.next_wakeup_ns()
    assert at_ns == 4_500_000, "the long one ends at 61 ms where nobody waits, 9 before its deadline"
    assert b.plan(at_ns).starts == (batch(0, long, (1, 2)),)


def on_lane_0(ms: int) -> Batcher:
    """Of two lanes, the first is alone for recommend, and is busy for so long. A run takes 10 ms."""
    costs = RunCosts({SMALL: 0.01, RANK: 0.01})
    grouping = FixedShapes([SMALL], 1000, costs)
    b = batcher((RANK,), streams=2, groupings={"recommend": grouping}, costs=costs, ordering=Ordering())
    fill(b, job(0))
    assert [start.lane for start in b.plan(0).starts] == [0]
    b.plan((10 - ms) * MS)
    return b


def test_a_lane_that_takes_other_kinds_promises_nothing_to_those_that_wait_for_theirs() -> None:
    b = on_lane_0(9)
    late = b.submit(job(1, at=1 * MS, deadline=15 * MS), 1 * MS)
    assert isinstance(late, Rejected) and late.reason == "too_late"
    assert b.submit(job(2, at=1 * MS, deadline=25 * MS), 1 * MS) == Accepted(1, None, 20 * MS)
    rank = b.submit(job(3, kind="rank", at=1 * MS, deadline=25 * MS), 1 * MS)
    assert isinstance(rank, Rejected), "the first of the queue waits for lane 0"
    assert b.plan(1 * MS) == Plan(), "nobody is hopeless"


def test_only_who_waits_for_a_busy_lane_is_hopeless() -> None:
    b = on_lane_0(9)
    assert b.submit(job(1, kind="rank", at=1 * MS, deadline=14 * MS), 1 * MS) == Accepted(1, None, 11 * MS)
    plan = b.plan(1 * MS)
    assert [start.lane for start in plan.starts] == [1] and not plan.expired


def test_no_more_batches_than_slots_are_in_flight() -> None:
    b = fill(batcher(in_flight=2), *(job(i, tokens=9) for i in range(6)))
    assert b.plan(0).starts == (batch(0, LONG, (0, 1)), batch(1, LONG, (2, 3)))
    assert b.plan(0) == Plan()
    assert b.next_wakeup_ns() is None
    assert b.commit(1, "well", 0) == Committed((2, 3))
    assert b.plan(0).starts == (batch(2, LONG, (4, 5)),)
    b.check()


def test_a_queued_job_expires_at_its_deadline_and_never_runs() -> None:
    b = fill(batcher((WIDE,)), job(0))
    assert b.plan(0).starts == (batch(0, WIDE, (0,)),)
    fill(b, job(1, deadline=7), job(2), job(3, deadline=5))
    assert b.next_wakeup_ns() == 5
    assert b.plan(4) == Plan()
    assert b.plan(7) == Plan((), (3, 1))
    assert b.next_wakeup_ns() is None
    b.commit(0, "well", 100)
    assert b.plan(100) == Plan((batch(1, WIDE, (2,)),))
    assert b.counts["expired"] == 2


def test_a_running_job_expires_at_its_deadline_or_when_its_batch_comes_back_late() -> None:
    b = fill(batcher((WIDE,)), job(1, deadline=5), job(2, deadline=9), job(3))
    assert b.plan(0).starts == (batch(0, WIDE, (1, 2, 3)),)
    assert b.next_wakeup_ns() == 5
    assert b.plan(5) == Plan((), (1,))
    assert b.commit(0, "well", 9) == Committed((3,), expired=(2,))
    assert b.counts == {**dict.fromkeys(TRANSITIONS, 0), "queued": 3, "running": 3, "done": 1, "expired": 2}


def test_cancelled_work_never_runs_and_its_result_is_nobodys() -> None:
    b = fill(batcher(), job(1), job(2), job(3))
    assert b.cancel(1, 0)
    assert not b.cancel(1, 0), "already gone"
    assert not b.cancel(99, 0), "never known"
    assert b.plan(0).starts == (batch(0, PAIR, (2, 3)),)
    assert b.cancel(3, 0)
    assert b.commit(0, "well", 0) == Committed((2,))
    assert b.plan(0) == Plan()
    b.check()


def test_overload_is_a_value() -> None:
    b = fill(batcher(max_queue=2), job(1), job(2))
    assert b.submit(job(3), 0) == Rejected("queue_full")
    assert b.submit(job(4, tokens=33), 0) == Rejected("too_large")
    assert b.submit(job(5, tokens=9, width=5), 0) == Rejected("too_large")
    assert b.submit(job(6, kind="rank", width=5), 0) == Rejected("too_large")
    assert b.plan(0).starts == (batch(0, PAIR, (1, 2)),)
    assert b.submit(job(3), 0) == Accepted(1), "running jobs are not queued"


def test_a_drain_refuses_new_work_and_hurries_the_rest() -> None:
    b = fill(batcher(max_wait_ns=100), job(1))
    b.drain(0)
    assert b.submit(job(2), 0) == Rejected("draining")
    assert b.next_wakeup_ns() == 0
    assert b.plan(0).starts == (batch(0, SMALL, (1,)),)
    assert b.commit(0, "well", 1) == Committed((1,))
    assert (b.live, b.in_flight) == (0, 0)


@pytest.mark.parametrize(
    ("misuse", "error"),
    [
        (lambda b: b.submit(job(1), 10), ValueError),
        (lambda b: b.submit(job(9), 9), ValueError),
        (lambda b: b.plan(9), ValueError),
        (lambda b: b.cancel(1, 9), ValueError),
        (lambda b: b.commit(0, "well", 9), ValueError),
        (lambda b: b.commit(7, "well", 10), KeyError),
    ],
    ids=[
        "live id",
        "submit in the past",
        "plan in the past",
        "cancel in the past",
        "commit in the past",
        "no batch",
    ],
)
def test_misuse_raises_and_changes_nothing(misuse: Callable[[Batcher], Any], error: type[Exception]) -> None:
    b = fill(batcher((SMALL, PAIR)), job(1), job(2), job(3))
    assert b.plan(10).starts == (batch(0, PAIR, (1, 2)),)
    before = (b.counts, b.queued, b.live, b.in_flight, b.next_wakeup_ns())
    with pytest.raises(error):
        misuse(b)
    assert (b.counts, b.queued, b.live, b.in_flight, b.next_wakeup_ns()) == before
    b.check()
    assert b.commit(0, "well", 10) == Committed((1, 2))


def test_ended_jobs_are_forgotten() -> None:
    b = batcher()
    for i in range(1000):
        fill(b, job(i, at=i, deadline=10**9))
        (start,) = b.plan(i).starts
        assert b.commit(start.run, "well", i) == Committed((i,))
        b.check()  # which bounds the deadlines that are remembered
    assert b.live == 0
    assert b.state(999) is None


def test_an_id_may_be_used_again_and_has_its_new_deadline_only() -> None:
    b = fill(batcher((WIDE,)), job(0))
    b.plan(0)
    fill(b, job(1, deadline=5))
    b.cancel(1, 0)
    fill(b, job(1, deadline=50))
    assert b.plan(5) == Plan()
    assert b.next_wakeup_ns() == 50


def test_a_batch_that_was_refused_for_lost_memory_is_planned_again_in_its_old_place() -> None:
    b = fill(batcher((PAIR,), max_queue=3), job(1), job(2), job(3))
    assert b.plan(0).starts == (batch(0, PAIR, (1, 2)),)
    fill(b, job(4), job(5))
    b.cancel(2, 0)
    assert b.commit(0, "lost", 1) == Committed(again=(1,))
    assert (b.state(1), b.queued) == ("queued", 4)
    assert b.submit(job(6), 1) == Rejected("queue_full")
    assert b.plan(1).starts == (batch(1, PAIR, (1, 3)),)
    b.check()


def test_a_share_of_what_was_reused_is_computed_again_while_nobody_waits() -> None:
    b = batcher(shadow_share=0.5)
    assert [b.shadow(0) for _ in range(4)] == [False, True, False, True]
    fill(b, job(1))
    assert [b.shadow(0) for _ in range(9)] == [False] * 9
    b.plan(0)
    assert [b.shadow(0), b.shadow(0)] == [True, False], "a busy time is not made up for"
    b.drain(0)
    assert not any(b.shadow(0) for _ in range(9))


def test_nobody_starves() -> None:
    """However many others arrive, the k-th job in the queue goes with the k-th batch at the latest."""
    b = fill(batcher(), *(job(i) for i in range(5)), job(5, kind="rank"))
    planned: list[int] = []
    for step in range(6):
        fill(b, *(job(100 + 10 * step + i) for i in range(4)))
        (start,) = b.plan(0).starts
        planned += start.jobs
        b.commit(start.run, "well", 0)
    assert 5 in planned


def test_every_state_and_event() -> None:
    events = {event for row in TRANSITIONS.values() for event in row}
    legal = 0
    for state, row in TRANSITIONS.items():
        for event in events:
            if event in row:
                assert advance(state, event) == row[event]
                legal += 1
            else:
                with pytest.raises(IllegalTransition, match=f"a {state} job cannot {event}"):
                    advance(state, event)
    assert legal == 10
    ends = [state for state, row in TRANSITIONS.items() if not row]
    assert ends == ["done", "failed", "cancelled", "expired", "rejected"]


def test_make_profiles_is_the_product_of_the_sizes() -> None:
    config = ProfilesConfig(batch=(1, 8), tokens=(64, 256), widths=(32,), candidates=(100,))
    assert make_profiles(config) == (
        Profile("recommend", 1, 64, 32),
        Profile("recommend", 1, 256, 32),
        Profile("recommend", 8, 64, 32),
        Profile("recommend", 8, 256, 32),
        Profile("rank", 1, 64, 100),
        Profile("rank", 1, 256, 100),
        Profile("rank", 8, 64, 100),
        Profile("rank", 8, 256, 100),
    )
    assert make_profiles(config, ["rank"]) == make_profiles(config)[4:]


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


def test_who_would_be_late_in_a_batch_that_others_fill_goes_first() -> None:
    """After four short jobs the long one could end in time alone, but then no other long one is with it."""
    short, ms = Profile("recommend", 4, 8, 8), 1_000_000
    alone, long = Profile("recommend", 1, 32, 4), Profile("recommend", 4, 32, 4)
    costs = RunCosts({short: 0.018, alone: 0.024, long: 0.036})
    for deadline_ms, first in ((48, alone), (55, short)):
        b = batcher((short, alone, long), ordering=Ordering(), costs=costs)
        others = [job(n, width=8, deadline=100 * ms) for n in range(1, 5)]
        (start,) = fill(b, job(0, tokens=32, deadline=deadline_ms * ms), *others).plan(0).starts
        assert start.shape == first
