# SPDX-License-Identifier: Apache-2.0
"""How often a user comes (BAT-9), and which of the cached ones comes least, on the device and on the host.

Both estimates are the number of accesses in the last window of W ns, the exponential one with weights that decay by e
every W. It needs one number a user: the estimate at time t is exp(key - t / W), so that keys compare as estimates do,
at any time, and a heap of keys stays in order while time passes.

Users that are not cached keep their estimates too, in a table of bounded size that forgets who came longest ago. Items
are as many as the catalog has, so they have an array (`ItemFrequencies`).
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from jgr.cache.entries import Name

Tier = Literal["device", "host"]
"""Where a cached user is kept."""

LISTS = 4096
"""So many requests' items are remembered, to be told of together."""


class Hotness(Protocol):
    """Estimates of users. Times in ns never go back."""

    def touch(self, user: Name, now_ns: int) -> None:
        """The user came."""

    def frequency(self, user: Name, now_ns: int) -> float:
        """Accesses in the last window; 0 for a user who never came or was forgotten."""

    def hold(self, user: Name, tier: Tier = "device") -> None:
        """The user is cached there from now on, and nowhere else, and is not forgotten."""

    def let_go(self, user: Name) -> None:
        """The user, who is cached, is so no more."""

    def forget(self, user: Name) -> None:
        """The user, who is not cached, never came."""

    def coldest(self, tier: Tier = "device") -> Iterator[Name]:
        """Who is cached there, the least frequent first, ties by name. None may be held or let go while it is read."""

    def check(self) -> None:
        """Audit; AssertionError."""


class _Held:
    """The users of one tier, and an order of their keys."""

    def __init__(self) -> None:
        self.keys: dict[Name, float] = {}
        self._heap: list[tuple[float, Name]] = []  # entries whose key is not the user's any more linger

    def put(self, user: Name, key: float) -> None:
        self.keys[user] = key
        heapq.heappush(self._heap, (key, user))
        self._sweep()

    def pop(self, user: Name) -> float:
        key = self.keys.pop(user)
        self._sweep()
        return key

    def coldest(self) -> Iterator[Name]:
        read: list[tuple[float, Name]] = []
        try:
            while self._heap:
                entry = heapq.heappop(self._heap)
                if self.keys.get(entry[1]) == entry[0] and entry not in read[-1:]:
                    read.append(entry)
                    yield entry[1]
        finally:
            for entry in read:
                heapq.heappush(self._heap, entry)

    def check(self) -> None:
        assert {(key, user) for user, key in self.keys.items()} <= set(self._heap), "a cached user is lost"
        assert len(self._heap) <= self._most(), "old entries pile up"

    def _sweep(self) -> None:
        if len(self._heap) > self._most():
            self._heap = [(key, user) for user, key in self.keys.items()]
            heapq.heapify(self._heap)

    def _most(self) -> int:
        return 2 * len(self.keys) + 64


class ExponentialWindow:
    """window_ns: W. remembered: users that are not cached and have an estimate, at most."""

    def __init__(self, window_ns: int, remembered: int) -> None:
        self._window_ns, self._remembered = window_ns, remembered
        self._others: OrderedDict[Name, float] = (
            OrderedDict()
        )  # keys of users that are not cached, last come last
        self._held: dict[Tier, _Held] = {"device": _Held(), "host": _Held()}

    def touch(self, user: Name, now_ns: int) -> None:
        now = now_ns / self._window_ns
        for held in self._held.values():
            if user in held.keys:
                held.put(user, _plus_one(held.keys[user], now))
                return
        self._others[user] = _plus_one(self._others.pop(user, -math.inf), now)
        self._forget()

    def frequency(self, user: Name, now_ns: int) -> float:
        places = (*(held.keys for held in self._held.values()), self._others)
        key = next((place[user] for place in places if user in place), -math.inf)
        return math.exp(key - now_ns / self._window_ns)

    def hold(self, user: Name, tier: Tier = "device") -> None:
        if user not in self._held[tier].keys:
            self._held[tier].put(user, self._taken(user))

    def let_go(self, user: Name) -> None:
        self._others[user] = self._taken(user)
        self._forget()

    def forget(self, user: Name) -> None:
        self._others.pop(user, None)

    def coldest(self, tier: Tier = "device") -> Iterator[Name]:
        return self._held[tier].coldest()

    def check(self) -> None:
        assert len(self._others) <= self._remembered, "more users are remembered than may be"
        places = [*(held.keys.keys() for held in self._held.values()), self._others.keys()]
        assert sum(map(len, places)) == len(set().union(*places)), "a user is in two places"
        for held in self._held.values():
            held.check()

    def _taken(self, user: Name) -> float:
        """The user's key, which stands nowhere any more."""
        for held in self._held.values():
            if user in held.keys:
                return held.pop(user)
        return self._others.pop(user, -math.inf)

    def _forget(self) -> None:
        while len(self._others) > self._remembered:
            self._others.popitem(last=False)


