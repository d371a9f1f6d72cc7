# SPDX-License-Identifier: Apache-2.0
"""A decoder that names the next item, each a token of its own: configs/ranker_beauty.py starts from it."""

from pathlib import Path

from jgr.config import Config, load_config, override

OUT = "runs/items_beauty"


def get_config() -> Config:
    return override(
        load_config(Path(__file__).with_name("ranker_beauty.py")),
        "model.name=items_beauty",
        f"model.path={OUT}",
        "train.model=generator",
        f"train.out={OUT}",
        "train.start=",
        "train.retriever=",
        "train.negatives=0",
        "train.steps=3000",
        "train.batch=256",
        "train.micro_batches=1",
        "train.dropout=0.4",
        "train.checkpoint_every=200",
        "train.evaluate_every=400",
    )
