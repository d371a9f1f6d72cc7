# SPDX-License-Identifier: Apache-2.0
"""How much room a promise leaves: a policy accepts a job whose predicted end is before its deadline by a margin.

The margin is what all but a few of the last accepted jobs ended later than predicted, whatever is wrong with the
predictions: who comes later fills batches, runs vary, the host is busy. So all jobs tell of it, not those alone that
were late, and a pause or a slow start is forgotten after so many jobs: a margin that stays wide lets small batches
alone run, under which nothing is late that would say otherwise.

A long job is refused sooner than a short one, because it needs more of what is left until its deadline; so under
overload only short ones would be served. Therefore a class of jobs that is refused less often than the others gets a
handicap, a share of the time until its deadline that it must leave unused besides. It grows until the class is refused
nearly as often, and shrinks where nobody is refused. What all classes have of it counts for none: it would only refuse
more of all.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

JOBS, FEW = 512, 5
"""Of so many last jobs, so many may have ended later than the margin covers."""
LEAST_NS, MOST_NS = 2_000_000, 100_000_000
"""Bounds of the margin."""
SHARE = 3
"""The margin is at most this part of the time until the deadline; with more, small batches alone would fit."""
RATE = 1 / 64
"""The weight of one job in the shares of refused jobs."""
GAIN = 4
"""How fast a handicap follows from a difference of these shares."""
ALIKE = 0.95
"""A class that is refused less often than this share of the mean gets a handicap."""
MOST = 0.6
"""The largest handicap."""
MOST_CLASSES = 256


@dataclass
class _Class:
    refused: float = 0.0
    handicap: float = 0.0


class Admission:
    """The margin, and the handicaps of classes, which are the caller's; at most MOST_CLASSES are told apart."""

    def __init__(self) -> None:
        self._classes: dict[Hashable, _Class] = {}
        self._refused = 0.0
        self._least = 0.0  # of all handicaps
        self._margin_ns = LEAST_NS
        self._last_ns: deque[int] = deque()  # of the last jobs, how much later they ended than was predicted
        self._sorted_ns: list[int] = []  # the same, ascending

    def room_ns(self, of: Hashable, left_ns: int) -> int:
        """What a job of a class must leave unused of the time until its deadline."""
        found = self._classes.get(of)
        margin_ns = min(self._margin_ns, left_ns // SHARE)
        return margin_ns + (round((found.handicap - self._least) * (left_ns - margin_ns)) if found else 0)

    def decided(self, of: Hashable, refused: bool) -> None:
        """A job of the class was refused, or accepted."""
        each = self._classes.get(of)
        if each is None:
            if len(self._classes) >= MOST_CLASSES:
                return
            each = self._classes[of] = _Class()
            self._least = 0.0
        self._refused += RATE * (refused - self._refused)
        each.refused += RATE * (refused - each.refused)
        more = GAIN * RATE * (ALIKE * self._refused - each.refused) - RATE**3
        before, each.handicap = each.handicap, min(MOST, max(0.0, each.handicap + more))
        if each.handicap != before:
            self._least = min(other.handicap for other in self._classes.values())

    def ended(self, later_ns: int) -> None:
        """An accepted job ended so much later than was predicted, or earlier where that is below 0; one that was ended
        for its deadline would have been at least so late."""
        self._last_ns.append(later_ns)
        bisect.insort(self._sorted_ns, later_ns)
        if len(self._last_ns) > JOBS:
            del self._sorted_ns[bisect.bisect_left(self._sorted_ns, self._last_ns.popleft())]
        few = FEW * len(self._last_ns) // JOBS
        self._margin_ns = max(LEAST_NS, min(MOST_NS, self._sorted_ns[-1 - few]))
