# SPDX-License-Identifier: Apache-2.0
"""The parts that all commands share: common flags, logs, and progress bars.

Results go to stdout; logs, progress and errors go to stderr. Importing this is cheap: tqdm loads with the
first bar.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TypeVar

from absl import flags

from jgr.config import Config, UserError, load_config, override

T = TypeVar("T")

LOG_LEVELS = ("debug", "info", "warning", "error")


def define_flags() -> None:
    """Define the flags that every command has."""
    flags.DEFINE_multi_string("config", [], "Python file whose get_config() returns the configuration")
    flags.DEFINE_multi_string("set", [], "override one field, as in --set server.port=8001")
    flags.DEFINE_enum("log_format", "human", ("human", "json"), "how logs are written to stderr")
    flags.DEFINE_enum("log_level", "info", LOG_LEVELS, "the least severe level that is logged")


def define_overwrite() -> None:
    """Define --overwrite, for commands that write something which may be there already (files.refuse_overwriting)."""
    flags.DEFINE_bool("overwrite", False, "replace what is there already")


def load(values: flags.FlagValues, default: Config | None = None) -> Config:
    """The configuration by the flags: the file of --config, else `default`, with every --set applied."""
    if len(values.config) > 1:
        raise UserError("--config may be given once; only jgr serve takes a configuration for each model")
    base = load_config(values.config[0]) if values.config else default or Config()
    return override(base, *values.set)


def load_folder(values: flags.FlagValues, argv: Sequence[str]) -> Config:
    """The configuration by the flags, where the command's one argument may name a model folder in place of --config."""
    refuse_arguments(argv[1:] if argv and "=" not in argv[0] else argv)
    if argv and values.config:
        raise UserError(f"a model is given by its folder, {argv[0]}, or by --config: leave out one of them")
    from jgr.models.hub import located
    from jgr.models.manifest import folder_config

    return located(load(values, folder_config(argv[0]) if argv else None))


def refuse_arguments(argv: Sequence[str]) -> None:
    """Raise UserError if a command that only takes flags got other arguments."""
    if argv:
        raise UserError(f"unexpected argument '{argv[0]}': flags are written --name=value")


class _JsonFormatter(logging.Formatter):
    """Writes a JSON object per line: time (UTC), level, logger, message, the call's `extra`, any exception."""

    _standard = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {k: v for k, v in record.__dict__.items() if k not in self._standard}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def set_up_logging(log_format: str, log_level: str) -> None:
    """Log to stderr in `log_format` ("human" or "json"): jgr from `log_level` up, others from warnings up."""
    human = logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s", datefmt="%H:%M:%S")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if log_format == "json" else human)
    level = logging.getLevelNamesMapping()[log_level.upper()]
    logging.basicConfig(level=max(level, logging.WARNING), handlers=[handler], force=True)
    logging.getLogger("jgr").setLevel(level)
    logging.captureWarnings(True)


def progress(items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
    """Yield `items` and show a progress bar, if stderr is a terminal."""
    from tqdm import tqdm

    # disable=None makes tqdm draw the bar on terminals only.
    yield from tqdm(items, desc=label, total=total, disable=None)


@contextlib.contextmanager
def progress_bar(label: str) -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar that is moved by calls of (steps done, steps in all, status), if stderr is a terminal."""
    from tqdm import tqdm

    with tqdm(desc=label, disable=None) as bar:

        def show(done: int, total: int, status: str) -> None:
            bar.total = total
            bar.set_postfix_str(status, refresh=False)
            bar.update(done - bar.n)

        yield show
