# SPDX-License-Identifier: Apache-2.0
"""Amazon Beauty (2014, 5-core), semantic ids of three levels made by jgr.

jgr prepare --source=amazon-beauty --raw=FOLDER --out=runs/data/beauty
jgr ids --data=runs/data/beauty --method=balanced --sizes=128,128,128 --collisions=reassign
"""

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

OUT = "runs/beauty"


def get_config() -> Config:
    return Config(
        model=ModelConfig(name="beauty", path=OUT),
        prompt=PromptConfig(template="<bos>{history}", item="{sid}", max_items=20),
        beam=BeamConfig(width=50),
        profiles=ProfilesConfig(batch=(1, 8, 16, 32), tokens=(96,), widths=(50,), candidates=(128,)),
        batching=BatchingConfig(max_tokens=8192),
        data=DataConfig(kind="prepared", path="runs/data/beauty"),
        train=TrainConfig(
            out=OUT,
            steps=2000,
            batch=256,
            learning_rate=2e-3,
            warmup_steps=100,
            weight_decay=0.1,
            dropout=0.3,
            max_items=20,
            checkpoint_every=100,
            evaluate_every=200,
            patience=4,
            hidden=128,
            layers=3,
            heads=4,
            kv_heads=4,
            head_dim=32,
            mlp=256,
        ),
    )
