# SPDX-License-Identifier: Apache-2.0
"""In which order waiting jobs run, and which of them are not worth a run: one flag, `batching.order`.

- deadline: the earliest deadline first, among the jobs that can still finish. What cannot is refused when it comes, or
  ended while it waits, so no run is wasted on it. The others are what it is compared with:
- edf: the earliest deadline first. Under overload it serves just those that are about to be late.
- fifo, lifo: the first, or the last, come is the first served.
- codel: fifo, but who has waited for long ends, where the queue has not been empty for long (CoDel for servers, as in
  Maurer, "Fail at Scale", ACM Queue 2015).

In all of them an interactive job goes before every batch job. With `deadline`, batch jobs begin nothing for a while
after an interactive one was refused that an idle device would have done in time: else they would get the time that the
others were refused for.

A job without a deadline is taken for one that is due `patience` after it came. If there are more of them than the
device can do beside the others, the next one is due only when half of the device (FAIR_SHARE) would have done those
that wait before it: so neither kind of jobs takes more than half of the device from the other. Where the device had
time for more of them than that, nobody else wanted it: then all who come later are due later by as much, so that what
was done in a quiet hour is not held against those who wait in a busy one.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable
from typing import Literal

from jgr.serving.policies.backlog import Backlog
from jgr.serving.policies.jobs import SORTS, Job, Sort, sort_of
from jgr.serving.policies.loads import Load

Order = Literal["deadline", "edf", "fifo", "lifo", "codel"]
Key = tuple[int, int, int]
"""What orders waiting jobs: the rank of the priority, the urgency in ns, the order of submission."""

FAIR_SHARE = 0.5
"""The share of the device that jobs without a deadline have where all jobs together want more than there is."""
CODEL_INTERVAL_NS = 100_000_000
"""How long a job may wait, where the queue was empty that recently."""
CODEL_TARGET_NS = 20_000_000
"""How long a job may wait, where the queue was not."""
GIVES_WAY_NS = 250_000_000
"""So long after such a refusal batch jobs begin nothing."""


class Ordering:
    """The order of a policy's queue. patience_ns: see above."""

    def __init__(self, order: Order = "deadline", patience_ns: int = 1_000_000_000) -> None:
        self.order = order
        self.predicts = order == "deadline"
        """Whether jobs that cannot finish in time are refused and ended."""
        self._patience_ns = patience_ns
        self.line: list[tuple[int, int]] = []
        """(due_ns, order) of the jobs that wait and share, ascending."""
        self._begun_ns = 0  # when the last of them that began was due
        self._ahead_ns = 0  # how far they were done before half of the device would have done them
        self._empty_ns = 0  # when the queue was last empty
        self.way_until_ns = 0
        """Until when batch jobs begin nothing."""

    def shares(self, job: Job) -> bool:
        """Whether the job is due when its sort's share of the device would have done it; see above."""
        return self.predicts and job.deadline_ns is None and job.priority == "interactive"

    def key(self, job: Job, order: int, share_ns: int) -> Key:
        """The key of a new job. order: of its submission. share_ns: what the device needs for it among many."""
        rank = int(job.priority == "batch")
        if self.order in ("fifo", "codel"):
            return rank, 0, order
        if self.order == "lifo":
            return rank, 0, -order
        if job.deadline_ns is not None:
            return rank, job.deadline_ns + self._ahead_ns, order
        due_ns = job.arrival_ns + self._patience_ns + self._ahead_ns
        if self.shares(job):
            last_ns = self.line[-1][0] if self.line else self._begun_ns
            due_ns = max(due_ns, last_ns + round(share_ns / FAIR_SHARE))
        return rank, due_ns, order

    def refused(self, job: Job, alone_end_ns: int, now_ns: int) -> None:
        """A job was refused. alone_end_ns: when an idle device would have done it."""
        if job.priority == "interactive" and job.deadline_ns is not None and alone_end_ns <= job.deadline_ns:
            self.way_until_ns = now_ns + GIVES_WAY_NS

    def gives_way(self, now_ns: int) -> bool:
        """Whether `batch` work may not begin now, although nobody waits before it."""
        return now_ns < self.way_until_ns

    def overdue(self, key: Key, now_ns: int) -> bool:
        """Whether a job that waits was due before now."""
        return key[1] < now_ns + self._ahead_ns

    def waits(self, job: Job, key: Key) -> None:
        """A job stands in the queue from now on."""
        if self.shares(job):
            bisect.insort(self.line, key[1:])

    def waited(self, job: Job, key: Key, starts: bool, now_ns: int) -> None:
        """A job stands in the queue no more. starts: it runs now."""
        if self.shares(job):
            at = bisect.bisect_left(self.line, key[1:])
            del self.line[at]
            if starts and at == 0:  # others fill a batch, and those before them still wait
                self._begun_ns = max(self._begun_ns, key[1])
                self._ahead_ns = max(self._ahead_ns, key[1] - self._patience_ns - now_ns)

    def waits_ns(self, queued: int, now_ns: int) -> int:
        """With codel: how long a job may wait now. queued: jobs that wait."""
        if not queued:
            self._empty_ns = now_ns
        return CODEL_INTERVAL_NS if now_ns - self._empty_ns <= CODEL_INTERVAL_NS else CODEL_TARGET_NS

    def too_long_at_ns(self, oldest_ns: int) -> int:
        """With codel: when the oldest job, which came then, will have waited for too long."""
        soon_ns = max(self._empty_ns + CODEL_INTERVAL_NS, oldest_ns + CODEL_TARGET_NS)
        return min(oldest_ns + CODEL_INTERVAL_NS, soon_ns) + 1


class Queue:
    """The jobs of a policy none of whose work has started, in their order, and what the device needs for them.

    empty: makes a load of nothing. job_of: the job of an id. revision: that of the costs in use.
    """

    def __init__(
        self,
        ordering: Ordering,
        empty: Callable[[], Load],
        job_of: Callable[[int], Job],
        revision: Callable[[], int],
    ) -> None:
        self._ordering = ordering
        self.order: list[tuple[Key, int]] = []
        """The key and the id of each, ascending."""
        self.of_sort: dict[Sort, int] = dict.fromkeys(SORTS, 0)
        """How many there are of each sort."""
        self.changes = 0
        """Counts the changes, for who keeps what depends on them."""
        self._backlog = Backlog(empty, lambda place: job_of(self.order[place][1]), revision)
        self.known = 0
        """So many of the first jobs are as the backlog knows them, and take what they took."""

    def add(self, job: Job, sort: Sort, key: Key) -> None:
        at = bisect.bisect(self.order, (key, job.id))
        self.order.insert(at, (key, job.id))
        self.of_sort[sort] += 1
        self._ordering.waits(job, key)
        self._changed(at)

    def remove(self, job: Job, sort: Sort, key: Key, starts: bool, now_ns: int) -> None:
        """A job waits no more. starts: it runs now."""
        at = bisect.bisect_left(self.order, (key, job.id))
        del self.order[at]
        self.of_sort[sort] -= 1
        self._ordering.waited(job, key, starts, now_ns)
        self._changed(at)

    def backlog(self) -> Backlog:
        """The backlog of the queue as it is. It is told here alone: who asks for no forecast needs none."""
        self._backlog.changed(self.known)
        self.known = len(self.order)
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
        self.known, self.changes = min(self.known, at), self.changes + 1
