# SPDX-License-Identifier: Apache-2.0
"""How many requests a fleet's door lets in at a time: as many as do not make each other wait on their way.

The one idea: it is TCP's window. Each answer says whether its request was held up between the processes of the fleet,
apart from its work; then fewer are let in, and otherwise one more after each time that all of them were answered. Who
is not let in is refused at once, which costs a small part of a request that is late in the end. It begins with as many
as a burst may have, and goes back there where nobody is held up, or nothing was told for long.
"""

from __future__ import annotations

LEAST, FIRST, MOST = 2.0, 64.0, 4096.0
HALF, LESS = 0.5, 0.875
"""What is left of the window when requests were held up: half, until a smaller one has held nobody up, and later less
is taken away."""
HELD_NS = 30_000_000
"""On its way a request takes some milliseconds, whatever its deadline. What is shorter than this holds nobody up."""
FORGOTTEN_NS = 5_000_000_000
"""After so long without an answer that tells, a small window begins anew: it knows nothing of what is there now."""
SHARE = 0.25
"""Beyond this part of its deadline a request was held up."""


def held_up(way_ns: float, deadline_ns: float) -> bool:
    """Whether a request with this deadline was held up, which was so long on its way there and back."""
    return way_ns > max(HELD_NS, SHARE * deadline_ns)


class Window:
    """Not thread-safe. Times in ns of any one clock."""

    def __init__(self) -> None:
        self.size, self.inside = FIRST, 0
        self._less_since_ns, self._left, self._told_ns = 0, HALF, 0

    def enter(self, now_ns: int) -> bool:
        """Let a request in, which `leave` ends; False: there are too many."""
        if now_ns - self._told_ns > FORGOTTEN_NS:
            self.size = max(self.size, FIRST)
        if self.inside >= int(self.size):
            return False
        self.inside += 1
        return True

    def leave(self) -> None:
        self.inside -= 1

    def answered(self, held_up: bool, came_ns: int, now_ns: int) -> None:
        """A request that came then has its answer, and was held up or was not. Those that were let in before the window
        became smaller say nothing of the smaller one."""
        self._told_ns = now_ns
        if held_up and came_ns >= self._less_since_ns:
            self.size, self._less_since_ns = max(LEAST, self.size * self._left), now_ns
        elif not held_up:
            if came_ns >= self._less_since_ns:
                self._left = LESS if self.size < FIRST else HALF
            if (
                self.size < FIRST or self.inside >= self.size / 2
            ):  # else it is not the window that keeps them few
                self.size = min(MOST, self.size + 1 / self.size)
