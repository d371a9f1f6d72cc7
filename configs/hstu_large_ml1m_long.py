# SPDX-License-Identifier: Apache-2.0
"""HSTU-large on MovieLens 1M for as many epochs as its authors train it (MODEL-11: 101), for a GPU.

Theirs draws 128 movies for each event's softmax and keeps the rate; here it is the softmax over all movies, and
the rate comes down as a cosine.
"""

from pathlib import Path

from jgr.config import Config, load_config, override


def get_config() -> Config:
    return override(
        load_config(Path(__file__).with_name("hstu_large_ml1m.py")),
        "model.name=hstu_large_ml1m_long",
        "model.path=runs/hstu_large_ml1m_long",
        "train.out=runs/hstu_large_ml1m_long",
        "train.steps=9600",
        "train.batch=64",
        "train.checkpoint_every=4800",
    )
