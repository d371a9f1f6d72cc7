# SPDX-License-Identifier: Apache-2.0
"""Moves the border of the pool by a memory controller: counts an epoch's requests, decides, moves (HLEM-3 .. 9).

An epoch ends with the first request that ends after memory.epoch_s, well or not, so that one without requests moves
nothing. Counting, deciding and moving are short and run on the event loop. What takes longer, a controller's learning
and the choice of hot users, has a thread of its own; no decision is made while that runs.

A control belongs to a border, as long as that is there, and counts the requests of all engines that share it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np

from jgr.cache.border import Border
from jgr.config import MemoryConfig
from jgr.serving.policies.memory_control import Controller
from jgr.serving.policies.memory_signals import HOT_USERS, TAIL, Signals

HOUR_NS = 3600 * 10**9
MOST_USERS = 100_000
"""So many users are counted; where there are more, the half that asked least is forgotten."""


class HotUsers:
    """Requests of each user in the last half hour to hour, and who is among the hottest of them."""

    def __init__(self) -> None:
        self._now: Counter[str | int] = Counter()
        self._before: Counter[str | int] = Counter()
        self._hot: frozenset[str | int] = frozenset()
        self._since_ns = 0

    def asked(self, user: str | int) -> bool:
        """Count a request; whether its user was hot when hot users were chosen last."""
        self._now[user] += 1
        if len(self._now) > MOST_USERS:
            self._now = Counter(dict(self._now.most_common(MOST_USERS // 2)))
        return user in self._hot

    def choose(self, now_ns: int) -> None:
        """HOT_USERS of the users that were counted are hot from now on. May run beside `asked`."""
        if now_ns - self._since_ns > HOUR_NS // 2:
            self._now, self._before, self._since_ns = Counter(), self._now, now_ns
        counts = self._before + Counter(dict(self._now))  # a copy, since the other one grows meanwhile
        self._hot = frozenset(name for name, _ in counts.most_common(round(HOT_USERS * len(counts))))


class BorderControl:
    """controller: decides. border: is moved. counts: of the rows since the start, `hits` and `misses`.

    clock: in ns, the one by which requests arrive.
    """

    def __init__(
        self,
        controller: Controller,
        border: Border,
        config: MemoryConfig,
        counts: Callable[[], Mapping[str, int]],
        clock: Callable[[], int],
    ) -> None:
        self._controller, self._border, self._config = controller, border, config
        self._counts, self._clock, self._users = counts, clock, HotUsers()
        self._learning: threading.Thread | None = None
        self._begin(clock())

    def answered(self, user: str | int | None, arrival_ns: int, events: int, cached: bool) -> None:
        """A request was answered. user: None or empty: nobody's. events: of its history. cached: whether
        the user was kept."""
        now_ns = self._clock()
        self._latency_ms.append((now_ns - arrival_ns) / 1e6)
        self._events += events
        self._cached += cached
        self._ended(user, now_ns)

    def lost(self, user: str | int | None) -> None:
        """A request of a user failed, expired, or was refused since there was no time or no room: it counts as late."""
        self._lost += 1
        self._ended(user, self._clock())

    def _ended(self, user: str | int | None, now_ns: int) -> None:
        self._hot += user is not None and user != "" and self._users.asked(user)
        if now_ns - self._begun_ns >= self._config.epoch_s * 1e9:
            if self._learning is None or not self._learning.is_alive():
                self._decide()
            self._begin(now_ns)

    def signals(self) -> Signals | None:
        """The epoch so far; NaN where nothing was counted. None: no request was answered, and some were lost.

        A lost request is as late as any that is told apart, TAIL limits. What only an answer tells, whether its user
        was kept and how long the history is, is of those that were answered.
        """
        rows, answered, none = self._rows(), len(self._latency_ms), float("nan")
        if not answered:
            return None if self._lost else Signals(none, none, none, none, none, none, requests=0)
        limit_ms, requests = self._config.limit_ms, answered + self._lost
        latency_ms = np.array(self._latency_ms + [TAIL * limit_ms] * self._lost)
        hits, all_ = rows["hits"], sum(rows.values())
        return Signals(
            hot_share=self._hot / requests,
            user_hits=self._cached / answered,
            row_hits=hits / all_ if all_ else none,
            mean_events=self._events / answered,
            late=float((latency_ms > limit_ms).mean()),
            p99_ms=float(np.quantile(latency_ms, 0.99)),
            requests=requests,
        )

    def _decide(self) -> None:
        border = self._border
        split = self._controller.decide(self.signals())
        pages = min(max(round(split * border.total), border.least), border.most)
        if pages != border.wanted:
            border.set_limit(pages)
        if abs(border.wanted - split * border.total) > 1:  # it was held back, and not rounded to pages alone
            self._controller.moved(border.wanted / border.total)
        self._learning = threading.Thread(target=self._learn, name="jgr-memory", daemon=True)
        self._learning.start()

    def _learn(self) -> None:
        self._controller.learn()
        self._users.choose(self._clock())

    def _begin(self, now_ns: int) -> None:
        self._begun_ns, self._latency_ms = now_ns, list[float]()
        self._events = self._cached = self._hot = self._lost = 0
        self._rows_before = dict(self._counts())

    def _rows(self) -> dict[str, int]:
        now, before = self._counts(), self._rows_before
        return {name: now.get(name, 0) - before.get(name, 0) for name in ("hits", "misses")}
