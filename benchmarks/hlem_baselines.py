# SPDX-License-Identifier: Apache-2.0
"""Baselines of HLEM's table that no server has: a Gaussian process, an exact search over profiled curves, an LSTM.

Each decides as the controllers of `jgr serve` do, from one epoch's signals, but goes to its split at once.
"""

from __future__ import annotations

import warnings
from collections import deque
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax

from jgr.serving.policies.memory_control import Held
from jgr.serving.policies.memory_signals import STATE, Limits, Signals, state
from jgr.simulation.controller import boosting, episodes, train
from jgr.simulation.controller.epochs import Traffic, World

OBSERVED = 20
"""Epochs that the Gaussian process is fitted to."""
SEEN = 12
"""States that the LSTM reads."""
UNITS = 64
PROFILED = np.round(np.arange(0.1, 0.651, 0.05), 2).astype(np.float32)
"""Shares of hot requests for which curves are profiled."""
Float32 = npt.NDArray[np.float32]


class Bo(Held):
    """A Gaussian process (Matern 5/2) on split and 99th percentile of the last epochs; the split of the greatest
    expected improvement."""

    def __init__(self, limits: Limits, seed: int = 0) -> None:
        super().__init__(limits)
        self._seen: deque[tuple[float, float]] = deque(maxlen=OBSERVED)
        self._random = np.random.default_rng(seed)

    def choose(self, signals: Signals) -> float:
        """See `Held.choose`."""
        from scipy.stats import norm
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import Matern, WhiteKernel

        self._seen.append((self.split, signals.p99_ms))
        if len(self._seen) < 4:
            return float(self._random.uniform(self.limits.least, self.limits.most))
        splits, tails = (np.array(column) for column in zip(*self._seen, strict=True))
        usual, spread = tails.mean(), max(float(tails.std()), 1e-6)
        kernel = Matern(0.2, (0.05, 1.0), nu=2.5) + WhiteKernel(0.1, (1e-3, 1.0))
        process = GaussianProcessRegressor(kernel, random_state=0)
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", ConvergenceWarning
            )  # the best noise may lie at an end of its bounds
            process.fit(splits[:, None], (tails - usual) / spread)
        mean, deviation = process.predict(episodes.GRID[:, None], return_std=True)
        gain = (tails.min() - usual) / spread - mean
        ratio = gain / np.maximum(deviation, 1e-9)
        return float(episodes.GRID[(gain * norm.cdf(ratio) + deviation * norm.pdf(ratio)).argmax()])


class Exact(Held):
    """MILP of the table: the least 99th percentile over a grid of splits, by curves that were profiled of this pool for
    several shares of hot requests at the usual load; the nearest curve counts. A search of the grid gives what the
    integer programme would."""

    def __init__(self, limits: Limits, world: World, events: float = 8_000.0) -> None:
        super().__init__(limits)
        ones = np.ones(len(PROFILED), np.float32)
        curves = np.asarray(episodes.table(world, Traffic(PROFILED, ones, ones * np.float32(events))))
        self._best = episodes.GRID[curves.argmin(1)]

    def choose(self, signals: Signals) -> float:
        """See `Held.choose`."""
        return float(self._best[np.abs(PROFILED - signals.hot_share).argmin()])


class Network(nn.Module):
    """States f32 [n, SEEN, STATE] -> splits f32 [n] in (0, 1): two LSTM layers."""

    @nn.compact
    def __call__(self, states: Any) -> Any:
        found = states
        for _ in range(2):
            found = nn.RNN(nn.LSTMCell(UNITS))(found)
        return nn.sigmoid(nn.Dense(1)(found[:, -1]))[:, 0]


class Lstm(Held):
    """The oracle's split as an LSTM guesses it from the last states."""

    def __init__(self, limits: Limits, weights: Any) -> None:
        super().__init__(limits)
        self._weights, self._seen = weights, deque[Float32](maxlen=SEEN)

    def choose(self, signals: Signals) -> float:
        """See `Held.choose`."""
        self._seen.append(state(signals, self.split, self.limits))
        if len(self._seen) < SEEN:
            return self.split
        return float(_guess(self._weights, np.stack(self._seen)[None])[0])


_guess = jax.jit(lambda weights, states: Network().apply(weights, states))


def fit_lstm(number: int = 48, steps: int = 1500, seed: int = 3) -> Any:
    """The weights of `Network`, fitted to the oracle's splits in pools that others were trained in, with splits by
    chance."""
    worlds, traffic = train.sample(np.random.default_rng((seed, 2)), number)
    rows, _ = (np.asarray(each) for each in boosting.explored(worlds, traffic, jax.random.key(seed)))
    of = [
        episodes.best_splits(np.asarray(episodes.table(*_one(worlds, traffic, at)), np.float64))
        for at in range(number)
    ]
    states = rows[..., :STATE]  # [epochs, pools, STATE]: what is seen before an epoch begins
    windows = np.lib.stride_tricks.sliding_window_view(states, SEEN, axis=0)  # [windows, pools, STATE, SEEN]
    given = windows.transpose(0, 1, 3, 2).reshape(-1, SEEN, STATE)
    wanted = np.array(of, np.float32).T[SEEN - 1 :].reshape(-1)
    network, optimizer = Network(), optax.adam(1e-3)
    weights = network.init(jax.random.key(seed), given[:1])

    @jax.jit
    def step(weights: Any, moments: Any, given: Any, wanted: Any) -> Any:
        slope = jax.grad(lambda w: jnp.square(network.apply(w, given) - wanted).mean())(weights)
        change, moments = optimizer.update(slope, moments)
        return optax.apply_updates(weights, change), moments

    moments, random = optimizer.init(weights), np.random.default_rng(seed)
    for _ in range(steps):
        chosen = random.integers(0, len(given), 256)
        weights, moments = step(weights, moments, given[chosen], wanted[chosen])
    return weights


def _one(worlds: World, traffic: Traffic, at: int) -> tuple[World, Traffic]:
    found: tuple[World, Traffic] = jax.tree.map(lambda column: column[at], (worlds, traffic))
    return found
