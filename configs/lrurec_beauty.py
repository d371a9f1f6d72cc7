# SPDX-License-Identifier: Apache-2.0
"""LRURec on Amazon Beauty, which names the candidates that a ranker orders: `jgr retrieve`."""

from jgr.config import Config, DataConfig, TrainConfig


def get_config() -> Config:
    return Config(
        data=DataConfig(kind="prepared", path="runs/data/beauty"),
        train=TrainConfig(
            model="lrurec",
            out="runs/lrurec_beauty",
            steps=4000,
            batch=256,
            learning_rate=1e-3,
            weight_decay=0.01,
            dropout=0.4,
            max_items=50,
            checkpoint_every=100,
            evaluate_every=200,
            patience=5,
            hidden=64,
            layers=2,
            mlp=256,
        ),
    )
