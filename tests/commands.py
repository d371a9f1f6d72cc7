# SPDX-License-Identifier: Apache-2.0
"""Commands of jgr as a process of their own would run them, but in this one: seconds of imports less for each."""

from __future__ import annotations

import io
import logging
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

from absl import flags


@contextmanager
def forgotten() -> Iterator[None]:
    """A command defines its flags, sets the levels of its log and writes that to what is stderr then; afterwards
    nothing is left of it, so that another one may run."""
    loggers = [logging.getLogger(name) for name in ("", "jgr", "jgr.serving")]
    before = [(logger.level, list(logger.handlers)) for logger in loggers]
    try:
        yield
    finally:
        for logger, (level, handlers) in zip(loggers, before, strict=True):
            logger.setLevel(level)
            logger.handlers[:] = handlers
        logging.captureWarnings(False)
        for module, defined in flags.FLAGS.flags_by_module_dict().items():
            for flag in list(defined) if module.startswith("jgr.cli.") else ():
                if flag.name in flags.FLAGS:
                    delattr(flags.FLAGS, flag.name)


def command(*argv: str) -> int:
    """Run a command; its exit code. What it prints goes where this process prints."""
    from jgr.cli.main import run

    with forgotten():
        return run(list(argv))


def run_here(*argv: str) -> subprocess.CompletedProcess[str]:
    """Run a command; what it returned and printed."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = command(*argv)
    return subprocess.CompletedProcess(argv, code, out.getvalue(), err.getvalue())
