# SPDX-License-Identifier: Apache-2.0
"""A library that is being built: beside its place, by one builder at a time, in steps that a killed builder need not
repeat.

The hidden folder beside the place has `of`, which says what the build is of, `done`, how many of its batches are on the
disk, `lock`, and the library's own files in `library`. These are moved to the place when they are whole. All that is
written follows from what the build is of, so one that went on has the same bytes as one that nobody ended.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from jgr.fields import UserError
from jgr.files import writing
from jgr.library.folder import ABOUT, KV, bits

_OF, _DONE, _LOCK, _FILES = "of", "done", "lock", "library"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Unfinished:
    """The folder of a library that is not whole yet. path: where its own files are written."""

    def __init__(self, work: Path) -> None:
        self._work, self.path = work, work / _FILES

    @property
    def is_clustered(self) -> bool:
        """Whether all but the keys and values is there: whoever builds writes ABOUT last."""
        return (self.path / ABOUT).exists()

    def kv(self, shape: tuple[int, ...], dtype: str) -> np.memmap[Any, Any]:
        """The mapped file of keys and values, of the dtype's bits; what is done of it stands there already. OSError
        where the disk lacks room, before anything is computed."""
        path = self.path / KV
        if (self._work / _DONE).exists() and path.exists():  # else it stands where it is to be already
            return np.lib.format.open_memmap(path, "r+")
        (self._work / _DONE).unlink(missing_ok=True)
        mapped = np.lib.format.open_memmap(path, "w+", bits(dtype), shape)
        # A mapped page that finds the disk full would end the process; so all of them are reserved.
        with open(path, "r+b") as stream:
            os.posix_fallocate(stream.fileno(), 0, path.stat().st_size)
        self.set_done(0)
        return mapped

    @property
    def done(self) -> int:
        """How many batches of keys and values are on the disk."""
        return int((self._work / _DONE).read_text())

    def set_done(self, batches: int) -> None:
        """Say so, once they are."""
        with writing(self._work / _DONE, UserError) as stream:
            stream.write(str(batches).encode())


def require_free(path: Path) -> None:
    """Raise UserError where something stands at `path`, as it does at `.` and `/`, which lack a name to build under."""
    if os.path.lexists(os.path.abspath(path)):
        raise UserError(f"{path}: is there already; name another folder, or remove it")


@contextmanager
def building(path: Path, of: str) -> Iterator[Unfinished]:
    """A library to build, which is put at `path` when the block succeeds; otherwise what is there is kept for the next
    builder. of: all that its bytes follow from, as a hash.

    UserError where something stands at `path`, another builder is at work there, an unfinished library is of something
    else, or the disk is full.
    """
    require_free(path)
    path = Path(os.path.abspath(path))
    work = path.with_name(f".{path.name}.partial")
    try:
        with _locked(path, work):
            unfinished = Unfinished(work)
            _require_same(work, of)
            unfinished.path.mkdir(exist_ok=True)
            yield unfinished
            unfinished.path.rename(path)
            shutil.rmtree(work)
    except OSError as error:
        if error.errno in _FULL:
            raise UserError(
                f"{path}: the disk is full; make room and start again: what is there stays"
            ) from error
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error


@contextmanager
def _locked(path: Path, work: Path) -> Iterator[None]:
    work.mkdir(parents=True, exist_ok=True)
    with open(work / _LOCK, "w") as lock:
        if not _lock(lock, work):
            raise UserError(f"{path}: another jgr kv library is at work there")
        require_free(path)  # another one may have ended between the two looks
        yield


def _lock(lock: IO[str], work: Path) -> bool:
    """Whether the lock is ours, and the one that others see: who ends takes it away with the folder."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(lock.fileno()), (work / _LOCK).stat())
    except (BlockingIOError, FileNotFoundError):
        return False


def _require_same(work: Path, of: str) -> None:
    known = work / _OF
    if not known.exists():
        with writing(known, UserError) as stream:
            stream.write(of.encode())
    elif known.read_text() != of:
        raise UserError(
            f"{work}: has a library of another model, other texts or other settings that was not finished; "
            "remove it, or name another folder"
        )
