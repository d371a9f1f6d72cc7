# SPDX-License-Identifier: Apache-2.0
"""The files that a training run writes while it runs, so that kill -9 costs only the steps since the last checkpoint.

    FOLDER/run.json         the configuration and data of the run; another run's folder is refused, see MAY_CHANGE
    FOLDER/checkpoints/N/   the state after N steps, by Orbax: the last two, and the best validated one
    FOLDER/metrics.jsonl    one line per step: step, loss (nats per target); one per validation: step and the metric,
                            recall@10 unless the run names another

When a run goes on from a checkpoint, later lines are dropped: they are written again, and are equal. The folder stays
when the run has ended, with its last state and its best one, so that it can go on to more steps.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from jgr.config import Config, ConfigError
from jgr.files import read_whole, writing
from jgr.models.checkpoint import require_space
from jgr.models.params import CheckpointError
from jgr.training.trainer import State

KEPT = 2
MAY_CHANGE = ("steps", "minutes", "patience", "checkpoint_every", "out")
"""The fields of the section train that a run may be continued with other values of."""
RECALL, NDCG = "recall@10", "ndcg@10"


class RunFolder:
    """The folder of one run, made or reopened.

    run: describes the run; runs with descriptions that are equal but for MAY_CHANGE are equal. metric: the name of the
    validated metric. anew: the flags that would start anew, for errors. Raises ConfigError if the folder belongs to
    another run, naming what differs, or another process writes to it.
    """

    def __init__(
        self, folder: Path, run: Mapping[str, Any], metric: str = RECALL, anew: str = "--fresh"
    ) -> None:
        import orbax.checkpoint as ocp  # 2-3 s of import time

        folder.mkdir(parents=True, exist_ok=True)
        described, path = json.dumps(run, indent=1, sort_keys=True), folder / "run.json"
        self._lock = _lock(folder)
        try:
            others = _differences(path, json.loads(described)) if path.exists() else []
            if others:
                more = f" and {len(others) - 3} more" if len(others) > 3 else ""
                raise ConfigError(
                    f"{folder}: holds a run of other settings or data ({'; '.join(others[:3])}{more}): {anew} starts "
                    "anew and drops it, or give another train.out"
                )
            with writing(path, ConfigError) as stream:  # a full disk leaves what was there
                stream.write(described.encode())
            drop(aside_of(folder))
        except ConfigError:
            os.close(self._lock)
            raise
        self.metrics, self._metric = folder / "metrics.jsonl", metric
        self._pending: list[dict[str, Any]] = []
        self._args = ocp.args
        options = ocp.CheckpointManagerOptions(preservation_policy=self)
        self._manager = ocp.CheckpointManager((folder / "checkpoints").absolute(), options=options)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        self._manager.close()
        os.close(self._lock)

    def latest(self, like: State) -> State | None:
        """The state to go on from, or None for a fresh run. like: any state of the run, for its shapes."""
        step = self._manager.latest_step()
        written = read_whole(self.metrics, ConfigError) if self.metrics.exists() else b""
        lines = [line for line in written.splitlines(keepends=True) if line.endswith(b"\n")]
        kept = [line for number, line in enumerate(lines, 1) if self._step_of(number, line) <= (step or 0)]
        with writing(
            self.metrics, ConfigError
        ) as stream:  # whole at any time: the best checkpoint is known by it alone
            stream.writelines(kept)
        return None if step is None else self.restore(step, like)

    def _step_of(self, number: int, line: bytes) -> int:
        try:
            return int(json.loads(line)["step"])
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            raise ConfigError(
                f"{self.metrics}:{number}: the line is damaged; remove it to go on without what it says"
            ) from None

    def restore(self, step: int, like: State) -> State:
        """Read the state after `step` steps. Raises CheckpointError if it is damaged."""
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
        try:
            state: State = self._manager.restore(step, args=self._args.StandardRestore(shapes))
        except Exception as error:  # Orbax and tensorstore raise many kinds for damaged files
            words = (str(error).splitlines() or [""])[0]
            raise CheckpointError(
                f"{self.metrics.parent}: the checkpoint of step {step} is damaged, or another version of jgr wrote it;"
                f" remove the folder to begin anew: {type(error).__name__}: {words}"
            ) from None
        return state

    def finish(self) -> None:
        """Keep only the last state and the best validated one, since no step follows unless the run is continued."""
        found = self.validations() if self.metrics.exists() else []
        best = best_validation(found)[0] if found else None
        for step in sorted(self._manager.all_steps())[:-1]:
            if step != best:
                self._manager.delete(step)

    def should_preserve(self, checkpoints: Sequence[Any], *, context: object) -> Sequence[bool]:
        """Which checkpoints to keep: Orbax's PreservationPolicy. The best one is found by metrics.jsonl."""
        del context
        validations = self.validations()
        best = best_validation(validations)[0] if validations else None
        oldest = len(checkpoints) - KEPT
        return [at >= oldest or found.step == best for at, found in enumerate(checkpoints)]

    def validations(self) -> list[tuple[int, float]]:
        """(step, value of the metric) of every validation so far, in order."""
        return [(int(line["step"]), line[self._metric]) for line in self.lines() if self._metric in line]

    def lines(self) -> list[dict[str, float]]:
        """The lines of metrics.jsonl so far: each has a step, and other figures by their names."""
        return [json.loads(line) for line in self.metrics.read_text(encoding="utf-8").splitlines()]

    def record(self, step: int, loss: jax.Array) -> None:
        """Remember a step's loss, which the next `save` fetches and writes."""
        self._pending.append({"step": step, "loss": loss})

    def save(self, step: int, state: State, value: float | None = None) -> list[dict[str, float]]:
        """Write losses, state and the step's validation, if there was one; returns the lines of metrics.jsonl.

        It does so when they are on disk, since the next step overwrites the state's buffers. Raises CheckpointError if
        they cannot be written; earlier checkpoints stay whole.
        """
        folder = self.metrics.parent
        require_space(folder, state)
        lines: list[dict[str, float]] = [
            {"step": line["step"], "loss": float(line["loss"])} for line in self._pending
        ]
        if value is not None:
            lines.append({"step": step, self._metric: value})
        try:
            with self.metrics.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
            self._manager.save(step, args=self._args.StandardSave(state))
            self._manager.wait_until_finished()
        except Exception as error:  # an OSError here, many other things in Orbax and tensorstore
            raise CheckpointError(f"{folder}: step {step} could not be written: {error}") from error
        self._pending.clear()
        return lines

    def note(self, step: int, value: float) -> None:
        """Write the validation of a step that is kept already. Raises CheckpointError if it cannot be written."""
        try:
            with self.metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, self._metric: value}) + "\n")
        except OSError as error:
            raise CheckpointError(f"{self.metrics}: could not be written: {error.strerror}") from error


