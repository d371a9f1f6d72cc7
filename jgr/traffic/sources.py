# SPDX-License-Identifier: Apache-2.0
"""Where a load comes from: a process with a mix, a log's arrivals with a mix, or a trace with its own requests.

The one idea: a source makes a schedule for any rate, so that a run, a sweep and a search for the capacity are the same
thing done once or many times. `number` counts the schedules of one measurement: each is drawn anew, and all repeat with
the seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jgr.traffic.arrivals import Process, replayed
from jgr.traffic.schedule import Float64, LoadError, Mix, Request, Schedule, draw

DEFAULT_RATE = 10.0
DEFAULT_DURATION_S = 10.0


class Source(Protocol):
    """Makes schedules."""

    def longest_s(self, rate: float) -> float:
        """How many seconds of this rate stay within the bound on requests."""

    def schedule(self, rate: float | None, duration_s: float | None, number: int) -> Schedule:
        """Requests at a mean rate per second, in [0, duration_s). None: the source's own. Raises LoadError."""


@dataclass(frozen=True, eq=False)
class ProcessSource:
    """Arrivals that are drawn, with requests of a mix."""

    process: Process
    mix: Mix
    seed: int
    max_requests: int

    def longest_s(self, rate: float) -> float:
        return self.max_requests / (rate * self.process.mean_factor)

    def schedule(self, rate: float | None, duration_s: float | None, number: int) -> Schedule:
        rate = DEFAULT_RATE if rate is None else rate
        duration_s = DEFAULT_DURATION_S if duration_s is None else duration_s
        expected = rate * self.process.mean_factor * duration_s
        if expected > self.max_requests * (1 + 1e-9):
            raise LoadError(
                f"--rate times --duration is {expected:.0f} requests; --max_requests is {self.max_requests}"
            )
        rng = np.random.default_rng((self.seed, number))
        return draw(self.process.times(rng, rate, duration_s), duration_s, self.mix, rng)


@dataclass(frozen=True, eq=False)
class LogSource:
    """Arrivals of a log, times_s [n] ascending seconds, with requests of a mix."""

    times_s: Float64
    mix: Mix
    seed: int
    max_requests: int

    def longest_s(self, rate: float) -> float:
        return self.max_requests / rate

    def schedule(self, rate: float | None, duration_s: float | None, number: int) -> Schedule:
        at_s, length_s = replayed(self.times_s, rate, duration_s, self.max_requests)
        return draw(at_s, length_s, self.mix, np.random.default_rng((self.seed, number)))


@dataclass(frozen=True, eq=False)
class TraceSource:
    """A trace: times_s [n] ascending seconds, and the request of each."""

    times_s: Float64
    requests: Sequence[Request]
    max_requests: int

    def longest_s(self, rate: float) -> float:
        return self.max_requests / rate

    def schedule(self, rate: float | None, duration_s: float | None, number: int) -> Schedule:
        if not self.requests:
            return Schedule(self.times_s, np.zeros(0, np.int32), (), 0.0)
        at_s, length_s = replayed(self.times_s, rate, duration_s, self.max_requests)
        return Schedule(at_s, np.arange(len(at_s), dtype=np.int32), self.requests, length_s)
