# SPDX-License-Identifier: Apache-2.0
"""What jobs that wait take, where batches are packed rows of tokens."""

from __future__ import annotations

from typing import Protocol

from jgr.serving.policies.jobs import Job


class Shares(Protocol):
    """What a job takes of the device; see Grouping."""

    def share_ns(self, job: Job) -> int: ...

    def alone_ns(self, job: Job) -> int: ...


class TokenLoad:
    """Jobs that wait, each with its share of full batches; the last one's batch is run whole."""

    def __init__(self, scheduler: Shares) -> None:
        self._scheduler = scheduler
        self._total_ns = 0

    def add(self, job: Job, most_ns: int | None = None) -> int:
        share_ns = self._scheduler.share_ns(job)
        end_ns = self._total_ns + max(share_ns, self._scheduler.alone_ns(job))
        if most_ns is None or end_ns <= most_ns:
            self._total_ns += share_ns
        return end_ns
