# SPDX-License-Identifier: Apache-2.0
"""The configurations that come with jgr, by name: `--config=industrial` is industrial.py of the folder configs/.

An installed jgr has the folder inside the package; in a checkout it lies beside it.
"""

from __future__ import annotations

import ast
import difflib
from pathlib import Path

from jgr.fields import COMPARED_CHARS, ConfigError

_PACKAGE = Path(__file__).parents[1]
_FOLDERS = (_PACKAGE / "configs", _PACKAGE.parent / "configs")
SUFFIX = ".py"
SHOWN = 3
"""How many of the names that look like an unknown one are told."""


def names() -> list[str]:
    """The names, sorted."""
    return sorted(path.stem for path in folder().glob(f"[!_]*{SUFFIX}"))


def summary(name: str) -> str:
    """The first line of the docstring of the configuration `name`."""
    tree = ast.parse((folder() / f"{name}{SUFFIX}").read_text(encoding="utf-8"))
    return (ast.get_docstring(tree) or "").partition("\n")[0]


def find(given: str | Path) -> Path:
    """The file of a configuration that is given by its path or by its name, which has no suffix and no folder.

    Raises ConfigError where there is none, with the names that look most like it.
    """
    path, known = Path(given), names()
    is_name = str(given) == path.stem
    if is_name and str(given) in known:
        return folder() / f"{given}{SUFFIX}"
    if path.is_file():
        return path
    if is_name:
        near = difflib.get_close_matches(str(given)[:COMPARED_CHARS], known, n=SHOWN, cutoff=0.0)
        raise ConfigError(
            f"there is no configuration {str(given)!r}; the nearest are {', '.join(near)}; jgr config --list "
            f"shows all, and a file is named with its suffix"
        )
    hint = f"; jgr has one of its own that is called {path.stem}" if path.stem in known else ""
    raise ConfigError(f"{path}: there is no such config file{hint}")


def folder() -> Path:
    """Where the files are."""
    return next(place for place in _FOLDERS if place.is_dir())
