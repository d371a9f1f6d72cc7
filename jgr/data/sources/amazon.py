# SPDX-License-Identifier: Apache-2.0
"""Amazon reviews: the 5-core sequence text of S3-Rec and its successors, and the files of the 2023 release.

5-core: `sequences.txt` (S3-Rec's `Beauty.txt`, renamed) has lines of `user item item ...`, oldest first. If
`items.jsonl` is there too, it holds objects with `item_id`, whose other fields are metadata.

LETTER's form of a 5-core set: `sequences.json`, one object of each user's items, oldest first.

2023: reviews are `*.jsonl` (as crawled), `*.csv` (user_id, parent_asin, rating, timestamp), or already split into
`*.train.csv`, `*.valid.csv`, `*.test.csv`. Items are `meta_*.jsonl`, of which a few fields are kept. An item's id is
its parent_asin; times are in milliseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from jgr.data.interactions import DataError
from jgr.data.sources.records import (
    Counts,
    Event,
    Item,
    Raw,
    Source,
    as_id,
    as_time,
    csv_rows,
    find,
    find_all,
    find_only,
    find_optional,
    json_object,
    parsed,
    user_lines,
)
from jgr.fields import once
from jgr.files import read_whole

META_FIELDS = ("title", "store", "main_category", "categories", "price")


def _open_5core(folder: Path) -> Raw:
    items = find_optional(folder, "items.jsonl")
    events = ((find(folder, "sequences.txt"), user_lines),)
    return Raw(events, (items, items_jsonl) if items else None)


def _open_letter(folder: Path) -> Raw:
    return Raw(((find(folder, "sequences.json"), _json_sequences),))


def _json_sequences(path: Path) -> Iterator[tuple[int, Event]]:
    """Read one object that names each user's items. An event's line is the number of its user, from 1."""
    content = read_whole(path, DataError)
    try:
        users = json_object(content)
        json.loads(content, object_pairs_hook=once)  # the other reader takes the last of a user's lists alone
    except ValueError as cause:
        raise DataError(f"{path}: {cause}") from None
    for number, (user_id, items) in enumerate(users.items(), 1):
        if not isinstance(items, list) or not items:
            raise DataError(f"{path}: user {user_id!r} has no list of items")
        for item in items:
            try:
                yield number, Event(user_id, as_id(item))
            except ValueError as cause:
                raise DataError(f"{path}: user {user_id!r}: {cause}") from None


def items_jsonl(path: Path) -> Iterator[tuple[int, Item]]:
    """Read objects with `item_id`. Their other fields are the metadata, or their only other field `metadata` is."""

    def parse(line: bytes) -> list[Item]:
        fields = json_object(line)
        item_id = as_id(fields.pop("item_id", None))
        nested = fields.get("metadata")
        return [
            Item(item_id, nested if list(fields) == ["metadata"] and isinstance(nested, dict) else fields)
        ]

    return parsed(path, parse)


def _open_2023(folder: Path) -> Raw:
    meta = find_all(folder, "meta_*.jsonl")
    if len(meta) > 1:
        raise DataError(f"{folder}: holds several categories: {', '.join(path.name for path in meta)}")
    items = (meta[0], _meta_2023) if meta else None
    parts = ("*.train.csv", "*.valid.csv", "*.test.csv")
    if find_all(folder, parts[0]):
        readers = [partial(_csv_2023, split=split) for split in range(3)]
        return Raw(
            tuple((find_only(folder, part), read) for part, read in zip(parts, readers, strict=True)), items
        )
    path = find_only(folder, "*.jsonl", "*.csv", beside=meta)
    read = _jsonl_2023 if path.name.removesuffix(".gz").endswith(".jsonl") else _csv_2023
    return Raw(((path, read),), items)


def _jsonl_2023(path: Path) -> Iterator[tuple[int, Event]]:
    def parse(line: bytes) -> list[Event]:
        fields = json_object(line)
        user_id, item_id = as_id(fields.get("user_id")), as_id(fields.get("parent_asin"))
        return [Event(user_id, item_id, as_time(fields.get("timestamp")))]

    return parsed(path, parse)


def _csv_2023(path: Path, split: int = 0) -> Iterator[tuple[int, Event]]:
    def parse(row: dict[str, str]) -> Event:
        return Event(row["user_id"], row["parent_asin"], as_time(row["timestamp"]), split)

    return csv_rows(path, ("user_id", "parent_asin", "timestamp"), parse)


def _meta_2023(path: Path) -> Iterator[tuple[int, Item]]:
    def parse(line: bytes) -> list[Item]:
        fields = json_object(line)
        return [Item(as_id(fields.get("parent_asin")), {k: fields[k] for k in META_FIELDS if fields.get(k)})]

    return parsed(path, parse)


SOURCES = {
    "amazon-5core": Source(_open_5core, splits=("leave_one_out",)),
    "amazon-beauty": Source(_open_5core, splits=("leave_one_out",), raw=Counts(22_363, 12_101, 198_502)),
    "amazon-sports": Source(_open_5core, splits=("leave_one_out",), raw=Counts(35_598, 18_357, 296_337)),
    "amazon-instruments": Source(_open_letter, splits=("leave_one_out",), raw=Counts(24_772, 9_922, 206_153)),
    "amazon-2023": Source(_open_2023, splits=("leave_one_out", "time", "given")),
}
