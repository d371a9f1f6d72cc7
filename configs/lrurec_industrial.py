# SPDX-License-Identifier: Apache-2.0
"""LRURec on Amazon Industrial and Scientific, which names the candidates of configs/rcllm_industrial.py."""

from jgr.config import Config, DataConfig, TrainConfig


def get_config() -> Config:
    return Config(
        data=DataConfig(kind="prepared", path="runs/data/industrial_titles", catalog="items"),
        train=TrainConfig(
            model="lrurec",
            out="runs/lrurec_industrial",
            steps=2000,
            batch=128,
            learning_rate=1e-3,
            weight_decay=0.01,
            dropout=0.5,
            max_items=50,
            checkpoint_every=100,
            evaluate_every=200,
            patience=3,
            hidden=64,
            layers=2,
            mlp=256,
        ),
    )
