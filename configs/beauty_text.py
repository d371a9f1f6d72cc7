# SPDX-License-Identifier: Apache-2.0
"""Amazon Beauty, semantic ids of the items' texts and of what was taken near them, the last code each item's own.

    jgr prepare --source=amazon-beauty --raw=FOLDER --out=runs/data/beauty_text
    jgr ids --data=runs/data/beauty_text --method=item
    jgr vectors --config=beauty_text --set data.catalog= --out=runs/data/beauty_text_words.npy
    jgr vectors --config=beauty_text --set data.catalog= --of=sequences --dims=128 --out=runs/data/beauty_text_near.npy
    jgr ids --data=runs/data/beauty_text --name=flat \
      --vectors=runs/data/beauty_text_words.npy,runs/data/beauty_text_near.npy \
      --method=balanced --sizes=256 --collisions=item

One code of 256 tells the model what an item is like, the second lets it learn what holds for no other. Its logits are
cosines, as HSTU's scores are (configs/hstu_beauty.py, whose dropout, temperature, width and batch these are); where an
item begins it also learns the item's own code, and its codes know the items' words.

What each brings, by the best recall@10 of 2,000 validation users within 2,000 steps: cosines alone .069, with the
item's own code where it begins .083, with the words too .079, and with the second code at a fifth of its weight .091:
among the items of its group an item was learnt by heart. A softmax over the whole vocabulary, label smoothing and
left-out events had .064 after 4,001 steps of twice the users.

Since then what the model reads are its rows times the square root of their width, as in HSTU: of 4,000 validation users
it has .095 within 1,200 steps, where it had .085. A code of its own for each item alone (data.catalog=,
train.item_loss=0, train.later_codes=1) has .112, in a search of one step: ids of several codes are for catalogs too
large for that.
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
        "train.cosines=true",
        "train.temperature=0.05",
        "train.item_loss=1",
        "train.item_vectors=runs/data/beauty_text_words.npy",
        "train.later_codes=0.2",
        "train.steps=1600",
        "train.batch=128",
        "train.learning_rate=1e-3",
        "train.weight_decay=0",
        "train.dropout=0.5",
        "train.layers=2",
        "train.patience=0",
        "train.checkpoint_every=400",
        "train.evaluate_every=400",
        "train.validation_examples=4000",
    )
