# SPDX-License-Identifier: Apache-2.0
"""Whether a server that failed is asked again already. Pure: the caller gives the time."""

from __future__ import annotations

AFTER = 3
FIRST_S, MOST_S = 0.1, 1.0
"""After so many failures in a row one question in a while is asked, and that while doubles."""


class Breaker:
    """Times in seconds of any one clock. Not thread-safe."""

    def __init__(self) -> None:
        self.failed_in_row = 0
        self._pause_s = FIRST_S
        self._again_s = 0.0
        self._asking = False

    def may(self, now_s: float) -> bool:
        """Whether to ask now. A True is one question: until its end others are told False."""
        if self.failed_in_row < AFTER:
            return True
        if self._asking or now_s < self._again_s:
            return False
        self._asking = True
        return True

    def failed(self, now_s: float) -> None:
        """A question got no answer."""
        self.failed_in_row += 1
        self._asking = False
        if self.failed_in_row >= AFTER:
            self._again_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, MOST_S)

    def worked(self) -> None:
        """A question got an answer, whatever it was."""
        self.failed_in_row, self._pause_s, self._asking = 0, FIRST_S, False
