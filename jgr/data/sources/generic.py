# SPDX-License-Identifier: Apache-2.0
"""Reads your own data: `interactions.{csv,tsv,jsonl,parquet}` and, if there, `items.*`; or RecBole's atomic files
`NAME.inter` (or `NAME.train.inter`, `NAME.valid.inter`, `NAME.test.inter`), `NAME.item` and `NAME.user`.

An interaction has user_id and item_id, and may have timestamp, split (train, valid or test), scenario (where the item
was shown), and any columns of what the user did, which `feedback_columns` turns into actions. An item has item_id;
every other column is metadata. All but Parquet may be gzipped. What is left out is counted and said.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jgr.data.interactions import DataError
from jgr.data.prepared import UNITS_PER_SECOND
from jgr.data.sources.amazon import items_jsonl
from jgr.data.sources.columns import SPLIT_OF, Ids, Scenarios, Splits, Times
from jgr.data.sources.feedback_columns import FeedbackColumn, Found, as_bits, thresholds
from jgr.data.sources.item_lists import LISTS, ItemLists
from jgr.data.sources.records import (
    EventColumns,
    Item,
    Source,
    TableOptions,
    Tabular,
    as_id,
    find_all,
    find_optional,
    nothing_found,
)
from jgr.data.sources.tables import MICROSECONDS, BadCell, Block, Table, open_table

FORMS = ("jsonl", "csv", "tsv", "parquet")
_KNOWN = ("user_id", "item_id", "timestamp", "split", "scenario")


def _open(folder: Path) -> Tabular:
    plain = find_all(folder, *(f"interactions.{form}" for form in FORMS))
    atomic = find_all(folder, "*.inter")
    if not plain and not atomic:
        raise nothing_found(folder, *(f"interactions.{form}" for form in FORMS), "*.inter")
    parts = {_split_of(path): path for path in atomic}
    whole = len(atomic) == 1 or (set(parts) == set(SPLIT_OF) and len(atomic) == len(parts))
    if len(plain) + bool(atomic) > 1 or not (plain or whole):
        names = ", ".join(path.name for path in (*plain, *atomic))
        raise DataError(
            f"{folder}: expected one file of interactions, or *.train, *.valid and *.test.inter: {names}"
        )
    events = plain or [parts[split] for split in SPLIT_OF if split in parts] or atomic
    if plain:
        items = find_optional(folder, *(f"items.{form}" for form in FORMS))
        users = find_optional(folder, *(f"users.{form}" for form in FORMS))
    else:
        name = atomic[0].name.split(".inter")[0].removesuffix(f".{_split_of(atomic[0])}")
        items, users = (find_optional(folder, f"{name}.{kind}") for kind in ("item", "user"))
    return Tabular(
        tuple(filter(None, (*events, users))),
        partial(_read, events, users),
        (items, _items) if items else None,
    )


def _split_of(path: Path) -> str:
    """The split that an atomic file's name gives, such as x.valid.inter; "" where it gives none."""
    parts = path.name.split(".")
    at = parts.index("inter")
    return parts[at - 1] if at and parts[at - 1] in SPLIT_OF else ""


