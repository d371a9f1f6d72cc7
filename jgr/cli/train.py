# SPDX-License-Identifier: Apache-2.0
"""`jgr train`: a semantic-ID generator from a dataset, into a folder that `jgr serve` takes."""

from __future__ import annotations

from collections.abc import Sequence

from absl import flags

from jgr.cli import console

HELP = "train a generator on a dataset"


def define_flags() -> None:
    """None of its own: everything is in the configuration."""


def main(argv: Sequence[str]) -> int:
    console.refuse_arguments(argv)
    config = console.load(flags.FLAGS)
    from jgr.data.datasets import load_dataset
    from jgr.training.generator import train_generator

    dataset = load_dataset(config.data)
    with console.progress_bar("training") as bar:
        folder = train_generator(config, dataset, bar)
    print(folder)
    return 0
