# SPDX-License-Identifier: Apache-2.0
"""What a source yields: events and items, each with the line it stands in.

The one idea: a source only knows how a line is written. Which ids exist, what repeats, in which order events
stand and how they are split is checked and done once, for all sources, in jgr/data/preparation/prepare.py.

A function that reads a line raises a plain ValueError; `parsed` and `csv_rows` turn it into a DataError with
the file and the line.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from jgr.catalog.catalog import Catalog
from jgr.data.interactions import DataError, Interactions
from jgr.files import read_lines

SplitName = Literal["leave_one_out", "time", "given"]
T = TypeVar("T")
MAX_TIME = 2**62


class Event(NamedTuple):
    """A user met an item. time: in the source's unit, None where unknown. split: 0 train, 1 valid, 2 test.

    actions: bits of Source.actions. scenario: where they met, from 0; -1: unknown. Of a source with actions only.
    """

    user_id: str
    item_id: str
    time: int | None = None
    split: int = 0
    actions: int = 0
    scenario: int = -1


class Item(NamedTuple):
    """An item and its metadata, plain JSON values."""

    item_id: str
    metadata: dict[str, Any]


@dataclass(frozen=True)
class Raw:
    """The files of one raw dataset and how each is read; readers yield (line number, record).

    events: in the order in which they are read. items: None where nothing describes the items; then the items
    are those of the events.
    """

    events: tuple[tuple[Path, Callable[[Path], Iterator[tuple[int, Event]]]], ...]
    items: tuple[Path, Callable[[Path], Iterator[tuple[int, Item]]]] | None = None


@dataclass(frozen=True)
class Whole:
    """A raw dataset that comes with semantic ids and with its examples cut out. files: all that `load` reads."""

    files: tuple[Path, ...]
    load: Callable[[], tuple[Catalog, Interactions]]


class Counts(NamedTuple):
    """How much a dataset holds."""

    users: int
    items: int
    interactions: int


@dataclass(frozen=True)
class Source:
    """A raw form.

    open: finds the files in a folder; DataError names what is missing. splits: those that are possible, the
    usual one first. raw, kept: known counts before and after the default filter, None where the form fits
    many datasets. min_item: default filter. unordered: a user's events are a set without an order. drop_repeats: a
    row that repeats user, item and time of another says nothing new. actions: what bit i of an event's says; empty
    where the form has no feedback.
    """

    open: Callable[[Path], Raw | Whole]
    splits: tuple[SplitName, ...] = ("leave_one_out", "time")
    raw: Counts | None = None
    kept: Counts | None = None
    min_item: int = 0
    unordered: bool = False
    drop_repeats: bool = False
    actions: tuple[str, ...] = ()


def find(folder: Path, *names: str) -> Path:
    """The first of `names` that exists, as it is or with .gz. DataError where none does."""
    path = find_optional(folder, *names)
    if path is None:
        raise DataError(f"{folder}: has no {' or '.join(names)} (each may be gzipped)")
    return path


def find_optional(folder: Path, *names: str) -> Path | None:
    paths = (folder / f"{name}{suffix}" for name in names for suffix in ("", ".gz"))
    return next((path for path in paths if path.is_file()), None)


def find_all(folder: Path, *patterns: str) -> list[Path]:
    """Every file that matches any of the glob patterns, as they are or with .gz, by name."""
    return sorted({p for pattern in patterns for s in ("", ".gz") for p in folder.glob(pattern + s)})


def find_only(folder: Path, *patterns: str, beside: Collection[Path] = ()) -> Path:
    """The one file that matches any of the glob patterns and is none of those `beside` it."""
    found = [path for path in find_all(folder, *patterns) if path not in beside]
    if len(found) != 1:
        what = f"there are {', '.join(path.name for path in found)}" if found else "there is none"
        raise DataError(f"{folder}: expected one file {' or '.join(patterns)} (it may be gzipped); {what}")
    return found[0]


def parsed(path: Path, parse: Callable[[bytes], Iterable[T]]) -> Iterator[tuple[int, T]]:
    """Every record of every line, with the line's number."""
    for number, line in read_lines(path, DataError):
        try:
            for record in parse(line):
                yield number, record
        except (ValueError, RecursionError) as cause:
            raise DataError(f"{path}:{number}: {cause}") from None


def csv_rows(
    path: Path, columns: Iterable[str], parse: Callable[[dict[str, str]], T]
) -> Iterator[tuple[int, T]]:
    """Every row of a CSV file with a header that holds `columns`, as `parse` reads it, with its line."""
    reader = csv.reader(_text_lines(path), strict=True)
    try:
        header = next(reader, [])
        absent = [column for column in columns if column not in header]
        if absent or len(set(header)) != len(header):
            raise ValueError(f"the header must name each column once, {', '.join(columns)} among them")
        for row in reader:
            if len(row) != len(header):
                raise ValueError(f"has {len(row)} fields, the header {len(header)}")
            yield reader.line_num, parse(dict(zip(header, row, strict=True)))
    except DataError:
        raise
    except (ValueError, csv.Error) as cause:
        raise DataError(f"{path}:{max(reader.line_num, 1)}: {cause}") from None


def _text_lines(path: Path) -> Iterator[str]:
    for number, line in read_lines(path, DataError):
        try:
            # The line ends are put back: a quoted field may hold some.
            yield line.decode("utf-8-sig" if number == 1 else "utf-8") + "\n"
        except UnicodeDecodeError as cause:
            raise DataError(f"{path}:{number}: {cause}") from None


def json_object(line: bytes) -> dict[str, Any]:
    """One JSON object; NaN, which JSON does not have, is refused."""
    value = msgspec.json.decode(line)
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, found {type(value).__name__}")
    return value


def as_id(value: object) -> str:
    """An id as text; whole numbers are read as their decimal text."""
    if type(value) is int:
        return str(value)
    if type(value) is not str:
        raise ValueError(f"an id must be text or a whole number, found {value!r}")
    return value


def as_time(value: object) -> int:
    """A time, a whole number from 0, also as text."""
    time = int(value) if isinstance(value, str) else value
    if type(time) is not int or not 0 <= time < MAX_TIME:
        raise ValueError(f"a time must be a whole number from 0, found {value!r}")
    return time


def fields_of(line: bytes, separator: str, n: int, encoding: str = "utf-8") -> list[str]:
    """The fields of a line, exactly n."""
    fields = line.decode(encoding).split(separator)
    if len(fields) != n:
        raise ValueError(f"expected {n} fields separated by {separator!r}, found {len(fields)}")
    return fields


def user_line(line: bytes, split: int = 0) -> list[Event]:
    """`user item item ...`: all of a user's events. A user without items is refused."""
    user_id, *item_ids = line.decode("utf-8").split(" ")
    if not item_ids or not all(item_ids):
        raise ValueError(f"user {user_id!r} has no items, or there are two spaces in a row")
    return [Event(user_id, item_id, None, split) for item_id in item_ids]


def user_lines(path: Path, split: int = 0) -> Iterator[tuple[int, Event]]:
    """A file of lines `user item item ...`, each user once."""
    seen: set[str] = set()

    def parse(line: bytes) -> list[Event]:
        events = user_line(line, split)
        user_id = events[0].user_id
        if user_id in seen:
            raise ValueError(f"user {user_id!r} has a line already")
        seen.add(user_id)
        return events

    return parsed(path, parse)
