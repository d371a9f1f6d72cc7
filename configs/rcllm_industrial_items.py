# SPDX-License-Identifier: Apache-2.0
"""A decoder that names the next item, each a token of its own: configs/rcllm_industrial_letters.py starts from it."""

from pathlib import Path

from jgr.config import Config, load_config, override

OUT = "runs/rcllm_industrial_items"


def get_config() -> Config:
    return override(
        load_config(Path(__file__).with_name("rcllm_industrial_letters.py")),
        "model.name=rcllm_industrial_items",
        f"model.path={OUT}",
        "prompt.item={sid}",
        "rank.method=likelihood",
        "train.model=generator",
        "train.layouts=both",
        "train.compute=float32",
        f"train.out={OUT}",
        "train.start=",
        "train.retriever=",
        "train.negatives=0",
        "train.minutes=0.5",
        "train.steps=1500",
        "train.warmup_steps=100",
        "train.batch=128",
        "train.label_smoothing=0.1",
        "train.skip_events=0.1",
        "train.evaluate_every=0",
    )
