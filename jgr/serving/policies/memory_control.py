# SPDX-License-Identifier: Apache-2.0
"""Where the border between embedding rows and kept users should stand: a small class for each controller (HLEM-3 .. 9).

Each is told of an epoch and answers with the split of the next: `decide(signals) -> split`. None of them knows pages;
what applies a split may do so late or in part, and tells it back by `moved`. Signals that are missing never move the
border by what was learnt: it goes to the safe split, step by step.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from jgr.serving.policies.memory_adapter import Adapter
from jgr.serving.policies.memory_models import BasePolicy, Trees
from jgr.serving.policies.memory_recovery import Recovery
from jgr.serving.policies.memory_signals import ACTIONS, STATE, Float32, Limits, Signals, reward, state

STEP = max(ACTIONS)
"""The largest action: the furthest that `ppo`, `pid` and the way to the safe split go in one epoch. What `full` adds to
an action, at most `memory_adapter.MOST`, comes on top (HLEM-8, eq. 6); `predictor` goes where it wants to be."""
WORSE = 3
"""Epochs in a row, each worse than the one before by more than WORSE_BY and late, after which nothing is believed."""
WORSE_BY = 0.02
DISTRUST = 10
"""Epochs for which the border then stays on its way to the safe split."""


class Controller(Protocol):
    """What drives the border. Not for threads: one caller, once an epoch."""

    def decide(self, signals: Signals | None) -> float:
        """The split of the next epoch. signals: of the one that ended; None: nothing was measured."""
        ...

    def learn(self) -> None:
        """What may be done in the background until the next decision."""
        ...

    def moved(self, split: float) -> None:
        """The split that is in force, where it is not the one that was decided."""
        ...


class Held:
    """What all controllers share: the split, its ends, and what happens without signals. By itself it is `static`."""

    def __init__(self, limits: Limits, split: float | None = None) -> None:
        self.limits = limits
        self.split = limits.clip(limits.safe if split is None else split)

    def decide(self, signals: Signals | None) -> float:
        """See `Controller.decide`."""
        if signals is None or not signals.whole:
            self.forget()
            self.split = self._to_safe()
        elif signals.requests > 0:
            self.split = self.limits.clip(self.choose(signals))
        return self.split

    def choose(self, signals: Signals) -> float:
        """The next split by signals that are whole, before it is clipped."""
        del signals
        return self.split

    def forget(self) -> None:
        """The epoch that ended tells nothing of the decision before it."""

    def learn(self) -> None:
        """See `Controller.learn`."""

    def moved(self, split: float) -> None:
        """See `Controller.moved`."""
        self.split = self.limits.clip(split)

    def _to_safe(self) -> float:
        away = self.limits.safe - self.split
        return self.split + min(max(away, -STEP), STEP)


class Static(Held):
    """The split stays; without signals too."""

    def decide(self, signals: Signals | None) -> float:
        del signals
        return self.split


class Pid(Held):
    """Both caches' misses at their prices, made equal by a PID loop.

    row_price, user_price: what a missed row share and a missed user share cost, in any common unit.
    """

    GAINS = (0.1, 0.01, 0.05)

    def __init__(
        self, limits: Limits, split: float | None = None, row_price: float = 1.0, user_price: float = 1.0
    ) -> None:
        super().__init__(limits, split)
        most = max(row_price, user_price)
        self._prices = (row_price / most, user_price / most)
        self._sum, self._last = 0.0, None  # type: float, float | None

    def choose(self, signals: Signals) -> float:
        rows, users = self._prices
        error = rows * (1.0 - signals.row_hits) - users * (1.0 - signals.user_hits)
        self._sum = min(max(self._sum + error, -1.0), 1.0)  # what has no effect at an end must not pile up
        slope = 0.0 if self._last is None else error - self._last
        self._last = error
        by = sum(gain * part for gain, part in zip(self.GAINS, (error, self._sum, slope), strict=True))
        return self.split + min(max(by, -STEP), STEP)

    def forget(self) -> None:
        self._last = None


class Predictor(Held):
    """Goes to the split at which boosted trees predict the least tail latency, at once: the baseline of one step."""

    def __init__(self, limits: Limits, trees: Trees, split: float | None = None) -> None:
        super().__init__(limits, split)
        self._trees = trees
        self._grid = np.arange(limits.least, limits.most + 1e-9, 0.02).astype(np.float32)
        self._rows = np.zeros((len(self._grid), STATE + 1), np.float32)
        self._rows[:, STATE] = self._grid

    def choose(self, signals: Signals) -> float:
        self._rows[:, :STATE] = state(signals, self.split, self.limits)
        predicted = self._trees.predict(self._rows)
        best = np.flatnonzero(predicted <= predicted.min() + 1e-6)
        return float(self._grid[best[np.abs(self._grid[best] - self.split).argmin()]])


class Ppo(Held):
    """The frozen base policy alone (HLEM-7)."""

    def __init__(self, limits: Limits, base: BasePolicy, split: float | None = None) -> None:
        super().__init__(limits, split)
        self._base = base

    def choose(self, signals: Signals) -> float:
        return self.split + ACTIONS[self._base.action(state(signals, self.split, self.limits))]


class Full(Held):
    """SmartAllocator: the base policy, corrected by the adapter; a burst takes it over (HLEM-16).

    corrects, recovers: whether it does either; the paper's ablations do without one.
    """

    def __init__(
        self,
        limits: Limits,
        base: BasePolicy,
        split: float | None = None,
        seed: int = 0,
        *,
        corrects: bool = True,
        recovers: bool = True,
    ) -> None:
        super().__init__(limits, split)
        self._base, self._adapter, self._recovery = base, Adapter(seed), Recovery()
        self._corrects, self._recovers = corrects, recovers
        self._before: tuple[Float32, int, float] | None = None
        self._last_reward, self._worse, self._distrust = 1.0, 0, 0

    @property
    def bursting(self) -> bool:
        """Whether the last epoch was one of a burst."""
        return self._recovery.bursting

    def choose(self, signals: Signals) -> float:
        if self._before is not None:
            self._adapter.observe(*self._before, signals, self.limits)
        self._before = None
        if self._recovers and self._recovery.detect(signals.p99_ms):
            return self._recovery.override(signals, self.split)
        if self._distrusted(signals):
            return self._to_safe()
        seen = state(signals, self.split, self.limits)
        action = self._base.action(seen)
        by = ACTIONS[action] + (self._adapter.correct(seen, action) if self._corrects else 0.0)
        chosen = self.limits.clip(self.split + by)
        self._before = (seen, action, chosen)
        return chosen

    def learn(self) -> None:
        if self._corrects:
            self._adapter.learn()

    def forget(self) -> None:
        self._before = None

    def _distrusted(self, signals: Signals) -> bool:
        """Whether three moves in a row made requests later (the safety rule of HLEM's table of choices)."""
        worth = reward(signals, self.limits)
        late = signals.p99_ms > self.limits.limit_ms
        self._worse = self._worse + 1 if late and worth < self._last_reward - WORSE_BY else 0
        self._last_reward = worth
        self._distrust = max(0, self._distrust - 1)
        if self._worse >= WORSE:
            self._worse, self._distrust = 0, DISTRUST
        return self._distrust > 0
