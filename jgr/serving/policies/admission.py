# SPDX-License-Identifier: Apache-2.0
"""How much room a promise leaves: a policy accepts a job whose predicted end is before its deadline by a margin.

The margin grows with every accepted job that is late after all, and shrinks with every one that is in time, so that one
in PROMISES is late, whatever is wrong with the predictions: who comes later fills batches, runs vary, the host is busy.
One pause makes many late, which says little of the next hundred: of the jobs that had been accepted before the margin
began to grow, at most so many count.

A long job is refused sooner than a short one, because it needs more of what is left until its deadline; so under
overload only short ones would be served. Therefore a class of jobs that is refused less often than the others gets a
handicap, a share of the time until its deadline that it must leave unused besides. It grows until the class is refused
nearly as often, and shrinks where nobody is refused. What all classes have of it counts for none: it would only refuse
more of all.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

PROMISES = 250
STEP_NS = 1_000_000
"""By how much the margin grows with a job that is late."""
LEAST_NS, MOST_NS = 2_000_000, 100_000_000
"""Bounds of the margin, which also leaves half of the time until the deadline."""
AT_ONCE = 10
"""Late jobs that count of those that were accepted before the first of them was late."""
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
        self._grows_ns, self._late = -1, 0

    def room_ns(self, of: Hashable, left_ns: int) -> int:
        """What a job of a class must leave unused of the time until its deadline."""
        found = self._classes.get(of)
        margin_ns = min(self._margin_ns, left_ns // 2)
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

    def in_time(self) -> None:
        """An accepted job was in time."""
        self._margin_ns = max(LEAST_NS, self._margin_ns - STEP_NS // PROMISES)

    def late(self, accepted_ns: int, now_ns: int) -> None:
        """A job that was accepted then is late now."""
        if accepted_ns > self._grows_ns:
            self._grows_ns, self._late = now_ns, 0
        self._late += 1
        if self._late <= AT_ONCE:
            self._margin_ns = min(MOST_NS, self._margin_ns + STEP_NS)
