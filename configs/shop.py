# SPDX-License-Identifier: Apache-2.0
"""The synthetic shop: what `make demo` trains and serves. About a minute of training on two cores."""

from jgr.config import (
    BeamConfig,
    Config,
    DataConfig,
    ModelConfig,
    ProfilesConfig,
    PromptConfig,
    TrainConfig,
)

OUT = "runs/shop"


def get_config() -> Config:
    return Config(
        model=ModelConfig(name="shop", path=OUT),
        prompt=PromptConfig(template="<bos>{history}", item="{sid}", max_items=20),
        beam=BeamConfig(width=32),
        profiles=ProfilesConfig(batch=(1, 8), tokens=(64,), widths=(32,), candidates=(128,)),
        data=DataConfig(kind="shop"),
        train=TrainConfig(
            out=OUT,
            steps=600,
            batch=64,
            learning_rate=3e-3,
            max_items=16,
            hidden=96,
            layers=2,
            heads=4,
            kv_heads=4,
            head_dim=24,
            mlp=256,
            dropout=0.1,
        ),
    )
