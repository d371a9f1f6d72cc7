# SPDX-License-Identifier: Apache-2.0
"""HSTU on MovieLens 1M, of its authors' size (MODEL-10), by the softmax over all movies, in many small steps.

The authors' recipe (MODEL-11) is 101 epochs of 48 steps of 128 users, a softmax over 128 movies drawn for each event,
and a constant rate: steps as a GPU wants them. A CPU's time goes for events, and more is learnt of them in small steps.
"""

from jgr.config import Config, DataConfig, ModelConfig, TrainConfig

OUT = "runs/hstu_ml1m"


def get_config() -> Config:
    return Config(
        model=ModelConfig(name="hstu_ml1m", path=OUT),
        data=DataConfig(kind="prepared", path="runs/data/ml1m"),
        train=TrainConfig(
            model="hstu",
            out=OUT,
            steps=16_000,
            batch=16,
            learning_rate=1e-3,
            warmup_steps=0,
            schedule="cosine",
            weight_decay=0.0,
            clip_norm=1e6,  # none
            dropout=0.2,
            temperature=0.05,
            max_items=200,
            checkpoint_every=400,
            evaluate_every=800,
            validation_examples=3000,
            hidden=50,
            layers=2,
            heads=1,
            kv_heads=1,
        ),
    )
