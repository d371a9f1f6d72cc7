# SPDX-License-Identifier: Apache-2.0
"""Tables of events or items, whatever their form: CSV, TSV, RecBole's atomic files, JSON lines and Parquet.

The one idea: a table is read as blocks of columns, so that what is done with a million rows is done by a few built-in
calls for each column of a block. A block knows which rows it holds, so that an error can still name its line.

CSV may quote fields; TSV and atomic files are literal, each line a row. An atomic file's header gives types, as in
`user_id:token`, `rating:float`, `item_seq:token_seq`. Parquet needs pyarrow (`pip install jgr[parquet]`); its rows are
counted from 1 as lines.
"""

from __future__ import annotations

import codecs
import csv
import importlib
import io
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from jgr.data.interactions import DataError
from jgr.data.sources.records import json_object
from jgr.files import MAX_LINE_BYTES, reading

ATOMIC_TYPES = ("token", "float", "token_seq", "float_seq")
MICROSECONDS = "us"
"""The type of a Parquet column of dates or times, which are read as microseconds since 1970."""
_ROWS = 1 << 15  # of a block
_BOM = b"\xef\xbb\xbf"


class BadCell(Exception):
    """A cell that cannot be used. index: its row in the block; column: its name, "" where the whole row is meant."""

    def __init__(self, index: int, column: str, message: str) -> None:
        super().__init__(message)
        self.index, self.column = index, column


class Block(NamedTuple):
    """Some consecutive rows. start: the rows of the file before it. columns: a list of `size` values by name.

    The first block of a file with a header has no rows, but the columns.

    A value is text in CSV, TSV and atomic files; None stands for nothing in JSON lines and Parquet.
    """

    start: int
    size: int
    columns: dict[str, list[Any]]


@dataclass(frozen=True, eq=False)
class Table:
    """A file of rows. blocks: reads it from the start. line_of: the line of a row, which is counted from 0.

    types: the type of a column, where the file gives one: of ATOMIC_TYPES, or MICROSECONDS.
    """

    path: Path
    blocks: Callable[[], Iterator[Block]]
    line_of: Callable[[int], int]
    types: dict[str, str] = field(default_factory=dict)

    def error(self, row: int, column: str, message: str) -> DataError:
        """The error for a cell, which names file, line and column."""
        named = f"{column}: " if column else ""
        return DataError(f"{self.path}:{self.line_of(row)}: {named}{message}")

    def require(self, block: Block, *columns: str) -> None:
        """Raise DataError where a block lacks one of the columns."""
        missing = next((name for name in columns if name not in block.columns), None)
        if missing is not None and len(block.columns) == 1 and ";" in (only := next(iter(block.columns))):
            raise DataError(f"{self.path}:1: there is one column, {only}: separate columns by commas")
        if missing is not None:
            raise DataError(
                f"{self.path}:1: the header must name each column once, {', '.join(columns)} among them; "
                f"{missing} is missing, there are {', '.join(block.columns) or 'none'}: rename the one that it is"
            )


def open_table(path: Path) -> Table:
    """The table of a file, by its name. Nothing but an atomic or Parquet file's header is read yet."""
    name = path.name.removesuffix(".gz")
    if path.suffix == ".parquet":
        return _parquet(path)
    if name.endswith(".jsonl"):
        return Table(path, lambda: _json_lines(path), lambda row: row + 1)
    if name.endswith(".csv"):
        return Table(path, lambda: _delimited(path, ",", True), lambda row: _line_of_csv(path, row))
    types = {} if name.endswith(".tsv") else _atomic_types(path)
    return Table(path, lambda: _delimited(path, "\t", False, bool(types)), lambda row: row + 2, types)


# Text


