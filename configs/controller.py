# SPDX-License-Identifier: Apache-2.0
"""The memory controller that comes with jgr: PPO and boosted trees on simulated pools. About a minute on two cores.

jgr train --config=controller
cp runs/controller/controller.npz jgr/serving/engine/memory_controller.npz

The file that is shipped was made by this command two changes earlier: PPO learnt from the whole reward, not from what
is beyond that of a split that stays, and its best round was chosen by episodes with actions by chance and from any
split, not by those of the policy as it is served.
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
