# SPDX-License-Identifier: Apache-2.0
"""`jgr completion SHELL` prints a script that completes jgr's commands, flags, fields, values and files.

The script of each shell only hands over the words of the line and shows what it is told. It runs `jgr completion reply
-- WORD...`, without the word `jgr` and with the word at the cursor last, which prints the candidates, one a line, each
with a tab and its meaning behind it. So the shells agree, and nothing grows old when jgr is updated. No slow module is
imported.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args, get_origin

from absl import flags

from jgr.ablation.mechanisms import SYSTEMS
from jgr.cli import console
from jgr.cli.completion_scripts import SCRIPTS
from jgr.cli.main import COMMANDS
from jgr.config import Config, UserError, named
from jgr.config.formats import SUFFIXES
from jgr.config.reference import Field, reference

HELP = "print the completion script of a shell: bash, zsh or fish"
WORDS = {
    "ablate": tuple(SYSTEMS),
    "bench": ("ops", "serve"),
    "catalog": ("build", "inspect"),
    "embeddings": ("upload",),
    "features": ("load",),
    "kv": ("build", "library"),
    "completion": tuple(SCRIPTS),
}
"""The first arguments of commands that take one of a few words."""
TAKES_FOLDERS = ("serve", "evaluate", "profile", "config", "bench", "embeddings")
MAX_FILES = 1000


class Candidate(NamedTuple):
    """A word that may stand at the cursor, and what it means."""

    word: str
    text: str = ""


def define_flags() -> None:
    """Define no flags."""


def main(argv: Sequence[str]) -> None:
    if not argv:
        print("source <(jgr completion bash)    # also zsh; fish: jgr completion fish | source")
    elif argv[0] == "reply":
        lines = ("\t".join(candidate) for candidate in candidates(argv[1:]))
        print("\n".join(line for line in lines if "\n" not in line))
    elif argv[0] in SCRIPTS:
        console.refuse_arguments(argv[1:])
        print(SCRIPTS[argv[0]], end="")
    else:
        raise UserError(f"there is no completion for {argv[0]!r}; there is for {', '.join(SCRIPTS)}")


def candidates(words: Sequence[str]) -> list[Candidate]:
    """What may stand at the cursor. words: those behind `jgr`, the last one as far as it is written."""
    *before, current = words or [""]
    if not before:
        commands = [Candidate(name, _help(name)) for name in COMMANDS]
        shown = commands if not current.startswith("-") else [Candidate("--help"), Candidate("--version")]
        return _beginning(shown, current)
    command = before[0]
    if command not in COMMANDS or "--" in before:
        return []
    known = _flags_of(command)
    name, equals, value = current.removeprefix("--").partition("=")
    if current.startswith("--") and equals:
        return [Candidate(f"--{name}={word}", text) for word, text in _values(known, name, value)]
    last = before[-1].removeprefix("--")
    if before[-1].startswith("--") and last in known and not known[last].boolean:
        return _values(known, last, current)
    if current.startswith("-"):
        return _beginning(_flag_words(known), current)
    if command in WORDS and not _arguments(before[1:], known):
        return _beginning((Candidate(word) for word in WORDS[command]), current)
    return _paths(current, lambda name: False) if command in TAKES_FOLDERS else []


def _arguments(words: Sequence[str], known: dict[str, flags.Flag[Any]]) -> list[str]:
    """The words that are neither flags nor their values."""
    found, of_flag = [], False
    for word in words:
        if not of_flag and not word.startswith("-"):
            found.append(word)
        name = word.removeprefix("--")
        of_flag = not of_flag and word.startswith("--") and name in known and not known[name].boolean
    return found


def _beginning(found: Iterable[Candidate], start: str) -> list[Candidate]:
    return [candidate for candidate in found if candidate.word.startswith(start)]


def _help(command: str) -> str:
    return cast(str, importlib.import_module(COMMANDS[command]).HELP)


def _flags_of(command: str) -> dict[str, flags.Flag[Any]]:
    """The flags of a command, and those that all have."""
    module = importlib.import_module(COMMANDS[command])
    if not flags.FLAGS.get_flags_for_module(module.__name__):
        module.define_flags()
    names = (module.__name__, console.__name__)
    return {flag.name: flag for name in names for flag in flags.FLAGS.get_flags_for_module(name)}


def _flag_words(known: dict[str, flags.Flag[Any]]) -> Iterator[Candidate]:
    for flag in known.values():
        text = flag.help or ""
        yield Candidate(f"--{flag.name}" if flag.boolean else f"--{flag.name}=", text)
        if flag.boolean:
            yield Candidate(f"--no{flag.name}", f"not: {text}")
    yield Candidate("--help", "describe the flags")
    yield Candidate("--help=", "describe the configuration, as in --help=config.server")


def _values(known: dict[str, flags.Flag[Any]], name: str, start: str) -> list[Candidate]:
    """The values of a flag that begin so."""
    if name == "help":
        topics = ["config", *(f"config.{section.name}" for section in reference(Config))]
        return _beginning(map(Candidate, topics), start)
    if name == "set":
        return _assignments(start)
    if name == "config":
        comes = (Candidate(known_as, named.summary(known_as)) for known_as in named.names())
        return _beginning(comes, start) + _paths(
            start, lambda name: Path(name).suffix.lower() in (".py", *SUFFIXES)
        )
    flag = known.get(name)
    if flag is None:
        return []
    if flag.boolean:
        return _beginning(map(Candidate, ("true", "false")), start)
    if isinstance(flag.parser, flags.EnumParser):
        return _beginning(map(Candidate, flag.parser.enum_values), start)
    return _paths(start) if _names_files(flag.help or "") else []


def _assignments(start: str) -> list[Candidate]:
    """What may stand behind --set: sections, once there is but one of them its fields, and behind = a field's values.

    `jgr serve` takes a model's name and a colon in front.
    """
    key, equals, value = start.partition("=")
    model, colon, key = key.rpartition(":")
    front = f"{model}{colon}"
    sections = reference(Config)
    fields = [field for section in sections for field in section.fields]
    if equals:
        found = next((field for field in fields if field.key == key), None)
        known = _field_values(found, value) if found else []
        return [Candidate(f"{front}{key}={candidate.word}", candidate.text) for candidate in known]
    begun = [section for section in sections if f"{section.name}.".startswith(key)]
    if "." not in key and len(begun) > 1:
        return [Candidate(f"{front}{section.name}.", section.text) for section in begun]
    return [Candidate(f"{front}{f.key}=", f.text) for f in fields if f.key.startswith(key)]


def _field_values(field: Field, start: str) -> list[Candidate]:
    hint = field.hint
    if get_origin(hint) is Literal:
        return _beginning(map(Candidate, get_args(hint)), start)
    if hint is bool:
        return _beginning(map(Candidate, ("true", "false")), start)
    if type(None) in get_args(hint):
        return _beginning([Candidate("none")], start)
    return _paths(start) if hint is str and _names_files(field.text) else []


def _names_files(text: str) -> bool:
    """Whether a description says that a value is a file or a folder."""
    return re.search(r"\b(files?|folders?)\b", text, re.IGNORECASE) is not None


def _paths(start: str, takes: Callable[[str], bool] = lambda name: True) -> list[Candidate]:
    """The folders that begin so, and the files whose name `takes` accepts; hidden ones if a dot is written."""
    folder, slash, begun = start.rpartition("/")
    try:
        with os.scandir(os.path.expanduser(f"{folder}/") if slash else ".") as entries:
            found = [(e.name, e.is_dir()) for e in entries if e.name.startswith(begun)]
    except (OSError, ValueError):
        return []
    shown = sorted((name, is_dir) for name, is_dir in found if begun or not name.startswith("."))
    words = [
        f"{folder}{slash}{name}{'/' if is_dir else ''}" for name, is_dir in shown if is_dir or takes(name)
    ]
    return [Candidate(word) for word in words[:MAX_FILES] if word.isprintable()]