class ItemFrequencies:
    """How often each item of a catalog was asked for in the last window, and with what (BAT-8).

    rows: items of the catalog. window_ns: W. The estimates are exponential, as those of users are.
    """

    def __init__(self, rows: int, window_ns: int) -> None:
        self._window_ns, self._keys = window_ns, np.full(rows, -np.inf)
        self._requests = -math.inf  # the key of how many requests came
        self.user_tokens = 0.0
        """Mean tokens of a request's user, of the last requests."""
        self.own: set[tuple[int, ...]] = set()
        """The items of requests that nobody sent, which do not count."""
        self._lists: deque[npt.NDArray[np.int32]] = deque(maxlen=LISTS)

    def touch(self, rows: Sequence[int], user_tokens: int, now_ns: int) -> None:
        """A request came, for items of these rows, each once."""
        if not rows or tuple(rows) in self.own:
            return
        now, at = now_ns / self._window_ns, np.array(rows, np.int64)
        at = at[at < len(self._keys)]  # of another catalog of the same model
        self._keys[at] = np.logaddexp(self._keys[at], now)
        self._lists.append(at.astype(np.int32))
        self.user_tokens = (
            user_tokens
            if self._requests == -math.inf
            else self.user_tokens + (user_tokens - self.user_tokens) / 16
        )
        self._requests = _plus_one(self._requests, now)

    def count_on(
        self, before: ItemFrequencies, rows: npt.NDArray[np.int32], here: npt.NDArray[np.int32]
    ) -> None:
        """Go on from the counts of another catalog (BAT-12), whose `rows` [m] are the rows `here` [m] of this one."""
        self._keys[here] = np.logaddexp(self._keys[here], before._keys[rows])
        if self._requests == -math.inf:
            self.user_tokens = before.user_tokens
        self._requests = float(np.logaddexp(self._requests, before._requests))

    def requests(self, now_ns: int) -> float:
        """Requests in the last window."""
        return math.exp(self._requests - now_ns / self._window_ns)

    def lists(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """The items of the last requests that were not told of yet, one after the other, and how many each had."""
        told, self._lists = self._lists, deque(maxlen=LISTS)
        lengths = np.array([len(rows) for rows in told], np.int32)
        return np.concatenate([np.zeros(0, np.int32), *told]), lengths

    def hottest(self, most: int, now_ns: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """The rows that were asked for, at most so many, the most frequent ones, and their frequencies, [m] each."""
        seen = np.flatnonzero(self._keys > -np.inf)
        if len(seen) > most:
            seen = seen[np.argpartition(-self._keys[seen], most)[:most]]
        frequency = np.exp(self._keys[seen] - now_ns / self._window_ns)
        return seen.astype(np.int32), frequency.astype(np.float32)


class RowFrequencies:
    """How often each row of an embedding table was used of late: a count of 8 bits a row, all of which are halved once
    so many uses were counted that rows used evenly would be at 8 (as TinyLFU ages its counts)."""

    def __init__(self, rows: int) -> None:
        self._counts = np.zeros(rows, np.uint8)
        self._left = self._window = 8 * max(rows, 1)

    def touch(self, rows: npt.NDArray[np.int64]) -> None:
        """Rows [n], each once, are used by one batch."""
        counts = self._counts[rows]
        self._counts[rows] = counts + (counts < 255)
        self._left -= len(rows)
        if self._left <= 0:
            self._counts >>= 1
            self._left = self._window

    def in_use(self, rows: npt.NDArray[np.signedinteger[Any]]) -> npt.NDArray[np.bool_]:
        """Whether each of some rows [n] was used more than once of late."""
        used: npt.NDArray[np.bool_] = self._counts[rows] > 1
        return used

    def counts(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """How often each of some rows [n] was used of late, 255 at most."""
        return self._counts[rows].astype(np.int64)

    def hottest(self, among: npt.NDArray[np.bool_], most: int) -> npt.NDArray[np.int64]:
        """The rows in use for which `among` [rows] is true, at most so many, the most frequent first."""
        rows = np.flatnonzero(among & (self._counts > 1))
        if len(rows) > most:
            rows = rows[np.argpartition(-self._counts[rows].astype(np.int16), most)[:most]]
        return rows[np.argsort(-self._counts[rows].astype(np.int16), kind="stable")]


def _plus_one(key: float, now: float) -> float:
    """A key after one more access now: log(exp(key - now) + 1) + now."""
    return now + math.log1p(math.exp(key - now))
