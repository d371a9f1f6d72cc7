# SPDX-License-Identifier: Apache-2.0
"""A training that ends by the clock: train.minutes.

How many steps a machine takes in a minute is not known before, and a learning rate that is cut off before it came down
leaves a worse model. So the schedule follows the share of the minutes that is gone, or of the steps if that is larger.
"""

from __future__ import annotations

import time
from collections.abc import Callable

COMPILING = 32
"""So many steps are asked for before the time of the schedule begins: batches have a few widths, and the first of each
waits for the compiler."""


class Clock:
    """minutes: from now on, above 0. steps: the end by steps. clock: seconds that never go back."""

    def __init__(self, minutes: float, steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._steps, self._clock = steps, clock
        self._since = clock()
        self._end = self._since + 60 * minutes
        self._asked = 0

    def place(self, done: int) -> int:
        """The place in the schedule, in steps, of the step that follows `done` steps: at least `done`."""
        now = self._clock()
        if self._asked < COMPILING:
            self._asked += 1
            self._since = now
        left = self._end - self._since
        share = 1.0 if left <= 0 else (now - self._since) / left
        return max(done, min(int(share * self._steps), self._steps))

    @property
    def over(self) -> bool:
        """Whether the minutes are over."""
        return self._clock() >= self._end
