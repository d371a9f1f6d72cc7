# SPDX-License-Identifier: Apache-2.0
"""One training run from its folder to its best weights: checkpoints, validation, early stopping, curves.

While it trains, the folder train.out + ".training" holds the state from which a killed run goes on.
"""

from __future__ import annotations

import logging
import shutil
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jgr.catalog.catalog import Catalog, save_catalog
from jgr.config import Config, ConfigError
from jgr.models import manifest
from jgr.models.params import PyTree
from jgr.training.board import Board
from jgr.training.curves import plot_curves
from jgr.training.progress import RECALL, RunFolder, best_validation
from jgr.training.trainer import Begin, Loss, State, Trainer, as_drawn, fit
from jgr.training.windows import Batches

LAG = 4
"""The loss that is shown is that of so many steps before, which the device has done: nobody waits for it."""

Progress = Callable[[int, int, str], None]
"""Called as progress(steps done, steps in all, status) before the first step and after each. status: a short text, such
as the loss."""
Validate = Callable[[PyTree], float]
"""Computes a metric of parameters on validation examples: recall@10 unless another is named. Higher is better."""

_log = logging.getLogger(__name__)


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
    metrics.jsonl of the metric that `validate` computes. begin: see Trainer.initial. Goes on where an earlier, killed
    call with the same arguments stopped. Returns train.out. Raises ConfigError for a loss that is not finite.
    """
    train = config.train
    trainer = Trainer(train, specs, loss)
    validated = validate is not None and train.evaluate_every > 0
    running = Path(f"{train.out}.training")
    settings = asdict(train)
    del settings["tensorboard"]  # what comes out does not depend on it
    run = {**described, "train": settings, "windows": windows.digest()}
    _log.info("training on %d examples, %d steps an epoch", len(windows), windows.steps_per_epoch())
    with RunFolder(running, run, metric) as folder:
        fresh = trainer.initial(begin)
        start = folder.latest(fresh)
        if start is not None:
            _log.info("going on from step %d", int(start.step))
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
            last = done == train.steps
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
            return to_validate and enough()

        if not enough():
            progress(int(state.step), train.steps, "compiling the step")
            with Board(train.tensorboard, int(state.step)) as board:
                state = fit(trainer, state, windows.batches(int(state.step)), on_step)
        reached = {"steps": float(state.step)}
        if validated:
            step, value = best_validation(folder.validations())
            reached = {"steps": float(step), metric: value}
            _log.info("keeping step %d: validation %s %.4f", step, metric, value)
            if step != int(state.step):
                state = folder.restore(step, state)

        def write_beside(out: Path) -> None:
            save_catalog(catalog, out / manifest.CATALOG)
            manifest.write(out, config, catalog, reached)
            shutil.copy(folder.metrics, out)
            plot_curves(out / "metrics.jsonl", out / "curves.png", metric)

        save(jax.device_get(state.params), write_beside)
    shutil.rmtree(running)
    return Path(train.out)
