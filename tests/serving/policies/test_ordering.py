# SPDX-License-Identifier: Apache-2.0
"""Jobs with a deadline and jobs without one share the device, whatever was before."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from jgr.serving.policies.batching import Batcher
from jgr.serving.policies.jobs import Job, Profile, Sort, sort_of
from jgr.serving.policies.run_costs import RunCosts

ONE = Profile("recommend", 1, 8, 1)
RUN_NS, IN_TIME_NS = 10_000_000, 500_000_000


class Device:
    """A batcher of single rows, and a device that takes 10 ms for each."""

    def __init__(self) -> None:
        costs = RunCosts({ONE: RUN_NS / 1e9})
        self.batcher = Batcher([ONE], max_tokens=100, max_wait_ns=0, max_queue=2000, costs=costs)
        self.now_ns = 0
        self._ids = itertools.count()

    def submit(self, sort: Sort) -> int:
        deadline_ns = self.now_ns + IN_TIME_NS if sort == "dated" else None
        job = Job(next(self._ids), "recommend", 8, 1, self.now_ns, deadline_ns)
        assert sort_of(job) == sort
        self.batcher.submit(job, self.now_ns)
        return job.id

    def run(self, times: int, waiting: dict[Sort, int]) -> Counter[Sort]:
        """Run so often, where so many of each sort wait each time. How many of each sort ran."""
        ran: Counter[Sort] = Counter()
        for _ in range(times):
            for sort, number in waiting.items():
                for _ in range(number - self.batcher.waiting(sort)):
                    self.submit(sort)
            before = {sort: self.batcher.waiting(sort) for sort in waiting}
            (start,) = self.batcher.plan(self.now_ns).starts
            ran += Counter({sort: before[sort] - self.batcher.waiting(sort) for sort in waiting})
            self.now_ns += RUN_NS
            self.batcher.commit(start.run, "well", self.now_ns)
        self.batcher.check()
        return ran


BUSY: dict[Sort, int] = {"dated": 4, "undated": 200}
"""More without a deadline than could be done within their patience."""


@pytest.mark.parametrize("waiting", [0, 1, 4, 300])
def test_what_was_done_without_rivals_is_not_held_against_those_who_come_later(waiting: int) -> None:
    device = Device()
    device.run(200, BUSY)
    if waiting:
        assert device.run(3000, {"undated": waiting})["undated"] > 2990
    ran = device.run(1000, BUSY)
    assert 400 < ran["undated"] < 600, "each has its half"


def test_those_who_left_take_no_time_from_those_who_stay() -> None:
    device = Device()
    for job_id in [device.submit("undated") for _ in range(1500)]:
        assert device.batcher.cancel(job_id, 0)
    ran = device.run(1000, BUSY)
    assert 400 < ran["undated"] < 550, "each has its half, once those without a deadline are as urgent"


def test_who_comes_later_is_not_before_who_has_waited() -> None:
    device = Device()
    first = [device.submit("undated") for _ in range(50)]
    device.run(40, {"undated": 0})
    last = device.submit("undated")
    order = []
    while device.batcher.queued:
        (start,) = device.batcher.plan(device.now_ns).starts
        order += start.jobs
        device.batcher.commit(start.run, "well", device.now_ns)
    assert order == [*first[40:], last]
