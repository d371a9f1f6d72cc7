# SPDX-License-Identifier: Apache-2.0
"""The parts that all commands share: common flags, logs, and how long work shows its progress.

Results go to stdout; logs, progress and errors go to stderr. On a terminal progress is a bar, with a rate and the time
that is left; logs are written above it. Elsewhere it is a line of the log now and then. Importing this is cheap: tqdm
loads with the first bar.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from absl import flags

from jgr.config import Config, UserError, load_config, override
from jgr.config.environment import assignments, variables_named
from jgr.cores import cores_here, cores_to_run_on

T = TypeVar("T")

LOG_LEVELS = ("debug", "info", "warning", "error")
TELL_EVERY_S = 10.0
"""Seconds between two lines of the log about the same work."""
NEW_OBJECTS = 50_000
"""After so many new objects Python looks for cycles among them, where it does so seldom."""

_log = logging.getLogger(__name__)
USUAL = gc.get_threshold()
"""How often Python looks for cycles by itself."""


@contextlib.contextmanager
def seldom_collecting() -> Iterator[None]:
    """A context in which Python looks for cycles once in NEW_OBJECTS new objects, and not in 700 as by default.

    To import jax and to trace a program makes hundreds of thousands of objects that stay, in which it would look for
    cycles hundreds of times: a tenth of the time of a short command.
    """
    young, *older = gc.get_threshold()
    gc.set_threshold(max(young, NEW_OBJECTS), *older)
    try:
        yield
    finally:
        gc.set_threshold(young, *older)


def collect_as_usual() -> None:
    """End `seldom_collecting` before its end, for what must not stand still for long: a server."""
    gc.set_threshold(*USUAL)


def define_flags() -> None:
    """Define the flags that every command has."""
    flags.DEFINE_multi_string(
        "config",
        [],
        "a configuration: a name of jgr config --list, or a file: .toml, .json, .yaml, or Python that has get_config()",
    )
    flags.DEFINE_multi_string("set", [], "override one field, as in --set server.port=8001")
    flags.DEFINE_enum("log_format", "human", ("human", "json"), "how logs are written to stderr")
    flags.DEFINE_enum("log_level", "info", LOG_LEVELS, "the least severe level that is logged")


def environment() -> list[str]:
    """What environment variables say, as --set does: it stands above what files say, and below --set."""
    return list(assignments(os.environ, Config).values())


def told_of_environment(message: str) -> str:
    """An error's message, with the variables that are set for the fields that it names."""
    found = [name for name in variables_named(message, os.environ, Config) if name not in message]
    return f"{message} (the environment sets {', '.join(found)})" if found else message


def define_overwrite() -> None:
    """Define --overwrite, for commands that write something which may be there already (files.refuse_overwriting)."""
    flags.DEFINE_bool("overwrite", False, "replace what is there already")


def refuse_unused(used: bool, names: Sequence[str], what: str) -> None:
    """Raise UserError for one of the flags that is given, unless they are used. what: they are for, in words."""
    for name in names:
        if not used and flags.FLAGS[name].present:
            raise UserError(f"--{name} has no effect here: it is for {what}")


def define_json() -> None:
    """Define --json, for commands whose result is lines for people and one JSON document (print_json)."""
    flags.DEFINE_bool(
        "json", False, "print the JSON document on a terminal too; elsewhere it is the last line"
    )


def print_json(document: Any) -> None:
    """Print a result as one line of JSON, unless it would flood a terminal whose user did not ask for it."""
    if flags.FLAGS.json or not sys.stdout.isatty():
        print(json.dumps(document))
    else:
        print("--json prints the whole result")


def terminal_width() -> int | None:
    """Characters in a line of the terminal that stdout is; None where it is none, and lines may have any length."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def define_ca_file() -> None:
    """Define --ca_file, for commands that ask a server by its URL (client.address.tls_context)."""
    flags.DEFINE_string(
        "ca_file",
        None,
        "PEM file of the authorities that may sign an https server's certificate; default: the system's",
    )


def load(values: flags.FlagValues, default: Config | None = None) -> Config:
    """The configuration: the file of --config, else `default`, then the environment, then every --set."""
    if len(values.config) > 1:
        raise UserError("--config may be given once; only jgr serve takes a configuration for each model")
    base = load_config(values.config[0]) if values.config else default or Config()
    return override(base, *environment(), *values.set)


def names_folder(argument: str) -> bool:
    """Whether an argument is meant as a folder: one with an equals sign that is none is a flag without its dashes."""
    return "=" not in argument or os.path.isdir(argument)


def load_folder(values: flags.FlagValues, argv: Sequence[str]) -> Config:
    """The configuration by the flags, where the command's one argument may name a model folder in place of --config."""
    refuse_arguments(argv[1:] if argv and names_folder(argv[0]) else argv)
    if argv and values.config:
        raise UserError(f"a model is given by its folder, {argv[0]}, or by --config: leave out one of them")
    from jgr.models.hub import located
    from jgr.models.manifest import folder_config, warn_of_prompt

    config = located(load(values, folder_config(argv[0]) if argv else None))
    for path in values.config:
        warn_of_prompt(config, path)
    return config


