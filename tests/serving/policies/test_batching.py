# SPDX-License-Identifier: Apache-2.0
"""The batcher: exact plans at toy size, and its state table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from jgr.config import ConfigError, ProfilesConfig
from jgr.serving.policies.batching import LEAD_NS, Batcher, FixedShapes, make_profiles
from jgr.serving.policies.jobs import (
    TRANSITIONS,
    Accepted,
    Committed,
    IllegalTransition,
    Job,
    Kind,
    Plan,
    Profile,
    Rejected,
    Request,
    Start,
    advance,
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
