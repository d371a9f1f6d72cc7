# SPDX-License-Identifier: Apache-2.0
"""The catalog: item id <-> semantic id <-> metadata.

The one idea: an item is a *row*. Everything behind the API works on int32 rows and codes; item ids, token
names and titles are looked up once, at the edge.

- A level's vocabulary is the set of symbols that occur in it: names in natural order (`<a_9>` before
  `<a_10>`), token ids in numeric order. A code is the index among those, so `<a_17>` is code 17 only if
  `<a_0>` .. `<a_16>` all occur.
- Rows are in the file's order, which matters: items that share a semantic id are returned in this order.
- The version names the content (ids, their order, semantic ids, metadata) and not the file format: it is the
  sha256 of what `save_catalog` writes to a plain `.jsonl`, so `sha256sum catalog.jsonl` shows it too.
- For millions of items the same content is stored in arrays (jgr.catalog.columns): `item_ids` and `metadata` are
  then sequences that decode an element when it is asked for.

Letters: n items, depth = number of levels.
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

from jgr.catalog import columns as catalog_columns
from jgr.catalog.columns import Columns
from jgr.catalog.id_lookup import Find, finder, in_arrays
from jgr.catalog.text_table import ItemIds, Metadata, TextTable
from jgr.config import UserError
from jgr.fields import CONTROL_CHARACTER, once
from jgr.files import MAX_LINE_BYTES, read_lines, read_whole, writing

Int32 = npt.NDArray[np.int32]
Symbol = str | int

MAX_DEPTH = 8
MAX_NAME_CHARS = 512
MAX_TOKEN = 2**31 - 1
LARGE_FILE_BYTES = 1 << 26
"""A larger `.jsonl` is read into arrays: a Python object for each item would take ten times its size."""

_SYMBOL_KEYS: dict[str, type] = {"token_ids": int, "semantic_id": str}
_LINE_KEYS = {"item_id", "metadata", *_SYMBOL_KEYS}
_DECODER = msgspec.json.Decoder()
_ENCODER = msgspec.json.Encoder(order="deterministic")


class CatalogError(UserError):
    """A catalog that cannot be used; the message names the file and line (or item) and what is wrong."""


@dataclass(frozen=True, eq=False)
class Catalog:
    """The items in row order. Make one with `Catalog.build` or `load_catalog`; both validate.

    item_ids: [n] external ids, unique.
    codes: [n, depth] int32, codes[row, level] indexes symbols[level].
    symbols: for each level a symbol for each code; all are token names (resolved by the tokenizer), or all are
    token ids of the model.
    metadata: [n] JSON objects, {} for an item without.
    version: first 16 hex digits of the sha256 of the content.
    """

    item_ids: Sequence[str]
    codes: Int32
    symbols: tuple[tuple[Symbol, ...], ...]
    metadata: Sequence[dict[str, Any]]
    version: str

    @property
    def depth(self) -> int:
        return len(self.symbols)

    @property
    def n_items(self) -> int:
        return len(self.item_ids)

    @property
    def level_sizes(self) -> tuple[int, ...]:
        return tuple(len(level) for level in self.symbols)

    @cached_property
    def _find(self) -> Find:
        """The function from item ids to their rows, -1 for an unknown id."""
        return finder(self.item_ids)

    def index(self) -> None:
        """Prepare the look-up of ids; else the first one does."""
        self._find  # noqa: B018

    def row(self, item_id: str) -> int | None:
        """The row of an item, None if the catalog has no such item."""
        row = int(self._find([item_id])[0])
        return row if row >= 0 else None

    def rows(self, item_ids: Sequence[str]) -> tuple[Int32, list[str]]:
        """The rows of the known ids, in the given order with repeats, and the unknown ids."""
        found = self._find(item_ids)
        known = found >= 0
        if known.all():
            return found, []
        return found[known], [item_ids[i] for i in np.flatnonzero(~known).tolist()]

    @classmethod
    def build(
        cls,
        item_ids: Sequence[str],
        symbols_per_item: Sequence[Sequence[Symbol]],
        metadata: Sequence[dict[str, Any]],
    ) -> Catalog:
        """Make a catalog of n >= 1 items from parallel sequences.

        symbols_per_item: [n] semantic ids, equally long (1 to 8), all of str or all of int (0 .. 2^31 - 1).
        metadata: [n] dicts of plain JSON values. CatalogError names the item.
        """
        if not len(item_ids) == len(symbols_per_item) == len(metadata):
            sizes = f"{len(item_ids)}, {len(symbols_per_item)} and {len(metadata)}"
            raise CatalogError(f"item_ids, symbols_per_item and metadata differ in length: {sizes}")
        return _assemble(item_ids, symbols_per_item, metadata, lambda i: f"item {i}")

    @classmethod
    def of_arrays(
        cls,
        item_ids: TextTable,
        codes: Int32,
        symbols: Sequence[Sequence[Symbol]],
        metadata: TextTable | None = None,
    ) -> Catalog:
        """Make a catalog of n >= 1 items without a Python object for each; it keeps the arrays.

        codes: [n, depth] int32. symbols: for each level its distinct symbols in code order, each used by some item.
        metadata: lines of canonical JSON (sorted keys, no spaces). Raises CatalogError, naming the field and item.
        """
        return _of_arrays(item_ids, codes, symbols, metadata, lambda row: f"item {row}")


def load_catalog(path: str | Path) -> Catalog:
    """Read a catalog, gzipped if its name ends in `.gz`. Raises CatalogError, naming the file and the line or item.

    `*.catalog`: a folder of arrays (jgr.catalog.columns), which are memory-mapped and must not change.

    `*.jsonl`: `{"item_id", "token_ids" | "semantic_id", "metadata"?}`, a line for each item; `token_ids` are the
    model's own ids, `semantic_id` holds token names. An integer item_id is read as its decimal text.

    `index.json` or `X.index.json` (LC-Rec, MiniOneRec): one object, item id -> token names. Metadata comes from
    `item.json` or `X.item.json` in the same folder, if that file exists; items that it lacks get {}.
    """
    path = Path(path)
    name = path.name.removesuffix(".gz")
    if name.endswith(".jsonl"):
        return _load_jsonl(path)
    if name == "index.json" or name.endswith(".index.json"):
        return _load_index(path)
    if name.endswith(catalog_columns.SUFFIX):
        return _load_columns(path)
    raise CatalogError(
        f"{path}: a catalog file is named *.jsonl, index.json or *.index.json, each also with .gz, or *.catalog"
    )


def save_catalog(catalog: Catalog, path: str | Path) -> None:
    """Write `*.jsonl`, `*.jsonl.gz` or a new folder `*.catalog`, atomically.

    Loading the result gives an equal catalog of the same version.
    """
    path = Path(path)
    if path.name.endswith(catalog_columns.SUFFIX):
        return catalog_columns.write(path, _columns(catalog), CatalogError)
    if not path.name.removesuffix(".gz").endswith(".jsonl"):
        raise CatalogError(f"{path}: a catalog is saved as *.jsonl, *.jsonl.gz or *.catalog")
    columns = [
        [names[code] for code in catalog.codes[:, lv].tolist()] for lv, names in enumerate(catalog.symbols)
    ]
    with writing(path, CatalogError) as stream:
        for line in _lines(catalog.item_ids, zip(*columns, strict=True), catalog.metadata, str):
            stream.write(line)


def _load_jsonl(path: Path) -> Catalog:
    if path.is_file() and path.stat().st_size > LARGE_FILE_BYTES:
        return load_columns(path)
    item_ids: list[str] = []
    symbols: list[list[Symbol]] = []
    metadata: list[dict[str, Any]] = []
    kind = ""
    for _, found, item_id, path_of_item, fields in _entries(path):
        kind = found
        item_ids.append(item_id)
        symbols.append(path_of_item)
        metadata.append(fields)
    if not item_ids:
        raise CatalogError(f"{path}: the catalog is empty")
    return _assemble(item_ids, symbols, metadata, lambda i: f"{path}:{i + 1}", _SYMBOL_KEYS[kind])


def _entries(path: Path) -> Iterator[tuple[int, str, Any, Any, Any]]:
    """Yield each line's number, key of its symbols, item id, symbols and metadata. Their types are not checked."""
    kind = ""
    for number, line in read_lines(path, CatalogError):
        try:
            entry = _DECODER.decode(line)
        except (ValueError, RecursionError) as cause:
            raise CatalogError(f"{path}:{number}: not JSON: {cause}") from None
        if not isinstance(entry, dict):
            raise CatalogError(f"{path}:{number}: expected an object, found {type(entry).__name__}")
        if not entry.keys() <= _LINE_KEYS:
            unknown, known = sorted(entry.keys() - _LINE_KEYS)[0], ", ".join(sorted(_LINE_KEYS))
            raise CatalogError(f"{path}:{number}: unknown key {unknown!r}; known: {known}")
        kind = kind or next((key for key in _SYMBOL_KEYS if key in entry), "")
        if "item_id" not in entry or kind not in entry or len(entry.keys() & _SYMBOL_KEYS.keys()) != 1:
            wanted = kind or "token_ids or semantic_id"
            raise CatalogError(f"{path}:{number}: needs item_id and {wanted} (one kind in the whole file)")
        item_id = entry["item_id"]
        given = str(item_id) if type(item_id) is int else item_id
        yield number, kind, given, entry[kind], entry.get("metadata", {})


