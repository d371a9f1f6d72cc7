# SPDX-License-Identifier: Apache-2.0
"""SASRec on MovieLens 1M, to stand beside the generator of configs/ml1m.py."""

from jgr.config import Config, DataConfig, TrainConfig


def get_config() -> Config:
    return Config(
        data=DataConfig(kind="prepared", path="runs/data/ml1m"),
        train=TrainConfig(
            model="sasrec",
            out="runs/sasrec_ml1m",
            steps=4000,
            batch=128,
            learning_rate=1e-3,
            weight_decay=0.0,
            dropout=0.2,
            negatives=512,
            max_items=100,
            checkpoint_every=100,
            evaluate_every=200,
            patience=5,
            hidden=64,
            layers=2,
            heads=2,
            mlp=64,
        ),
    )
