# SPDX-License-Identifier: Apache-2.0
"""Climber on KuaiRand-Pure: whether a user clicks, likes or watches what is shown, from what was done before.

jgr prepare --source=kuairand-feedback --raw=FOLDER --out=runs/data/kuairand
jgr ids --data=runs/data/kuairand --method=item
jgr features load --config=climber_kuairand --data=runs/data/kuairand
"""

from jgr.config import (
    Config,
    DataConfig,
    ExecutorsConfig,
    FeaturesConfig,
    FeedbackConfig,
    ModelConfig,
    TrainConfig,
)

OUT = "runs/climber_kuairand"


def get_config() -> Config:
    return Config(
        model=ModelConfig(name="climber_kuairand", path=OUT),
        # What users were shown on a day: a few items, seldom more than 16.
        executors=ExecutorsConfig(sizes=(16, 128)),
        features=FeaturesConfig(
            store="runs/data/kuairand_features.sqlite", schema="duration:int32,tags:int32[4]"
        ),
        data=DataConfig(kind="prepared", path="runs/data/kuairand"),
        train=TrainConfig(
            model="climber",
            out=OUT,
            steps=800,
            batch=128,
            learning_rate=2e-3,
            warmup_steps=50,
            weight_decay=1.0,  # few impressions an item: what is seldom seen stays near zero
            dropout=0.0,
            max_items=96,
            checkpoint_every=100,
            evaluate_every=100,
            patience=5,
            validation_examples=12_000,
            hidden=32,
            layers=2,
            heads=2,
            kv_heads=2,
            mlp=64,
        ),
        # Likes are one impression in sixty, and their loss is a tenth of a click's.
        feedback=FeedbackConfig(
            tasks=("click", "like", "long_view"),
            weights=(1.0, 6.0, 1.0),
            blocks=3,
            behaviours=("click+long_view", "like+follow+comment+forward", ""),
        ),
    )
