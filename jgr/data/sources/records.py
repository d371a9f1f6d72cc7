# SPDX-License-Identifier: Apache-2.0
"""The records that a source yields: events and items, each with its line number.

The one idea: a source only knows how a line is written. Which ids exist, what repeats, the order of the events and
their split are handled once, for all sources, in jgr/data/preparation/prepare.py.

A function that reads a line raises a plain ValueError; `parsed` and `csv_rows` turn it into a DataError with
the file and the line.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from jgr.catalog.catalog import Catalog
from jgr.data.interactions import DataError, Interactions
from jgr.files import read_lines

SplitName = Literal["leave_one_out", "time", "given"]
T = TypeVar("T")
MAX_TIME = 2**62
TOLD_FILES = 8
"""Files of a folder that an error names."""


class Event(NamedTuple):
    """One contact of a user with an item. time: in the source's unit, None if unknown. split: 0 train, 1 valid, 2 test.

    actions: bits, named by Source.actions. scenario: where the item was shown, from 0, or -1 if unknown. Both are only
    used by sources with feedback.
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
    """The files of one raw dataset, each with its reader, which yields (line number, record).

    events: in the order in which they are read. items: None if no file describes the items; then the items are those
    that the events name.
    """

    events: tuple[tuple[Path, Callable[[Path], Iterator[tuple[int, Event]]]], ...]
    items: tuple[Path, Callable[[Path], Iterator[tuple[int, Item]]]] | None = None


@dataclass(frozen=True)
class ReadyDataset:
    """A raw dataset that brings semantic ids and ready-made examples. files: all that `load` reads."""

    files: tuple[Path, ...]
    load: Callable[[], tuple[Catalog, Interactions]]


@dataclass(frozen=True)
class TableOptions:
    """How tables of interactions are read.

    time_unit: what numbers of time count, "": by their size. actions: the columns that are actions, COLUMN or
    COLUMN:LEAST; empty: all that can be.
    """

    time_unit: str = ""
    actions: tuple[str, ...] = ()


class EventColumns(NamedTuple):
    """All events of a raw dataset, in the order of its files: arrays of [total], or None.

    user, item: indices into user_ids and item_ids, which are in the order first seen. time: in time_unit, see
    prepared.UNITS_PER_SECOND. split: 0 train, 1 valid, 2 test. place: the file and line of an event. notes: how the
    columns were read and what is left out, in words. actions, scenario: see Event; action_names and scenario_names say
    what they stand for, the latter empty where scenarios are numbers of the source.
    """

    user: npt.NDArray[Any]
    item: npt.NDArray[Any]
    user_ids: list[str]
    item_ids: list[str]
    time: npt.NDArray[np.int64] | None
    split: npt.NDArray[Any]
    place: Callable[[int], tuple[Path, int]]
    notes: tuple[str, ...] = ()
    time_unit: str = ""
    actions: npt.NDArray[np.int32] | None = None
    scenario: npt.NDArray[np.int32] | None = None
    action_names: tuple[str, ...] = ()
    scenario_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tabular:
    """A raw dataset whose events are read by columns. files: all that `read` reads. items: as for Raw."""

    files: tuple[Path, ...]
    read: Callable[[TableOptions], EventColumns]
    items: tuple[Path, Callable[[Path], Iterator[tuple[int, Item]]]] | None = None


class Counts(NamedTuple):
    """How much a dataset holds."""

    users: int
    items: int
    interactions: int


@dataclass(frozen=True)
class Source:
    """A format of raw datasets.

    open: finds the files in a folder; raises DataError, naming what is missing. splits: the possible ones, the usual
    one first. raw, kept: known counts before and after the default filter; None if the format fits many datasets.
    min_item: default filter. unordered: a user's events are a set without an order. drop_repeats: drop a row that
    repeats the user, item and time of another, and where the format names no actions, those and the scenario. actions:
    the name of each bit of an event's actions; empty if the format has no feedback, or any.
    """

    open: Callable[[Path], Raw | Tabular | ReadyDataset]
    splits: tuple[SplitName, ...] = ("leave_one_out", "time")
    raw: Counts | None = None
    kept: Counts | None = None
    min_item: int = 0
    unordered: bool = False
    drop_repeats: bool = False
    actions: tuple[str, ...] = ()


def find(folder: Path, *names: str) -> Path:
    """The first of `names` that exists in the folder, plain or with .gz. Raises DataError if none does."""
    path = find_optional(folder, *names)
    if path is None:
        raise nothing_found(folder, *names)
    return path


