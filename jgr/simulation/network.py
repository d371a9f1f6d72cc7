# SPDX-License-Identifier: Apache-2.0
"""Network links in virtual time: when what was sent has arrived. Time is an argument, in seconds."""

from __future__ import annotations


class TokenBucket:
    """One link that passes `rate` tokens a second, and up to `burst` tokens at once after it was idle."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        self._level, self._at = burst, 0.0

    def passed(self, tokens: float, now: float) -> float:
        """The time at which `tokens`, sent at `now` after all that was sent before, have passed.

        Calls come in order of time: `now` never goes back.
        """
        self._level = min(self._burst, self._level + (now - self._at) * self._rate) - tokens
        self._at = now
        return now + max(0.0, -self._level) / self._rate
