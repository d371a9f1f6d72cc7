# SPDX-License-Identifier: Apache-2.0
"""What jobs that wait take of the device, by how batches are made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, Self

from jgr.serving.policies.jobs import Job, Kind
from jgr.serving.policies.run_costs import Cover


class Load(Protocol):
    """Work that waits for the device, in the order of `add`."""

    def add(self, job: Job, most_ns: int | None = None) -> int:
        """How long the device needs, in ns, until this job is done too. most_ns: it is left out if that is more."""

    def copy(self) -> Self:
        """The same work, to which other jobs can be added."""


class ShareLoad:
    """Jobs that wait, each with its share of full batches; the last one's batch is run whole.

    share_ns: what a job takes of the device where many wait. alone_ns: what it takes alone.
    """

    def __init__(self, share_ns: Callable[[Job], int], alone_ns: Callable[[Job], int]) -> None:
        self._share_ns, self._alone_ns = share_ns, alone_ns
        self._total_ns = 0

    def add(self, job: Job, most_ns: int | None = None) -> int:
        share_ns = self._share_ns(job)
        end_ns = self._total_ns + max(share_ns, self._alone_ns(job))
        if most_ns is None or end_ns <= most_ns:
            self._total_ns += share_ns
        return end_ns

    def copy(self) -> Self:
        other = type(self)(self._share_ns, self._alone_ns)
        other._total_ns = self._total_ns
        return other


Class = tuple[int, int]


class ClassLoad:
    """Jobs that wait, as if each class had batches of its own. A job's own batch is full when it runs: who comes later
    will fill it.

    class_of: the class of a job. cover: what any number of jobs of a class takes. full: see Grouping.load.
    """

    def __init__(self, class_of: Callable[[Job], Class], cover: Callable[[Class], Cover], full: bool) -> None:
        self._class_of, self._cover, self._full = class_of, cover, full
        self._jobs: dict[Class, tuple[Cover, int, int]] = {}  # of each class: how many, and what they take
        self._total_ns = 0

    def add(self, job: Job, most_ns: int | None = None) -> int:
        of = self._class_of(job)
        cover, number, before_ns = self._jobs.get(of) or (self._cover(of), 0, 0)
        after_ns = cover.ns(number + 1)
        own_ns = cover.full_ns(number + 1) if self._total_ns or self._full else after_ns
        end_ns = self._total_ns - before_ns + own_ns
        if most_ns is None or end_ns <= most_ns:
            self._jobs[of] = cover, number + 1, after_ns
            self._total_ns += after_ns - before_ns
        return end_ns

    def copy(self) -> Self:
        other = type(self)(self._class_of, self._cover, self._full)
        other._jobs, other._total_ns = self._jobs.copy(), self._total_ns
        return other


class KindsLoad:
    """Jobs that wait, of all kinds: one batch has jobs of one."""

    def __init__(self, loads: Mapping[Kind, Load]) -> None:
        self._loads = loads
        self._ns, self._total_ns = dict.fromkeys(loads, 0), 0

    def add(self, job: Job, most_ns: int | None = None) -> int:
        others_ns = self._total_ns - self._ns[job.kind]
        ns = self._loads[job.kind].add(job, None if most_ns is None else most_ns - others_ns)
        if most_ns is None or others_ns + ns <= most_ns:
            self._ns[job.kind], self._total_ns = ns, others_ns + ns
        return others_ns + ns

    def copy(self) -> Self:
        other = type(self)({kind: load.copy() for kind, load in self._loads.items()})
        other._ns, other._total_ns = self._ns.copy(), self._total_ns
        return other
