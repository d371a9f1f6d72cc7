# SPDX-License-Identifier: Apache-2.0
"""A catalog as a folder of arrays that are memory-mapped instead of read: the form for millions of items.

    catalog.json           {"format": 1, "version", "symbols": one list for each level, "sha256"}
    codes.npy              [n, depth] int32
    item_ids.npy           uint8, the ids' UTF-8, one after the other
    item_id_offsets.npy    [n + 1] int64, the start of each id, and the end of the last
    metadata.npy, metadata_offsets.npy    the same for a line of JSON per item; absent if no item has metadata

The one idea: no item has a Python object of its own, and everything is checked by array operations when the folder
is opened. `sha256` covers the symbols and the arrays' bytes, so that a file that was cut, swapped or edited is found.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from jgr.catalog.text_table import ItemIds, Metadata, TextTable, object_fault, text_fault
from jgr.config import UserError
from jgr.files import read_whole, require_regular

Int32 = npt.NDArray[np.int32]
Symbols = Sequence[Sequence[str | int]]

SUFFIX = ".catalog"
MAX_ITEMS = 2**31 - 2
MANIFEST = "catalog.json"
_FORMAT = 1
_DTYPES = {
    "codes": np.int32,
    "item_ids": np.uint8,
    "item_id_offsets": np.int64,
    "metadata": np.uint8,
    "metadata_offsets": np.int64,
}
_OPTIONAL = ("metadata", "metadata_offsets")
_BYTES = 1 << 24
_ENCODER = msgspec.json.Encoder(order="deterministic")


class Columns(NamedTuple):
    """A catalog's content; see jgr.catalog.catalog.Catalog. The symbols are not checked in this file."""

    item_ids: ItemIds
    codes: Int32
    symbols: Symbols
    metadata: Metadata
    version: str


def check(
    item_ids: TextTable,
    codes: Int32,
    symbols: Symbols,
    metadata: TextTable | None,
    max_chars: int,
    fault: Callable[[str, int | None, str], Exception],
) -> ItemIds:
    """Check arrays of the right dtypes against each other, and return the ids, ready for look-ups.

    fault(field, row, problem): makes the error to raise; row is None if the problem is not one item's.
    """
    n, depth = codes.shape
    for name, table in (("item_ids", item_ids), ("metadata", metadata)):
        if table is None:
            continue
        offsets = table.offsets
        if (
            len(table) != n
            or offsets[0] != 0
            or offsets[-1] != len(table.data)
            or (np.diff(offsets) < 1).any()
        ):
            raise fault(name, None, f"its offsets do not divide {len(table.data)} bytes into {n} texts")
    for level in range(depth):
        found, size = codes[:, level], len(symbols[level])
        wrong = (found < 0) | (found >= size)
        if wrong.any():
            row = int(wrong.argmax())
            raise fault("codes", row, f"level {level} has code {found[row]}, and {size} symbols")
        if not np.bincount(found, minlength=size).all():
            raise fault("symbols", None, f"level {level} has symbols that no item has")
    bad = text_fault(item_ids, max_chars)
    if bad is not None:
        raise fault(
            "item_id", bad, f"must be UTF-8 of 1 to {max_chars} characters, and no control characters"
        )
    ids = ItemIds(item_ids)
    twice = ids.repeated()
    if twice is not None:
        raise fault("item_id", twice[1], f"{ids[twice[1]][:80]!r} is that of item {twice[0]}, too")
    bad = None if metadata is None else object_fault(metadata)
    if bad is not None:
        raise fault("metadata", bad, "must be an object of plain, finite JSON values")
    return ids


def version(item_ids: ItemIds, codes: Int32, symbols: Symbols, metadata: Metadata) -> str:
    """Hash what jgr.catalog.catalog.save_catalog would write as JSON lines, a part at a time to save memory."""
    digest = hashlib.sha256()
    key = "semantic_id" if isinstance(symbols[0][0], str) else "token_ids"
    for first, last in (metadata.table or item_ids.table).chunks():
        levels = [
            [names[code] for code in codes[first:last, level].tolist()] for level, names in enumerate(symbols)
        ]
        given = [b"{}"] * (last - first)
        if metadata.table is not None:
            given = metadata.table.text(first, last).removesuffix(b"\n").split(b"\n")
        rows = zip(item_ids[first:last], given, zip(*levels, strict=True), strict=True)
        digest.update(
            _ENCODER.encode_lines(
                [
                    {"item_id": item_id, "metadata": msgspec.Raw(fields), key: path}
                    for item_id, fields, path in rows
                ]
            )
        )
    return digest.hexdigest()[:16]


