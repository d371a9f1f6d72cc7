# SPDX-License-Identifier: Apache-2.0
"""One training run from its folder to its best weights: checkpoints, validation, early stopping, curves.

The folder train.out + ".training" holds the state from which a killed run goes on, and a finished one to more steps.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jgr.catalog.catalog import Catalog, save_catalog
from jgr.config import Config, ConfigError, TrainConfig
from jgr.files import refuse_overwriting
from jgr.models import manifest
from jgr.models.params import CheckpointError, PyTree, count
from jgr.models.room import require_memory
from jgr.training.board import Board
from jgr.training.clock import Clock
from jgr.training.curves import plot_curves
from jgr.training.progress import RECALL, RunFolder, aside_of, best_validation, set_aside
from jgr.training.trainer import Begin, Int32, Loss, State, Trainer, as_drawn, fit
from jgr.training.windows import Batches

LAG = 4
"""The loss that is shown is that of so many steps before, which the device has done: nobody waits for it."""

Progress = Callable[[int, int, str], None]
"""Called as progress(steps done, steps in all, status) before the first step and after each. status: a short text, such
as the loss."""
Validate = Callable[[PyTree], float]
"""Computes a metric of parameters on validation examples: recall@10 unless another is named. Higher is better."""

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def making_way(out: str, fresh: bool, overwrite: bool) -> Iterator[None]:
    """Decide what becomes of what is there, around a training into train.out.

    A run that can go on does, finished or not, unless it is to start afresh. A finished model is replaced by another
    run only with overwrite. A run that is dropped stands aside until the new one has begun, and comes back where
    that is refused. Raises UserError, which says what to do.
    """
    trained, running = _trained(Path(out)), _running(out)
    aside = aside_of(running)
    if aside.is_dir() and not running.exists():  # a start was killed before the new run began
        aside.rename(running)
    if trained and (fresh or not running.is_dir()):
        refuse_overwriting(Path(out), overwrite, "train.out", "a trained model")
    if running.is_dir() and (fresh or (trained and overwrite)):
        set_aside(running)
    try:
        yield
    finally:
        if aside.is_dir() and not running.exists():
            aside.rename(running)


def _trained(out: Path) -> bool:
    return (out / "params").is_dir()


def _running(out: str) -> Path:
    return Path(f"{Path(out)}.training")  # beside it, also for a name that ends in a slash


def train_to_best(
    config: Config,
    catalog: Catalog,
    specs: PyTree,
    loss: Loss,
    windows: Batches,
    *,
    described: Mapping[str, Any],
    validate: Validate | None,
    progress: Progress,
    save: Callable[[PyTree, Callable[[Path], None]], None],
    metric: str = RECALL,
    begin: Begin = as_drawn,
) -> Path:
    """Train, and `save` the parameters of the best validation, or of the last step if nothing is validated.

    described: all that the run depends on besides config.train and the windows. save(params, write_beside) must call
    write_beside(folder), which adds the catalog, serving.json, metrics.jsonl and curves.png. metric: the name in
    metrics.jsonl of the metric that `validate` computes. begin: see Trainer.initial. Goes on where an earlier call with
    the same arguments stopped or ended; the number of steps may be another. Returns train.out. Raises ConfigError for a
    loss that is not finite.
    """
    train = config.train
    clock = Clock(train.minutes, train.steps) if train.minutes else None
    trainer = Trainer(train, specs, loss)
    _require_memory(specs)
    validated = validate is not None and train.evaluate_every > 0
    running = _running(train.out)
    anew = "--overwrite" if _trained(Path(train.out)) else "--fresh"
    settings = asdict(train)
    del settings["tensorboard"]  # what comes out does not depend on it
    run = {**described, "train": settings, "windows": windows.digest()}
    _log.info("training on %d examples, %d steps an epoch", len(windows), windows.steps_per_epoch())
    with RunFolder(running, run, metric, anew) as folder:
        fresh = trainer.initial(begin)
        start = folder.latest(fresh)
        if start is not None:
            _tell(train, int(start.step), running, anew)
        state = fresh if start is None else trainer.place(start)
        quality, losses = "", deque[jax.Array](maxlen=LAG + 1)

        def enough() -> bool:
            if not validated or train.patience == 0:
                return False
            found = folder.validations()
            return (
                bool(found)
                and found[-1][0] - best_validation(found)[0] >= train.patience * train.evaluate_every
            )

        def on_step(done: int, state: State, loss: jax.Array) -> bool:
            nonlocal quality
            folder.record(done, loss)
            losses.append(loss)
            last = done == train.steps or (clock is not None and clock.over)
            progress(done, train.steps, f"loss {float(loss if last else losses[0]):.3f}{quality}")
            to_validate = validated and (done % train.evaluate_every == 0 or last)
            if not to_validate and done % train.checkpoint_every != 0 and not last:
                return False
            if not np.isfinite(float(loss)):
                raise ConfigError(f"the loss of step {done} is {float(loss)}: lower train.learning_rate")
            value = None
            if validate is not None and to_validate:
                progress(done, train.steps, "validating")
                value = validate(state.params)
            board.write(folder.save(done, state, value))
            if value is not None:
                quality = f", {metric} {value:.4f}"
                _log.info("step %d of %d: validation %s %.4f", done, train.steps, metric, value)
            return (to_validate and enough()) or last

        if enough() and int(state.step) < train.steps:
            _log.info(
                "step %d was the last, by train.patience: with a larger one it goes on", int(state.step)
            )
        elif int(state.step) < train.steps:
            with Board(train.tensorboard, folder.lines()) as board:
                place = None if clock is None else clock.place
                batches = _telling(windows.batches(int(state.step)), int(state.step), train.steps, progress)
                state = fit(trainer, state, batches, on_step, place)
        reached = {"steps": float(state.step)}
        if validate is not None and validated:
            # A run that was cut short may have as many steps as are wanted, and no validation of the last one.
            if int(state.step) not in dict(folder.validations()):
                folder.note(int(state.step), validate(state.params))
            step, value = best_validation(folder.validations())
            reached = {"steps": float(step), metric: value}
            _log.info("keeping step %d: validation %s %.4f", step, metric, value)
            if step != int(state.step):
                state = folder.restore(step, state)

        if train.learn_valid:
            reached[manifest.LEARNT_VALID] = 1.0

        def write_beside(out: Path) -> None:
            save_catalog(catalog, out / manifest.CATALOG)
            manifest.write(out, config, catalog, reached)
            shutil.copy(folder.metrics, out)
            plot_curves(out / "metrics.jsonl", out / "curves.png", metric)

        save(jax.device_get(state.params), write_beside)
        folder.finish()
    kept_mb = sum(path.stat().st_size for path in running.rglob("*") if path.is_file()) / 1e6
    _log.info("%s (%.1f MB) is for going on to more steps; without that, remove it", running, kept_mb)
    return Path(train.out)


def _require_memory(specs: PyTree) -> None:
    """Raise ConfigError unless the host, where it is the device, has room for weights, their gradients and AdamW's two
    moments."""
    try:
        require_memory(4 * np.dtype(np.float32).itemsize * count(specs), 0)
    except CheckpointError as error:
        raise ConfigError(f"train.hidden, train.layers, train.max_items and the like: {error}") from None


def _telling(batches: Iterable[Int32], begun: int, total: int, progress: Progress) -> Iterator[Int32]:
    """The batches; tells of each shape of them, for which the step is compiled, in the log too: that may take
    minutes, of which nothing else is seen without a terminal."""
    shapes = set()
    for done, batch in enumerate(batches, start=begun):
        if batch.shape not in shapes:
            shapes.add(batch.shape)
            _log.info("compiling the step for batches of %s", " x ".join(map(str, batch.shape)))
            progress(done, total, "compiling the step")
        yield batch


def _tell(train: TrainConfig, done: int, running: Path, anew: str) -> None:
    """Say where a run goes on. Raises ConfigError where it has gone further than it is asked to."""
    if done > train.steps:
        raise ConfigError(
            f"train.steps: {running} has gone {done} steps, more than {train.steps}: set train.steps to {done} or more "
            f"to keep them, or {anew} to start anew"
        )
    if done == train.steps:
        _log.info("all %d steps are done: a larger train.steps goes on, %s starts anew", done, anew)
    else:
        _log.info("going on from step %d to %d; the learning rate follows that end", done, train.steps)
