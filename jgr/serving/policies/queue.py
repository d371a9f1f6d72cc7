# SPDX-License-Identifier: Apache-2.0
"""The jobs of a policy none of whose work has started, in their order, and what the device needs for them."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable

from jgr.serving.policies.backlog import Backlog
from jgr.serving.policies.jobs import SORTS, Job, Sort, sort_of
from jgr.serving.policies.loads import Load
from jgr.serving.policies.ordering import Key


class Queue:
    """empty: makes a load of nothing. job_of: the job of an id. revision: that of the costs in use."""

    def __init__(
        self, empty: Callable[[], Load], job_of: Callable[[int], Job], revision: Callable[[], int]
    ) -> None:
        self.order: list[tuple[Key, int]] = []
        """The key and the id of each, ascending."""
        self.of_sort: dict[Sort, int] = dict.fromkeys(SORTS, 0)
        """How many there are of each sort."""
        self.changes = 0
        """Counts the changes, for who keeps what depends on them."""
        self._backlog = Backlog(empty, lambda place: job_of(self.order[place][1]), revision)
        self._same = 0  # so many of the first jobs are those that the backlog knows

    def add(self, job: Job, key: Key) -> None:
        at = bisect.bisect(self.order, (key, job.id))
        self.order.insert(at, (key, job.id))
        self.of_sort[sort_of(job)] += 1
        self._changed(at)

    def remove(self, job: Job, key: Key) -> None:
        at = bisect.bisect_left(self.order, (key, job.id))
        del self.order[at]
        self.of_sort[sort_of(job)] -= 1
        self._changed(at)

    def relearn(self) -> None:
        """What jobs take may be other than before."""
        self._same = 0

    def backlog(self) -> Backlog:
        """The backlog of the queue as it is. It is told here alone: who asks for no forecast needs none."""
        self._backlog.changed(self._same)
        self._same = len(self.order)
        return self._backlog

    def check(self, jobs: Iterable[tuple[Key, Job]]) -> None:
        """Audit: these are the jobs that wait; AssertionError."""
        jobs = list(jobs)
        assert sorted((key, job.id) for key, job in jobs) == self.order, "the queue and the states disagree"
        for sort in SORTS:
            of = sum(sort_of(job) == sort for _, job in jobs)
            assert of == self.of_sort[sort], "queued jobs are miscounted"
        self.backlog().check()

    def _changed(self, at: int) -> None:
        self._same, self.changes = min(self._same, at), self.changes + 1
