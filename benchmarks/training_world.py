# SPDX-License-Identifier: Apache-2.0
"""What training_speed compares: one recipe for each model, its data for the peers, and jgr's own training in a process.

    python -m benchmarks.training_world FOLDER MODEL DATA MEMORY

is `jgr train` by that recipe, all of its loop, held between two steps until it is asked for more; see peers/lines.py.
The recipe is configs/hstu_beauty.py; SASRec takes it with a feed-forward block of 256 and scores that are not divided.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, cast

import jax
import numpy as np

from benchmarks.peers.lines import Message, serve
from configs import hstu_beauty
from jgr.config import Config
from jgr.data.datasets import Dataset, load_dataset
from jgr.heap import keep_memory
from jgr.models import retrievers
from jgr.training.retriever import softmax_loss, train_retriever, training_sequences
from jgr.training.run import LAG
from jgr.training.trainer import Trainer
from jgr.training.windows import Windows

Model = Literal["sasrec", "hstu"]
MODELS: tuple[Model, ...] = ("sasrec", "hstu")
DATA = "runs/data/training-speed"
KEPT = "kept"
"""The word for memory that is kept as `jgr train` keeps it."""
CHECKED_STEPS = 3
WARM_STEPS = LAG + 1
"""Steps before the first that is timed: jgr goes so many steps ahead of the loss that it shows."""
_ENDLESS = 1 << 20


def recipe(model: Model, data: str = DATA) -> Config:
    """The configuration of `jgr train`, with learning rate and steps such that every step does the same work."""
    config = hstu_beauty.get_config()
    train = replace(
        config.train,
        model=model,
        temperature=config.train.temperature if model == "hstu" else 1.0,
        steps=_ENDLESS,
        schedule="constant",
        warmup_steps=0,
        evaluate_every=0,
        checkpoint_every=_ENDLESS,
    )
    return replace(config, data=replace(config.data, path=data), train=train)


def export(folder: Path, config: Config, dataset: Dataset, steps: int) -> list[float]:
    """Write what a peer needs into the folder, and return jgr's loss before each of the first steps without dropout.

    sizes.json: the recipe. weights.npz: the weights that a training begins with. windows.npz: the windows of each step,
    [steps, B, N + 1] rows with -1 on the right, and the width [steps] up to which a step computes.
    """
    train = config.train
    cfg = retrievers.make_config(train, dataset.catalog.item_ids)
    windows = Windows(training_sequences(dataset.interactions, train.learn_valid), train)
    batches = [windows.batch(step) for step in range(steps)]
    plain = softmax_loss(cfg, train.negatives, 0.0, temperature=train.temperature)
    trainer = Trainer(train, retrievers.retriever(cfg).spec(cfg), plain)
    state, losses = trainer.initial(), []
    weights: Any = {  # NumPy's types take no names of arrays in a dictionary
        "/".join(str(getattr(part, "name", part)) for part in path): np.asarray(value)
        for path, value in jax.tree_util.tree_leaves_with_path(state.params)
    }
    for step in range(CHECKED_STEPS):
        state, loss = trainer.step(state, batches[step])
        losses.append(float(loss))
    widest = train.max_items + 1
    padded = [np.pad(rows, ((0, 0), (0, widest - rows.shape[1])), constant_values=-1) for rows in batches]
    folder.mkdir(parents=True)
    (folder / "sizes.json").write_text(json.dumps({**asdict(cfg), "train": asdict(train)}))
    np.savez(folder / "weights.npz", **weights)
    np.savez(folder / "windows.npz", rows=np.stack(padded), widths=[rows.shape[1] for rows in batches])
    return losses


class _Ended(Exception):
    """Unwinds a training that goes on no more."""


class HeldTraining:
    """`jgr train` in a thread, which goes on only while steps are asked for."""

    def __init__(self, config: Config, dataset: Dataset) -> None:
        self._wanted: queue.Queue[int] = queue.Queue()
        self._found: queue.Queue[Message] = queue.Queue()
        self._left, self._count, self._done = 0, 0, 0
        self._began_s = 0.0
        self._thread = threading.Thread(target=self._train, args=(config, dataset), daemon=True)
        self._thread.start()

    def steps(self, count: int) -> Message:
        """Take WARM_STEPS and then `count` steps.

        Returns the seconds in which the device did `count` of them, and the number of the first of these.
        """
        self._wanted.put(count)
        found = self._found.get()
        if "error" in found:
            raise RuntimeError(found["error"])
        return found

    def close(self) -> None:
        """End the training where it is held."""
        self._wanted.put(0)
        self._thread.join()

    def _train(self, config: Config, dataset: Dataset) -> None:
        try:
            train_retriever(config, dataset, self._on_step)
        except _Ended:
            pass
        except Exception as error:  # the asking thread tells it
            self._found.put({"error": f"{type(error).__name__}: {error}"})

    def _on_step(self, done: int, total: int, status: str) -> None:
        """jgr's progress: it is called after each step is handed to the device."""
        if done == self._done and done > 0:
            return  # another word on the same step
        self._done = done
        now_s = time.perf_counter()
        if self._left:
            self._left -= 1
            if self._left == self._count:
                self._began_s = now_s
            if self._left:
                return
            _drain()  # before others are timed
            # By now the device has done the step of LAG before, whose loss the status shows.
            first = done - self._count - LAG
            self._found.put({"seconds": now_s - self._began_s, "first": first, "status": status})
        self._count = self._wanted.get()
        if not self._count:
            raise _Ended
        self._left = self._count + WARM_STEPS


def export_histories(folder: Path, dataset: Dataset) -> None:
    """Write each user's whole history as RecBole's atomic file; it holds the last two events out, as jgr does."""
    lines = ["user_id:token\titem_id:token\ttimestamp:float"]
    test = dataset.interactions.test
    for user, history, target in zip(test.users, test.histories, test.targets, strict=True):
        lines += [f"{user}\t{row}\t{at}" for at, row in enumerate([*history, target])]
    folder.mkdir()
    (folder / f"{folder.name}.inter").write_text("\n".join(lines) + "\n")


def _drain() -> None:
    """Wait for the steps that are under way."""
    jax.block_until_ready([x for x in jax.live_arrays() if not x.is_deleted()])


def _load(folder: str) -> Callable[[Message], Message]:
    model, data, memory = sys.argv[2:5]
    if memory == KEPT:
        keep_memory(os.environ)
    config = recipe(cast(Model, model), data)
    config = replace(config, train=replace(config.train, out=f"{folder}/{model}-{memory}"))
    training = HeldTraining(config, load_dataset(config.data))
    return lambda request: training.steps(request["count"])


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    serve(_load, ("jax", "jaxlib"))
