# SPDX-License-Identifier: Apache-2.0
"""What makes trainings cheaper that are tested for something else: no curves, and one program for equal steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jgr.config import TrainConfig
from jgr.models.params import PyTree
from jgr.training import run
from jgr.training.trainer import Loss, Trainer


def leave_empty(metrics: Path, picture: Path, metric: str) -> None:
    """In place of plot_curves: the picture's file is there, and nothing in it."""
    assert metrics.exists() and metric
    picture.touch()


@contextmanager
def without_curves() -> Iterator[None]:
    """Trainings draw no curves, which tests/training/test_curves.py is about: that takes as long as dozens of steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "plot_curves", leave_empty)
        yield


@contextmanager
def equal_steps_compiled_once() -> Iterator[None]:
    """For trainings over the same data, where to compile a step takes longer than all of a run: the program of the
    first is that of the others with the same settings. At a constant rate the number of steps is none of them."""
    compiled: dict[str, Any] = {}

    class Sharing(Trainer):
        def __init__(self, train: TrainConfig, specs: PyTree, loss: Loss) -> None:
            super().__init__(train, specs, loss)
            of_no_step: dict[str, Any] = dict.fromkeys(("checkpoint_every", "evaluate_every", "patience"), 1)
            if train.schedule == "constant":
                of_no_step["steps"] = train.warmup_steps
            key = repr(replace(train, out="", tensorboard="", start="", **of_no_step))
            self._step = compiled.setdefault(key, self._step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "Trainer", Sharing)
        yield
