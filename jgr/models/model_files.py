# SPDX-License-Identifier: Apache-2.0
"""Which version of a model a folder holds: a hash of what decides its scores.

The one idea: the name is the content. Weights, config.json and tokenizer.json are hashed as they lie on disk, so
equal folders have equal revisions on every machine, and nobody has to count versions. The catalog has a version of
its own, and answers name both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from jgr.config import UserError
from jgr.fields import require
from jgr.files import require_regular

REVISION_DIGITS = 8

Stamp = tuple[str, int, int, int]


class ModelFiles:
    """The files of a model folder as they are found at construction.

    `revision`, asked for when everything has been read, tells whether somebody wrote to them meanwhile.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found = _stamps(folder)

    def revision(self) -> str:
        """The first digits of the content's SHA-256. UserError where the files are not those found at first."""
        whole = hashlib.sha256()
        try:
            for name, *_ in self._found:
                with (self._folder / name).open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").digest()
                whole.update(len(name).to_bytes(4) + name.encode() + digest)
            unchanged = _stamps(self._folder) == self._found
        except FileNotFoundError:
            unchanged = False
        if not unchanged:
            raise UserError(f"{self._folder}: the model changed while it was read; load it again")
        return whole.hexdigest()[:REVISION_DIGITS]


def check_folder(folder: str) -> None:
    """Raise UserError where a folder's name has a zero byte, or a pipe, a device or a socket stands for a file of its
    model: to open one may take for ever."""
    require("\0" not in folder, f"model.path: {folder!r} has a zero byte, which no folder's name has")
    for path in _paths(Path(folder)):
        if not path.is_dir():
            require_regular(path, UserError)


def _paths(folder: Path) -> Iterator[Path]:
    """What the model is read from, files and folders, and places where nothing is."""
    yield folder / "config.json"
    yield folder / "tokenizer.json"
    params = folder / "params"
    yield from params.rglob("*") if params.is_dir() else folder.glob("*.safetensors*")


def _stamps(folder: Path) -> list[Stamp]:
    """Name, inode, size and time of each file that the model is read from, by name."""
    found = [(path.relative_to(folder).as_posix(), path.stat()) for path in _paths(folder) if path.is_file()]
    return sorted((name, s.st_ino, s.st_size, s.st_mtime_ns) for name, s in found)
