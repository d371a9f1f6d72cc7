# SPDX-License-Identifier: Apache-2.0
"""A decoder that names the next item, each a token of its own: configs/rcllm_industrial_letters.py starts from it.

    jgr vectors --config=rcllm_industrial_items --out=runs/data/industrial_titles_words.npy

It is the generator of configs/industrial_text.py with a code for each item alone.
"""

from pathlib import Path

from jgr.config import Config, load_config, override

OUT = "runs/rcllm_industrial_items"


def get_config() -> Config:
    return override(
        load_config(Path(__file__).with_name("industrial_text.py")),
        "model.name=rcllm_industrial_items",
        f"model.path={OUT}",
        "data.path=runs/data/industrial_titles",
        "data.catalog=items",
        f"train.out={OUT}",
        "train.item_vectors=runs/data/industrial_titles_words.npy",
        "train.item_loss=0",
        "train.later_codes=1",
    )
