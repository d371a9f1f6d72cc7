# SPDX-License-Identifier: Apache-2.0
"""Columns of events as arrays: ids, splits, scenarios and times. What users did is in `feedback_columns`.

The one idea: a column is numbered, each different value once, in the order first seen. So Python code runs for each
different value and not for each row. Every `add` takes the values of a block; a value that cannot be used is a BadCell.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import repeat
from operator import attrgetter, sub
from typing import Any

import numpy as np
import numpy.typing as npt

from jgr.data.prepared import MAX_ID_CHARS, UNITS_PER_SECOND
from jgr.data.sources.records import MAX_TIME
from jgr.data.sources.tables import BadCell

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

SPLIT_OF = {"train": 0, "valid": 1, "test": 2}
MAX_SCENARIOS = 10_000
UNIT_BELOW = {"s": 10**11, "ms": 10**14, "us": 10**17, "ns": 2**63}
"""Whole numbers below so much are times in this unit: 10^11 seconds is the year 5138, 10^11 milliseconds is 1973."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_EMPTY = (None, "")


class Numbered(dict[Any, int]):
    """Values and their numbers, in the order first asked for."""

    def __missing__(self, value: Any) -> int:
        number = self[value] = len(self)
        return number

    def codes(self, values: list[Any]) -> Int32:
        """The number of each value. Raises TypeError for a list or an object of JSON."""
        return np.fromiter(map(self.__getitem__, values), np.int32, len(values))


def joined(parts: list[npt.NDArray[Any]], dtype: Any) -> npt.NDArray[Any]:
    """The parts end to end, none of them too."""
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype, copy=False)


class Ids:
    """A column of ids. Text and whole numbers are ids; a number is the text of its digits."""

    def __init__(self, column: str) -> None:
        self._column, self._numbered, self._parts = column, Numbered(), list[Int32]()

    def add(self, values: list[Any] | None) -> None:
        """Take a block's values; None where the block lacks the column."""
        if values is None:
            raise BadCell(0, self._column, "is missing")
        kinds = set(map(type, values))
        if not kinds <= {str, int}:
            wrong = next(i for i, value in enumerate(values) if type(value) not in (str, int))
            raise BadCell(
                wrong, self._column, f"an id must be text or a whole number, found {_shown(values[wrong])}"
            )
        texts = list(map(str, values)) if int in kinds else values
        known = len(self._numbered)
        self._parts.append(self._numbered.codes(texts))
        for text in list(self._numbered)[known:]:
            if not 0 < len(text) <= MAX_ID_CHARS:
                raise BadCell(texts.index(text), self._column, f"an id has 1 to {MAX_ID_CHARS} characters")

    def finish(self) -> tuple[Int64, list[str]]:
        """The number of each row's id, and the ids."""
        return joined(self._parts, np.int64), list(self._numbered)


class Splits:
    """A column of train, valid and test. A row that says nothing is train."""

    def __init__(self, column: str) -> None:
        self._column, self._parts = column, list[Int64]()

    def add(self, values: list[Any] | None, size: int, given: int) -> None:
        """Take a block's values. given: the split of rows that name none."""
        if values is None:
            self._parts.append(np.full(size, given, np.int64))
            return
        numbers: dict[Any, int] = {**dict.fromkeys(_EMPTY, given), **SPLIT_OF}
        try:
            self._parts.append(np.fromiter(map(numbers.__getitem__, values), np.int64, size))
        except (KeyError, TypeError):
            wrong = next(i for i, value in enumerate(values) if value not in (*_EMPTY, *SPLIT_OF))
            raise BadCell(
                wrong, self._column, f"must be train, valid or test, found {_shown(values[wrong])}"
            ) from None

    def finish(self) -> Int64:
        """The split of each row: 0 train, 1 valid, 2 test."""
        return joined(self._parts, np.int64)


