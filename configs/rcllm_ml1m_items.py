# SPDX-License-Identifier: Apache-2.0
"""A decoder that names the next item, each a token of its own: configs/rcllm_ml1m.py starts from it.

jgr vectors --config=rcllm_ml1m_items --out=runs/data/ml1m_titles_words.npy
"""

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
        "train.item_vectors=runs/data/ml1m_titles_words.npy",
        "train.dropout=0.2",
        "train.max_items=50",
        "train.steps=2000",
        "train.validation_examples=3000",
    )
