# SPDX-License-Identifier: Apache-2.0
"""Who goes before whom where jobs differ in priority, in size and in whether they name a deadline."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from jgr.serving.policies.batching import Batcher
from jgr.serving.policies.jobs import Accepted, Job, Priority, Profile, Start
from jgr.serving.policies.ordering import GIVES_WAY_NS
from jgr.serving.policies.run_costs import RunCosts
from jgr.simulation.serving import simulate

MS = 1_000_000
SHORT, LONG = 64, 512
COSTS = {
    Profile("recommend", rows, tokens, 10): (10 + 2 * rows) * (1 if tokens == SHORT else 4) / 1e3
    for rows in (1, 2, 4, 8)
    for tokens in (SHORT, LONG)
}
A_SECOND = 8 / 26e-3
"""The short jobs that the device does a second, in full batches."""


def batcher() -> Batcher:
    return Batcher(list(COSTS), max_tokens=10**9, max_wait_ns=0, max_queue=256, costs=RunCosts(COSTS))


def make(
    number: int,
    at_ms: float = 0,
    in_ms: int | None = None,
    tokens: int = SHORT,
    priority: Priority = "interactive",
) -> Job:
    at_ns = round(at_ms * MS)
    deadline_ns = None if in_ms is None else at_ns + in_ms * MS
    return Job(number, "recommend", tokens, 10, at_ns, deadline_ns, priority=priority)


def run_ns(start: Start) -> int:
    assert isinstance(start.shape, Profile)
    return round(COSTS[start.shape] * 1e9)


def stream(load: float, seconds: float, first: int, **given: Any) -> list[Job]:
    """Short jobs at random times. load: of what the device does."""
    rng, jobs, at_s = random.Random(first), list[Job](), 0.0
    while (at_s := at_s + rng.expovariate(load * A_SECOND)) < seconds:
        jobs.append(make(first + len(jobs), at_s * 1e3, **given))
    return jobs


@pytest.mark.parametrize("in_ms", [None, 400])
def test_short_batch_jobs_do_not_go_before_a_long_interactive_one(in_ms: int | None) -> None:
    b = batcher()
    b.submit(make(0, in_ms=in_ms, tokens=LONG), 0)
    for number in range(1, 9):
        b.submit(make(number, priority="batch"), 0)
    assert b.plan(0).starts[0].jobs[0] == 0


def test_batch_jobs_fill_rows_that_are_free_and_make_no_batch_larger() -> None:
    profiles = {Profile("recommend", 4, SHORT, 10): 0.018, Profile("recommend", 8, SHORT, 10): 0.026}
    b = Batcher(list(profiles), max_tokens=10**9, max_wait_ns=0, max_queue=256, costs=RunCosts(profiles))
    for number in range(3):
        b.submit(make(number), 0)
    for number in range(3, 9):
        b.submit(make(number, priority="batch"), 0)
    assert b.plan(0).starts[0].jobs == (0, 1, 2, 3)


def test_what_a_batch_job_was_promised_keeps_no_interactive_one_out() -> None:
    b = Batcher(list(COSTS)[:1], max_tokens=10**9, max_wait_ns=0, max_queue=256, costs=RunCosts(COSTS))
    told = [b.submit(make(number, in_ms=100, priority="batch"), 0) for number in range(20)]
    assert sum(isinstance(each, Accepted) for each in told) == 8, "12 ms each"
    b.plan(0)
    verdict = b.submit(make(99, 1, 100), MS)
    assert isinstance(verdict, Accepted) and verdict.predicted_ns == 24 * MS, "behind the one that runs"


@pytest.mark.parametrize("in_ms", [None, 100, 1000])
def test_as_many_interactive_jobs_are_in_time_beside_batch_jobs_as_without(in_ms: int | None) -> None:
    interactive = stream(0.9, 8, first=0, in_ms=100)
    beside = stream(1.0, 8, first=10**6, in_ms=in_ms, priority="batch")
    in_time = []
    for jobs in (interactive, sorted(interactive + beside, key=lambda job: job.arrival_ns)):
        out = simulate(batcher(), jobs, run_ns)
        in_time.append(sum(out.verdicts[job.id] == "done" for job in interactive))
    assert in_time[1] >= 0.97 * in_time[0]


@pytest.mark.parametrize(("load", "in_ms"), [(0.63, None), (0.63, 1000), (0.84, None)])
def test_batch_jobs_do_not_get_the_time_that_interactive_ones_are_refused_for(
    load: float, in_ms: int | None
) -> None:
    """Runs vary, so that admission keeps a margin, for which it refuses some while the device is idle."""
    interactive = stream(load, 12, first=0, in_ms=100)
    beside = stream(0.5, 12, first=10**6, in_ms=in_ms, priority="batch")
    in_time = []
    for jobs in (interactive, sorted(interactive + beside, key=lambda job: job.arrival_ns)):
        rng = random.Random(5)
        out = simulate(
            batcher(), jobs, lambda start, rng=rng: round(run_ns(start) * (1 + rng.expovariate(2.5)))
        )  # type: ignore[misc]
        in_time.append(sum(out.verdicts[job.id] == "done" for job in interactive))
        done = sum(out.verdicts[job.id] == "done" for job in beside if job.id in out.verdicts)
    assert len(interactive) > 1.1 * in_time[0], "some are refused"
    assert in_time[1] >= 0.995 * in_time[0] and done > 200


def test_batch_jobs_begin_once_no_interactive_one_was_refused_for_a_while() -> None:
    b = Batcher(list(COSTS)[:1], max_tokens=10**9, max_wait_ns=0, max_queue=256, costs=RunCosts(COSTS))
    for number in range(3):
        b.submit(make(number, in_ms=30), 0)  # the third cannot be in time behind the others
    b.submit(make(3, in_ms=1), 0)  # nor could this one on an idle device
    b.submit(make(4, priority="batch"), 0)
    first = b.plan(0).starts
    assert [start.jobs for start in first] == [(0,)]
    b.commit(first[0].run, "well", 12 * MS)
    (second,) = b.plan(12 * MS).starts
    b.commit(second.run, "well", 24 * MS)
    assert not b.plan(24 * MS).starts and b.next_wakeup_ns() == GIVES_WAY_NS
    b.submit(make(5, 100, in_ms=1), 100 * MS)
    assert not b.plan(100 * MS).starts and b.next_wakeup_ns() == GIVES_WAY_NS, (
        "what is hopeless is not in the way"
    )
    assert [start.jobs for start in b.plan(GIVES_WAY_NS).starts] == [(4,)]


FLOODS: dict[str, Callable[[], list[Job]]] = {
    "without a deadline": lambda: stream(1.2, 8, first=1),
    "with a deadline": lambda: stream(2.0, 8, first=1, in_ms=500),
    "of batch jobs": lambda: stream(2.0, 8, first=1, priority="batch"),
}


@pytest.mark.parametrize("flood", FLOODS)
def test_a_job_of_a_size_of_its_own_runs_though_others_do_more_in_the_same_time(flood: str) -> None:
    rare = make(0, 2000, tokens=LONG)
    jobs = sorted([rare, *FLOODS[flood]()], key=lambda job: job.arrival_ns)
    out = simulate(batcher(), jobs, run_ns)
    waited_ms = (out.ended_ns[0] - rare.arrival_ns) / MS
    # Its patience is a second, and of those without a deadline more came before it than half of the device does.
    assert out.verdicts[0] == "done" and waited_ms <= (2100 if flood == "without a deadline" else 1200)