class Scenarios:
    """A column of where items were shown: whole numbers as they are, or names, which are numbered in sorted order."""

    def __init__(self, column: str) -> None:
        self._column, self._numbered, self._parts = column, Numbered({"": 0}), list[Int32]()

    def add(self, values: list[Any] | None, size: int) -> None:
        """Take a block's values; None where the block lacks the column."""
        known = len(self._numbered)
        cells: list[Any] = [""] * size if values is None else ["" if v is None else v for v in values]
        try:
            self._parts.append(self._numbered.codes(cells))
        except TypeError:
            wrong = next(i for i, value in enumerate(cells) if isinstance(value, list | dict))
            raise BadCell(
                wrong, self._column, f"expected a name or a number, found {_shown(cells[wrong])}"
            ) from None
        for value in list(self._numbered)[known:]:
            if isinstance(value, str) and not value.isprintable():
                raise BadCell(
                    cells.index(value), self._column, f"a name must be printable, found {_shown(value)}"
                )
            if not isinstance(value, str | int) or isinstance(value, bool):
                raise BadCell(
                    cells.index(value),
                    self._column,
                    f"expected a name or a whole number, found {_shown(value)}",
                )
        if len(self._numbered) > MAX_SCENARIOS:
            raise BadCell(
                0, self._column, f"there are more than {MAX_SCENARIOS} scenarios: is it another column?"
            )

    def finish(self) -> tuple[Int32, list[str]]:
        """The scenario of each row, -1: not known, and the names; no names where the column holds numbers.

        All rows are of scenario 0 where no row names one.
        """
        codes, values = joined(self._parts, np.int32), list(self._numbered)[1:]
        if not values:
            return np.zeros(len(codes), np.int32), []
        texts = list(map(str, values))
        if all(t.isascii() and t.isdecimal() and len(t) < 100 and int(t) < MAX_SCENARIOS for t in texts):
            return np.array([-1, *map(int, texts)], np.int32)[codes], []
        names = sorted(set(texts))
        place = {name: at for at, name in enumerate(names)}
        return np.array([-1, *(place[text] for text in texts)], np.int32)[codes], names


@dataclass(frozen=True, eq=False)
class FoundTimes:
    """Times as whole numbers of a unit since 1970. said: how they were read, in words."""

    times: Int64
    unit: str
    said: str


