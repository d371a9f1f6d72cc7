# SPDX-License-Identifier: Apache-2.0
"""How much one caller may ask for: a token bucket for the rate, a share of each queue, and a number of connections.

All are pure and of bounded size. A bucket is one number, the time at which it is full again: a token that is taken
moves it on by the time that one token needs, and it is never in the past.
"""

from __future__ import annotations

NS_PER_S = 1_000_000_000


class Bucket:
    """Fills by `rate` tokens a second, and holds at most `burst`; it begins full. rate: above 0. burst: at least 1."""

    def __init__(self, rate: float, burst: int) -> None:
        self._token_ns = max(1, round(NS_PER_S / rate))
        self._spare_ns = self._token_ns * (burst - 1)
        self._full_ns = 0

    def take(self, now_ns: int) -> int:
        """Take a token: 0. Where there is none, nothing is taken: the nanoseconds, above 0, until there is one."""
        full_ns = max(self._full_ns, now_ns)
        wait_ns = full_ns - now_ns - self._spare_ns
        if wait_ns > 0:
            return wait_ns
        self._full_ns = full_ns + self._token_ns
        return 0


class Share:
    """Requests that one caller holds in each queue: at most the share of the queue's size, and one in any case.

    share: above 0, at most 1. There is a number for each queue that was ever entered.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._held: dict[str, int] = {}

    def change(self, share: float) -> None:
        """Have another share from now on. What is held stays held, also where it is more."""
        self._share = share

    def enter(self, queue: str, size: int) -> bool:
        """Hold one more place of the queue, which has so many; False where the share is used up."""
        held = self._held.get(queue, 0)
        if held >= max(1, int(self._share * size)):
            return False
        self._held[queue] = held + 1
        return True

    def leave(self, queue: str) -> None:
        """Give a place back that was entered."""
        assert self._held[queue] > 0, "nothing is held"
        self._held[queue] -= 1


class Places:
    """At most so many of something at a time, such as connections. most: at least 1."""

    def __init__(self, most: int) -> None:
        self._most, self._held = most, 0

    def change(self, most: int) -> None:
        """Have another number from now on. What is held stays held, also where it is more."""
        self._most = most

    def enter(self) -> bool:
        """Hold one more; False where all are held."""
        if self._held >= self._most:
            return False
        self._held += 1
        return True

    def leave(self) -> None:
        """Give one back that was entered."""
        assert self._held > 0, "nothing is held"
        self._held -= 1
