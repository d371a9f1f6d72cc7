# SPDX-License-Identifier: Apache-2.0
"""A decoder that names the next item, each a token of its own: configs/rcllm_ml1m.py starts from it."""

from pathlib import Path

from jgr.config import Config, load_config, override

OUT = "runs/rcllm_ml1m_items"


def get_config() -> Config:
    return override(
        load_config(Path(__file__).with_name("rcllm_industrial_items.py")),
        "model.name=rcllm_ml1m_items",
        f"model.path={OUT}",
        "prompt.max_items=50",
        "data.path=runs/data/ml1m_titles",
        "data.catalog=",
        f"train.out={OUT}",
        "train.max_items=50",
        "train.minutes=1",
        "train.steps=10000",
        "train.warmup_steps=300",
        "train.label_smoothing=0",
        "train.skip_events=0",
    )
