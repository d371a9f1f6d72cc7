# SPDX-License-Identifier: Apache-2.0
"""HSTU whose item embeddings know the items' texts: for short histories, where few items were taken often.

    jgr vectors --config=hstu_text --set data.path=FOLDER --out=vectors.npy
    jgr train --config=hstu_text --set data.path=FOLDER --set train.item_vectors=vectors.npy

With texts it learns fast and then by heart: after some ten passes over the users validation gets worse, so steps are
few and the best validated weights are kept. The settings were chosen on Amazon Industrial, where those of
benchmarks/quality_informed_industrial.py have validated better since.
"""

from jgr.config import Config, DataConfig, ModelConfig, TrainConfig

OUT = "runs/hstu_text"


def get_config() -> Config:
    return Config(
        model=ModelConfig(name="hstu_text", path=OUT),
        data=DataConfig(kind="minionerec", path=""),
        train=TrainConfig(
            model="hstu",
            out=OUT,
            steps=600,
            batch=128,
            learning_rate=1e-3,
            weight_decay=0.0,
            dropout=0.5,
            temperature=0.05,
            max_items=10,
            checkpoint_every=50,
            evaluate_every=50,
            validation_examples=5000,
            hidden=128,
            layers=2,
            heads=2,
            kv_heads=2,
        ),
    )
