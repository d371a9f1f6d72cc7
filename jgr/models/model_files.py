# SPDX-License-Identifier: Apache-2.0
"""Which version of a model a folder holds: a hash of what decides its scores.

The one idea: the name is the content. Weights, config.json and tokenizer.json are hashed as they lie on disk, so
equal folders have equal revisions on every machine, and nobody has to count versions. The catalog has a version of
its own, and answers name both.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from jgr.config import UserError

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


def _stamps(folder: Path) -> list[Stamp]:
    """Name, inode, size and time of each file that the model is read from, by name."""
    weights = (
        (folder / "params").rglob("*") if (folder / "params").is_dir() else folder.glob("*.safetensors*")
    )
    paths = [folder / "config.json", folder / "tokenizer.json", *weights]
    found = [(path.relative_to(folder).as_posix(), path.stat()) for path in paths if path.is_file()]
    return sorted((name, s.st_ino, s.st_size, s.st_mtime_ns) for name, s in found)
