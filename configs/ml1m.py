# SPDX-License-Identifier: Apache-2.0
"""MovieLens 1M, the 3,416 movies of the SASRec papers, semantic ids of two levels made by jgr.

jgr prepare --source=movielens-1m-sasrec --raw=FOLDER --out=runs/data/ml1m
jgr ids --data=runs/data/ml1m --method=balanced --sizes=64,64 --collisions=reassign
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

OUT = "runs/ml1m"


def get_config() -> Config:
    return Config(
        model=ModelConfig(name="ml1m", path=OUT),
        prompt=PromptConfig(template="<bos>{history}", item="{sid}", max_items=50),
        beam=BeamConfig(width=50),
        profiles=ProfilesConfig(batch=(1, 8, 16, 32), tokens=(128,), widths=(50,), candidates=(128,)),
        batching=BatchingConfig(max_tokens=8192),
        data=DataConfig(kind="prepared", path="runs/data/ml1m"),
        train=TrainConfig(
            out=OUT,
            steps=3000,
            batch=128,
            learning_rate=2e-3,
            warmup_steps=200,
            weight_decay=0.1,
            dropout=0.2,
            max_items=50,
            checkpoint_every=100,
            evaluate_every=300,
            patience=4,
            hidden=128,
            layers=3,
            heads=4,
            kv_heads=4,
            head_dim=32,
            mlp=256,
        ),
    )
