# SPDX-License-Identifier: Apache-2.0
"""Items' keys and values in files, computed ahead (BAT-12): what `jgr kv build` writes and replicas read.

A block is known by the digest of the item's tokens, so a catalog that changed finds the items that did not. There are
three files: `kv.json` says what the blocks are of, `blocks.bin` has them one after the other, and `index.bin` has a
record of each. A record is written once its block is on the disk, so a builder that was killed leaves a folder to go on
from: what the index does not know, or knows only half, is written again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import msgspec
import numpy as np
import numpy.typing as npt

from jgr.fields import UserError
from jgr.files import read_whole, writing
from jgr.placement.shared_items import CHECKSUM_BYTES, Block, checksum

FORMAT = 1
ABOUT, BLOCKS, INDEX, LOCK = "kv.json", "blocks.bin", "index.bin", "lock"
RECORD = np.dtype(
    [("high", "<u8"), ("low", "<u8"), ("checksum", "<u8", 2), ("first", "<u8"), ("cells", "<u8")]
)
"""The digest in two halves, the checksum, and where the block is: its first cell and their number."""
CHECKED = 64
"""So many of the last records are compared with their blocks when a builder goes on."""


class About(msgspec.Struct, frozen=True):
    """identity: of the model, as `jgr.serving.decoders.caching.identity`. cell_words: 32-bit words of a cell. model:
    its name and version, for people."""

    format: int
    identity: str
    cell_words: int
    model: str = ""


class KvFolder:
    """The blocks of a folder. Raises UserError where it is not of this model, or cannot be read.

    Blocks are read and not mapped: a page that is mapped of a file that was cut short since ends the process.
    """

    def __init__(self, path: Path, identity: str) -> None:
        self.path = path
        self.about = _about(path)
        _require_same(path, self.about, identity)
        self._records, _ = _records(path, self.about)
        self._order = np.argsort(self._records["high"], kind="stable")
        self._high = self._records["high"][self._order]
        try:
            self._blocks = os.open(path / BLOCKS, os.O_RDONLY)
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from error
        weakref.finalize(self, os.close, self._blocks)

    def __len__(self) -> int:
        return len(self._records)

    def has(self, digest: bytes) -> bool:
        """Whether there is a block of the item whose tokens have this hash."""
        return self._find(digest) is not None

    def read(self, digest: bytes) -> Block | None:
        """The item's block; None where there is none, or its bytes are not those that were written."""
        record = self._find(digest)
        if record is None:
            return None
        first, cells = int(record["first"]), int(record["cells"])
        size = self.about.cell_words * 4
        raw = os.pread(self._blocks, cells * size, first * size)
        if len(raw) < cells * size:
            return None
        words = np.frombuffer(raw, np.uint32).reshape(cells, self.about.cell_words)
        block = Block(words, record["checksum"].tobytes())
        return block if checksum(block.words) == block.checksum else None

    def _find(self, digest: bytes) -> Any:
        high, low = _halves(digest)
        at = int(np.searchsorted(self._high, np.uint64(high)))
        while at < len(self._high) and self._high[at] == high:
            record = self._records[self._order[at]]
            if record["low"] == low:
                return record
            at += 1
        return None