class Times:
    """A column of times: whole numbers, numbers with fractions, or ISO 8601 texts; one of these in the whole column.

    unit: what numbers count, of UNITS_PER_SECOND; "" goes by their size, see UNIT_BELOW. dated: the file itself says
    that they are times in this unit, as Parquet does.
    """

    def __init__(self, column: str, unit: str = "", dated: bool = False) -> None:
        self._column, self._unit, self._dated = column, unit, dated
        self._parts: list[npt.NDArray[Any]] = []
        self._iso, self._zoneless = False, False
        self.given, self.rows = 0, 0

    def add(self, values: list[Any] | None, size: int) -> None:
        """Take a block's values; None where the block lacks the column."""
        cells: list[Any] = [None] * size if values is None else values
        empty = cells.count(None) + cells.count("")
        wanted = self.given > 0 if self.rows else cells[0] not in _EMPTY
        if empty != (0 if wanted else size):
            wrong = next(i for i, cell in enumerate(cells) if (cell not in _EMPTY) != wanted)
            raise BadCell(wrong, self._column, "some events have a time and some have none")
        self.rows += size
        if not wanted:
            return
        first = not self.given
        self.given += size
        if first and isinstance(cells[0], str):
            self._iso = _number(cells[0]) is None
        self._parts.append(self._iso_times(cells) if self._iso else self._numbers(cells))

    def _iso_times(self, values: list[Any]) -> Int64:
        """Microseconds since 1970."""
        try:
            found = list(map(datetime.fromisoformat, values))
        except (TypeError, ValueError):
            wrong = next(i for i, value in enumerate(values) if not _is_iso(value))
            raise BadCell(
                wrong, self._column, f"expected a time in ISO 8601, as in 2024-05-31T08:00:00Z, found "
                f"{_shown(values[wrong])}"
            ) from None  # fmt: skip
        zones = set(map(attrgetter("tzinfo"), found))
        if None in zones:
            self._zoneless = True
            found = [one if one.tzinfo else one.replace(tzinfo=UTC) for one in found]
        since = np.array(list(map(sub, found, repeat(_EPOCH))), "timedelta64[us]").astype(np.int64)
        if since.min() < 0:
            wrong = int(since.argmin())
            raise BadCell(wrong, self._column, f"a time must be from 1970 on, found {_shown(values[wrong])}")
        return since

    def _numbers(self, values: list[Any]) -> npt.NDArray[Any]:
        """Whole numbers as int64, others as float64."""
        found = None
        if set(map(type, values)) <= {str, int, float}:
            with contextlib.suppress(ValueError, OverflowError):
                found = _parsed(values)
        if found is None or not ((found >= 0) & (found < MAX_TIME)).all():
            wrong = next((i for i, value in enumerate(values) if not _is_time(value)), 0)
            raise BadCell(
                wrong,
                self._column,
                f"a time must be a number from 0, which is 1970, found {_shown(values[wrong])}",
            )
        whole = found.dtype.kind == "i" or bool((found == np.floor(found)).all())
        return found.astype(np.int64) if whole else found

    def finish(self) -> FoundTimes | None:
        """The times of all rows; None where no row has one. Raises BadCell for numbers of several units.

        The index of a BadCell is then that among all rows.
        """
        if not self.given:
            return None
        if self._iso:
            times, unit = joined(self._parts, np.int64), "us"
            if not (times % UNITS_PER_SECOND["us"]).any():
                times, unit = times // UNITS_PER_SECOND["us"], "s"
            zone = "; those without a zone taken as UTC" if self._zoneless else ""
            return FoundTimes(times, unit, f"{self._column}: ISO 8601{zone}; {_span(times, unit)}")
        fractions = any(part.dtype.kind == "f" for part in self._parts)
        numbers = joined(self._parts, np.float64 if fractions else np.int64)
        unit, how = self._unit, "by the file's own type" if self._dated else "as asked for"
        if not unit:
            unit = next(name for name, limit in UNIT_BELOW.items() if float(numbers.max()) < limit)
            how = "by their size (--time_unit says otherwise)"
            self._refuse_mixed(numbers, unit)
        if fractions:
            micro = numbers * (UNITS_PER_SECOND["us"] / UNITS_PER_SECOND[unit])
            if micro.max() >= MAX_TIME:
                raise BadCell(int(micro.argmax()), self._column, f"is too large for a time in {unit}")
            times = np.round(micro).astype(np.int64)
            said, unit = f"numbers of {unit}, {how}", "us"
        else:
            times, said = numbers, f"whole numbers of {unit}, {how}"
        return FoundTimes(times, unit, f"{self._column}: {said}; {_span(times, unit)}")

    def _refuse_mixed(self, numbers: npt.NDArray[Any], unit: str) -> None:
        """Refuse numbers that are of `unit` by the largest, and of a smaller one by the least."""
        least = float(numbers.min())
        if unit != "s" and least < UNIT_BELOW["s"]:
            raise BadCell(
                int(numbers.argmin()),
                self._column,
                f"{least:.0f} is a time in s by its size, {float(numbers.max()):.0f} one in {unit}: "
                "give all in one unit, and name it with --time_unit",
            )


def _span(times: Int64, unit: str) -> str:
    def day(time: int) -> str:
        seconds = time // UNITS_PER_SECOND[unit]
        return str(np.datetime64(seconds, "s"))[:10]

    return f"from {day(int(times.min()))} to {day(int(times.max()))} UTC"


def _parsed(values: list[Any]) -> npt.NDArray[Any]:
    """Numbers, also as texts, as an array. Raises ValueError or OverflowError."""
    if float not in set(map(type, values)):
        with contextlib.suppress(ValueError):
            return np.array(list(map(int, values)), np.int64)
    return np.array(list(map(float, values)), np.float64)


def _is_time(value: Any) -> bool:
    number = _number(value)
    return type(value) in (str, int, float) and number is not None and 0 <= number < MAX_TIME


def _number(value: Any) -> float | None:
    """The number that a cell holds; None where it holds none, or no finite one."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _is_iso(value: Any) -> bool:
    try:
        datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return False
    return True


def _shown(value: Any) -> str:
    """A cell in an error: short."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def first_wrong(values: Iterable[Any]) -> int:
    """The index of the first value that is no finite number."""
    return next((i for i, value in enumerate(values) if _number(value) is None), 0)
