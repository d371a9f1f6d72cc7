# SPDX-License-Identifier: Apache-2.0
"""What one run of requests at a rate says of a P99 limit, and what several say together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from jgr.traffic.measures import quantile, share_bounds
from jgr.traffic.schedule import Float64

SHARE, CONFIDENCE = 0.99, 0.95
LATE_CLIENT_S = 0.01
"""A probe is limited by the client where 1 % of its requests went out later than this."""


class Probe(NamedTuple):
    """A rate that was tried. latencies_s: [n] ascending, infinite for what was not answered. late_s: the P99 of how
    late the client was; waited: requests that waited for a connection."""

    rate: float
    latencies_s: Float64
    late_s: float = 0.0
    waited: int = 0

    @property
    def p99_s(self) -> float:
        return quantile(self.latencies_s, SHARE)

    @property
    def client_limited(self) -> bool:
        return self.late_s > LATE_CLIENT_S or self.waited > 0

    def bounds(self, limit_s: float) -> tuple[float, float]:
        """Between which the share in time is, each end with the confidence."""
        return share_bounds(int((self.latencies_s <= limit_s).sum()), len(self.latencies_s), CONFIDENCE)

    def shows(self, limit_s: float) -> bool:
        """Whether the limit holds, with confidence."""
        return self.bounds(limit_s)[0] >= SHARE

    def refutes(self, limit_s: float) -> bool:
        """Whether the limit does not hold, with confidence."""
        return self.bounds(limit_s)[1] < SHARE


class Bracket(NamedTuple):
    """The rates of one limit. held: the highest rate that held, 0 where none did; failed: the lowest above it that did
    not, infinite where none failed. shown, refuted: the same with confidence."""

    held: float
    failed: float
    shown: float
    refuted: float

    @property
    def ratio(self) -> float:
        return self.failed / self.held if self.held else math.inf


def bracket(probes: Sequence[Probe], limit_s: float) -> Bracket:
    """Noise makes answers late and never early: a rate that held is believed, whatever a lower one showed."""
    held = max((p.rate for p in probes if p.p99_s <= limit_s), default=0.0)
    shown = max((p.rate for p in probes if p.shows(limit_s)), default=0.0)
    failed = min((p.rate for p in probes if p.rate > held), default=math.inf)
    refuted = min((p.rate for p in probes if p.rate > held and p.refutes(limit_s)), default=math.inf)
    return Bracket(held, failed, shown, refuted)
