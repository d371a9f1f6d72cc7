# SPDX-License-Identifier: Apache-2.0
"""The one console script, `jgr`: finds a command, parses its flags, and turns a user's mistake into one line.

A command is a module with `HELP` (one line), `define_flags()` (its absl flags; console.py defines the shared
ones) and `main(argv) -> int | None`, which gets the arguments that are not flags and returns an exit code. A
command is imported when it is called or listed, so it imports jax and other slow modules only inside `main`.

Exit codes: 0 done, 1 a defect of jgr (with its traceback), 2 a user's mistake, 130 interrupted, 141 nobody
reads the output.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
import logging
import os
import re
import sys
from collections.abc import Sequence
from typing import Protocol, cast

from absl import flags

from jgr import __version__, extras, logs
from jgr.cli import console
from jgr.config import Config, UserError
from jgr.heap import keep_memory

COMMANDS = {
    "demo": "jgr.cli.demo",
    "prepare": "jgr.cli.prepare",
    "vectors": "jgr.cli.vectors",
    "ids": "jgr.cli.ids",
    "catalog": "jgr.cli.catalog",
    "features": "jgr.cli.features",
    "convert": "jgr.cli.convert",
    "train": "jgr.cli.train",
    "embeddings": "jgr.cli.embeddings",
    "tune": "jgr.cli.tune",
    "retrieve": "jgr.cli.retrieve",
    "kv": "jgr.cli.kv",
    "serve": "jgr.cli.serve",
    "cluster": "jgr.cli.cluster",
    "top": "jgr.cli.top",
    "evaluate": "jgr.cli.evaluate",
    "bench": "jgr.cli.bench",
    "profile": "jgr.cli.profile",
    "ablate": "jgr.cli.ablate",
    "config": "jgr.cli.config",
    "completion": "jgr.cli.completion",
}


NO_FILE_OF_OURS = (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EROFS, errno.ENOSPC)
"""What is wrong with a file that a user named, and never a defect of jgr."""
NO_VALUES = (
    (r"invalid literal for int\(\) .*", "must be an integer"),
    (r"could not convert string to float: .*", "must be a number"),
    (r"\('Non-boolean argument .*", "must be true or false"),
)
"""Python's words for a flag's value that is none of its type, with ours."""


class Command(Protocol):
    """The members of a command's module."""

    __name__: str
    HELP: str

    def define_flags(self) -> None: ...
    def main(self, argv: Sequence[str]) -> int | None: ...


def run(argv: Sequence[str] | None = None) -> int:
    """Run `jgr` with `argv` (default: the process's arguments, without its name) and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        with console.seldom_collecting():
            code = _run(arguments)
        sys.stdout.flush()
        return code
    except (UserError, flags.Error) as e:
        print("jgr:", console.told_of_environment(" ".join(told(e).split())), file=sys.stderr)
        return 2
    except ModuleNotFoundError as e:
        advice = extras.advice(e)
        if advice is None:
            raise
        print("jgr:", advice, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return _interrupted()
    except BrokenPipeError:
        # The reader of stdout has ended, as in `jgr config | head -1`. The buffered rest is discarded: the
        # interpreter's own flush at exit would fail as this one did.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as e:
        if e.errno not in NO_FILE_OF_OURS or e.filename is None:
            raise
        print(f"jgr: {e.filename}: {e.strerror}", file=sys.stderr)
        return 2


def _interrupted() -> int:
    """The exit code of an interrupted command. Where JAX is loaded the process ends here."""
    if "jax" in sys.modules:
        # JAX gives up a compilation at once, but XLA goes on with it in a thread, under which the interpreter's end is
        # a segmentation fault.
        logging.shutdown()
        with contextlib.suppress(OSError):  # nobody may read the output any more
            sys.stdout.flush()
        os._exit(130)
    return 130


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("help", "--help", "-h"):
        print(_listing())
        return 0
    if arguments[0] == "--version":
        print(__version__)
        return 0
    name, *rest = arguments
    command = _load(name)
    command.define_flags()
    console.define_flags()
    own = rest[: rest.index("--")] if "--" in rest else rest  # what stands behind -- is none of ours
    if "--help" in own or "-h" in own:
        print(_usage(name, command))
        return 0
    for topic in (argument.removeprefix("--help=") for argument in own if argument.startswith("--help=")):
        print(_described(topic))
        return 0
    flags.FLAGS.set_gnu_getopt()  # flags may follow arguments: jgr bench serve --rate=10
    _, *positional = flags.FLAGS([f"jgr {name}", *rest])
    logs.set_up(flags.FLAGS.log_format, flags.FLAGS.log_level)
    keep_memory(os.environ)  # before a command starts threads
    return command.main(positional) or 0


def told(error: Exception) -> str:
    """What is wrong; of a flag's value in words where absl has Python's."""
    said = str(error)
    if isinstance(error, flags.IllegalFlagValueError):
        for of_python, words in NO_VALUES:
            said = re.sub(of_python, words, said)
    return said


def _load(name: str) -> Command:
    if name.startswith("-"):
        raise UserError(f"the command comes before its flags: jgr <command> {name}; run 'jgr' for the list")
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ";"
        raise UserError(f"there is no command '{name}'{hint} run 'jgr' for the list")
    return cast(Command, importlib.import_module(COMMANDS[name]))


def _listing() -> str:
    lines = [f"  {name:<10} {_load(name).HELP}" for name in COMMANDS]
    return "\n".join(["jgr <command> [--flags]", *lines, "jgr <command> --help shows the command's flags"])


def _usage(name: str, command: Command) -> str:
    """The help text of one command: what it does, its own flags, then the shared ones."""
    lines = [f"jgr {name}: {command.HELP}", "", (command.__doc__ or "").strip(), ""]
    for module in (command.__name__, console.__name__):
        for flag in flags.FLAGS.get_flags_for_module(module):
            default = "" if flag.default in (None, "", []) else f" (default: {flag.default_as_str})"
            lines.append(f"  --{flag.name:<16} {flag.help}{default}")
    lines.append(
        f"  --{'help=config':<16} describe every field of the configuration; --help=config.server, a section"
    )
    return "\n".join(lines)


def _described(topic: str) -> str:
    """What --help=TOPIC prints of the configuration's fields."""
    from jgr.config import reference as config_reference

    return config_reference.plain_text(config_reference.chosen(config_reference.reference(Config), topic))