def _byte_blocks(path: Path) -> Iterator[bytes]:
    """The file in blocks of whole lines. Raises DataError for an endless line."""
    with reading(path, DataError) as stream:
        rest, lines = b"", 0
        while part := stream.read(MAX_LINE_BYTES):
            cut = part.rfind(b"\n") + 1
            if not cut and len(rest) + len(part) > MAX_LINE_BYTES:
                raise DataError(f"{path}:{lines + 1}: the line is longer than {MAX_LINE_BYTES} bytes")
            if cut:
                block, rest = rest + part[:cut], part[cut:]
                lines += block.count(b"\n")
                yield block
            else:
                rest += part
        if rest:
            yield rest + b"\n"


def _lines(path: Path) -> Iterator[str]:
    def texts() -> Iterator[io.StringIO]:
        done = 0
        for block in _byte_blocks(path):
            content = block if done else block.removeprefix(_BOM)
            try:
                text = content.decode("utf-8")
            except UnicodeDecodeError as cause:
                line = done + 1 + content[: cause.start].count(b"\n")
                if not done and content[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                    raise DataError(f"{path}:1: is in UTF-16; iconv -f UTF-16 -t UTF-8 converts it") from None
                bad = f"the byte 0x{content[cause.start]:02x} is not UTF-8"
                raise DataError(
                    f"{path}:{line}: {bad}; iconv -f LATIN1 -t UTF-8 converts a Latin-1 file"
                ) from None
            done += block.count(b"\n")
            yield io.StringIO(text, newline="\n")

    return itertools.chain.from_iterable(texts())


def _reader(path: Path, delimiter: str, quoted: bool) -> Any:
    csv.field_size_limit(MAX_LINE_BYTES)  # its own limit is below that of a line
    if quoted:
        return csv.reader(_lines(path), delimiter=delimiter, strict=True)
    return csv.reader(_lines(path), delimiter=delimiter, quoting=csv.QUOTE_NONE, strict=True)


def _header_cells(path: Path, reader: Any) -> list[str]:
    try:
        cells: list[str] = next(reader, [])
    except csv.Error as cause:
        raise DataError(f"{path}:1: {cause}") from None
    return cells


def _header(path: Path, reader: Any, typed: bool) -> list[str]:
    cells = _header_cells(path, reader)
    names = [cell.rpartition(":")[0] if typed else cell for cell in cells]
    if not names or len(set(names)) != len(names):
        raise DataError(f"{path}:1: the header must name each column once")
    return names


def _atomic_types(path: Path) -> dict[str, str]:
    types = {}
    for cell in _header_cells(path, _reader(path, "\t", False)):
        name, _, type_ = cell.rpartition(":")
        if not name or type_ not in ATOMIC_TYPES:
            raise DataError(
                f"{path}:1: {cell!r}: the header must give a type for each column, as in user_id:token; "
                f"there are {', '.join(ATOMIC_TYPES)}"
            )
        types[name] = type_
    if not types:
        raise DataError(f"{path}:1: the header must name each column once")
    return types


def _delimited(path: Path, delimiter: str, quoted: bool, typed: bool = False) -> Iterator[Block]:
    reader = _reader(path, delimiter, quoted)
    names = _header(path, reader, typed)
    yield Block(0, 0, {name: [] for name in names})
    start = 0
    try:
        while rows := list(itertools.islice(reader, _ROWS)):
            if set(map(len, rows)) != {len(names)}:
                wrong = next(i for i, row in enumerate(rows) if len(row) != len(names))
                line = _line_of_csv(path, start + wrong) if quoted else start + wrong + 2
                raise DataError(f"{path}:{line}: has {len(rows[wrong])} fields, the header {len(names)}")
            yield Block(start, len(rows), dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)))
            start += len(rows)
    except csv.Error as cause:
        raise DataError(f"{path}:{max(reader.line_num, 1)}: {cause}") from None


def _line_of_csv(path: Path, row: int) -> int:
    """The last line of a row: quoted fields may hold line ends, so it is counted by reading again."""
    reader = _reader(path, ",", True)
    next(itertools.islice(reader, row + 1, None), None)
    return int(reader.line_num)


