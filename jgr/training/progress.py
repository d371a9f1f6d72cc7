# SPDX-License-Identifier: Apache-2.0
"""What a training run leaves on disk while it runs, so that kill -9 costs only the steps since the last checkpoint.

    FOLDER/run.json         the configuration and data of the run; another run's folder is refused
    FOLDER/checkpoints/N/   the state after N steps, by Orbax; the last two are kept
    FOLDER/metrics.jsonl    one line per step: step, loss (nats per token)

Lines beyond the checkpoint that a run goes on from are dropped: they are written again, and equal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jgr.config import ConfigError
from jgr.models.params import CheckpointError
from jgr.training.trainer import State

KEPT = 2


class RunFolder:
    """The folder of one run, made or reopened. `run` describes it: equal descriptions, equal runs.

    Raises ConfigError where the folder belongs to another run.
    """

    def __init__(self, folder: Path, run: Mapping[str, Any]) -> None:
        import orbax.checkpoint as ocp  # 2-3 s of import time

        folder.mkdir(parents=True, exist_ok=True)
        described, path = json.dumps(run, indent=1, sort_keys=True), folder / "run.json"
        if path.exists() and path.read_text(encoding="utf-8") != described:
            raise ConfigError(
                f"{folder}: holds an unfinished run of another configuration or dataset; remove it first"
            )
        path.write_text(described, encoding="utf-8")
        self._metrics = folder / "metrics.jsonl"
        self._losses: list[tuple[int, jax.Array]] = []
        self._args = ocp.args
        options = ocp.CheckpointManagerOptions(max_to_keep=KEPT)
        self._manager = ocp.CheckpointManager((folder / "checkpoints").absolute(), options=options)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        self._manager.close()

    def latest(self, like: State) -> State | None:
        """The state to go on from, or None for a fresh run. like: any state of the run, for its shapes."""
        step = self._manager.latest_step()
        written = self._metrics.read_text(encoding="utf-8") if self._metrics.exists() else ""
        lines = written.splitlines(keepends=True)
        self._metrics.write_text("".join(lines[: step or 0]), encoding="utf-8")
        if step is None:
            return None
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), like)
        try:
            state: State = self._manager.restore(step, args=self._args.StandardRestore(shapes))
        except Exception as error:  # Orbax and tensorstore raise many kinds for damaged files
            raise CheckpointError(
                f"{self._metrics.parent}: the checkpoint of step {step} is damaged: {error!r}"
            ) from None
        return state

    def record(self, step: int, loss: jax.Array) -> None:
        """Keep a step's loss; it is fetched and written with the next `save`."""
        self._losses.append((step, loss))

    def save(self, step: int, state: State) -> None:
        """Write losses and state. Returns when they are on disk: the next step overwrites the state's buffers."""
        with self._metrics.open("a", encoding="utf-8") as file:
            for at, loss in self._losses:
                file.write(json.dumps({"step": at, "loss": float(loss)}) + "\n")
        self._losses.clear()
        self._manager.save(step, args=self._args.StandardSave(state))
        self._manager.wait_until_finished()
