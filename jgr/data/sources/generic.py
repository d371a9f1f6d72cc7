# SPDX-License-Identifier: Apache-2.0
"""Reads your own data: `interactions.{jsonl,csv,parquet}` and, if there, `items.{jsonl,csv,parquet}`.

An interaction has user_id and item_id, and may have timestamp (a whole number, in every row or in none) and split
(train, valid or test); other fields are ignored. An item has item_id; every other field is metadata. JSONL and
CSV may be gzipped. Parquet needs pyarrow (`pip install jgr[parquet]`); its rows are counted from 1 as lines.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jgr.data.interactions import DataError
from jgr.data.sources.amazon import items_jsonl
from jgr.data.sources.records import (
    Event,
    Item,
    Raw,
    Source,
    T,
    as_id,
    as_time,
    csv_rows,
    find,
    find_optional,
    json_object,
    parsed,
)

SPLIT_OF = {"train": 0, "valid": 1, "test": 2}
FORMS = ("jsonl", "csv", "parquet")


def _open(folder: Path) -> Raw:
    interactions = find(folder, *(f"interactions.{form}" for form in FORMS))
    items = find_optional(folder, *(f"items.{form}" for form in FORMS))
    return Raw(((interactions, _events),), (items, _items) if items else None)


def _events(path: Path) -> Iterator[tuple[int, Event]]:
    if path.suffix == ".parquet":
        return _parquet_rows(path, _event)
    if path.name.removesuffix(".gz").endswith(".csv"):
        return csv_rows(path, ("user_id", "item_id"), _event)
    return parsed(path, lambda line: [_event(json_object(line))])


def _items(path: Path) -> Iterator[tuple[int, Item]]:
    if path.suffix == ".parquet":
        return _parquet_rows(path, _item)
    if path.name.removesuffix(".gz").endswith(".csv"):
        return csv_rows(path, ("item_id",), _item)
    return items_jsonl(path)


def _event(row: dict[str, Any]) -> Event:
    split = row.get("split", "train")
    if split not in SPLIT_OF:
        raise ValueError(f"split must be train, valid or test, found {split!r}")
    time = as_time(row["timestamp"]) if "timestamp" in row else None
    return Event(as_id(row.get("user_id")), as_id(row.get("item_id")), time, SPLIT_OF[split])


def _item(row: dict[str, Any]) -> Item:
    item_id = as_id(row.pop("item_id", None))
    return Item(item_id, {name: value for name, value in row.items() if value is not None and value != ""})


def _parquet_rows(path: Path, parse: Callable[[dict[str, Any]], T]) -> Iterator[tuple[int, T]]:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise DataError(f"{path}: Parquet needs pyarrow: pip install jgr[parquet]") from None
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=4096):
                for row in batch.to_pylist():
                    number += 1
                    yield number, parse(row)
    except (OSError, ValueError) as cause:  # pyarrow's own errors are ValueErrors
        raise DataError(f"{path}{f':{number}' if number else ''}: {cause}") from None


SOURCES = {"generic": Source(_open, splits=("leave_one_out", "time", "given"))}