def _lock(folder: Path) -> int:
    """Lock the folder itself, so that no lock file is left; the system unlocks it when the process ends in any way."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(f"{folder}: another training writes here; wait for it or set train.out") from None
    return descriptor


def best_validation(validations: list[tuple[int, float]]) -> tuple[int, float]:
    """(step, value) of the best validation; of equal ones the latest, whose checkpoint is the one kept."""
    return max(validations, key=lambda found: (found[1], found[0]))


def drop(folder: Path) -> None:
    """Remove a run's folder, if it is there. Raises ConfigError where another process trains in it."""
    if not folder.is_dir():
        return
    descriptor = _lock(folder)
    try:
        shutil.rmtree(folder)
    finally:
        os.close(descriptor)


def aside_of(folder: Path) -> Path:
    """Where a run stands that is to be dropped when another has begun in its folder."""
    return Path(f"{folder}.aside")


def set_aside(folder: Path) -> None:
    """Have a run stand aside. Raises ConfigError where another process trains in it."""
    drop(aside_of(folder))
    descriptor = _lock(folder)
    try:
        folder.rename(aside_of(folder))
    finally:
        os.close(descriptor)


def _differences(path: Path, run: Mapping[str, Any]) -> list[str]:
    """What the run of a run.json had otherwise, one text for each field, but for MAY_CHANGE.

    A setting that is newer than the run had its default value then.
    """
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return ["its run.json is damaged"]
    was, now, defaults = _flat(before), _flat(run), _flat(asdict(Config()))
    was = {name: defaults[name] for name in now.keys() & defaults.keys()} | was
    names = sorted(was.keys() | now.keys())
    return [
        f"{name} was {was.get(name)}, now {now.get(name)}"
        for name in names
        if was.get(name) != now.get(name) and name.removeprefix("train.") not in MAY_CHANGE
    ]


def _flat(value: Any, at: str = "") -> dict[str, str]:
    """The fields of nested objects by dotted names, as short texts."""
    if isinstance(value, Mapping):
        return {
            name: text for key, part in value.items() for name, text in _flat(part, f"{at}{key}.").items()
        }
    return {at.removesuffix("."): json.dumps(value)}
