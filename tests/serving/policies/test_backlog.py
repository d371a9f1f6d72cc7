# SPDX-License-Identifier: Apache-2.0
"""What is kept of a queue's load is what a walk finds, and refused jobs cost no walk."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable
from typing import Self

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jgr.serving.policies.admission import LEAST_NS
from jgr.serving.policies.backlog import STRIDE, Backlog
from jgr.serving.policies.batching import Batcher, FixedShapes, Group, Loses
from jgr.serving.policies.jobs import Accepted, Job, Profile, Rejected
from jgr.serving.policies.ordering import Ordering
from jgr.serving.policies.run_costs import RunCosts

MS = 1_000_000


def job(number: int, deadline_ms: int | None = None, tokens: int = 8) -> Job:
    return Job(number, "recommend", tokens, 1, 0, None if deadline_ms is None else deadline_ms * MS)


class Squares:
    """A load in which every place counts: the sum so far, times itself, plus the job's tokens."""

    def __init__(self) -> None:
        self.total = 0

    def add(self, job: Job, most_ns: int | None = None) -> int:
        self.total = (self.total * 31 + job.tokens) % 1_000_003
        return self.total

    def copy(self) -> Self:
        return copy.copy(self)


def walked(queue: Iterable[Job]) -> list[int]:
    load = Squares()
    return [load.add(each) for each in queue]


QUEUES = st.lists(
    st.tuples(st.sampled_from(["insert", "remove", "before", "end", "dearer"]), st.integers(0, 10**6)),
    max_size=120,
)


@given(QUEUES)
@settings(max_examples=200, deadline=None)
def test_what_is_kept_is_what_a_walk_finds(steps: list[tuple[str, int]]) -> None:
    queue = [job(n, tokens=n + 1) for n in range(3 * STRIDE)]
    revision = 0
    backlog = Backlog(Squares, queue.__getitem__, lambda: revision)
    for what, number in steps:
        at = number % (len(queue) + 1)
        if what == "insert":
            queue.insert(at, job(number, tokens=number))
            backlog.changed(at)
        elif what == "remove" and at < len(queue):
            del queue[at]
            backlog.changed(at)
        elif what == "before":
            load = backlog.before(at)
            assert load.add(job(0, tokens=7)) == walked([*queue[:at], job(0, tokens=7)])[-1]
        elif what == "end" and at < len(queue):
            assert backlog.end_ns(at) == walked(queue)[at]
        elif what == "dearer":
            revision += 1
        backlog.check()


def test_a_kept_load_that_is_wrong_is_found() -> None:
    queue = [job(n, tokens=n + 1) for n in range(5)]
    backlog = Backlog(Squares, queue.__getitem__, lambda: 0)
    backlog.before(5)
    del queue[2]
    with pytest.raises((AssertionError, IndexError)):
        backlog.check()


def test_only_a_few_jobs_are_added_for_another_forecast_of_the_same_queue() -> None:
    read: Counter[int] = Counter()
    queue = [job(n) for n in range(100)]

    def job_at(place: int) -> Job:
        read["jobs"] += 1
        return queue[place]

    backlog = Backlog(Squares, job_at, lambda: 0)
    backlog.before(100)
    assert read.pop("jobs") == 100
    for at in range(101):
        backlog.before(at)
        assert read.pop("jobs", 0) < STRIDE


class Counted(FixedShapes):
    """How often a batch was looked for."""

    looked = 0

    def group(
        self, jobs: Iterable[Job], due: bool, now_ns: int, begin_ns: int | None, loses: Loses
    ) -> Group | None:
        self.looked += 1
        return super().group(jobs, due, now_ns, begin_ns, loses)


ONE, FOUR = Profile("recommend", 1, 8, 1), Profile("recommend", 4, 8, 1)


def overloaded(costs: RunCosts, shapes: FixedShapes, *profiles: Profile, patience_ms: int = 1000) -> Batcher:
    """With a batch in flight, of one job, that ends in 10 ms."""
    made = Batcher(
        profiles,
        max_tokens=10**6,
        max_wait_ns=0,
        max_queue=1000,
        in_flight=2,
        groupings={"recommend": shapes},
        ordering=Ordering("deadline", patience_ms * MS),
        costs=costs,
    )
    made.submit(job(10**6, 1000), 0)
    assert len(made.plan(0).starts) == 1
    return made


def test_no_batch_is_looked_for_again_while_all_that_come_are_refused() -> None:
    costs = RunCosts({ONE: 0.010, FOUR: 0.016})
    shapes = Counted([ONE, FOUR], 10**6)
    batcher = overloaded(costs, shapes, ONE, FOUR)
    for number in range(3):  # not yet a full batch, so that more are waited for
        assert isinstance(batcher.submit(job(number, 200), 0), Accepted)
    assert not batcher.plan(0).starts
    looked = shapes.looked
    for number in range(100):
        assert isinstance(batcher.submit(job(100 + number, 5), number), Rejected)
        assert not batcher.plan(number).starts
        batcher.check()
    assert shapes.looked == looked
    assert isinstance(batcher.submit(job(500, 200), 200), Accepted)
    (start,) = batcher.plan(200).starts
    assert shapes.looked == looked + 1 and start.jobs == (0, 1, 2, 500)


def test_who_has_no_deadline_and_waits_between_counts_for_who_waits_behind() -> None:
    costs = RunCosts({ONE: 0.010})
    batcher = overloaded(costs, FixedShapes([ONE], 10**6), ONE, patience_ms=25)
    batcher.submit(job(1), 0)  # due after 25 ms
    batcher.submit(job(2), 0)  # due after 45 ms
    behind = batcher.submit(job(3, 46), 0)
    assert behind == Accepted(3, None, 40 * MS)
    first = batcher.submit(job(4, 22), 0)  # would end after 20 ms, and the other one after 50
    assert first == Rejected("too_late", 20 * MS + LEAST_NS, for_others=True)
    soon = batcher.submit(job(5, 19), 0)
    assert soon == Rejected("too_late", 20 * MS + LEAST_NS)
    batcher.check()
