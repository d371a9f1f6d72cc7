# SPDX-License-Identifier: Apache-2.0
"""`jgr train`: trains a model on a dataset, and writes a folder that `jgr serve` takes.

A run that was stopped goes on where it was, and one that has ended goes on to more train.steps. --fresh starts anew;
only with --overwrite does that replace a trained model.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from jgr import extras
from jgr.cli import console
from jgr.config import Config, TrainConfig

if TYPE_CHECKING:
    from jgr.data.datasets import Dataset
    from jgr.training.run import Progress

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
    from jgr.training.run import making_way

    keep_compiled(config)
    out, fresh, overwrite = config.train.out, flags.FLAGS.fresh, flags.FLAGS.overwrite
    with making_way(out, fresh, overwrite) if out else contextlib.nullcontext():
        dataset = load_dataset(config.data)
        with console.progress_bar("training") as bar:
            folder = fit(config, dataset, bar)
    print(folder)
    return 0


def keep_compiled(config: Config) -> None:
    """Keep compiled steps in the folder of model.compilation_cache, so that a training that goes on, and the next
    trial of the same shapes, need not compile them; unless JAX is told of a folder of its own."""
    import jax

    from jgr.serving.engine.compilation import use_compilation_cache

    if config.model.compilation_cache and not getattr(jax.config, "jax_compilation_cache_dir", None):
        use_compilation_cache(Path(os.path.expanduser(config.model.compilation_cache)))


def fit(
    config: Config, dataset: Dataset, progress: Progress, on_validation: Callable[[float], None] | None = None
) -> Path:
    """Train the model that config.train names, and return its folder. on_validation: takes each value in turn."""
    from jgr.evaluation import validation
    from jgr.features import extraction
    from jgr.models import retrievers, scorers
    from jgr.training.feedback import train_feedback
    from jgr.training.generator import train_generator
    from jgr.training.ranker_training import train_ranker
    from jgr.training.retriever import train_retriever

    def watched(validate: Callable[..., float]) -> Callable[..., float]:
        def value_of(*model: Any) -> float:
            value = validate(*model)
            if on_validation is not None:
                on_validation(value)
            return value

        return value_of

    validated = config.train.evaluate_every > 0
    if config.train.model in retrievers.MODELS:
        recall = watched(validation.retriever_recall(config, dataset)) if validated else None
        return train_retriever(config, dataset, progress, recall)
    if config.train.model in scorers.MODELS:
        features = extraction.of_catalog(config.features.schema, dataset.catalog)
        area = watched(validation.feedback_auc(config, dataset, features)) if validated else None
        return train_feedback(config, dataset, features, progress, area)
    if config.train.model == "ranker":
        ranked = watched(validation.ranker_recall(config, dataset)) if validated else None
        return train_ranker(config, dataset, progress, ranked)
    search = watched(validation.generator_recall(config, dataset)) if validated else None
    return train_generator(config, dataset, progress, search)


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
