# SPDX-License-Identifier: Apache-2.0
"""HSTU-large on MovieLens 1M by its authors' recipe (MODEL-10, MODEL-11): hstu_ml1m.py with more layers and heads."""

from pathlib import Path

from jgr.config import Config, load_config, override


def get_config() -> Config:
    return override(
        load_config(Path(__file__).with_name("hstu_ml1m.py")),
        "train.out=runs/hstu_large_ml1m",
        "train.layers=8",
        "train.heads=2",
    )
