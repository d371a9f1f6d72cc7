# SPDX-License-Identifier: Apache-2.0
"""HSTU with texts on Amazon Beauty that also learns how soon, if at all, people take a thing again.

    jgr vectors --config=hstu_repeats_beauty --out=vectors.npy
    jgr train --config=hstu_repeats_beauty --set train.item_vectors=vectors.npy

Whether the history's items may be answers is the asker's choice; with train.repeats they stand where they belong.
"""

from pathlib import Path

from jgr.config import Config, load_config, override

OUT = "runs/hstu_repeats_beauty"


def get_config() -> Config:
    return override(
        load_config(Path(__file__).with_name("hstu_text.py")),
        "model.name=hstu_repeats_beauty",
        f"model.path={OUT}",
        "data.kind=prepared",
        "data.path=runs/data/beauty_items",
        f"train.out={OUT}",
        "train.max_items=50",
        "train.steps=1800",
        "train.evaluate_every=150",
        "train.repeats=true",
    )
