# SPDX-License-Identifier: Apache-2.0
"""Amazon Industrial and Scientific with MiniOneRec's split and semantic ids: --set data.path=FOLDER."""

from jgr.config import (
    BatchingConfig,
    BeamConfig,
    Config,
    DataConfig,
    ModelConfig,
    ProfilesConfig,
    PromptConfig,
    TrainConfig,
)

OUT = "runs/industrial"


def get_config() -> Config:
    return Config(
        model=ModelConfig(name="industrial", path=OUT),
        prompt=PromptConfig(template="<bos>{history}", item="{sid}", max_items=10),
        beam=BeamConfig(width=50),
        profiles=ProfilesConfig(batch=(1, 8, 16, 32), tokens=(32,), widths=(50,), candidates=(128,)),
        batching=BatchingConfig(max_tokens=8192),
        data=DataConfig(kind="minionerec"),
        train=TrainConfig(
            out=OUT,
            steps=840,
            batch=256,
            learning_rate=2e-3,
            weight_decay=0.1,
            dropout=0.3,
            max_items=10,
            checkpoint_every=120,
            evaluate_every=120,
            hidden=128,
            layers=3,
            heads=4,
            kv_heads=4,
            head_dim=32,
            mlp=512,
        ),
    )
