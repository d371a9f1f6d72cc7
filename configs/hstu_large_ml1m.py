# SPDX-License-Identifier: Apache-2.0
"""HSTU-large on MovieLens 1M, of its authors' size (MODEL-10): hstu_ml1m.py with more layers and heads."""

from pathlib import Path

from jgr.config import Config, load_config, override


def get_config() -> Config:
    return override(
        load_config(Path(__file__).with_name("hstu_ml1m.py")),
        "model.name=hstu_large_ml1m",
        "model.path=runs/hstu_large_ml1m",
        "train.out=runs/hstu_large_ml1m",
        "train.steps=12000",
        "train.layers=8",
        "train.heads=2",
    )
