# SPDX-License-Identifier: Apache-2.0
"""A search for the hyper-parameters of a training: `jgr tune`, by Optuna's tree-structured Parzen estimator.

The one idea: a trial is a training of its own with some fields drawn, and its value the best validation of it. The
study lies in a folder (study.db, SQLite), so it goes on after it was stopped: finished trials are known, and a trial
that was cut short is trained on from its last checkpoint. Only the validation split is read.

A trial whose validations are below the median of earlier trials at the same step is ended (pruned). Of the models only
the best one's folder is kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jgr.config import Config, ConfigError, UserError, override
from jgr.files import make_folder

Report = Callable[[float], None]
"""Takes the value of each validation in turn."""
Fit = Callable[[Config, Report], None]
"""Trains config.train.out, or goes on with it, and reports every validation. What it raises ends the study."""

_log = logging.getLogger(__name__)

MOST_FAILED = 10
"""So many trials that fail one after the other end the study. A few may do so by chance, where many draws have fields
that do not go together."""
BEFORE_PRUNING = 4
"""So many trials are finished before one is pruned."""
DATABASE, PICTURE, BEST = "study.db", "trials.png", "best.toml"
_NAME = "jgr"


class Pruned(Exception):
    """Raised by a Report: the trial is not worth going on with."""


@dataclass(frozen=True)
class Range:
    """What may be drawn for a field: one of `choices`, or a number from low to high.

    log: its logarithm is drawn evenly. whole: it is a whole number.
    """

    field: str
    choices: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    whole: bool = False

    @classmethod
    def parse(cls, text: str) -> Range:
        """Read `field=a,b,c`, `field=low:high` or `field=low:high:log`. Raises UserError."""
        field, equals, values = text.partition("=")
        wrong = f"--vary={text}: write section.field=a,b,c or section.field=low:high, with :log for even logarithms"
        if not equals or not field or not values:
            raise UserError(wrong)
        if ":" not in values:
            return cls(field, tuple(dict.fromkeys(value.strip() for value in values.split(","))))
        low, high, *rest = values.split(":")
        if rest not in ([], ["log"]):
            raise UserError(wrong)
        try:
            ends = float(low), float(high)
        except ValueError:
            raise UserError(wrong) from None
        if not (math.isfinite(ends[0]) and math.isfinite(ends[1]) and ends[0] < ends[1]):
            raise UserError(f"--vary={text}: the first number must be below the second")
        if rest and ends[0] <= 0:
            raise UserError(f"--vary={text}: logarithms need numbers above 0")
        whole = all(part.strip().lstrip("+-").isdigit() for part in (low, high))
        return cls(field, (), *ends, bool(rest), whole)

    def draw(self, trial: Any) -> str:
        """A value from an Optuna trial."""
        if self.choices:
            return str(trial.suggest_categorical(self.field, self.choices))
        if self.whole:
            return str(trial.suggest_int(self.field, int(self.low), int(self.high), log=self.log))
        return repr(trial.suggest_float(self.field, self.low, self.high, log=self.log))


def check(config: Config, ranges: Sequence[Range]) -> None:
    """Raise UserError unless the configuration validates and every field takes both ends, or a choice, of its range.

    Not every choice, since some go with those of other fields alone.
    """
    if not ranges:
        raise UserError("--vary: name a field and what to try, as in --vary=train.dropout=0.2:0.6")
    twice = [r.field for r in ranges if sum(other.field == r.field for other in ranges) > 1]
    if twice:
        raise UserError(f"--vary: {twice[0]} is given twice")
    if not config.train.evaluate_every:
        raise ConfigError("train.evaluate_every is 0: a study compares validations, so set it")
    if config.train.model == "controller":
        raise ConfigError("train.model=controller is trained on simulations, and validates nothing")
    for r in ranges:
        if not r.field.startswith("train.") or r.field in (
            "train.out",
            "train.evaluate_every",
            "train.model",
        ):
            raise UserError(f"--vary: {r.field} cannot be varied: only how the model of train.* is made can")
        fits, refused = False, None
        for value in r.choices or (r.low, r.high):
            try:
                override(config, f"{r.field}={int(value) if r.whole else value}")
                fits = True
            except ConfigError as error:
                refused = error
        if refused is not None and not (fits and r.choices):
            raise refused


class Study:
    """The trials in a folder, to go on with. Needs jgr[tune].

    data: the digest of the dataset. Raises UserError where the folder's study is of another configuration, other
    ranges or other data.
    """

    def __init__(self, folder: Path, config: Config, ranges: Sequence[Range], data: str = "") -> None:
        import optuna
        from sqlalchemy.exc import SQLAlchemyError

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        check(config, ranges)
        make_folder(folder, UserError, "--out")
        self._folder, self._config, self._ranges = folder, config, tuple(ranges)
        self._states = optuna.trial.TrialState
        path = (folder / DATABASE).absolute()
        storage = f"sqlite:///{path}"
        try:
            known = path.exists() and _NAME in optuna.get_all_study_names(storage)
            # Another seed each time: with the same one a study that goes on would draw its first trials again.
            done = len(optuna.load_study(study_name=_NAME, storage=storage).trials) if known else 0
        except (optuna.exceptions.OptunaError, SQLAlchemyError) as error:
            raise UserError(
                f"{path}: is not a study that can be gone on with: {type(error).__name__}"
            ) from None
        self._study = optuna.create_study(
            study_name=_NAME,
            storage=storage,
            direction="maximize",
            load_if_exists=True,
            sampler=optuna.samplers.TPESampler(seed=config.train.seed + done),
            pruner=optuna.pruners.MedianPruner(n_startup_trials=BEFORE_PRUNING),
        )
        made_of = _digest(config, self._ranges)
        if self._study.user_attrs.setdefault("of", made_of) != made_of:
            raise UserError(
                f"{folder}: holds a study of another configuration or other ranges: give another --out"
            )
        self._study.set_user_attr("of", made_of)
        if self._study.user_attrs.setdefault("data", data) != data:
            raise UserError(
                f"{folder}: holds a study of other data: the dataset of data.path was made anew; give another --out"
            )
        self._study.set_user_attr("data", data)

    @property
    def finished(self) -> int:
        """How many trials have a value or were pruned."""
        return len(self._of(self._states.COMPLETE, self._states.PRUNED))

    def run(self, trials: int, fit: Fit, progress: Callable[[int, int, str], None]) -> None:
        """Go on until so many trials are finished, those before included. UserError where another process does."""
        with _alone(self._folder):
            self._run(trials, fit, progress)

    def _run(self, trials: int, fit: Fit, progress: Callable[[int, int, str], None]) -> None:
        for cut_short in self._of(self._states.RUNNING):
            folder = cut_short.user_attrs.get("folder", f"trial-{cut_short.number}")
            self._study.tell(cut_short.number, state=self._states.FAIL)
            self._study.enqueue_trial(cut_short.params, user_attrs={"folder": folder})
        while self.finished < trials:
            progress(self.finished, trials, self._told())
            self._trial(fit)
            self.draw()
        progress(self.finished, trials, self._told())

    def best(self) -> tuple[Config, float, int]:
        """The configuration of the best trial, for a training into config.train.out, its value and its number."""
        if not self._of(self._states.COMPLETE):
            raise UserError(f"{self._folder}: no trial was finished")
        trial = self._study.best_trial
        return override(self._config, *trial.user_attrs["assigned"]), self._study.best_value, trial.number

    def folder_of(self, number: int) -> Path:
        """The folder of a trial, which holds its model while no other trial is better."""
        trial = self._study.trials[number]
        return self._folder / str(trial.user_attrs.get("folder", f"trial-{number}"))

    def rows(self) -> list[dict[str, Any]]:
        """A row for each trial: number, value (None if it has none), state, and the drawn fields."""
        return [
            {"trial": t.number, "value": t.value, "state": t.state.name.lower(), **t.params}
            for t in self._study.trials
        ]

    def draw(self) -> None:
        """Draw the trials into trials.png: their values in order, and against each field."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        rows = [row for row in self.rows() if row["value"] is not None and row["state"] == "complete"]
        if not rows:
            return
        names = [r.field for r in self._ranges]
        figure = Figure(figsize=(3.2 * (1 + len(names)), 3.4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(1, 1 + len(names), sharey=True, squeeze=False)[0]
        values = [row["value"] for row in rows]
        best = [max(values[: i + 1]) for i in range(len(values))]
        axes[0].plot(
            [row["trial"] for row in rows], best, color="tab:red", drawstyle="steps-post", label="best so far"
        )
        axes[0].scatter([row["trial"] for row in rows], values, s=14)
        axes[0].set_xlabel("trial")
        axes[0].set_ylabel("best validation")
        axes[0].legend(fontsize="small")
        for panel, r in zip(axes[1:], self._ranges, strict=True):
            panel.scatter([row[r.field] for row in rows], values, s=14)
            panel.set_xlabel(r.field.removeprefix("train."))
            if r.log:
                panel.set_xscale("log")
        figure.savefig(self._folder / PICTURE, dpi=120)

    def _of(self, *states: Any) -> list[Any]:
        return list(self._study.get_trials(deepcopy=False, states=states))

    def _told(self) -> str:
        found = self._of(self._states.COMPLETE)
        return f"best {max(trial.value for trial in found):.4f}" if found else ""

    def _trial(self, fit: Fit) -> None:
        trial = self._study.ask()
        folder = self._folder / trial.user_attrs.get("folder", f"trial-{trial.number}")
        assigned = [f"{r.field}={r.draw(trial)}" for r in self._ranges]
        trial.set_user_attr("assigned", assigned)
        trial.set_user_attr("folder", folder.name)
        every, values = self._config.train.evaluate_every, list[float]()
        before = len(_validations(Path(f"{folder}.training")))  # of a trial that was cut short

        def report(value: float) -> None:
            values.append(value)
            trial.report(value, (before + len(values)) * every)
            if trial.should_prune():
                raise Pruned

        try:
            places = [f"train.out={folder}"]
            if board := self._config.train.tensorboard:
                places.append(f"train.tensorboard={Path(board) / folder.name}")
            fit(override(self._config, *assigned, *places), report)
        except Pruned:
            self._study.tell(trial, state=self._states.PRUNED)
            _remove(folder)
            return
        except ConfigError as error:
            # Fields that do not go together, such as heads that do not divide hidden, or a loss that is not finite:
            # the trial would fail again. A cause that is not the trial's ends the study soon, and then it goes on.
            _log.warning("trial %d failed: %s", trial.number, error)
            self._study.tell(trial, state=self._states.FAIL)
            _remove(folder)
            last = [each.state for each in self._study.trials[-MOST_FAILED:]]
            if last == [self._states.FAIL] * MOST_FAILED:
                raise
            return
        previous = max(self._of(self._states.COMPLETE), key=lambda t: t.value, default=None)
        value = max(_validations(folder) or values)
        self._study.tell(trial, value)
        loser = folder
        if previous is None or value > previous.value:
            loser = self._folder / previous.user_attrs["folder"] if previous else None
        if loser is not None:
            _remove(loser)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock the folder itself, which the system unlocks when the process ends in any way."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder}: another process goes on with this study; wait for it") from None
        yield
    finally:
        os.close(descriptor)


def _validations(folder: Path) -> list[float]:
    """Those of the whole training, also before it was cut short."""
    with contextlib.suppress(OSError):
        written = (folder / "metrics.jsonl").read_text()
        # A training that was killed may have left a part of a line.
        lines = [json.loads(line) for line in written[: written.rfind("\n") + 1].splitlines()]
        return [value for line in lines for name, value in line.items() if name not in ("step", "loss")]
    return []


def _remove(folder: Path) -> None:
    for path in (folder, Path(f"{folder}.training")):
        shutil.rmtree(path, ignore_errors=True)


def _digest(config: Config, ranges: Sequence[Range]) -> str:
    """The digest of all that trials depend on: the ranges, and the sections that training reads, apart from where it
    writes."""
    sections = ("train", "data", "prompt", "beam", "rank", "feedback", "features")
    read = {name: dataclasses.asdict(getattr(config, name)) for name in sections}
    for name in ("out", "tensorboard"):
        del read["train"][name]
    whole = json.dumps([read, [dataclasses.astuple(r) for r in ranges]], sort_keys=True, default=str)
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


def told(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The trials as lines of text, the best first."""
    ranked = sorted(rows, key=lambda row: (row["state"] != "complete", -(row["value"] or 0.0), row["trial"]))
    for row in ranked:
        value = f"{row['value']:.4f}" if row["state"] == "complete" else row["state"]
        drawn = ", ".join(f"{name.removeprefix('train.')} {row[name]}" for name in row if "." in name)
        yield f"trial {row['trial']:>3}  {value:>8}  {drawn}"