def _load_index(path: Path) -> Catalog:
    index = _read_object(path)
    if not index:
        raise CatalogError(f"{path}: the catalog is empty")
    item_ids = list(index)
    stem = path.name.removesuffix(".gz").removesuffix("index.json")
    beside = [path.with_name(f"{stem}item.json{suffix}") for suffix in ("", ".gz")]
    items_path = next((other for other in beside if other.exists()), None)
    items = _read_object(items_path) if items_path else {}
    if items and not items.keys() & index.keys():
        raise CatalogError(f"{items_path}: describes none of the items of {path.name}")
    metadata = [items.get(item_id, {}) for item_id in item_ids]
    return _assemble(item_ids, list(index.values()), metadata, lambda i: f"{path}: item {item_ids[i]!r}", str)


def load_columns(path: str | Path) -> Catalog:
    """Read `*.jsonl[.gz]` as load_catalog does, but into arrays, which take about the file's size in memory."""
    path = Path(path)
    gathered = _Gathered()
    for number, kind, item_id, symbols, metadata in _entries(path):
        try:
            gathered.add(_SYMBOL_KEYS[kind], item_id, symbols, metadata)
        except (ValueError, OverflowError) as cause:
            raise CatalogError(f"{path}:{number}: {cause}") from None
    if not gathered.levels:
        raise CatalogError(f"{path}: the catalog is empty")
    return gathered.catalog(lambda row: f"{path}:{row + 1}")


