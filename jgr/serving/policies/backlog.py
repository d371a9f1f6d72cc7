# SPDX-License-Identifier: Apache-2.0
"""What the device needs for the jobs that wait, one after the other, as it is read by the forecast of a new job.

It is kept from one change of the queue to the next. Most jobs of an overload are refused, which changes nothing: then a
forecast costs the same however many wait.
"""

from __future__ import annotations

from collections.abc import Callable

from jgr.serving.policies.jobs import Job
from jgr.serving.policies.loads import Load

STRIDE = 8
"""The load is kept at every so many places of the queue; between two of them jobs are added anew."""


class Backlog:
    """empty: makes a load of nothing. job_at: the job at a place of the queue. revision: that of the costs in use."""

    def __init__(
        self, empty: Callable[[], Load], job_at: Callable[[int], Job], revision: Callable[[], int]
    ) -> None:
        self._empty, self._job_at, self._revision_now = empty, job_at, revision
        self._revision = -1
        self._ends_ns: list[int] = []  # of the first jobs, as far as anybody asked
        self._marks: list[Load] = []  # the load of the first 0, STRIDE, 2 * STRIDE, ... of these
        self._all: Load | None = None  # that of all of these

    def before(self, at: int) -> Load:
        """The load of the first jobs of the queue, so many; the caller's own."""
        whole = self._walk(at)
        if at == len(self._ends_ns):
            return whole.copy()
        load = self._marks[at // STRIDE].copy()
        for place in range(at - at % STRIDE, at):
            load.add(self._job_at(place))
        return load

    def end_ns(self, at: int) -> int:
        """How long the device needs until the job at that place is done too."""
        self._walk(at + 1)
        return self._ends_ns[at]

    def changed(self, at: int) -> None:
        """The jobs from that place on are others than before, or take something else."""
        if at < len(self._ends_ns):
            mark = at // STRIDE
            del self._marks[mark + 1 :], self._ends_ns[mark * STRIDE :]
            self._all = self._marks[mark].copy()

    def check(self) -> None:
        """Audit: what is kept is what a walk finds now; AssertionError."""
        if self._all is not None and self._revision == self._revision_now():
            fresh = self._empty()
            walked = [fresh.add(self._job_at(place)) for place in range(len(self._ends_ns))]
            assert walked == self._ends_ns, "a kept backlog is not that of the queue"

    def _walk(self, to: int) -> Load:
        """Go on to that place at least; the load of all jobs before the one that was reached."""
        whole, revision = self._all, self._revision_now()
        if whole is None or revision != self._revision:
            whole, self._ends_ns, self._revision = self._empty(), [], revision
            self._all, self._marks = whole, [whole.copy()]
        for place in range(len(self._ends_ns), to):
            self._ends_ns.append(whole.add(self._job_at(place)))
            if len(self._ends_ns) % STRIDE == 0:
                self._marks.append(whole.copy())
        return whole
