# SPDX-License-Identifier: Apache-2.0
"""What a training run leaves on disk while it runs, so that kill -9 costs only the steps since the last checkpoint.

    FOLDER/run.json         the configuration and data of the run; another run's folder is refused
    FOLDER/checkpoints/N/   the state after N steps, by Orbax: the last two, and the best validated one
    FOLDER/metrics.jsonl    one line per step: step, loss (nats per target); one per validation: step and the metric,
                            recall@10 unless the run names another

Lines beyond the checkpoint that a run goes on from are dropped: they are written again, and equal.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jgr.config import ConfigError
from jgr.models.checkpoint import require_space
from jgr.models.params import CheckpointError
from jgr.training.trainer import State

KEPT = 2
RECALL = "recall@10"


class RunFolder:
    """The folder of one run, made or reopened. `run` describes it: equal descriptions, equal runs. metric: validated.

    Raises ConfigError where the folder belongs to another run, or another process writes to it.
    """

    def __init__(self, folder: Path, run: Mapping[str, Any], metric: str = RECALL) -> None:
        import orbax.checkpoint as ocp  # 2-3 s of import time

        folder.mkdir(parents=True, exist_ok=True)
        described, path = json.dumps(run, indent=1, sort_keys=True), folder / "run.json"
        if path.exists() and path.read_text(encoding="utf-8") != described:
            raise ConfigError(
                f"{folder}: holds an unfinished run of another configuration or dataset; remove it first"
            )
        self._lock = _lock(folder)
        try:
            path.write_text(described, encoding="utf-8")
        except OSError as error:
            os.close(self._lock)
            raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
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
        written = self.metrics.read_text(encoding="utf-8") if self.metrics.exists() else ""
        lines = [line for line in written.splitlines(keepends=True) if line.endswith("\n")]
        kept = [line for line in lines if json.loads(line)["step"] <= (step or 0)]
        self.metrics.write_text("".join(kept), encoding="utf-8")
        return None if step is None else self.restore(step, like)

    def restore(self, step: int, like: State) -> State:
        """The state after `step` steps. Raises CheckpointError where it is damaged."""
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

    def should_preserve(self, checkpoints: Sequence[Any], *, context: object) -> Sequence[bool]:
        """Orbax's PreservationPolicy. The best is the one by metrics.jsonl, which outlives this process."""
        del context
        validations = self.validations()
        best = best_validation(validations)[0] if validations else None
        oldest = len(checkpoints) - KEPT
        return [at >= oldest or found.step == best for at, found in enumerate(checkpoints)]

    def validations(self) -> list[tuple[int, float]]:
        """(step, value of the metric) of every validation so far, in order."""
        lines = map(json.loads, self.metrics.read_text(encoding="utf-8").splitlines())
        return [(line["step"], line[self._metric]) for line in lines if self._metric in line]

    def record(self, step: int, loss: jax.Array) -> None:
        """Keep a step's loss; it is fetched and written with the next `save`."""
        self._pending.append({"step": step, "loss": loss})

    def save(self, step: int, state: State, value: float | None = None) -> None:
        """Write losses, state and the step's validation, if there was one.

        Returns when they are on disk: the next step overwrites the state's buffers. Raises CheckpointError where they
        cannot be written; the checkpoints before are whole.
        """
        folder = self.metrics.parent
        require_space(folder, state)
        lines = [{"step": line["step"], "loss": float(line["loss"])} for line in self._pending]
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


def _lock(folder: Path) -> int:
    """Of the folder itself, so that nothing is left behind; the system takes it back from a process that was killed."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(f"{folder}: another training writes here; wait for it or set train.out") from None
    return descriptor


def best_validation(validations: list[tuple[int, float]]) -> tuple[int, float]:
    """(step, value) of the best; the latest of equal ones, which is the one whose checkpoint is kept."""
    return max(validations, key=lambda found: (found[1], found[0]))
