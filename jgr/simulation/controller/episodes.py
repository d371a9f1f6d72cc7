# SPDX-License-Identifier: Apache-2.0
"""The live controllers, driven through the epoch model, and the oracle that they are compared with (HLEM-17)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jgr.serving.policies.memory_control import Controller
from jgr.serving.policies.memory_signals import LONGEST, TAIL, Limits, Signals
from jgr.simulation.controller import epochs, ppo
from jgr.simulation.controller.epochs import Latency, Traffic, World
from jgr.simulation.controller.workload import EPOCH_S

Float64 = npt.NDArray[np.float64]
GRID = np.round(np.arange(0.1, 0.9001, 0.02), 2)
WARM = 10
"""Epochs at the begin that are not judged."""


@dataclass(frozen=True)
class Episode:
    """What a controller did, by epoch, f64 [epochs] each.

    split: in force. best: the oracle's. gap: the mean distance of both after WARM epochs. regret: by how much the warm
    99th percentile at the split is above that at the oracle's, as a share, in the mean. p99_ms: what requests saw.
    worth: the reward. bursting: epochs that the controller took for a burst.
    """

    split: Float64
    best: Float64
    p99_ms: Float64
    late: Float64
    worth: Float64
    bursting: npt.NDArray[np.bool_]
    gap: float
    regret: float


@jax.jit
def table(world: World, traffic: Traffic) -> Any:
    """The warm 99th percentile of every epoch at every split of GRID, seconds, f32 [epochs, splits]."""
    by_split = jax.vmap(epochs.steady, (None, None, 0))
    return jax.vmap(by_split, (None, 0, None))(world, traffic, jnp.asarray(GRID, jnp.float32)).p99_s


def best_splits(p99: Float64) -> Float64:
    """The oracle's split of each epoch: the least percentile; of those within a 10,000th the nearest to the last."""
    found = np.empty(len(p99))
    for at, row in enumerate(p99):
        ties = np.flatnonzero(row <= row.min() * (1.0 + 1e-4))
        last = found[at - 1] if at else GRID[row.argmin()]
        found[at] = GRID[ties[np.abs(GRID[ties] - last).argmin()]]
    return found


@jax.jit
def _epoch(
    world: World, now: Traffic, hits: epochs.Hits, split: jax.Array, key: jax.Array
) -> tuple[epochs.Hits, jax.Array, jax.Array, Latency]:
    end, mean, found = epochs.step(world, now, hits, split)
    return end, ppo.observe(world, now, mean, found, split, key), ppo.reward(world, found), found


def run(controller: Controller, world: World, traffic: Traffic, limits: Limits, seed: int = 0) -> Episode:
    """A controller over all epochs of some traffic. The noise of what it sees depends on the seed alone."""
    p99 = np.asarray(table(world, traffic), np.float64)
    best = best_splits(p99)
    length = len(best)
    columns = [np.asarray(column) for column in traffic]
    keys = jax.random.split(jax.random.key(seed), length)
    split = getattr(controller, "split", limits.safe)
    hits = epochs.steady_hits(world, Traffic(*(column[0] for column in columns)), jnp.float32(split))
    splits, seen, late, worth = (np.empty(length) for _ in range(4))
    bursting = np.zeros(length, bool)
    for at in range(length):
        now = Traffic(*(column[at] for column in columns))
        hits, state, reward, found = _epoch(world, now, hits, np.float32(split), keys[at])
        splits[at], seen[at], late[at], worth[at] = split, found.p99_s * 1e3, found.late, reward
        split = controller.decide(signals(np.asarray(state), float(now.load * world.rate), limits))
        controller.learn()
        bursting[at] = getattr(controller, "bursting", False)
    chosen = np.array([np.interp(split, GRID, row) for split, row in zip(splits, p99, strict=True)])
    least = p99.min(1)
    judged = slice(WARM, None)
    return Episode(
        splits,
        best,
        seen,
        late,
        worth,
        bursting,
        gap=float(np.abs(splits - best)[judged].mean()),
        regret=float((chosen / least - 1.0)[judged].mean()),
    )


def signals(state: npt.NDArray[Any], rate: float, limits: Limits) -> Signals:
    """The signals that a state of the model stands for: f32 [STATE], requests/s."""
    hot, users, rows, length, late, _, p99 = (float(value) for value in state)
    return Signals(
        hot, users, rows, length * LONGEST, late, p99 * TAIL * limits.limit_ms, int(rate * EPOCH_S)
    )
