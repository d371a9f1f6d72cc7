# SPDX-License-Identifier: Apache-2.0
"""An embedding table in a file of its own, which is read by rows through the page cache and never loaded (HLEM-2).

    8 bytes MAGIC | header as JSON, padded with spaces to HEADER_BYTES in all | rows, one after the other

The header says what the rows are: of which table and model, how many, how wide, in which type. A file may hold a shard:
the rows from `first` on. What does not agree with it (a file cut short, another width or model) is refused when the
file is opened, at the cost of reading the header; `TableFile.verify` reads all of it.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import ml_dtypes
import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from jgr.config import UserError
from jgr.fields import one_line
from jgr.files import reading, require_regular, writing

MAGIC = b"jgr-rows"
HEADER_BYTES = 4096
READ_BYTES = 16 << 20
RowType = Literal["float32", "float16", "bfloat16"]
ROW_TYPES = get_args(RowType)
_COUNT = Meta(ge=0, le=1 << 40)


class TableError(UserError):
    """A table's file that is missing, damaged, or not the one that the model needs."""


class TableHeader(Struct, frozen=True):
    """What a file's rows are.

    name: the table's. rows: of the whole table. width: numbers of a row. model: the identity of the model
    (`ModelFiles.identity`); "": of any. first, held: which rows this file has. sha256: of their bytes. whole: of all
    of the table's rows, which its shards have in common.
    """

    name: str
    rows: Annotated[int, _COUNT]
    width: Annotated[int, Meta(ge=1, le=1 << 16)]
    dtype: RowType
    model: str
    first: Annotated[int, _COUNT]
    held: Annotated[int, _COUNT]
    sha256: str
    whole: str = ""

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return row_dtype(self.dtype)

    @property
    def row_bytes(self) -> int:
        return self.width * self.numpy_dtype.itemsize


def row_dtype(name: RowType) -> np.dtype[Any]:
    """The dtype of that name."""
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def digest_of(parts: Iterable[npt.NDArray[Any]], dtype: RowType) -> str:
    """The SHA-256 of rows, in parts [n, width] of any float dtype, rounded to `dtype`: `whole`, where these are all."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(np.ascontiguousarray(part).astype(row_dtype(dtype)).tobytes())
    return digest.hexdigest()


def write(
    path: Path,
    name: str,
    parts: Iterable[npt.NDArray[Any]],
    *,
    width: int,
    dtype: RowType,
    model: str = "",
    rows: int | None = None,
    first: int = 0,
    whole: str = "",
) -> TableHeader:
    """Write a table, or a shard of one, from parts [n, width] of any float dtype, which are rounded to `dtype`.

    rows: of the whole table; None: those that are given. whole: its digest, where these are not all. Raises TableError
    where the disk refuses it, ValueError where a number is not finite once it is rounded.
    """
    digest, held = hashlib.sha256(), 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path, TableError) as stream:
        stream.write(bytes(HEADER_BYTES))
        for part in parts:
            with np.errstate(over="ignore"):
                values = np.ascontiguousarray(part).astype(row_dtype(dtype))
            if (
                values.ndim != 2
                or values.shape[1] != width
                or not np.isfinite(values.astype(np.float32)).all()
            ):
                raise ValueError(f"table {name}: rows {values.shape} of width {width}, all finite in {dtype}")
            data = values.tobytes()
            digest.update(data)
            stream.write(data)
            held += len(values)
        rows, sha256 = held if rows is None else rows, digest.hexdigest()
        whole = sha256 if held == rows else whole
        header = TableHeader(name, rows, width, dtype, model, first, held, sha256, whole)
        stream.seek(0)
        stream.write((MAGIC + msgspec.json.encode(header)).ljust(HEADER_BYTES))
    return header


class TableFile:
    """An open table: `rows` [held, width] is mapped into memory, and read by the kernel where it is touched."""

    def __init__(self, path: Path, *, name: str = "", rows: int = 0, width: int = 0, model: str = "") -> None:
        """name, rows, width, model: what it must be; "" and 0: anything. Raises TableError, which says what is not."""
        self.path = path
        require_regular(path, TableError)
        with reading(path, TableError) as stream:  # once: another file may be renamed to its name meanwhile
            self.header = header = _header(path, stream.read(HEADER_BYTES))
            self._file = os.dup(stream.fileno())
        weakref.finalize(self, os.close, self._file)
        whole = HEADER_BYTES + header.held * header.row_bytes
        self._stamp = size, _ = self._stamp_now()
        if size != whole:
            how = "cut short" if size < whole else "too long"
            raise TableError(f"{path}: {how}: it has {size} bytes, its header says {whole}")
        if header.first + header.held > header.rows:
            raise TableError(f"{path}: damaged: it holds rows beyond the table's {header.rows}")
        wanted = {"name": name, "rows": rows, "width": width, "model": model}
        for field, value in wanted.items():
            found = getattr(header, field)
            if value and found != value and not (field == "model" and not found):
                what = {"name": "table", "width": "row width", "rows": "number of rows"}.get(field, field)
                raise TableError(f"{path}: is of another {what}: {found!r}, and {value!r} is needed")
        self.rows = self._mapped() if header.held else np.zeros((0, header.width), header.numpy_dtype)

    @property
    def unchanged(self) -> bool:
        """Whether nobody has written to the file since it was opened, by its size and time. One that was renamed or
        deleted is unchanged; `rows` are still its own."""
        return self._stamp_now() == self._stamp

    def _mapped(self) -> npt.NDArray[Any]:
        with open(self._file, "rb", closefd=False) as stream:
            shape = (self.header.held, self.header.width)
            return np.memmap(stream, self.header.numpy_dtype, "r", HEADER_BYTES, shape)

    def _stamp_now(self) -> tuple[int, int]:
        status = os.fstat(self._file)
        return status.st_size, status.st_mtime_ns

    def verify(self) -> None:
        """Read all rows and compare their digest. Raises TableError where they are not those that were written."""
        digest = hashlib.sha256()
        with reading(self.path, TableError) as stream:
            stream.seek(HEADER_BYTES)
            while data := stream.read(READ_BYTES):
                digest.update(data)
        if digest.hexdigest() != self.header.sha256:
            raise TableError(f"{self.path}: damaged: its rows are not those that were written (SHA-256)")


def _header(path: Path, data: bytes) -> TableHeader:
    if not data.startswith(MAGIC) or len(data) < HEADER_BYTES:
        raise TableError(f"{path}: is not a table of embeddings that jgr wrote, or is cut short")
    try:
        return msgspec.json.decode(data[len(MAGIC) :], type=TableHeader)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TableError(f"{path}: damaged header: {one_line(error)}") from None