class _Gathered:
    """Collects items one by one into arrays. Codes number a level's symbols as they come; `catalog` reorders them."""

    def __init__(self) -> None:
        self.levels: list[dict[Symbol, int]] = []
        self._ids, self._metadata, self._codes = bytearray(), bytearray(), array("i")
        self._id_ends, self._metadata_ends = array("q", [0]), array("q", [0])

    def add(self, kind: type, item_id: Any, symbols: Any, metadata: Any) -> None:
        """Add an item. Raises ValueError or OverflowError if it is malformed; _of_arrays checks the rest."""
        given = (("item_id", item_id, str), ("semantic id", symbols, list), ("metadata", metadata, dict))
        for name, value, wanted in given:
            if type(value) is not wanted or not (value or wanted is dict):
                raise ValueError(f"{name} must be a {wanted.__name__} with content, found {_show(value)}")
        self.levels = self.levels or [{} for _ in symbols]
        if len(symbols) != len(self.levels):
            raise ValueError(f"the semantic id has {len(symbols)} levels, earlier ones {len(self.levels)}")
        valid, wanted_symbol = _SYMBOL_RULES[kind]
        for level, (symbol, known) in enumerate(zip(symbols, self.levels, strict=True)):
            if not valid(symbol):
                raise ValueError(f"level {level} must be {wanted_symbol}, found {_show(symbol)}")
            self._codes.append(known.setdefault(symbol, len(known)))
        self._ids += item_id.encode("utf-8", "surrogatepass")
        self._id_ends.append(len(self._ids))
        self._metadata += _ENCODER.encode(metadata) + b"\n"
        self._metadata_ends.append(len(self._metadata))

    def catalog(self, where: Callable[[int], str]) -> Catalog:
        codes = np.frombuffer(self._codes, np.int32).reshape(-1, len(self.levels))
        symbols = [sorted(known, key=_natural) for known in self.levels]
        for level, (known, names) in enumerate(zip(self.levels, symbols, strict=True)):
            ranks = np.empty(len(names), np.int32)
            ranks[[known[name] for name in names]] = np.arange(len(names), dtype=np.int32)
            codes[:, level] = ranks[codes[:, level]]
        has_metadata = len(self._metadata) > len(b"{}\n") * len(codes)
        ids, metadata = _table(self._ids, self._id_ends), _table(self._metadata, self._metadata_ends)
        return _of_arrays(ids, codes, symbols, metadata if has_metadata else None, where)


