# SPDX-License-Identifier: Apache-2.0
"""The predictor that PPO is compared with: boosted trees of the next epoch's tail latency, by scikit-learn (HLEM's
table).

It learns from epochs in which the split was moved by chance. Its target is one epoch, so what an epoch later pays for
is not in it: that is what the paper's baselines lack.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jgr.serving.policies.memory_signals import TAIL, Float32
from jgr.simulation.controller import epochs, ppo
from jgr.simulation.controller.epochs import Traffic, World


@jax.jit
def explored(worlds: World, traffic: Traffic, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Epochs with splits by chance: (state and next split f32 [t, n, STATE + 1], its p99 over the limit f32 [t, n]).

    worlds: [n] of each scalar; traffic: f32 [n, epochs]. A third of the moves are small, the others go anywhere.
    """
    number, length = traffic.load.shape
    begin, run = jax.random.split(key)
    splits = jax.random.uniform(begin, (number,), minval=ppo.LEAST, maxval=ppo.MOST)
    first = jax.vmap(ppo.reset)(worlds, traffic, splits, jax.random.split(begin, number))

    def one(env: ppo.Environment, key: jax.Array) -> tuple[ppo.Environment, tuple[jax.Array, jax.Array]]:
        where, near, which, noise = jax.random.split(key, 4)
        anywhere = jax.random.uniform(where, (number,), minval=ppo.LEAST, maxval=ppo.MOST)
        close = jnp.clip(env.split + 0.08 * jax.random.normal(near, (number,)), ppo.LEAST, ppo.MOST)
        split = jnp.where(jax.random.uniform(which, (number,)) < 1 / 3, close, anywhere)

        def step(world: World, now: Traffic, hits: epochs.Hits, split: jax.Array, key: jax.Array) -> Any:
            end, mean, found = epochs.step(world, now, hits, split)
            tail = jnp.minimum(found.p99_s / world.limit_s, TAIL)
            return end, ppo.observe(world, now, mean, found, split, key), tail

        now = jax.tree.map(lambda column: column[jnp.arange(number), env.epoch], traffic)
        end, state, tail = jax.vmap(step)(worlds, now, env.hits, split, jax.random.split(noise, number))
        row = jnp.concatenate([env.state, split[:, None]], axis=1)
        return ppo.Environment(end, split, env.epoch + 1, state), (row, tail)

    _, found = jax.lax.scan(one, first, jax.random.split(run, length))
    return found


def fit(rows: Float32, tails: Float32, trees: int = 120, seed: int = 0) -> dict[str, npt.NDArray[Any]]:
    """Trees as `memory_models.Trees` reads them. rows: f32 [n, STATE + 1]. tails: f32 [n]."""
    from sklearn.ensemble import GradientBoostingRegressor

    model = GradientBoostingRegressor(
        n_estimators=trees, max_depth=5, learning_rate=0.1, subsample=0.5, random_state=seed
    )
    model.fit(rows, tails)
    found = [each.tree_ for each in model.estimators_[:, 0]]
    nodes = max(tree.node_count for tree in found)

    def padded(name: str, fill: float, dtype: type) -> npt.NDArray[Any]:
        filled = np.full((len(found), nodes), fill, dtype)
        for at, tree in enumerate(found):
            values = getattr(tree, name)
            filled[at, : tree.node_count] = values[:, 0, 0] * 0.1 if name == "value" else values
        return filled

    feature = padded("feature", -1, np.int32)
    inner = feature >= 0
    return {
        "feature": np.where(inner, feature, -1).astype(np.int32),
        "threshold": np.where(inner, padded("threshold", 0, np.float32), 0).astype(np.float32),
        "left": np.where(inner, padded("children_left", 0, np.int32), 0).astype(np.int32),
        "right": np.where(inner, padded("children_right", 0, np.int32), 0).astype(np.int32),
        "value": padded("value", 0, np.float32),
        "start": np.array([float(model.init_.constant_[0, 0])], np.float32),
    }
