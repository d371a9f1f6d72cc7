# SPDX-License-Identifier: Apache-2.0
"""Where the bytes of blocks arrive at a reader, when they do not follow the answer on the socket: a file in the shared
memory of one machine. Who has made it is its reader, and it is named to the owner, who puts the bytes there."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from jgr.placement.shared_items import Block

LANDING_BYTES = 32 << 20
"""The most bytes of one answer."""
SHARED = Path("/dev/shm")


class TransportError(Exception):
    """Nothing usable came: the other end is not there, too slow, of another model, or not to be trusted."""


class Landing(Protocol):
    """A reader's end."""

    @property
    def name(self) -> str: ...
    def get(self, at: int, size: int) -> bytes: ...
    def remove(self) -> None: ...


class PeerLanding(Protocol):
    """An owner's end of what a reader has named."""

    @property
    def name(self) -> str: ...
    def put(self, blocks: Sequence[Block]) -> None: ...
    def close(self) -> None: ...


class SharedLanding:
    """A file under /dev/shm in which an owner puts bytes for a reader, who has made it. It is written and read, not
    mapped: where the memory is full a write is an error, and a mapped page ends the process."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path, self._file = path, os.fdopen(descriptor, "r+b", buffering=0)

    @property
    def name(self) -> str:
        """What the owner is told."""
        return str(self._path)

    @classmethod
    def new(cls) -> SharedLanding:
        path = SHARED / f"jgr-items-{secrets.token_hex(16)}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(descriptor, LANDING_BYTES)  # takes memory as far as it is written to
        return cls(path, descriptor)

    @classmethod
    def of_peer(cls, name: str) -> SharedLanding:
        """The file that a reader named. TransportError unless it is one that `new` makes."""
        path = Path(name)
        if path.parent != SHARED or not path.name.startswith("jgr-items-") or "\0" in name:
            raise TransportError("bytes are only put under /dev/shm")
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        about = os.fstat(descriptor)
        if about.st_uid != os.geteuid() or about.st_size != LANDING_BYTES:
            os.close(descriptor)
            raise TransportError("the file for the bytes is of another user, or of another size")
        landing = cls(path, descriptor)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()  # both ends have it: nothing is left of it once they end, however they do
        return landing

    def put(self, blocks: Sequence[Block]) -> None:
        """Write the blocks one after another. Raises OSError where the shared memory is full."""
        self._file.seek(0)
        for block in blocks:
            left = np.ascontiguousarray(block.words).reshape(-1).view(np.uint8).data
            while left:
                left = left[self._file.write(left) :]

    def get(self, at: int, size: int) -> bytes:
        return os.pread(self._file.fileno(), size, at)

    def close(self) -> None:
        self._file.close()

    def remove(self) -> None:
        self.close()
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
