# SPDX-License-Identifier: Apache-2.0
"""HSTU-large on MovieLens 1M by its authors' recipe (MODEL-10, MODEL-11): 101 epochs of 48 steps."""

from jgr.config import Config, DataConfig, TrainConfig


def get_config() -> Config:
    return Config(
        data=DataConfig(kind="prepared", path="runs/data/ml1m"),
        train=TrainConfig(
            model="hstu",
            out="runs/hstu_large_ml1m",
            steps=4848,
            batch=128,
            learning_rate=1e-3,
            warmup_steps=0,
            schedule="constant",
            weight_decay=0.0,
            clip_norm=1e6,  # none
            dropout=0.2,
            negatives=128,
            weigh_negatives=False,
            temperature=0.05,
            max_items=200,
            checkpoint_every=48,
            evaluate_every=240,
            hidden=50,
            layers=8,
            heads=2,
            kv_heads=1,
        ),
    )