class KvBuilder:
    """Adds blocks to a folder, which it makes where there is none; a context.

    Raises UserError where another builder is at work there, where the folder is of another model, or the disk is full.
    """

    def __init__(self, path: Path, about: About) -> None:
        self.path, self._about = path, about
        self._blocks: IO[bytes]
        self._index: IO[bytes]
        self._known: set[bytes] = set()
        self._cells = 0

    def __enter__(self) -> KvBuilder:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / LOCK, "w")
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise UserError(f"{self.path}: another jgr kv build is at work there") from None
        try:
            self._open()
        except BaseException:
            self._lock.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # What a full disk did not take is tried again as a file closes; the error that is on its way says more.
        less = () if error is None else (OSError,)
        with contextlib.suppress(*less), contextlib.ExitStack() as files:
            for file in (self._lock, self._index, self._blocks):
                files.callback(file.close)

    def has(self, digest: bytes) -> bool:
        return digest in self._known

    def __len__(self) -> int:
        return len(self._known)

    def add(self, blocks: Mapping[bytes, Block]) -> None:
        """Write blocks by their digests; those that are there already are left out."""
        new = {digest: block for digest, block in blocks.items() if digest not in self._known}
        records = np.zeros(len(new), RECORD)
        first = self._cells
        for at, (digest, block) in enumerate(new.items()):
            assert block.words.shape[1] == self._about.cell_words
            high, low = _halves(digest)
            records[at] = (high, low, np.frombuffer(block.checksum, "<u8"), first, len(block.words))
            first += len(block.words)
        try:
            for block in new.values():
                self._blocks.write(np.ascontiguousarray(block.words).data)
            _on_disk(self._blocks)
            self._index.write(records.tobytes())
            _on_disk(self._index)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise UserError(
                f"{self.path}: the disk is full after {len(self._known)} items; make room and start again: "
                "what is there stays"
            ) from error
        self._cells = first
        self._known.update(new)

    def _open(self) -> None:
        about = self.path / ABOUT
        if about.exists():
            _require_same(self.path, _about(self.path), self._about.identity)
        else:
            with writing(about, UserError) as stream:
                stream.write(msgspec.json.format(msgspec.json.encode(self._about)) + b"\n")
        for name in (BLOCKS, INDEX):
            (self.path / name).touch()
        records, self._cells = _records(self.path, self._about)
        good = _whole(self.path, records, self._about.cell_words)
        records = records[:good]
        self._cells = int((records["first"] + records["cells"]).max()) if good else 0
        self._known = {record["high"].tobytes() + record["low"].tobytes() for record in records}
        os.truncate(self.path / INDEX, good * RECORD.itemsize)
        os.truncate(self.path / BLOCKS, self._cells * self._about.cell_words * 4)
        self._blocks, self._index = open(self.path / BLOCKS, "ab"), open(self.path / INDEX, "ab")


def require_room(path: Path, nbytes: int) -> None:
    """Raise UserError where the folder's disk has not so much room left, before hours of work."""
    free = shutil.disk_usage(path).free
    if nbytes > free:
        raise UserError(
            f"{path}: the disk has {free / 2**20:.0f} MB left, the items' keys and values need {nbytes / 2**20:.0f}"
        )


def _about(path: Path) -> About:
    if not path.is_dir():
        raise UserError(f"{path}: there is no such folder; jgr kv build MODEL --out={path} makes it")
    try:
        about = msgspec.json.decode(read_whole(path / ABOUT, UserError), type=About)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path / ABOUT}: is not what jgr kv build writes: {error}") from None
    if about.format != FORMAT:
        raise UserError(f"{path}: was made by another version of jgr; build it again")
    return about


def _require_same(path: Path, about: About, identity: str) -> None:
    if about.identity != identity:
        raise UserError(
            f"{path}: is of another model, or of other cells ({about.identity}; this model's are {identity}); "
            "build it again in another folder"
        )


def _records(path: Path, about: About) -> tuple[npt.NDArray[Any], int]:
    """The records whose blocks are in the file, and the number of its cells."""
    try:
        raw = (path / INDEX).read_bytes()
        cells = (path / BLOCKS).stat().st_size // (about.cell_words * 4)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    records = np.frombuffer(raw[: len(raw) // RECORD.itemsize * RECORD.itemsize], RECORD)
    inside = records["first"] + records["cells"] <= cells
    count = len(records) if inside.all() else int(np.argmin(inside))
    return records[:count], cells


def _whole(path: Path, records: npt.NDArray[Any], cell_words: int) -> int:
    """How many of the records to believe: the last ones' blocks are compared."""
    count = len(records)
    with open(path / BLOCKS, "rb") as blocks:
        for at in range(max(0, count - CHECKED), count):
            first, cells = int(records[at]["first"]), int(records[at]["cells"])
            blocks.seek(first * cell_words * 4)
            words = np.frombuffer(blocks.read(cells * cell_words * 4), np.uint32)
            if checksum(words) != records[at]["checksum"].tobytes():
                return at
    return count


def _halves(digest: bytes) -> tuple[int, int]:
    assert len(digest) == CHECKSUM_BYTES
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def _on_disk(stream: IO[bytes]) -> None:
    stream.flush()
    os.fsync(stream.fileno())
