# SPDX-License-Identifier: Apache-2.0
"""The bound that goodput is compared with: nobody reaches more, and what it counts is what brute force counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import goodput
from benchmarks.goodput import (
    MS,
    SHARE_NS,
    batcher,
    jobs_at,
    least_costs_ns,
    most_in_batches,
    most_in_time,
    profile_ns,
)
from jgr.serving.policies.jobs import Job, Profile, Start
from jgr.serving.policies.ordering import Order
from jgr.simulation.serving import simulate
from jgr.traffic import arrivals


def run_ns(start: Start) -> int:
    assert isinstance(start.shape, Profile)
    return profile_ns(start.shape)


@pytest.mark.parametrize("order", ["deadline", "fifo", "codel"])
@pytest.mark.parametrize(("load", "deadlines"), [(0.9, (100,)), (1.5, (100, 200)), (3.0, (60,))])
def test_no_order_answers_more_in_time_than_the_bound(
    order: Order, load: float, deadlines: tuple[int, ...]
) -> None:
    times = arrivals.poisson(np.random.default_rng(1), load * 1e9 / SHARE_NS / 1.3, 2.0)
    jobs = jobs_at(times.tolist(), deadlines, 0.3, seed=3)
    out = simulate(batcher(order, goodput.PROFILES), jobs, run_ns)
    most, alike = most_in_time(jobs, 2.0)
    assert 0 < sum(verdict == "done" for verdict in out.verdicts.values()) <= most
    assert alike <= most <= len(jobs)
    least_ns = least_costs_ns(jobs)
    done: set[int] = {job for job, verdict in out.verdicts.items() if verdict == "done"}
    for start, begin_ns, end_ns in out.runs:
        if done.issuperset(start.jobs):
            assert sum(least_ns[job] for job in start.jobs) <= end_ns - begin_ns


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20)), max_size=12), st.integers(1, 12))
def test_jobs_that_can_be_in_a_batch_are_counted(given: list[tuple[int, int]], takes: int) -> None:
    jobs = [
        Job(number, "recommend", 256, 32, at * MS, (at + left) * MS)
        for number, (at, left) in enumerate(sorted(given))
    ]

    def waits(job: Job, begin: int) -> bool:
        assert job.deadline_ns is not None
        return job.arrival_ns <= begin * MS and (begin + takes) * MS <= job.deadline_ns

    together = [[job for job in jobs if waits(job, begin)] for begin in range(60)]
    assert goodput._together(jobs, takes * MS) == [
        max(len(some) * (job in some) for some in together) for job in jobs
    ]


def test_long_jobs_that_come_alone_take_a_run_each() -> None:
    jobs = [
        Job(number, "recommend", 256, 32, 10**9 * number, 10**9 * number + 100 * MS) for number in range(3)
    ]
    alone_ns = profile_ns(Profile("recommend", 8, 256, 32)) - 7 * SHARE_NS
    cheapest_ns = min(profile_ns(Profile("recommend", n, 256, 32)) - (n - 1) * SHARE_NS for n in (1, 2, 4, 8))
    assert set(least_costs_ns(jobs).values()) == {cheapest_ns} and cheapest_ns <= alone_ns


@pytest.mark.parametrize(("load", "deadline_ms"), [(1.0, 30), (1.5, 60), (3.0, 40)])
def test_no_order_answers_more_of_one_length_in_time_than_the_bound_of_its_batches(
    load: float, deadline_ms: int
) -> None:
    profiles = [profile for profile in goodput.PROFILES if profile.tokens == 64]
    shapes = [(profile.batch, profile_ns(profile)) for profile in profiles]
    times = arrivals.poisson(np.random.default_rng(2), load * 1e9 / SHARE_NS, 2.0)
    jobs = jobs_at(times.tolist(), (deadline_ms,), 0.0, seed=3)
    most = most_in_batches(jobs, shapes, 2.0)
    for order in ("deadline", "fifo"):
        out = simulate(batcher(order, profiles), jobs, run_ns)
        assert 0 < sum(verdict == "done" for verdict in out.verdicts.values()) <= most <= len(jobs)


def test_a_batch_that_deadlines_leave_half_empty_makes_each_of_its_jobs_dearer() -> None:
    # 8 rows take 60 ms of the 100: five jobs can wait for its beginning, and take 12 ms each. One row takes 20 ms.
    jobs = [Job(n, "recommend", 64, 32, 10 * n * MS, (10 * n + 100) * MS) for n in range(40)]
    both, second = [(8, 60 * MS), (1, 20 * MS)], 400 + 100
    assert max(goodput._together(jobs, 60 * MS)) == 5
    assert most_in_batches(jobs, both, 0.4) == 40 and 40 * 12 <= second
    assert most_in_batches(jobs, both[1:], 0.4) == second // 20


def test_what_no_batch_ends_in_time_for_is_never_answered() -> None:
    jobs = [Job(n, "recommend", 64, 32, 10 * n * MS, (10 * n + 100) * MS) for n in range(4)]
    assert most_in_batches(jobs, [(8, 101 * MS)], 10.0) == 0


def test_capacity_of_disturbed_runs_is_that_of_their_mean() -> None:
    start = Start(0, 0, goodput.PROFILES[0], ())
    takes = goodput.disturbed(np.random.default_rng(0))
    ratios = np.array([takes(start) for _ in range(20_000)]) / run_ns(start)
    mean = 1 + goodput.SLOW_SHARE * (goodput.SLOW - 1)
    assert ratios.mean() == pytest.approx(mean, abs=4 * ratios.std() / 20_000**0.5)
    assert np.mean(ratios > 2) == pytest.approx(goodput.SLOW_SHARE, abs=0.004)
    assert ratios[ratios < 2].std() == pytest.approx(goodput.VARIES, rel=0.05)