def size_threads(configs: Sequence[Config]) -> None:
    """Say how many threads XLA has on a CPU, before its backend starts: cores_here less server.host_cores, and more
    than devices where a CPU stands for several. UserError where that cannot be.

    A device that waits for the others holds a thread, and with fewer of them than devices all would wait for ever.
    """
    devices = max(max(config.model.tensor_parallel, config.data_parallel.devices) for config in configs)
    cores, kept = cores_here(), configs[0].server.host_cores
    if kept:
        if devices > 1:
            raise UserError("server.host_cores is for models on one device")
        if kept >= cores:
            raise UserError(f"server.host_cores={kept} leaves no core to the model: there are {cores}")
        os.environ["PJRT_NPROC"] = str(cores - kept)
    elif (threads := cores if devices == 1 else max(cores, 2 * devices)) != cores_to_run_on():
        os.environ.setdefault("NPROC", str(threads))
    if cores < cores_to_run_on():
        _log.info("a limit on CPU time leaves %d of %d cores to this process", cores, cores_to_run_on())


def refuse_arguments(argv: Sequence[str]) -> None:
    """Raise UserError if a command that only takes flags got other arguments."""
    if argv:
        raise UserError(f"unexpected argument '{argv[0]}': flags are written --name=value")


def progress(items: Iterable[T], label: str, total: int) -> Iterator[T]:
    """Yield `items`, of which there are `total`, and show how far that is; see `progress_bar`."""
    with progress_bar(label) as show:
        show(0, total, "")
        for done, item in enumerate(items, 1):
            yield item
            show(done, total, "")


@contextlib.contextmanager
def progress_bar(label: str) -> Iterator[Callable[[int, int, str], None]]:
    """Shows work that is told of by calls of (steps done, steps in all, status): as a bar where stderr is a terminal,
    else in the log."""
    if not sys.stderr.isatty():
        yield Teller(label)
        return
    from tqdm import tqdm
    from tqdm.contrib.logging import logging_redirect_tqdm

    with contextlib.ExitStack() as stack:
        stack.enter_context(logging_redirect_tqdm())
        bars: list[tqdm[Any]] = []

        def show(done: int, total: int, status: str) -> None:
            if not bars:  # what an earlier run has done is no part of the pace
                bars.append(stack.enter_context(tqdm(desc=label, total=total, initial=done, mininterval=0.1)))
            (bar,) = bars
            bar.total = total
            bar.set_postfix_str(status, refresh=bar.n == done)
            bar.update(done - bar.n)

        yield show


class Teller:
    """Writes to the log how far some work is once in TELL_EVERY_S seconds, and when it is done; nothing of work that
    takes less. clock: seconds that never go back."""

    def __init__(
        self,
        label: str,
        tell: Callable[[str], None] = _log.info,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._label, self._tell, self._clock = label, tell, clock
        self._begun: tuple[int, float] | None = None  # what was done at the first call, and when that was
        self._told = (0, math.inf)  # the same of the last line, until then of the first call
        self._since: tuple[int, float] | None = (
            None  # the same of the last line, until then of the first step's end
        )
        self._done = 0

    def __call__(self, done: int, total: int, status: str) -> None:
        now_s = self._clock()
        if self._begun is None or done < self._done:  # other work begins, such as compiling another model
            self._begun, self._told, self._since = (done, now_s), (done, now_s), None
        elif self._since is None and done > self._begun[0]:
            self._since = (done, now_s)  # the first step compiles, and says nothing of the others
        self._done = done
        ended = done >= total and self._told > self._begun
        if not ended and now_s - self._told[1] < TELL_EVERY_S:
            return
        pace = self._pace(self._begun if done >= total else self._since, done, total, now_s)
        self._told = (done, now_s)
        self._since = self._since and self._told
        self._tell(f"{self._label}: {done} of {total}{pace}{status and ', ' + status}")

    @staticmethod
    def _pace(since: tuple[int, float] | None, done: int, total: int, now_s: float) -> str:
        """The steps a second since then (what was done, and when), and how long the rest takes at that pace."""
        if since is None:
            return ""
        steps, seconds = done - since[0], now_s - since[1]
        if steps <= 0 or seconds <= 0:
            return ""
        rate = steps / seconds
        pace = f"{rate:.3g} a second" if rate >= 1 else f"{1 / rate:.3g} s each"
        return f", {pace}" + (f", {duration(round((total - done) / rate))} left" if done < total else "")


def duration(seconds: int) -> str:
    """As 1:02:03 or 2:03."""
    hours, minutes = divmod(seconds // 60, 60)
    return f"{hours}:{minutes:02}:{seconds % 60:02}" if hours else f"{minutes}:{seconds % 60:02}"
