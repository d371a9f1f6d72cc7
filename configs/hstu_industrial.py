# SPDX-License-Identifier: Apache-2.0
"""HSTU on Amazon Industrial and Scientific, whose histories are short, to stand beside configs/industrial.py."""

from jgr.config import Config, DataConfig, ModelConfig, TrainConfig

OUT = "runs/hstu_industrial"


def get_config() -> Config:
    return Config(
        model=ModelConfig(name="hstu_industrial", path=OUT),
        data=DataConfig(kind="minionerec", path=""),
        train=TrainConfig(
            model="hstu",
            out=OUT,
            steps=3000,
            batch=256,
            learning_rate=1e-3,
            weight_decay=0.0,
            dropout=0.5,
            temperature=0.1,
            max_items=10,
            checkpoint_every=100,
            evaluate_every=100,
            patience=5,
            hidden=64,
            layers=2,
            heads=2,
        ),
    )
