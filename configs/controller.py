# SPDX-License-Identifier: Apache-2.0
"""The memory controller that comes with jgr: PPO and boosted trees on simulated pools. About a minute on two cores.

jgr train --config=controller
cp runs/controller/controller.npz jgr/serving/engine/memory_controller.npz

The file that is shipped was made by this command.
"""

from jgr.config import Config, TrainConfig


def get_config() -> Config:
    return Config(
        train=TrainConfig(
            model="controller",
            out="runs/controller",
            steps=240,  # rounds: an episode of 200 epochs in each of `batch` pools
            batch=32,
            learning_rate=3e-4,
            evaluate_every=20,
        ),
    )
