# SPDX-License-Identifier: Apache-2.0
"""HSTU on Amazon Beauty by the softmax over all items: the recipe of the quality table's scorers.

The other datasets' files take it as it is and change the data alone, so that what it reaches there owes nothing to a
search on them.
"""

from jgr.config import Config, DataConfig, ModelConfig, TrainConfig

OUT = "runs/hstu_beauty"


def get_config() -> Config:
    return Config(
        model=ModelConfig(name="hstu_beauty", path=OUT),
        data=DataConfig(kind="prepared", path="runs/data/beauty_items"),
        train=TrainConfig(
            model="hstu",
            out=OUT,
            steps=4000,
            batch=128,
            learning_rate=1e-3,
            weight_decay=0.0,
            dropout=0.5,
            temperature=0.05,
            max_items=50,
            checkpoint_every=200,
            evaluate_every=400,
            hidden=128,
            layers=2,
            heads=2,
            kv_heads=2,
        ),
    )
