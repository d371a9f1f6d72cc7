# SPDX-License-Identifier: Apache-2.0
"""What a run of each compiled shape takes: measured at warm-up, corrected by every run that ends well.

A run's time is the time for which it kept its lane from the next one: from its start, or the end of the run before it
where that was later, until its end was known. So it holds the host's part as far as nothing hides it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Any

RATE = 1 / 8
"""The weight of a new time in the averages."""
TRIED = 1 / 2
"""The same of a run that was tried although it seemed too dear: there is nothing else to learn from."""
COMMON = 3 / 4
"""The part of an error that is put down to the machine, for all shapes alike; the rest is the shape's own. A shape that
is not run while the machine becomes slower, or because it seemed dear, is corrected by those that are."""
MOST = 2.0
"""The largest relative error that counts: a pause of the host must not refuse the next second's requests."""


class RunCosts:
    """seconds: measured at warm-up, by shape. A shape that was not measured costs nothing until its first run; where
    none was, nothing ever does."""

    def __init__(self, seconds: Mapping[Any, float] | None = None) -> None:
        self._own: dict[Hashable, float] = {shape: s * 1e9 for shape, s in (seconds or {}).items()}
        self._machine = 1.0
        self._spread: dict[Hashable, float] = {}
        self.revision = 0
        """Counts the corrections, for who keeps what depends on them."""

    def ns(self, shape: Hashable) -> int:
        return round(self._own.get(shape, 0) * self._machine)

    def spread_ns(self, shape: Hashable) -> int:
        """The mean distance of a run's time from what was predicted."""
        return round(self._spread.get(shape, 0))

    def observe(self, shape: Hashable, took_ns: int, tried: bool = False) -> None:
        """A run ended well after so long. tried: it was a trial."""
        if not self._own:
            return
        self.revision += 1
        took_ns = max(1, took_ns)  # of nothing but such runs, costs would become 0, which no factor corrects
        predicted = self._own.get(shape, 0) * self._machine
        if not predicted:
            self._own[shape] = took_ns / self._machine
            return
        error = min(took_ns / predicted - 1, MOST)
        spread = self._spread.get(shape, 0.0)
        self._spread[shape] = spread + RATE * (abs(error) * predicted - spread)
        # Powers, since of products such as 1 + RATE * error the common one drifts away from the shape's own.
        rate = TRIED if tried else RATE
        self._machine *= math.exp(rate * COMMON * error)
        self._own[shape] *= math.exp(rate * (1 - COMMON) * error)


GOOD = 1.5
"""A shape that costs up to so many times the least for each job is good enough to keep a promise with."""


class Cover:
    """The least time in which any number of jobs of one size are run, in batches of some sizes.

    batches: (jobs, ns) of each shape that takes such jobs.
    """

    def __init__(self, batches: list[tuple[int, int]]) -> None:
        self._bulk, self._bulk_ns = min(batches, key=lambda each: (each[1] / each[0], -each[0]))
        most_ns = GOOD * self._bulk_ns / self._bulk
        self._good = [(jobs, ns) for jobs, ns in batches if ns / jobs <= most_ns]
        self._full_ns: dict[int, int] = {}
        most = max(jobs for jobs, _ in batches)
        self._table = [0]
        for n in range(1, 2 * most + 1):
            self._table.append(min(ns + self._table[max(0, n - jobs)] for jobs, ns in batches))

    def full_ns(self, jobs: int) -> int:
        """The same if all batches are full, of a shape that is nearly the cheapest for each job."""
        found = self._full_ns.get(jobs)
        if found is None:
            found = self._full_ns[jobs] = min([-(-jobs // size) * ns for size, ns in self._good])
        return found

    def ns(self, jobs: int) -> int:
        beyond = jobs - len(self._table) + 1
        if beyond <= 0:
            return self._table[jobs]
        whole = -(-beyond // self._bulk)
        return self._table[jobs - whole * self._bulk] + whole * self._bulk_ns
