# SPDX-License-Identifier: Apache-2.0
"""A decoder that names the next item, each a token of its own: configs/ranker_ml1m.py starts from it."""

from pathlib import Path

from jgr.config import Config, load_config, override

OUT = "runs/items_ml1m"


def get_config() -> Config:
    return override(
        load_config(Path(__file__).with_name("ranker_ml1m.py")),
        "model.name=items_ml1m",
        f"model.path={OUT}",
        "train.model=generator",
        f"train.out={OUT}",
        "train.start=",
        "train.retriever=",
        "train.negatives=0",
        "train.steps=4000",
        "train.batch=128",
        "train.micro_batches=1",
        "train.dropout=0.2",
        "train.checkpoint_every=200",
        "train.evaluate_every=400",
    )