# JSON lines


def _json_lines(path: Path) -> Iterator[Block]:
    decoder = msgspec.json.Decoder(dict[str, Any])
    start = 0
    for block in _byte_blocks(path):
        lines = block.count(b"\n")
        try:
            rows = decoder.decode_lines(block)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            rows = []
        if len(rows) != lines:  # an empty line is no row
            raise _bad_line(path, block, start)
        names = dict.fromkeys(itertools.chain.from_iterable(rows))
        yield Block(start, lines, {name: list(map(methodcaller("get", name), rows)) for name in names})
        start += lines


def _bad_line(path: Path, block: bytes, start: int) -> DataError:
    for number, line in enumerate(block.splitlines(), start + 1):
        try:
            json_object(line)
        except (ValueError, RecursionError, msgspec.MsgspecError) as cause:
            return DataError(f"{path}:{number}: {cause}")
    return DataError(f"{path}:{start + 1}: the lines from here on are not one JSON object each")


# Parquet


def _parquet(path: Path) -> Table:
    try:
        arrow: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise DataError(f"{path}: Parquet needs pyarrow: pip install jgr[parquet]") from None

    def guarded(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (ValueError, arrow.ArrowException) as cause:
            raise DataError(f"{path}: {cause}") from None

    with reading(path, DataError) as stream:
        columns = list(guarded(lambda: parquet.ParquetFile(stream)).schema_arrow)
    names = [column.name for column in columns]
    if len(set(names)) != len(names):
        raise DataError(f"{path}: the schema must name each column once")
    kinds = arrow.types
    dated = [
        column.name for column in columns if kinds.is_timestamp(column.type) or kinds.is_date(column.type)
    ]
    types = dict.fromkeys(dated, MICROSECONDS)

    def blocks() -> Iterator[Block]:
        with reading(path, DataError) as stream:
            file = guarded(lambda: parquet.ParquetFile(stream))
            yield Block(0, 0, {name: [] for name in file.schema_arrow.names})
            start, batches = 0, file.iter_batches(batch_size=_ROWS)
            while (batch := guarded(lambda: next(batches, None))) is not None:
                # A string that is no UTF-8 is found when it is read.
                values = guarded(partial(_all_values, arrow, batch.columns))
                yield Block(start, batch.num_rows, dict(zip(batch.schema.names, values, strict=True)))
                start += batch.num_rows

    return Table(path, blocks, lambda row: row + 1, types)


def _all_values(arrow: Any, columns: Any) -> list[list[Any]]:
    return [_arrow_values(arrow, column) for column in columns]


def _arrow_values(arrow: Any, column: Any) -> list[Any]:
    """The values of an Arrow array, by array operations where its type has some."""
    kinds = arrow.types
    if kinds.is_timestamp(column.type) or kinds.is_date(column.type):
        zone = getattr(column.type, "tz", None)
        column = column.cast(arrow.timestamp("us", tz=zone), safe=False).cast(arrow.int64())
    if kinds.is_dictionary(column.type):
        column = column.dictionary_decode()
    if kinds.is_floating(column.type):  # NaN says that there is no number
        column = importlib.import_module("pyarrow.compute").if_else(column.is_nan(), None, column)
    plain = kinds.is_integer(column.type) or kinds.is_floating(column.type) or kinds.is_boolean(column.type)
    if plain and not column.null_count:
        values: list[Any] = column.to_numpy(zero_copy_only=False).tolist()
        return values
    if kinds.is_string(column.type) or kinds.is_large_string(column.type):
        encoded = column.dictionary_encode()
        names = [*encoded.dictionary.to_pylist(), None]
        return list(map(names.__getitem__, encoded.indices.fill_null(len(names) - 1).to_numpy().tolist()))
    listed: list[Any] = column.to_pylist()
    return listed
