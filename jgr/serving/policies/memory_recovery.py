# SPDX-License-Identifier: Apache-2.0
"""When a burst takes the border away from what was learnt, and what happens to it then (HLEM-9).

A burst begins in the epoch whose 99th percentile is far above the usual one, and ends after some epochs near it. What
is usual is not learnt from a burst. Meanwhile embedding rows only ever give room to users: that needs no refill, and so
nothing on the link that the misses of the burst need.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from jgr.serving.policies.memory_signals import ACTIONS, Signals

FACTOR = 2.0
"""Standard deviations above the mean that are a burst."""
LEAST_SPREAD = 0.05
"""The least standard deviation, as a share of the mean: a calm hour must not make every ripple a burst."""
CALM = 0.5
"""Standard deviations above the mean below which an epoch is calm."""
RELEASE = 3
"""Calm epochs in a row that end a burst."""
LASTING = 10
"""Epochs after which a burst is no burst: what lasts is the new usual, which is learnt anew. The paper's last 3 to
5."""
WINDOW = 10
"""Epochs that the means reach back; before so many were seen nothing is a burst."""
HOT = 0.4
"""The share of requests by hot users above which users are given room."""


@dataclass
class Recovery:
    """Told of every epoch once, by `detect`."""

    bursting: bool = False
    _mean: float = field(default=0.0, init=False)
    _square: float = field(default=0.0, init=False)
    _seen: int = field(default=0, init=False)
    _calm: int = field(default=0, init=False)
    _lasted: int = field(default=0, init=False)

    def detect(self, p99_ms: float) -> bool:
        """Whether this epoch is one of a burst. What is usual is that of the epochs before it."""
        spread = self.spread_ms()
        if self.bursting:
            self._calm = self._calm + 1 if p99_ms <= self._mean + CALM * spread else 0
            self._lasted += 1
            self.bursting = self._calm < RELEASE
            if self._lasted >= LASTING:
                self.bursting, self._seen = False, 0
        elif self._seen >= WINDOW and p99_ms > self._mean + FACTOR * spread:
            self.bursting, self._calm, self._lasted = True, 0, 0
        if not self.bursting:
            self._learn(p99_ms)
        return self.bursting

    def spread_ms(self) -> float:
        """The standard deviation that is usual, with its floor."""
        return max(math.sqrt(max(0.0, self._square - self._mean**2)), LEAST_SPREAD * self._mean)

    def override(self, signals: Signals, split: float) -> float:
        """The split of the next epoch of a burst, before it is clipped."""
        return split + ACTIONS[0] if signals.hot_share > HOT else split

    def _learn(self, p99_ms: float) -> None:
        self._seen += 1
        rate = max(1.0 / self._seen, 2.0 / (WINDOW + 1))
        self._mean += rate * (p99_ms - self._mean)
        self._square += rate * (p99_ms**2 - self._square)
