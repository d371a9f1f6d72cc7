# SPDX-License-Identifier: Apache-2.0
"""Reading files that others wrote, and writing files that nobody ever sees half-written.

The one idea: everything that can go wrong with a file (missing, cut short, not gzip, endless line) is raised as
the caller's own error type with the path in the message, so that a command can show one clear line. Files whose
names end in `.gz` are (un)compressed on the fly.
"""

from __future__ import annotations

import gzip
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from jgr import stopping
from jgr.fields import UserError

MAX_LINE_BYTES = 1 << 20
MAX_FILE_BYTES = 1 << 30
LINES_A_STEP = 4096
"""So many lines are read between two questions whether the work is to stop."""


@contextmanager
def reading(path: Path, error: type[UserError]) -> Iterator[IO[bytes]]:
    """Open `path` for reading bytes. A failure to open, read or decompress it is raised as `error`.

    A pipe, a device and a socket are refused: nobody knows when, or whether, they end.
    """
    if "\0" in str(path):
        raise error(f"{str(path)!r}: cannot be read: no file's name has a zero byte")
    try:
        with open(path, "rb", opener=_open_at_once) as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise error(f"{path}: cannot be read: it is not a regular file")
            if path.suffix == ".gz":
                with gzip.open(stream, "rb") as unpacked:
                    yield cast(IO[bytes], unpacked)
            else:
                yield stream
    except EOFError:
        raise error(f"{path}: the gzip file is cut short; fetch it again") from None
    except (OSError, zlib.error) as cause:
        reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else cause
        raise error(f"{path}: cannot be read: {reason}") from cause


def read_lines(path: Path, error: type[UserError]) -> Iterator[tuple[int, bytes]]:
    """Yield each line's number, from 1, and its bytes without the line end. Raises `error` over MAX_LINE_BYTES."""
    with reading(path, error) as stream:
        number = 0
        while line := stream.readline(MAX_LINE_BYTES + 1):
            number += 1
            if not number % LINES_A_STEP:
                stopping.check()
            if len(line) > MAX_LINE_BYTES:
                raise error(f"{path}:{number}: the line is longer than {MAX_LINE_BYTES} bytes")
            yield number, line.rstrip(b"\r\n")


def read_whole(path: Path, error: type[UserError], most: int | None = None) -> bytes:
    """Return the uncompressed content. Raises `error` above `most` bytes (MAX_FILE_BYTES), so that a small gzip cannot
    explode."""
    most = MAX_FILE_BYTES if most is None else most
    with reading(path, error) as stream:
        large = os.fstat(stream.fileno()).st_size > most  # told at once, and not after so many bytes
        content = bytearray()
        while not large and (
            chunk := stream.read(MAX_LINE_BYTES)
        ):  # read(most) would take as much memory at once
            stopping.check()
            content += chunk
            large = len(content) > most
    if large:
        raise error(f"{path}: holds more than {most} bytes")
    return bytes(content)


def is_pipe(path: Path) -> bool:
    """Whether a path is a pipe, a socket or a device, which a reader could wait for, rather than a file or a folder."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def require_regular(path: Path, error: type[UserError]) -> None:
    """Raise `error` where something other than a regular file, such as a pipe, stands at `path`.

    For files that others open, who may wait for ever. What is not there is left to them.
    """
    try:
        mode = path.stat().st_mode
    except OSError:
        return
    if not stat.S_ISREG(mode):
        raise error(f"{path}: cannot be read: it is not a regular file")


def _open_at_once(path: str, flags: int) -> int:
    """Opens a pipe without waiting for somebody who writes to it; nothing is different for a file."""
    return os.open(path, flags | os.O_NONBLOCK)


@contextmanager
def writing(path: Path, error: type[UserError]) -> Iterator[IO[bytes]]:
    """Write `path` as a whole or not at all: a second file is written, and replaces `path` if the block succeeds.

    A failure to write is raised as `error`. Equal content gives equal files, also compressed ones.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as stream:
            if path.suffix == ".gz":
                with gzip.GzipFile(filename="", mode="wb", fileobj=stream, mtime=0) as packed:
                    yield cast(IO[bytes], packed)
            else:
                yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
    except OSError as cause:
        raise error(f"{path}: cannot be written: {cause.strerror or cause}") from cause
    finally:
        partial.unlink(missing_ok=True)


def make_folder(folder: Path, error: type[UserError], option: str) -> None:
    """Make a folder and those above it, unless it is there. A failure is raised as `error`, which names the option."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        raise error(f"{option}: no folder can be made at {folder}: {cause.strerror or cause}") from None


def refuse_overwriting(path: Path, overwrite: bool, option: str, what: str) -> None:
    """Refuse to replace `what` stands at `path`, unless `overwrite`: the one rule of all commands that write.

    option: what names another place. Raises UserError, which says what to do.
    """
    if not overwrite:
        raise UserError(f"{path} holds {what}: --overwrite replaces it, or give another {option}")
