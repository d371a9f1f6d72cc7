# SPDX-License-Identifier: Apache-2.0
"""SASRec on Amazon Industrial and Scientific, to stand beside the generator of configs/industrial.py."""

from jgr.config import Config, DataConfig, TrainConfig


def get_config() -> Config:
    return Config(
        data=DataConfig(kind="minionerec", path=""),
        train=TrainConfig(
            model="sasrec",
            out="runs/sasrec_industrial",
            steps=2000,
            batch=256,
            learning_rate=1e-3,
            weight_decay=0.1,
            dropout=0.4,
            negatives=512,
            max_items=10,
            checkpoint_every=100,
            evaluate_every=200,
            patience=5,
            hidden=64,
            layers=2,
            heads=2,
            mlp=64,
        ),
    )
