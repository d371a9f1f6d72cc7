# SPDX-License-Identifier: Apache-2.0
"""How fast pages that embeddings got may be filled in the background: with what critical misses leave (HLEM-11).

A token bucket. Its rate is the link's speed times TARGET, less the bytes a second that misses take, which are a mean
with weights that decay; so a burst of misses stops the refill, and the end of it lets the refill go on. Pure: time is
an argument.
"""

from __future__ import annotations

import math

TARGET = 0.8
"""The share of the link that refill and misses take together, at most."""
DECAY_NS = 200_000_000
BURST_S = 0.05
"""The bucket holds what the link carries in so long."""


STEP_BYTES, STEP_S = 1 << 20, 0.001
"""One copy of the refill is no larger, and takes the link no longer: a critical miss may have to wait for it."""


class RefillBudget:
    """bytes_per_s: the link's speed; 0: nothing is throttled."""

    def __init__(self, bytes_per_s: float) -> None:
        self._link = bytes_per_s
        self._misses, self._tokens, self._last_ns = 0.0, 0.0, 0

    @property
    def step(self) -> int:
        """The most bytes that one copy has."""
        return min(STEP_BYTES, int(self._link * STEP_S)) if self._link else STEP_BYTES

    def missed(self, count: int, now_ns: int) -> None:
        """Critical misses took so many bytes."""
        self._advance(now_ns)
        self._misses += count / (DECAY_NS / 1e9)

    def take(self, wanted: int, now_ns: int) -> int:
        """How many of the wanted bytes may be copied now."""
        if not self._link:
            return wanted
        self._advance(now_ns)
        given = max(0, min(wanted, int(self._tokens)))
        self._tokens -= given
        return given

    def give_back(self, count: int) -> None:
        """So many of the bytes that were taken are not copied."""
        self._tokens += count

    def _advance(self, now_ns: int) -> None:
        passed_s = max(0, now_ns - self._last_ns) / 1e9
        self._last_ns = max(now_ns, self._last_ns)
        self._misses *= math.exp(-passed_s * 1e9 / DECAY_NS)
        rate = max(0.0, self._link * TARGET - self._misses)
        self._tokens = min(self._tokens + rate * passed_s, self._link * BURST_S)
