# SPDX-License-Identifier: Apache-2.0
"""Amazon Industrial and Scientific by the recipe of configs/beauty_text.py, of which nothing but the data differs.

    jgr prepare --source=minionerec --raw=FOLDER --out=runs/data/industrial_text
    jgr vectors --config=industrial_text --set data.catalog= --out=runs/data/industrial_text_words.npy
    jgr vectors --config=industrial_text --set data.catalog= --of=sequences --dims=128 \
      --out=runs/data/industrial_text_near.npy
    jgr ids --data=runs/data/industrial_text --name=flat \
      --vectors=runs/data/industrial_text_words.npy,runs/data/industrial_text_near.npy \
      --method=balanced --sizes=256 --collisions=item
"""

from pathlib import Path

from jgr.config import Config, load_config, override

OUT = "runs/industrial_text"


def get_config() -> Config:
    return override(
        load_config(Path(__file__).with_name("beauty_text.py")),
        "model.name=industrial_text",
        f"model.path={OUT}",
        f"train.out={OUT}",
        "data.path=runs/data/industrial_text",
        "train.item_vectors=runs/data/industrial_text_words.npy",
    )
