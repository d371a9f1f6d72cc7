# SPDX-License-Identifier: Apache-2.0
"""Amazon Beauty, semantic ids of the items' texts and of what was taken near them, the last code each item's own.

    jgr prepare --source=amazon-beauty --raw=FOLDER --out=runs/data/beauty_text
    jgr ids --data=runs/data/beauty_text --method=item
    jgr vectors --config=beauty_text --set data.catalog= --out=runs/data/beauty_words.npy
    jgr vectors --config=beauty_text --set data.catalog= --of=sequences --dims=128 --out=runs/data/beauty_near.npy
    jgr ids --data=runs/data/beauty_text --name=own --vectors=runs/data/beauty_words.npy,runs/data/beauty_near.npy \
      --method=balanced --sizes=128,128 --collisions=item

Two codes of 128 tell the model what an item is like, the third lets it learn what holds for no other. Histories are
short, so a third of their events are left out, anew in each epoch, and targets are smoothed.
"""

from pathlib import Path

from jgr.config import Config, load_config, override

OUT = "runs/beauty_text"


def get_config() -> Config:
    return override(
        load_config(Path(__file__).with_name("beauty.py")),
        "model.name=beauty_text",
        f"model.path={OUT}",
        f"train.out={OUT}",
        "data.path=runs/data/beauty_text",
        "data.catalog=own",
        "train.steps=6000",
        "train.learning_rate=1e-3",
        "train.weight_decay=0.1",
        "train.dropout=0.4",
        "train.label_smoothing=0.1",
        "train.skip_events=0.3",
        "train.patience=0",
        "train.checkpoint_every=1000",
        "train.evaluate_every=1000",
        "train.validation_examples=4000",
    )
