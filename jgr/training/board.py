# SPDX-License-Identifier: Apache-2.0
"""Writes a run's losses and validations for TensorBoard, which reads them while the run goes on (train.tensorboard).

The one idea: metrics.jsonl is what a run knows, and a board is its picture. A run that goes on draws all of it again: a
process that was killed may have lost the end of what it drew, and another folder may have been given meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

from jgr.config import ConfigError


class Board:
    """The event files of one run, in a folder; "": there are none. Use as a context manager.

    before: the lines of metrics.jsonl so far; they are shown in place of all that the folder has. ConfigError where the
    package is missing.
    """

    def __init__(self, folder: str, before: Iterable[Mapping[str, float]] = ()) -> None:
        self._writer: Any = None
        if folder:
            try:
                from tensorboardX import SummaryWriter
            except ImportError:
                raise ConfigError(
                    "train.tensorboard needs a package that is not installed: pip install 'jgr[tensorboard]'"
                ) from None
            self._writer = SummaryWriter(folder, purge_step=1)
            self.write(before)

    def write(self, lines: Iterable[Mapping[str, float]]) -> None:
        """Write lines of metrics.jsonl: each has a step, and other figures by their names."""
        if self._writer is None:
            return
        for line in lines:
            for name, value in line.items():
                if name != "step":  # a name may not have an @
                    self._writer.add_scalar(name.replace("@", "_at_"), value, int(line["step"]))
        self._writer.flush()

    def __enter__(self) -> Board:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.close()