def write(path: Path, columns: Columns, error: type[UserError]) -> None:
    """Write a folder as a whole or not at all. Raises `error` if it exists already."""
    if path.exists():
        raise error(f"{path}: exists already; a catalog's folder is never changed")
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    arrays: dict[str, npt.NDArray[Any]] = {
        "codes": np.ascontiguousarray(columns.codes, np.int32),
        "item_ids": columns.item_ids.table.data,
        "item_id_offsets": columns.item_ids.table.offsets,
    }
    if columns.metadata.table is not None:
        arrays["metadata"] = columns.metadata.table.data
        arrays["metadata_offsets"] = columns.metadata.table.offsets
    manifest = {
        "format": _FORMAT,
        "version": columns.version,
        "symbols": columns.symbols,
        "sha256": _sha256(columns.symbols, arrays),
    }
    try:
        partial.mkdir(parents=True)
        for name, array in arrays.items():
            np.save(partial / f"{name}.npy", array)
        (partial / MANIFEST).write_text(json.dumps(manifest) + "\n")
        os.rename(partial, path)
    except OSError as cause:
        raise error(f"{path}: cannot be written: {cause.strerror or cause}") from cause
    finally:
        with suppress(OSError):
            shutil.rmtree(partial)


def read(path: Path, max_chars: int, error: type[UserError]) -> Columns:
    """Memory-map a folder that `write` wrote. Raises `error`, naming the file and field that cannot be used."""
    manifest = _manifest(path / MANIFEST, error)
    symbols = manifest["symbols"]
    arrays = {name: _map(path / f"{name}.npy", name, error) for name in _DTYPES if _expected(path, name)}
    codes = arrays["codes"]
    if codes.ndim != 2 or codes.shape[1] != len(symbols) or not 0 < len(codes) <= MAX_ITEMS:
        raise error(f"{path / 'codes.npy'}: must be [items, {len(symbols)}], found {list(codes.shape)}")
    for name, array in arrays.items():
        if name != "codes" and (array.ndim != 1 or not len(array)):
            raise error(f"{path / name}.npy: must have one dimension, found {list(array.shape)}")
    if _sha256(symbols, arrays) != manifest["sha256"]:
        raise error(f"{path}: is not what was written: the sha256 of its arrays is another; build it again")

    def fault(field: str, row: int | None, problem: str) -> Exception:
        return error(f"{path}: {field}: {problem if row is None else f'item {row}: {problem}'}")

    texts = TextTable(arrays["item_ids"], arrays["item_id_offsets"])
    fields = TextTable(arrays["metadata"], arrays["metadata_offsets"]) if "metadata" in arrays else None
    ids = check(texts, codes, symbols, fields, max_chars, fault)
    return Columns(ids, codes, symbols, Metadata(fields, len(codes)), manifest["version"])


def _manifest(path: Path, error: type[UserError]) -> dict[str, Any]:
    content = read_whole(path, error)
    try:
        manifest = msgspec.json.decode(content)
    except (ValueError, RecursionError) as cause:
        raise error(f"{path}: not JSON: {cause}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise error(f"{path}: format: must be {_FORMAT}")
    for name in ("version", "sha256"):
        if not isinstance(manifest.get(name), str):
            raise error(f"{path}: {name}: must be text")
    version = manifest["version"]
    if len(version) != 16 or not set(version) <= set("0123456789abcdef"):
        raise error(f"{path}: version: must be 16 hexadecimal digits")
    symbols = manifest.get("symbols")
    if not isinstance(symbols, list) or not symbols or not all(isinstance(s, list) and s for s in symbols):
        raise error(f"{path}: symbols: must be a list of symbols for each level")
    return manifest


def _expected(path: Path, name: str) -> bool:
    return name not in _OPTIONAL or any((path / f"{other}.npy").exists() for other in _OPTIONAL)


def _map(path: Path, name: str, error: type[UserError]) -> npt.NDArray[Any]:
    require_regular(path, error)
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError) as cause:
        reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
        raise error(f"{path}: cannot be read: {' '.join(reason.split())}") from None
    if not isinstance(array, np.memmap) or array.dtype != _DTYPES[name] or not array.flags.c_contiguous:
        raise error(f"{path}: must be a plain array of {np.dtype(_DTYPES[name]).name}")
    plain: npt.NDArray[Any] = array.view(np.ndarray)
    return plain


def _sha256(symbols: Symbols, arrays: dict[str, npt.NDArray[Any]]) -> str:
    digest = hashlib.sha256(json.dumps(symbols).encode())
    for name, array in arrays.items():
        digest.update(f"{name} {array.shape}".encode())
        flat = array.reshape(-1).view(np.uint8)
        for at in range(0, len(flat), _BYTES):
            digest.update(flat[at : at + _BYTES].data)
    return digest.hexdigest()
