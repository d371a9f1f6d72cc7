# SPDX-License-Identifier: Apache-2.0
"""A small correction of the base policy, learnt from what is served (HLEM-8).

The last layer begins as zeros, so at first nothing is corrected. `correct` is called for a decision; `learn` takes
one step and may be called in the background, between decisions. What an epoch was worth is fitted to the state and
the split by ridge regression over the last thousand epochs; a step goes where that fit says the split would have been
worth more, and only where the fit is sure of that: a border that hardly moved, or a latency that hardly follows it,
teaches nothing but noise. Far from the limit of latency the reward is flat, so what is fitted is the latency itself,
which is what a split changes.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from jgr.serving.policies.memory_signals import ACTIONS, STATE, Float32, Limits, Signals

Float64 = npt.NDArray[np.float64]

MOST = 0.02
"""The largest correction."""
UNITS = 32
KEPT = 1000
"""Epochs that are remembered, first in, first out."""
LEAST = 64
"""Epochs below which nothing is learnt; also how many a step is taken over."""
RATE = 1e-3
"""The learning rate at a 99th percentile that is the limit: eta0."""
RIDGE = 1e-2
SURE = 2.0
"""Standard errors from 0 below which a slope counts as 0."""
MEMORY = 0.9
_INPUTS = STATE + len(ACTIONS)


class Adapter:
    """seed: of the first weights and of which epochs a step is taken over."""

    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        scale = 1.0 / np.sqrt([_INPUTS, UNITS])
        self._w0 = self._random.standard_normal((_INPUTS, UNITS)) * scale[0]
        self._w1 = self._random.standard_normal((UNITS, UNITS)) * scale[1]
        self._w2 = np.zeros(UNITS)
        self._seen: deque[tuple[Float64, float, float]] = deque(maxlen=KEPT)
        self._late = 1.0  # mean 99th percentile over its limit, m of eq. 7

    def correct(self, state: Float32, action: int) -> float:
        """The correction of a base action, in [-MOST, MOST]."""
        inputs = np.zeros(_INPUTS)
        inputs[:STATE] = state
        inputs[STATE + action] = 1.0
        return MOST * float(np.tanh(np.tanh(np.tanh(inputs @ self._w0) @ self._w1) @ self._w2))

    def observe(self, state: Float32, action: int, split: float, after: Signals, limits: Limits) -> None:
        """Remember what came of a decision. split: the one that was chosen in this state by this base action."""
        tail = after.p99_ms / limits.limit_ms
        self._late = MEMORY * self._late + (1.0 - MEMORY) * tail
        inputs = np.zeros(_INPUTS)
        inputs[:STATE] = state
        inputs[STATE + action] = 1.0
        self._seen.append((inputs, split, min(tail, 4.0)))

    @property
    def rate(self) -> float:
        """Eq. 7: slower while all is well, faster while requests are late."""
        return RATE * min(max(self._late, 0.1), 4.0)

    def learn(self) -> None:
        """One step, over LEAST of the remembered epochs; nothing before there are so many."""
        if len(self._seen) < LEAST:
            return
        inputs = np.array([seen[0] for seen in self._seen])
        splits, tails = (np.array([seen[at] for seen in self._seen]) for at in (1, 2))
        chosen = self._random.integers(len(inputs), size=LEAST)
        self._descend(inputs[chosen], fitted_slopes(inputs[:, :STATE], splits, tails, chosen))

    def _descend(self, inputs: Float64, slope: Float64) -> None:
        """One step of gradient descent on the fitted latency. slope: f64 [n], by the split."""
        first = np.tanh(inputs @ self._w0)
        second = np.tanh(first @ self._w1)
        out = np.tanh(second @ self._w2)
        # The correction is shared by MOST, and so is its gradient: dividing by it makes the rate one of the network.
        of_out = slope * (1.0 - out**2) / len(inputs)
        of_second = np.outer(of_out, self._w2) * (1.0 - second**2)
        of_first = (of_second @ self._w1.T) * (1.0 - first**2)
        steps = (inputs.T @ of_first, first.T @ of_second, second.T @ of_out)
        norm = float(np.sqrt(sum(float((step**2).sum()) for step in steps)))
        rate = self.rate / max(1.0, norm)
        self._w0 -= rate * steps[0]
        self._w1 -= rate * steps[1]
        self._w2 -= rate * steps[2]


def _features(states: Float64, splits: Float64) -> Float64:
    """f64 [n, STATE + 1 + 5]: the state, and a parabola in the split whose place depends on the load."""
    by = _bends(states)
    return np.column_stack([states, splits**2, splits[:, None] * by])


def fitted_slopes(states: Float64, splits: Float64, tails: Float64, at: npt.NDArray[np.int64]) -> Float64:
    """The derivative of the latency by the split at the epochs `at` [m], by ridge regression on all: f64 [m].

    states: [n, STATE]; splits, tails: [n]. 0 where the slope is within SURE standard errors of it.
    """
    features = _features(states, splits)
    moved = features - features.mean(0)
    centred = tails - tails.mean()
    inverse = np.linalg.inv(moved.T @ moved + RIDGE * np.eye(moved.shape[1]))
    weights = inverse @ (moved.T @ centred)
    noise = float(np.square(centred - moved @ weights).sum()) / max(1, len(tails) - moved.shape[1])
    of = np.zeros((len(at), moved.shape[1]))
    of[:, STATE], of[:, STATE + 1 :] = 2.0 * splits[at], _bends(states[at])
    slopes = of @ weights
    errors = np.sqrt(noise * np.einsum("ij,jk,ik->i", of, inverse, of))
    return np.where(np.abs(slopes) > SURE * errors, slopes, 0.0)


def _bends(states: Float64) -> Float64:
    """What moves the best split: nothing, hot users, both hit rates, the length. f64 [n, 5]."""
    return np.column_stack([np.ones(len(states)), states[:, :4]])