class _Events:
    """Gathers the columns of all files. rows: where each file's events begin, to name the line of one later."""

    def __init__(self, options: TableOptions) -> None:
        if options.time_unit and options.time_unit not in UNITS_PER_SECOND:
            raise DataError(
                f"--time_unit: there are {', '.join(UNITS_PER_SECOND)}, not {options.time_unit!r}"
            )
        self._wanted = thresholds(options.actions)
        self._unit = options.time_unit
        self._users, self._items = Ids("user_id"), Ids("item_id")
        self._splits, self._scenarios = Splits("split"), Scenarios("scenario")
        self._times: Times | None = None
        self._feedback: dict[str, FeedbackColumn] = {}
        self._lists = ItemLists()
        self._listed: set[str] = set()
        self._tables: list[tuple[int, Table, list[int] | None]] = []
        self.total = 0

    def read(self, table: Table) -> None:
        """Take a file. Raises DataError, naming file, line and column."""
        lists = next((name for name in LISTS if table.types.get(name) == "token_seq"), "")
        rows: list[int] = []
        self._tables.append((self.total, table, rows if lists else None))
        split = SPLIT_OF[_split_of(table.path) or "train"] if table.path.match("*.inter*") else 0
        empty = True
        for block in table.blocks():
            if not block.size:
                table.require(block, "user_id", *(() if lists else ("item_id",)))
                continue
            empty = False
            found, of = block, None
            try:
                if lists:
                    found, of = self._lists.events(block, lists)
                    rows += of
                if found.size:
                    self._add(table, found, split)
            except BadCell as bad:
                row = block.start + bad.index if of is None else of[bad.index]
                raise table.error(row, bad.column, str(bad)) from None
            self.total += found.size
        if empty:
            raise DataError(f"{table.path}: the file holds no events")

    def _add(self, table: Table, block: Block, split: int) -> None:
        columns, size = block.columns, block.size
        self._users.add(columns.get("user_id"))
        self._items.add(columns.get("item_id"))
        self._splits.add(columns.get("split"), size, split)
        self._scenarios.add(columns.get("scenario"), size)
        if self._times is None:
            dated = table.types.get("timestamp") == MICROSECONDS
            self._times = Times("timestamp", "us" if dated else self._unit, dated)
        self._times.add(columns.get("timestamp"), size)
        for name in columns.keys() - self._feedback.keys() - set(_KNOWN):
            if table.types.get(name, "").endswith("_seq"):
                self._listed.add(name)
                continue
            if not name.isprintable():
                raise BadCell(0, repr(name[:80]), "the name of a column must be printable")
            numbers = table.types.get(name) == "float"
            self._feedback[name] = FeedbackColumn(name, self._wanted.get(name, ()), numbers)
            if self.total:  # rows before the first that has the column
                self._feedback[name].add(None, self.total)
        for name, column in self._feedback.items():
            column.add(columns.get(name), size)

    def finish(self) -> EventColumns:
        """All columns, and what became of them."""
        (user, user_ids), (item, item_ids) = self._users.finish(), self._items.finish()
        try:
            times = self._times.finish() if self._times else None
        except BadCell as bad:
            path, line = self._place(bad.index)
            raise DataError(f"{path}:{line}: {bad.column}: {bad}") from None
        split = self._splits.finish()
        notes = [times.said] if times else ["there are no times: events are taken in the order of the file"]
        notes += [f"{name}: left out: lists are no feedback" for name in sorted(self._listed)]
        if split.any():
            counts = np.bincount(split, minlength=3).tolist()
            parts = ", ".join(f"{n} {name}" for name, n in zip(SPLIT_OF, counts, strict=True))
            notes.append(f"split: {parts}; --split=given takes it")
        left = sorted(self._lists.left_out)
        notes += [f"{name}: left out: it belongs to a user's list and to none of its items" for name in left]
        absent = [name for name in self._wanted if name not in self._feedback]
        if absent:
            known = ", ".join(sorted(self._feedback)) or "none"
            raise DataError(f"--actions: there is no column {absent[0]!r} of feedback; there are {known}")
        found: dict[str, Found] = {}
        for name, column in sorted(self._feedback.items()):
            made = column.finish()
            if self._wanted and name not in self._wanted:
                made = "left out: --actions does not name it"
            elif name in self._wanted and isinstance(made, str):
                raise DataError(f"--actions={name}: cannot be an action: {made}")
            notes.append(f"{name}: {made if isinstance(made, str) else made.said}")
            if not isinstance(made, str):
                found[name] = made
        actions, names = as_bits(found, self.total)
        scenario, scenarios = self._scenarios.finish()
        if scenarios:
            notes.append(f"scenario: {', '.join(f'{n} {i}' for i, n in enumerate(scenarios))}")
        if not names and scenario.any():
            notes.append("scenario: left out, since no column says what users did")
        return EventColumns(
            user, item, user_ids, item_ids, None if times is None else times.times, split,
            self._place, tuple(notes), times.unit if times else "",
            actions if names else None, scenario if names else None, names, tuple(scenarios) if names else (),
        )  # fmt: skip

    def _place(self, event: int) -> tuple[Path, int]:
        at = bisect_right([start for start, _, _ in self._tables], event) - 1
        start, table, rows = self._tables[at]
        row = event - start
        return table.path, table.line_of(row if rows is None else rows[row])


def _read(paths: list[Path], users: Path | None, options: TableOptions) -> EventColumns:
    events = _Events(options)
    for path in paths:
        events.read(open_table(path))
    found = events.finish()
    if users is None:
        return found
    rows = sum(block.size for block in open_table(users).blocks())
    return found._replace(
        notes=(*found.notes, f"{users.name}: left out, {rows} users: models read no features of users")
    )


# Items


def _items(path: Path) -> Iterator[tuple[int, Item]]:
    name = path.name.removesuffix(".gz")
    if name.endswith(".jsonl"):
        return items_jsonl(path)
    return _table_items(open_table(path))


def _table_items(table: Table) -> Iterator[tuple[int, Item]]:
    for block in table.blocks():
        table.require(block, "item_id")
        for i, item_id in enumerate(block.columns.pop("item_id")):
            column = "item_id"
            try:
                id_ = as_id(item_id)
                metadata: dict[str, Any] = {}
                for column, values in block.columns.items():
                    if values[i] is not None and values[i] != "":
                        metadata[column] = _typed(values[i], table.types.get(column, ""))
            except ValueError as cause:
                raise table.error(block.start + i, column, str(cause)) from None
            yield table.line_of(block.start + i), Item(id_, metadata)


def _typed(value: Any, type_: str) -> Any:
    """A cell of an atomic file by its column's type; a cell of another file as it is."""
    if type_ == MICROSECONDS:
        return str(np.datetime64(value, "us"))
    if type_ not in ("float", "token_seq", "float_seq"):
        return value
    parts = value.split(" ") if type_.endswith("_seq") else [value]
    if type_ != "token_seq":
        parts = [float(part) for part in parts]
        if not np.isfinite(parts).all():
            raise ValueError(f"expected finite numbers, found {value!r}")
    return parts if type_.endswith("_seq") else parts[0]


SOURCES = {"generic": Source(_open, splits=("leave_one_out", "time", "given"), drop_repeats=True)}