def nothing_found(folder: Path, *names: str) -> DataError:
    """The error for a folder without any of the files, which tells what is there instead."""
    if not folder.is_dir():
        what = "is a file: name the folder that it is in" if folder.exists() else "there is no such folder"
        return DataError(f"{folder}: {what}")
    there = sorted(path.name for path in folder.iterdir())
    told = ", ".join(there[:TOLD_FILES]) + (", ..." if len(there) > TOLD_FILES else "")
    wanted = f"has no {' or '.join(names)} (each may be gzipped)"
    return DataError(f"{folder}: {wanted}; {f'there are {told}' if told else 'it is empty'}")


def find_optional(folder: Path, *names: str) -> Path | None:
    """The same, or None. What stands there and is no file is found too, so that reading it tells of it."""
    paths = (folder / f"{name}{suffix}" for name in names for suffix in ("", ".gz"))
    return next((path for path in paths if os.path.lexists(path)), None)


def find_all(folder: Path, *patterns: str) -> list[Path]:
    """Every file that matches any of the glob patterns, plain or with .gz, sorted by name."""
    return sorted({p for pattern in patterns for s in ("", ".gz") for p in folder.glob(pattern + s)})


def find_only(folder: Path, *patterns: str, beside: Collection[Path] = ()) -> Path:
    """The only file that matches any of the glob patterns, apart from the files in `beside`."""
    found = [path for path in find_all(folder, *patterns) if path not in beside]
    if len(found) != 1:
        what = f"there are {', '.join(path.name for path in found)}" if found else "there is none"
        raise DataError(f"{folder}: expected one file {' or '.join(patterns)} (it may be gzipped); {what}")
    return found[0]


def parsed(path: Path, parse: Callable[[bytes], Iterable[T]]) -> Iterator[tuple[int, T]]:
    """Parse every line into records, and yield each with its line's number."""
    for number, line in read_lines(path, DataError):
        try:
            for record in parse(line):
                yield number, record
        except (ValueError, RecursionError) as cause:
            raise DataError(f"{path}:{number}: {cause}") from None


def csv_rows(
    path: Path, columns: Iterable[str], parse: Callable[[dict[str, str]], T]
) -> Iterator[tuple[int, T]]:
    """Parse every row of a CSV file, whose header must hold `columns`, and yield it with its line's number."""
    reader = csv.reader(_text_lines(path), strict=True)
    try:
        header = next(reader, [])
        absent = [column for column in columns if column not in header]
        if absent or len(set(header)) != len(header):
            named = f"the header must name each column once, {', '.join(columns)} among them"
            raise ValueError(f"{named}; there are {', '.join(header) or 'none'}")
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
    """Parse one JSON object. NaN, which is not JSON, is refused."""
    try:
        value = msgspec.json.decode(line)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, found {type(value).__name__}")
    return value


def as_id(value: object) -> str:
    """Read an id, which is text or a whole number, as text."""
    if type(value) is int:
        return str(value)
    if type(value) is not str:
        raise ValueError(f"an id must be text or a whole number, found {value!r}")
    return value


def as_time(value: object) -> int:
    """Read a time: a whole number from 0, given as a number or as text."""
    time = int(value) if isinstance(value, str) else value
    if type(time) is not int or not 0 <= time < MAX_TIME:
        raise ValueError(f"a time must be a whole number from 0, found {value!r}")
    return time


def fields_of(line: bytes, separator: str, n: int, encoding: str = "utf-8") -> list[str]:
    """Split a line into exactly n fields. Raises ValueError if there are more or fewer."""
    fields = line.decode(encoding).split(separator)
    if len(fields) != n:
        raise ValueError(f"expected {n} fields separated by {separator!r}, found {len(fields)}")
    return fields


def user_line(line: bytes, split: int = 0) -> list[Event]:
    """Parse a line `user item item ...` into the user's events. A user without items is refused."""
    user_id, *item_ids = line.decode("utf-8").split(" ")
    if not item_ids or not all(item_ids):
        raise ValueError(f"user {user_id!r} has no items, or there are two spaces in a row")
    return [Event(user_id, item_id, None, split) for item_id in item_ids]


def user_lines(path: Path, split: int = 0) -> Iterator[tuple[int, Event]]:
    """Read a file of lines `user item item ...`, with one line for each user."""
    seen: set[str] = set()

    def parse(line: bytes) -> list[Event]:
        events = user_line(line, split)
        user_id = events[0].user_id
        if user_id in seen:
            raise ValueError(f"user {user_id!r} has a line already")
        seen.add(user_id)
        return events

    return parsed(path, parse)