def _table(data: bytearray, ends: array[int]) -> TextTable:
    return TextTable(np.frombuffer(data, np.uint8), np.frombuffer(ends, np.int64))


def _load_columns(path: Path) -> Catalog:
    columns = catalog_columns.read(path, MAX_NAME_CHARS, CatalogError)
    where = str(path / catalog_columns.MANIFEST)
    return _of_columns(columns, where)


def _of_arrays(
    item_ids: TextTable,
    codes: Int32,
    symbols: Sequence[Sequence[Symbol]],
    metadata: TextTable | None,
    where: Callable[[int], str],
) -> Catalog:
    def fault(field: str, row: int | None, problem: str) -> CatalogError:
        return CatalogError(f"{field if row is None else f'{where(row)}: {field}'}: {problem}")

    if codes.ndim != 2 or codes.shape[1] != len(symbols) or not len(codes):
        raise CatalogError(f"codes: must be [n >= 1, {len(symbols)}], found {list(codes.shape)}")
    ids = catalog_columns.check(item_ids, codes, symbols, metadata, MAX_NAME_CHARS, fault)
    fields = Metadata(metadata, len(codes))
    version = catalog_columns.version(ids, codes, symbols, fields)
    return _of_columns(Columns(ids, codes, symbols, fields, version), "symbols")


def _of_columns(columns: Columns, where: str) -> Catalog:
    """Make a catalog of arrays that were checked. Only the symbols are checked here."""
    if not 1 <= len(columns.symbols) <= MAX_DEPTH:
        raise CatalogError(f"{where}: {len(columns.symbols)} levels; 1 to {MAX_DEPTH} are possible")
    kind = int if type(columns.symbols[0][0]) is int else str
    for level, symbols in enumerate(columns.symbols):
        if _vocabulary(symbols, level, kind, lambda i: f"{where}: symbol {i}") != tuple(symbols):
            raise CatalogError(f"{where}: the symbols of level {level} are not distinct and in natural order")
    columns.codes.setflags(write=False)
    named = tuple(tuple(level) for level in columns.symbols)
    return Catalog(columns.item_ids, columns.codes, named, columns.metadata, columns.version)


def _columns(catalog: Catalog) -> Columns:
    ids, metadata = catalog.item_ids, catalog.metadata
    if not isinstance(ids, ItemIds):
        ids = in_arrays(ids)
    if not isinstance(metadata, Metadata):
        lines = [_ENCODER.encode(fields) + b"\n" for fields in metadata]
        metadata = Metadata(TextTable.of(lines) if any(metadata) else None, len(lines))
    return Columns(ids, catalog.codes, catalog.symbols, metadata, catalog.version)


