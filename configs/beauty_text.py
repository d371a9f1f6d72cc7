# SPDX-License-Identifier: Apache-2.0
"""Amazon Beauty, semantic ids of the items' texts and of what was taken near them, the last code each item's own.

    jgr prepare --source=amazon-beauty --raw=FOLDER --out=runs/data/beauty_text
    jgr ids --data=runs/data/beauty_text --method=item
    jgr vectors --config=beauty_text --set data.catalog= --out=runs/data/beauty_words.npy
    jgr vectors --config=beauty_text --set data.catalog= --of=sequences --dims=128 --out=runs/data/beauty_near.npy
    jgr ids --data=runs/data/beauty_text --name=flat --vectors=runs/data/beauty_words.npy,runs/data/beauty_near.npy \
      --method=balanced --sizes=256 --collisions=item

One code of 256 tells the model what an item is like, the second lets it learn what holds for no other. Histories are
short, so a third of their events are left out, anew in each epoch, and targets are smoothed.

Of the four recipes in benchmarks/quality_beauty_text.py it has the best recall@10 of the validation users: .064 after
4,001 steps, which were 1.75 minutes on an H200 beside six other trainings. With two codes of 128 before the own one it
was .052, and .060 by three codes of 128, with and without smoothing and left-out events; none had longer.
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
        "data.catalog=flat",
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
