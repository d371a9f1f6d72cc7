# SPDX-License-Identifier: Apache-2.0
"""What a policy remembers of a job that has not ended, and of a run that has not come back."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from jgr.serving.policies.jobs import Event, Job, Start, State, Work
from jgr.serving.policies.ordering import Key


@dataclass
class Live:
    """A job that has not ended. key: its place among those that wait. requeued: it was started in vain.

    latest_ns: when its first run must start for it to be in time; None: it is not ended before its deadline, which it
    was not promised to meet. idle_until_ns: so long the device may wait for company, whoever is first, and keep that
    promise: for half of what was left beside all that was to run before it.
    """

    job: Job
    key: Key
    state: State = "new"
    requeued: bool = False
    latest_ns: int | None = None
    accepted_ns: int = 0
    idle_until_ns: int = 0


@dataclass(frozen=True)
class Flight:
    """A run that was started at `at_ns` and has not come back. cost: the name of its time in the costs."""

    start: Start
    at_ns: int
    cost: Hashable


Span = tuple[int, int]
"""When a lane began a run and when it ended it, in ns."""


L = TypeVar("L", bound=Live)


class Returned(NamedTuple, Generic[L]):
    """A live job whose work came back, and what becomes of the job."""

    entry: L
    work: Work
    event: Event