def _read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object and refuse repeated keys, of which the fast parser would silently keep the last."""

    def constant(name: str) -> NoReturn:
        raise UserError(f"{name} is not a JSON number")

    content = read_whole(path, CatalogError)
    try:
        value = json.loads(content.decode("utf-8"), object_pairs_hook=once, parse_constant=constant)
    except UserError as error:
        raise CatalogError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as cause:
        raise CatalogError(f"{path}: not JSON: {cause}") from None
    if not isinstance(value, dict):
        raise CatalogError(f"{path}: expected an object, found {type(value).__name__}")
    return value


def _assemble(
    item_ids: Sequence[str],
    symbols: Sequence[Sequence[Symbol]],
    metadata: Sequence[dict[str, Any]],
    where: Callable[[int], str],
    kind: type | None = None,
) -> Catalog:
    """Validate and build. where(i): item i's place in the source. kind: the symbols' type if the source fixes it."""
    _check_ids(item_ids, where)
    depth = _check_depth(symbols, where)
    columns = list(zip(*symbols, strict=True))
    kind = kind or (int if type(columns[0][0]) is int else str)
    levels = [_vocabulary(column, level, kind, where) for level, column in enumerate(columns)]
    codes = np.empty((len(item_ids), depth), np.int32)
    for level, (column, vocabulary) in enumerate(zip(columns, levels, strict=True)):
        code_of = {symbol: code for code, symbol in enumerate(vocabulary)}
        codes[:, level] = [code_of[symbol] for symbol in column]
    digest = hashlib.sha256()
    for line in _lines(item_ids, symbols, metadata, where):
        digest.update(line)
    codes.setflags(write=False)
    return Catalog(tuple(item_ids), codes, tuple(levels), tuple(metadata), digest.hexdigest()[:16])


def _check_ids(item_ids: Sequence[str], where: Callable[[int], str]) -> None:
    first: dict[str, int] = {}
    for i, item_id in enumerate(item_ids):
        if (
            type(item_id) is not str
            or not 0 < len(item_id) <= MAX_NAME_CHARS
            or CONTROL_CHARACTER.search(item_id)
        ):
            raise CatalogError(
                f"{where(i)}: item_id must be 1 to {MAX_NAME_CHARS} characters, and no control characters, "
                f"found {_show(item_id)}"
            )
        if first.setdefault(item_id, i) != i:
            raise CatalogError(
                f"{where(i)}: item_id {_show(item_id)} is already used at {where(first[item_id])}"
            )


def _check_depth(symbols: Sequence[Sequence[Symbol]], where: Callable[[int], str]) -> int:
    if not symbols:
        raise CatalogError("the catalog is empty")
    for i, path in enumerate(symbols):
        if type(path) not in (list, tuple):
            raise CatalogError(f"{where(i)}: the semantic id must be a list, found {_show(path)}")
        if len(path) != len(symbols[0]):
            raise CatalogError(
                f"{where(i)}: the semantic id has {len(path)} levels, earlier ones {len(symbols[0])}"
            )
    depth = len(symbols[0])
    if not 1 <= depth <= MAX_DEPTH:
        raise CatalogError(f"{where(0)}: the semantic id has {depth} levels; 1 to {MAX_DEPTH} are possible")
    return depth


def _vocabulary(
    column: Sequence[Symbol], level: int, kind: type, where: Callable[[int], str]
) -> tuple[Symbol, ...]:
    """The distinct symbols of one level, in code order. Checks every symbol of the level."""
    valid, wanted = _SYMBOL_RULES[kind]
    if set(map(type, column)) == {kind}:
        distinct = set(column)
        if all(map(valid, distinct)):
            return tuple(sorted(distinct, key=_natural))
    i = next(i for i, symbol in enumerate(column) if not valid(symbol))
    raise CatalogError(f"{where(i)}: level {level} must be {wanted}, found {_show(column[i])}")


def _is_token(symbol: object) -> bool:
    return type(symbol) is int and 0 <= symbol <= MAX_TOKEN


def _is_name(symbol: object) -> bool:
    return type(symbol) is str and 0 < len(symbol) <= MAX_NAME_CHARS


_SYMBOL_RULES: dict[type, tuple[Callable[[object], bool], str]] = {
    int: (_is_token, f"an integer from 0 to {MAX_TOKEN}"),
    str: (_is_name, f"a token name of 1 to {MAX_NAME_CHARS} characters"),
}


def _natural(symbol: Symbol) -> tuple[tuple[tuple[str, int], ...], Symbol]:
    """Sort key that compares digit runs by value; the symbol itself decides between `<a_1>` and `<a_01>`."""
    parts = re.findall(r"([^0-9]*)([0-9]*)", str(symbol))
    return tuple((text, int(digits or -1)) for text, digits in parts), symbol


def _lines(
    item_ids: Iterable[str],
    symbols: Iterable[Sequence[Symbol]],
    metadata: Iterable[dict[str, Any]],
    where: Callable[[int], str],
) -> Iterator[bytes]:
    """The canonical JSONL lines: keys sorted at every depth, no spaces."""
    for i, (item_id, path, fields) in enumerate(zip(item_ids, symbols, metadata, strict=True)):
        key = "semantic_id" if type(path[0]) is str else "token_ids"
        if type(fields) is not dict:
            raise CatalogError(f"{where(i)}: metadata must be an object, found {_show(fields)}")
        try:
            line = _ENCODER.encode({"item_id": item_id, key: path, "metadata": fields}) + b"\n"
            # NaN would be written as null and a date as text, but reading back must give the same values.
            faithful = not fields or _DECODER.decode(line)["metadata"] == fields
        except (TypeError, ValueError, RecursionError) as cause:
            raise CatalogError(f"{where(i)}: cannot be written as JSON: {cause}") from None
        if not faithful:
            raise CatalogError(f"{where(i)}: metadata must be plain, finite JSON values")
        if len(line) > MAX_LINE_BYTES:
            raise CatalogError(f"{where(i)}: ids and metadata take more than {MAX_LINE_BYTES} bytes")
        yield line


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
