# SPDX-License-Identifier: Apache-2.0
"""The live policies in virtual time: a server that promises in time what it accepts, and wastes no run.

A batch of n rows takes 10 + 2n ms, so batches of eight do 308 jobs a second.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import pytest

from jgr.serving.policies.batching import Batcher
from jgr.serving.policies.jobs import Accepted, Job, Priority, Profile, Rejected, Start
from jgr.serving.policies.orchestration import Orchestrator
from jgr.serving.policies.ordering import Order, Ordering
from jgr.serving.policies.run_costs import RunCosts
from jgr.simulation.serving import Outcomes, simulate

MS = 1_000_000
ROWS = (1, 2, 4, 8)
SHORT = [Profile("recommend", rows, 64, 32) for rows in ROWS]
LONG = [Profile("recommend", rows, 256, 32) for rows in ROWS]
CAPACITY = 8 / 26e-3
SECONDS = 8


def run_ns(start: Start) -> int:
    assert isinstance(start.shape, Profile)
    return profile_ns(start.shape)


def profile_ns(profile: Profile) -> int:
    return (10 + 2 * profile.batch) * MS * (1 if profile.tokens == 64 else 2)


def batcher(
    order: Order = "deadline", profiles: Sequence[Profile] = SHORT, in_flight: int = 2, factor: float = 1.0
) -> Batcher:
    """factor: how much dearer runs are said to be than they are."""
    return Batcher(
        profiles,
        max_tokens=10**9,
        max_wait_ns=0,
        max_queue=1024,
        in_flight=in_flight,
        ordering=Ordering(order),
        costs=RunCosts({profile: factor * profile_ns(profile) / 1e9 for profile in profiles}),
    )


def arrivals(load: float, deadlines_ms: Sequence[int | None], seed: int = 0, long: float = 0.0) -> list[Job]:
    """A Poisson process; load: of the capacity. long: share of jobs of 256 tokens, which take twice as long."""
    rng = random.Random(seed)
    jobs: list[Job] = []
    at_s = rng.expovariate(load * CAPACITY / (1 + long))
    while at_s < SECONDS:
        deadline_ms = rng.choice(deadlines_ms)
        arrival_ns = int(at_s * 1e9)
        deadline_ns = None if deadline_ms is None else arrival_ns + deadline_ms * MS
        tokens = 256 if rng.random() < long else 64
        jobs.append(Job(len(jobs), "recommend", tokens, 32, arrival_ns, deadline_ns))
        at_s += rng.expovariate(load * CAPACITY / (1 + long))
    return jobs


def done(out: Outcomes, jobs: Sequence[Job]) -> float:
    return sum(out.verdicts[job.id] == "done" for job in jobs) / len(jobs)


@pytest.mark.parametrize("load", [0.5, 0.9, 1.0, 1.5, 3.0])
@pytest.mark.parametrize("deadlines", [(100,), (200,), (100, 200)], ids=str)
def test_goodput_is_that_of_the_device_whatever_comes(load: float, deadlines: tuple[int, ...]) -> None:
    jobs = arrivals(load, deadlines)
    out = simulate(batcher(), jobs, run_ns, launch_ns=MS // 2)
    goodput = sum(verdict == "done" for verdict in out.verdicts.values()) / SECONDS
    assert goodput >= 0.95 * min(len(jobs) / SECONDS, CAPACITY)
    assert out.wasted_ns <= 0.02 * out.busy_ns
    ends = Counter(out.verdicts.values())
    assert ends["expired"] <= 0.01 * (ends["done"] + ends["expired"]), "what is accepted is in time"
    assert all(
        out.ended_ns[job.id] < (job.deadline_ns or 0) for job in jobs if out.verdicts[job.id] == "done"
    )
    assert sum(ends.values()) == len(jobs), "nobody goes without an answer"


def test_without_prediction_an_overloaded_server_serves_those_that_are_late() -> None:
    jobs = arrivals(1.5, (100,))
    for order in ("fifo", "edf"):
        out = simulate(batcher(order, in_flight=1), jobs, run_ns)
        assert done(out, jobs) < 0.05
        assert out.wasted_ns > 0.9 * out.busy_ns
    for order in ("lifo", "codel"):
        assert done(simulate(batcher(order), jobs, run_ns), jobs) > 0.55


@pytest.mark.parametrize("load", [1.1, 2.0, 3.0])
def test_a_refusal_comes_at_once_and_says_when_the_answer_would_have_come(load: float) -> None:
    jobs = arrivals(load, (100,))
    policy, told = batcher(), []
    submit = policy.submit

    def spy(job: Job, now_ns: int) -> object:
        verdict = submit(job, now_ns)
        told.append((job, now_ns, verdict))
        return verdict

    policy.submit = spy  # type: ignore[method-assign,assignment]
    out = simulate(policy, jobs, run_ns)
    refused = [(job, now_ns, v) for job, now_ns, v in told if out.verdicts[job.id] == "refused"]
    assert refused
    for job, now_ns, verdict in refused:
        assert verdict.reason == "too_late"  # type: ignore[attr-defined]
        assert now_ns == job.arrival_ns
        assert 0 < verdict.predicted_ns - now_ns < 300 * MS  # type: ignore[attr-defined]


def test_who_names_no_deadline_and_who_does_share_the_device() -> None:
    for load in (2.0, 3.0):
        jobs = arrivals(load, (100, None))
        out = simulate(batcher(), jobs, run_ns)
        fair(out, jobs)
        assert on_time(out, jobs) >= 0.95 * CAPACITY * SECONDS


def fair(out: Outcomes, jobs: Sequence[Job]) -> None:
    """Who names a deadline and who does not are served alike while they come."""
    dated = on_time(out, [job for job in jobs if job.deadline_ns is not None])
    undated = on_time(out, [job for job in jobs if job.deadline_ns is None])
    assert 1 / 1.5 <= dated / undated <= 1.5


def on_time(out: Outcomes, jobs: Sequence[Job]) -> int:
    return sum(out.verdicts[job.id] == "done" and out.ended_ns[job.id] < SECONDS * 1e9 for job in jobs)


def test_batch_jobs_give_way() -> None:
    both = arrivals(0.8, (100,)), arrivals(0.8, (None,), seed=1)
    priorities: tuple[Priority, Priority] = ("interactive", "batch")
    jobs = [
        Job(2 * j.id + at, j.kind, j.tokens, j.width, j.arrival_ns, j.deadline_ns, priority=priorities[at])
        for at, some in enumerate(both)
        for j in some
    ]
    jobs.sort(key=lambda job: job.arrival_ns)
    out = simulate(batcher(), jobs, run_ns)
    assert done(out, [job for job in jobs if job.priority == "interactive"]) > 0.97
    waits = [out.ended_ns[job.id] - job.arrival_ns for job in jobs if job.priority == "batch"]
    assert max(waits) > 1000 * MS, "they wait for what is left"


@pytest.mark.parametrize("load", [1.1, 1.5, 2.0, 3.0])
def test_no_length_is_refused_much_more_often_than_the_others(load: float) -> None:
    jobs = arrivals(load, (100, 200), long=0.3)
    out = simulate(batcher(profiles=[*SHORT, *LONG]), jobs, run_ns)
    mean = 1 - done(out, jobs)
    for tokens in (64, 256):
        refused = 1 - done(out, [job for job in jobs if job.tokens == tokens])
        assert refused <= max(0.02, 1.5 * mean) + 0.05


def test_costs_that_were_measured_wrong_are_corrected() -> None:
    """The device became three times slower, or faster, than at the warm-up."""
    for factor in (1 / 3, 3.0):
        policy = batcher(factor=factor)
        jobs = arrivals(1.5, (100,))
        out = simulate(policy, jobs, run_ns)
        late = [job for job in jobs if job.arrival_ns > 3e9]
        assert sum(out.verdicts[job.id] == "done" for job in late) >= 0.93 * CAPACITY * (SECONDS - 3)


def test_an_idle_server_tries_a_request_that_it_would_refuse() -> None:
    policy = batcher(profiles=SHORT[:1], factor=40)  # 480 ms, in truth 12
    jobs = [Job(at, "recommend", 64, 32, at * 110 * MS, (at * 110 + 100) * MS) for at in range(60)]
    out = simulate(policy, jobs, run_ns)
    verdicts = [out.verdicts[job.id] for job in jobs]
    assert verdicts[0] == "done" and "refused" in verdicts, "one is tried, not all"
    assert set(verdicts[-30:]) == {"done"}, "within three seconds"


def test_the_next_batch_is_on_its_way_before_one_ends() -> None:
    """At saturation the device waits for the host once a batch, or never."""
    jobs = [Job(at, "recommend", 64, 32, 0, None) for at in range(800)]
    spans = {}
    for in_flight in (1, 2):
        out = simulate(batcher(in_flight=in_flight), jobs, run_ns, launch_ns=MS)
        begin, end = out.runs[0][1], out.runs[-1][2]
        spans[in_flight] = out.busy_ns / (end - begin)
    assert spans[1] == pytest.approx(26 / 27, abs=1e-3)
    assert spans[2] == 1.0


def test_a_scorer_keeps_its_promise_too() -> None:
    """Parts of 128 take 4 ms, of 256 7 ms, the user 6 ms; two at a time."""
    costs = {0: 6e-3, 128: 4e-3, 256: 7e-3}
    rng = random.Random(3)
    for load in (0.8, 1.5, 3.0):
        jobs: list[Job] = []
        at_s = 0.0
        while at_s < SECONDS:
            at_s += rng.expovariate(load * 2 / 7e-3)
            deadline_ms = rng.choice((60, None))
            arrival_ns = int(at_s * 1e9)
            deadline_ns = None if deadline_ms is None else arrival_ns + deadline_ms * MS
            jobs.append(Job(len(jobs), "rank", 0, rng.choice((200, 256)), arrival_ns, deadline_ns))
        policy = Orchestrator((0, 0, 128, 128, 256, 256), costs, max_queue=1024, streams=2)
        out = simulate(policy, jobs, lambda start: round(costs[start.shape] * 1e9))  # type: ignore[index]
        dated = [job for job in jobs if job.deadline_ns is not None]
        ends = Counter(out.verdicts[job.id] for job in dated)
        assert ends["expired"] <= 0.01 * len(dated)
        assert out.wasted_ns <= 0.02 * out.busy_ns
        assert on_time(out, jobs) >= 0.95 * min(len(jobs), SECONDS * 2 / 7e-3)
        if load > 2:
            fair(out, jobs)


class Foretelling:
    """A batcher that is asked about each job before it is given it."""

    def __init__(self, inner: Batcher) -> None:
        self._inner = inner
        self.foretold = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def submit(self, job: Job, now_ns: int) -> Accepted | Rejected:
        like = msgspec.structs.replace(job, id=-1)
        refused = self._inner.refuses(like, now_ns)
        self.foretold += refused is not None
        return refused or self._inner.submit(job, now_ns)


@pytest.mark.parametrize("long", [0.0, 0.3])
def test_what_is_foretold_to_be_late_is_what_is_refused_when_it_is_submitted(long: float) -> None:
    jobs = arrivals(1.5, (100, 200, None), long=long)
    profiles = SHORT + LONG if long else SHORT
    plain = simulate(batcher(profiles=profiles), jobs, run_ns, launch_ns=MS // 2)
    asked = Foretelling(batcher(profiles=profiles))
    told = simulate(cast(Batcher, asked), jobs, run_ns, launch_ns=MS // 2)
    assert told.verdicts == plain.verdicts and told.ended_ns == plain.ended_ns
    assert told.predicted_ns == plain.predicted_ns and told.runs == plain.runs
    refused = sum(verdict == "refused" for verdict in plain.verdicts.values())
    assert asked.foretold == refused > 100


def test_nothing_is_foretold_of_an_idle_device_or_of_a_job_without_a_deadline() -> None:
    made = batcher()
    late = Job(0, "recommend", 64, 32, 0, 1)
    assert made.refuses(late, 0) is None, "one of these is tried"
    made.submit(Job(1, "recommend", 64, 32, 0, 100 * MS), 0)
    assert made.refuses(late, 0) == Rejected("too_late", made.submit(late, 0).predicted_ns)
    assert made.refuses(Job(0, "recommend", 64, 32, 0, None), 0) is None
    edf = batcher("edf")
    edf.submit(Job(1, "recommend", 64, 32, 0, 100 * MS), 0)
    assert edf.refuses(late, 0) is None, "nothing is predicted"
