# SPDX-License-Identifier: Apache-2.0
"""`jgr train`: trains a model on a dataset, and writes a folder that `jgr serve` takes.

A run that was stopped goes on where it was, and one that has ended goes on to more train.steps. --fresh starts anew;
only with --overwrite does that replace a trained model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from absl import flags

from jgr import extras
from jgr.cli import console
from jgr.config import TrainConfig

HELP = "train a generator, a ranker or a scorer on a dataset, or a memory controller"


def define_flags() -> None:
    flags.DEFINE_bool("fresh", False, "start anew, and drop the run that would go on")
    console.define_overwrite()


def main(argv: Sequence[str]) -> int:
    console.refuse_arguments(argv)
    config = console.load(flags.FLAGS)
    if config.train.model == "controller":
        return _controller(config.train)
    extras.require("train", "jgr train")
    from jgr.data.datasets import load_dataset
    from jgr.evaluation import validation
    from jgr.features import extraction
    from jgr.models import retrievers, scorers
    from jgr.training.feedback import train_feedback
    from jgr.training.generator import train_generator
    from jgr.training.ranker_training import train_ranker
    from jgr.training.retriever import train_retriever
    from jgr.training.run import make_way

    if config.train.out:
        make_way(config.train.out, flags.FLAGS.fresh, flags.FLAGS.overwrite)
    dataset = load_dataset(config.data)
    with console.progress_bar("training") as bar:
        validated = config.train.evaluate_every > 0
        if config.train.model in retrievers.MODELS:
            recall = validation.retriever_recall(config, dataset) if validated else None
            folder = train_retriever(config, dataset, bar, recall)
        elif config.train.model in scorers.MODELS:
            features = extraction.of_catalog(config.features.schema, dataset.catalog)
            area = validation.feedback_auc(config, dataset, features) if validated else None
            folder = train_feedback(config, dataset, features, bar, area)
        elif config.train.model == "ranker":
            ranked = validation.ranker_recall(config, dataset) if validated else None
            folder = train_ranker(config, dataset, bar, ranked)
        else:
            search = validation.generator_recall(config, dataset) if validated else None
            folder = train_generator(config, dataset, bar, search)
    print(folder)
    return 0


def _controller(train: TrainConfig) -> int:
    """Train a memory controller: it takes minutes, so it is not one of those that go on."""
    extras.require("controller", "jgr train of a controller")
    from jgr.files import refuse_overwriting
    from jgr.simulation.controller.train import FILE, train_controller

    if (Path(train.out) / FILE).exists():
        refuse_overwriting(Path(train.out), flags.FLAGS.overwrite, "train.out", "a trained controller")
    with console.progress_bar("training") as bar:
        print(train_controller(train, bar))
    return 0
