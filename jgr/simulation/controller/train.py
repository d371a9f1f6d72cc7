# SPDX-License-Identifier: Apache-2.0
"""`jgr train` of a memory controller: PPO and boosted trees on simulated pools, one small file, and their curves."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jgr.config import ConfigError, TrainConfig
from jgr.files import make_folder
from jgr.serving.engine.memory_controller import write_controller
from jgr.simulation.controller import boosting, ppo, workload
from jgr.simulation.controller.epochs import Traffic, World
from jgr.training.curves import plot_curves

METRIC = "mean reward of held-out episodes"
WORTH = "mean worth of held-out episodes"
"""What the best round is chosen by, see `ppo.worth`."""
FILE = "controller.npz"
Progress = Callable[[int, int, str], None]
"""Called as progress(rounds done, rounds in all, status)."""


def sample(random: np.random.Generator, number: int) -> tuple[World, Traffic]:
    """So many worlds by chance, the regimes in turns."""
    regimes = [workload.REGIMES[at % len(workload.REGIMES)] for at in range(number)]
    return ppo.stacked(
        [workload.random_world(random) for _ in regimes], [workload.traffic(each, random) for each in regimes]
    )


_trainer = functools.cache(ppo.Trainer)


def train_policy(
    train: TrainConfig, progress: Progress, tell: Callable[[dict[str, float]], None] = lambda line: None
) -> Any:
    """The parameters of the best validated round. Each round has worlds of its own; those of validation are never
    learnt.

    Raises ConfigError for a loss that is not finite.
    """
    random, held_out = np.random.default_rng(train.seed), np.random.default_rng((train.seed, 1))
    trainer = _trainer(train.learning_rate)
    validation = sample(held_out, train.batch)
    key = jax.random.key(train.seed)
    learner = trainer.begin(key)
    best: tuple[float, Any] = (-np.inf, learner.params)
    every = train.evaluate_every or train.steps
    for done in range(1, train.steps + 1):
        key, now = jax.random.split(key)
        learner, found = trainer.round(learner, *sample(random, train.batch), now)
        line = {"step": float(done), **{name: float(value) for name, value in found.items()}}
        if not np.isfinite(line["loss"]):
            raise ConfigError(f"the loss of round {done} is {line['loss']}: lower train.learning_rate")
        if done % every == 0 or done == train.steps:
            judged = trainer.judge(learner.params, *validation, jax.random.key(0))
            line[WORTH], line[METRIC] = (float(each) for each in judged)
            best = max(best, (line[WORTH], learner.params), key=lambda pair: pair[0])
        tell(line)
        progress(done, train.steps, f"reward {line['reward']:.3f}")
    return best[1]


def train_controller(train: TrainConfig, progress: Progress) -> Path:
    """Train both, and write train.out: controller.npz, metrics.jsonl and curves.png. Returns the folder.

    train.steps: rounds of PPO; train.batch: pools side by side in each. Raises ConfigError where train.out is missing.
    """
    if not train.out:
        raise ConfigError("train.out: where the controller goes")
    out = Path(train.out)
    make_folder(out, ConfigError, "train.out")
    metrics = out / "metrics.jsonl"
    with metrics.open("w", encoding="utf-8") as file:
        params = train_policy(train, progress, lambda line: print(json.dumps(line), file=file))
    progress(train.steps, train.steps, "boosting trees")
    worlds, traffic = sample(np.random.default_rng((train.seed, 2)), 4 * train.batch)
    rows, tails = (
        np.asarray(each) for each in boosting.explored(worlds, traffic, jax.random.key(train.seed))
    )
    trees = boosting.fit(rows.reshape(-1, rows.shape[-1]), tails.ravel(), seed=train.seed)
    write_controller(out / FILE, ppo.arrays(params) | trees)
    plot_curves(metrics, out / "curves.png", METRIC)
    return out
