# SPDX-License-Identifier: Apache-2.0
"""PPO's advantages and loss against plain loops over the papers' formulas, and a training that learns."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jgr.config import ConfigError, TrainConfig
from jgr.serving.engine.memory_controller import read_controller
from jgr.serving.policies.memory_control import Ppo, Predictor
from jgr.serving.policies.memory_models import BasePolicy, Trees
from jgr.serving.policies.memory_signals import ACTIONS, STATE, Limits, Signals, reward, state
from jgr.simulation.controller import boosting, episodes, epochs, ppo, workload
from jgr.simulation.controller import train as training


def test_advantages_are_the_sums_of_discounted_errors() -> None:
    random = np.random.default_rng(0)
    rewards, values = random.standard_normal((2, 7, 3)).astype(np.float32)
    last = random.standard_normal(3).astype(np.float32)
    after = np.vstack([values[1:], last])
    errors = rewards + 0.95 * after - values
    expected = np.zeros_like(errors)
    for at in range(7):
        for later in range(at, 7):
            expected[at] += (0.95 * 0.95) ** (later - at) * errors[later]
    np.testing.assert_allclose(jax.jit(ppo.advantages)(rewards, values, last), expected, rtol=1e-4, atol=1e-5)


def test_the_loss_is_the_clipped_surrogate_the_value_and_the_entropy() -> None:
    random = np.random.default_rng(1)
    logits = random.standard_normal((9, 5)).astype(np.float32)
    value, old, advantage, goal = random.standard_normal((4, 9)).astype(np.float32)
    action = random.integers(0, 5, 9)
    taken = ppo.Steps(np.zeros((9, STATE)), action, old, value, old, old)
    expected, clipped = 0.0, 0
    for at in range(9):
        odds = np.exp(logits[at] - logits[at].max())
        odds /= odds.sum()
        ratio = odds[action[at]] / np.exp(old[at])
        clipped += abs(ratio - 1) > 0.2
        gain = min(ratio * advantage[at], min(max(ratio, 0.8), 1.2) * advantage[at])
        entropy = -sum(p * np.log(p) for p in odds)
        expected += (-gain + 0.25 * (value[at] - goal[at]) ** 2 - 0.01 * entropy) / 9
    assert 0 < clipped <= 9
    assert float(jax.jit(ppo.loss)(logits, value, taken, advantage, goal)) == pytest.approx(
        expected, rel=1e-4
    )


@pytest.fixture(scope="module", autouse=True)
def begun_at_once() -> Iterator[None]:
    """Fresh weights are one program, where their operations one by one would be forty."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo.Trainer, "begin", jax.jit(ppo.Trainer.begin, static_argnums=0))
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a very short training."""
    out = tmp_path_factory.mktemp("controller")
    train = TrainConfig(
        model="controller", out=str(out), steps=3, batch=3, evaluate_every=2, learning_rate=1e-3
    )
    return training.train_controller(train, lambda done, steps, status: None)


def test_a_training_writes_a_controller_that_serves_and_its_curves(trained: Path) -> None:
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [training.METRIC in line for line in lines] == [False, True, True]
    assert (trained / "curves.png").stat().st_size > 1000
    arrays = read_controller(trained / training.FILE)
    told = Signals(0.2, 0.3, 0.6, 8000.0, 0.0, 20.0, 300)
    assert round(Ppo(Limits(), BasePolicy(arrays)).decide(told) - 0.5, 6) in ACTIONS
    assert 0.1 <= Predictor(Limits(), Trees(arrays)).decide(told) <= 0.9


def test_the_numpy_actor_is_the_trained_network() -> None:
    net = ppo.ActorCritic()
    params = jax.jit(net.init)(jax.random.key(3), np.zeros(STATE, np.float32))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 9606  # HLEM-7's count
    states = np.random.default_rng(0).random((6, STATE)).astype(np.float32)
    logits: Any = jax.jit(net.apply)(params, states)
    np.testing.assert_allclose(BasePolicy(ppo.arrays(params)).logits(states), logits[0], atol=1e-5)


def test_the_environment_gives_the_state_and_the_reward_of_the_policies() -> None:
    random = np.random.default_rng(0)
    world = workload.random_world(random)
    limits = Limits(limit_ms=float(world.limit_s) * 1e3)
    now = epochs.Traffic(np.float32(0.3), np.float32(1.2), np.float32(9000))
    hits = jax.jit(epochs.steady_hits)(world, now, np.float32(0.4))
    found = jax.jit(epochs.latency)(world, now, hits)
    told = Signals(
        0.3,
        0.3 * float(hits.hot) + 0.7 * float(hits.cold),
        float(hits.rows),
        9000.0,
        float(found.late),
        float(found.p99_s) * 1e3,
        200,
    )
    keys = jax.random.split(jax.random.key(0), 400)
    of_all = jax.jit(jax.vmap(ppo.observe, (None, None, None, None, None, 0)))
    seen = np.asarray(of_all(world, now, hits, found, np.float32(0.4), keys))
    np.testing.assert_allclose(seen.mean(0), state(told, 0.4, limits), atol=0.01)
    got, worth = jax.jit(lambda *of: (ppo.reward(*of), ppo.worth(*of)))(world, found)
    assert float(got) == pytest.approx(reward(told, limits), rel=1e-4)
    tail = min(told.p99_ms / limits.limit_ms, 4.0)
    assert float(worth) == pytest.approx(-math.log(tail), rel=1e-4, abs=1e-5)


def test_what_a_split_that_stays_gets_is_what_a_policy_that_does_nothing_gets() -> None:
    random = np.random.default_rng(1)
    world, traffic = workload.random_world(random), workload.traffic("burst", random, 12)
    key = jax.random.key(0)
    env, got = jax.jit(ppo.reset)(world, traffic, np.float32(0.5), key), []
    act = jax.jit(ppo.act)
    for _ in range(12):
        env, worth, reward = act(world, traffic, env, np.int32(ACTIONS.index(0.0)), key)
        got.append((float(worth), float(reward)))
    found = np.stack(jax.jit(ppo.fixed)(world, traffic, np.float32(0.5)), 1)
    np.testing.assert_allclose(found, got, rtol=1e-5, atol=1e-6)


def test_a_round_of_fewer_steps_than_a_minibatch_learns_from_them_all() -> None:
    random = np.random.default_rng(2)
    alone = ppo.stacked([workload.random_world(random)], [workload.traffic("burst", random, 12)])
    trainer = ppo.Trainer(passes=2, minibatch=256)
    begun = trainer.begin(jax.random.key(0))
    learner, told = trainer.round(begun, *alone, jax.random.key(1))
    assert np.isfinite(told["loss"])
    for after, before in zip(*map(jax.tree.leaves, (learner.params, begun.params)), strict=True):
        assert np.isfinite(after).all() and (np.asarray(after) != before).any()


def test_trees_in_numpy_are_those_of_scikit_learn() -> None:
    from sklearn.ensemble import GradientBoostingRegressor

    rows = np.random.default_rng(0).random((300, STATE + 1)).astype(np.float32)
    tails = (rows[:, STATE] - rows[:, 0]) ** 2
    fitted = GradientBoostingRegressor(
        n_estimators=9, max_depth=5, learning_rate=0.1, subsample=0.5, random_state=4
    )
    ours = Trees(
        boosting.fit(rows, tails, trees=9, seed=4)
        | {"features": np.array(ppo.FEATURES), "actions": np.array(ACTIONS)}
    )
    np.testing.assert_allclose(ours.predict(rows), fitted.fit(rows, tails).predict(rows), atol=1e-5)


def test_the_oracle_takes_the_least_and_of_equal_ones_the_nearest() -> None:
    flat = np.full(len(episodes.GRID), 30.0)
    bent = 30.0 + 100 * (episodes.GRID - 0.42) ** 2
    np.testing.assert_allclose(episodes.best_splits(np.array([bent, flat, bent])), [0.42, 0.42, 0.42])


def test_a_training_without_a_folder_or_with_a_loss_that_is_not_finite_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = TrainConfig(model="controller", steps=2, batch=3)
    with pytest.raises(ConfigError, match=r"train\.out"):
        training.train_controller(train, lambda *told: None)
    wild = dataclasses.replace(train, out=str(tmp_path), learning_rate=1e-3)  # a trainer that is compiled

    def sample(*of: Any) -> Any:
        return jax.tree.map(lambda x: x * np.float32("nan"), drawn(*of))

    drawn = training.sample
    monkeypatch.setattr(training, "sample", sample)
    with pytest.raises(ConfigError, match=r"lower train\.learning_rate"):
        training.train_controller(wild, lambda *told: None)
