# SPDX-License-Identifier: Apache-2.0
"""Requests take turns on the event loop.

Translating a request takes the loop up to a millisecond. If hundreds that came at once were translated in one turn of
it, then all that time no run would be started and no answer sent, and answers that the device had would be late. So a
turn translates as many as take some two milliseconds, and the others wait: in two lines, those with a deadline and
those without one, which go on alternately, and in a third that goes on while both are empty. In each, first come, first
served.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from jgr.serving.policies.jobs import SORTS, Sort

TURN_NS = 2_000_000
"""For so long one turn of the loop may translate requests."""
LEAST, MOST = 4, 16
"""Bounds of how many these are. More at once make larger batches, and a turn costs something by itself."""
RATE = 1 / 8
"""The weight of one turn in the mean time of a request."""


class Inside:
    """Counts who is inside its `with` blocks, of one event loop."""

    def __init__(self) -> None:
        self._count, self._left = 0, asyncio.Event()

    def __enter__(self) -> None:
        self._count += 1

    def __exit__(self, *raised: object) -> None:
        self._count -= 1
        if not self._count:
            self._left.set()

    async def over(self) -> None:
        """Wait until nobody is inside."""
        while self._count:
            self._left.clear()
            await self._left.wait()


class Turns:
    """All methods are called on one event loop. clock: nanoseconds that never go back."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._lines: dict[Sort, OrderedDict[asyncio.Future[None], None]]
        self._lines = {sort: OrderedDict() for sort in SORTS}
        self.waiting = 0
        """Requests in all lines."""
        self._coming = Inside()
        self._last: Sort = "undated"  # of the two lines that go on alternately, the one that went on last
        self._begun, self._began_ns = 0, 0  # how many requests this turn has begun, and when it began
        self._most = LEAST  # how many it may begin
        self._each_ns = TURN_NS / LEAST  # the mean time of a turn for each request that it begins

    def ahead(self, sort: Sort) -> int:
        """Requests of this sort that wait."""
        return len(self._lines[sort])

    def wait_ns(self, sort: Sort) -> int:
        """How long a request of this sort would wait now."""
        if not self.waiting:
            return 0
        ahead = 1 + len(self._lines[sort])
        if sort == "batch":
            ahead = 1 + self.waiting
        elif self._lines["undated" if sort == "dated" else "dated"]:
            ahead *= 2
        return round(ahead * self._each_ns)

    def coming(self) -> Inside:
        """Around all that a request waits for before its turn has come, and its turn."""
        return self._coming

    async def over(self) -> None:
        """Wait until all that are coming have had their turns, and have gone on."""
        await self._coming.over()

    async def take(self, sort: Sort) -> None:
        """Wait for one's turn."""
        if self._begun == 0:
            self._began_ns = self._clock()
            asyncio.get_running_loop().call_soon(self._next)
        if self._begun < self._most and not self.waiting:
            self._begun += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._lines[sort][turn] = None
        self.waiting += 1
        try:
            await turn
        finally:  # whoever leaves a line that stands still must not stay in it
            if turn in self._lines[sort]:
                del self._lines[sort][turn]
                self.waiting -= 1

    def _next(self) -> None:
        now_ns = self._clock()
        self._each_ns += RATE * ((now_ns - self._began_ns) / self._begun - self._each_ns)
        self._most = min(MOST, max(LEAST, int(TURN_NS / max(1, self._each_ns))))
        self._began_ns, self._begun = now_ns, 0
        while self._begun < self._most and self.waiting:
            turn, _ = self._line().popitem(last=False)
            self.waiting -= 1
            if not turn.done():  # whoever waited may have been cancelled
                turn.set_result(None)
                self._begun += 1
        if self._begun:
            asyncio.get_running_loop().call_soon(self._next)

    def _line(self) -> OrderedDict[asyncio.Future[None], None]:
        other: Sort = "undated" if self._last == "dated" else "dated"
        for sort in (other, self._last):
            if self._lines[sort]:
                self._last = sort
                return self._lines[sort]
        return self._lines["batch"]
