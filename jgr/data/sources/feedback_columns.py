# SPDX-License-Identifier: Apache-2.0
"""Columns of what users did, as actions: each is a bit of an event, which scorers learn to predict (docs/ranking.md).

The one idea: a column of few different values loses nothing. Zeros and ones are an action of the column's name. Other
numbers, such as ratings, are one action for each step, `rating_from_4` where the rating is at least 4. Texts are one
action for each text, `event_cart`. A column of more values becomes actions only by a least value that is asked for, as
in `watch_ms:3000`; otherwise it is left out, and said.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from jgr.data.interactions import UNRECORDED, DataError
from jgr.data.sources.columns import Int32, Numbered, first_wrong, joined
from jgr.data.sources.tables import BadCell

Bool = npt.NDArray[np.bool_]

MAX_VALUES = 10
"""The most different values of a column whose every value becomes an action."""
MAX_ACTIONS = 31
"""The most actions of a dataset: the bits of a non-negative int32."""
_WORDS = {"true": 1.0, "false": 0.0}
_PLAIN = re.compile(r"[^\w.-]+")


@dataclass(frozen=True, eq=False)
class Found:
    """The actions of a column. columns: where each was done, [total] each. empty: the rows that say nothing, [total].

    said: what became of the column, in words.
    """

    columns: dict[str, Bool]
    empty: Bool
    said: str


def thresholds(texts: Sequence[str]) -> dict[str, list[float]]:
    """The columns that --actions names, and their least values: `click` has none, `rating:4` one. Raises DataError."""
    found: dict[str, list[float]] = {}
    for text in texts:
        column, colon, least = text.strip().rpartition(":")
        column, least = (column, least) if colon else (least, "")
        try:
            value = float(least) if colon else 0.0
        except ValueError:
            value = float("nan")
        if not column or not np.isfinite(value):
            raise DataError(f"--actions: {text!r} is neither COLUMN nor COLUMN:LEAST, as in rating:4")
        found.setdefault(column, []).extend([value] if colon else [])
    return found


class FeedbackColumn:
    """One column. least: numbers from which on an action is done. only_numbers: whether the file's header says so."""

    def __init__(self, name: str, least: Sequence[float] = (), only_numbers: bool = False) -> None:
        self._name, self._least, self._only_numbers = name, sorted(set(least)), only_numbers
        self._numbered = Numbered({None: 0, "": 0})
        self._parts: list[npt.NDArray[Any]] = []
        self._filled, self._many, self._least_helps = 0, False, False

    def add(self, values: list[Any] | None, size: int) -> None:
        """Take a block's values; None where the block lacks the column."""
        cells = [None] * size if values is None else values
        empty = cells.count(None) + cells.count("")
        self._filled += size - empty
        if self._only_numbers or self._least:
            self._require_numbers(cells)
        if self._least:
            numbers = np.array([np.nan if cell in (None, "") else float(cell) for cell in cells], np.float64)
            self._parts.append(numbers)
            return
        if not self._many:
            try:
                new = set(cells) - self._numbered.keys()
                self._many = len(self._numbered) - 2 + len(new) > MAX_VALUES
                found = {*self._numbered, *new} - {None, ""}
                self._least_helps = all(_as_number(value) is not None for value in found)
            except TypeError:  # lists and objects are no feedback
                self._many = True
            if self._many:
                self._parts.clear()
            else:
                self._parts.append(self._numbered.codes(cells))

    def _require_numbers(self, cells: list[Any]) -> None:
        filled = [cell for cell in cells if cell not in (None, "")]
        try:
            numbers = np.array(list(map(float, filled)), np.float64)
        except (TypeError, ValueError, OverflowError):
            numbers = np.full(1, np.nan)
        if not np.isfinite(numbers).all():
            wrong = filled[first_wrong(filled)]
            raise BadCell(cells.index(wrong), self._name, f"expected a finite number, found {wrong!r:.80}")

    def finish(self) -> Found | str:
        """The actions, or why there are none, in words."""
        if self._least:
            return self._by_least()
        if self._many:
            way = f" (--actions={self._name}:LEAST makes an action of these numbers)"
            said = f"left out, {self._filled} values: more than {MAX_VALUES} different ones"
            return said + way if self._least_helps else said
        codes = joined(self._parts, np.int32)
        values = list(self._numbered)[2:]
        if not values:
            return "left out: it has no values"
        place = np.array([self._numbered[value] for value in values])
        numbers = [_as_number(value) for value in values]
        if all(number is not None for number in numbers):
            return self._by_number(codes, place, [float(number or 0) for number in numbers])
        texts = [str(value) for value in values]
        if len(set(texts)) == 1:
            return f"left out, {self._filled} values: all are {texts[0]!r}"
        columns: dict[str, Bool] = {}
        for text, code in sorted(zip(texts, place.tolist(), strict=True)):
            name = f"{self._name}_{_PLAIN.sub('_', text)}"
            columns[name] = columns.get(name, np.zeros(len(codes), bool)) | (codes == code)
        return self._found(columns, codes == 0)

    def _by_least(self) -> Found:
        numbers = joined(self._parts, np.float64)
        columns = {self._from(least): numbers >= least for least in self._least}
        return self._found(columns, np.isnan(numbers))

    def _by_number(self, codes: Int32, place: npt.NDArray[Any], numbers: list[float]) -> Found | str:
        of_code = np.full(int(codes.max()) + 2, np.nan)
        of_code[place] = numbers
        values, levels = of_code[codes], sorted(set(numbers))
        if set(levels) <= {0.0, 1.0}:
            return self._found({self._name: values == 1}, np.isnan(values))
        if len(levels) == 1:
            return f"left out, {self._filled} values: all are {levels[0]:g}"
        return self._found({self._from(level): values >= level for level in levels[1:]}, np.isnan(values))

    def _from(self, least: float) -> str:
        """The action's name, with all digits of the number: six of them would give two levels one name.

        A fraction from a column of 32 bits has those of 32: 3.7 is not 3.700000047683716.
        """
        short = not least.is_integer() and np.float32(least) == least
        return (
            f"{self._name}_from_{np.format_float_positional(np.float32(least) if short else least, trim='-')}"
        )

    def _found(self, columns: dict[str, Bool], empty: Bool) -> Found:
        counts = ", ".join(f"{name} {int(done.sum())}" for name, done in columns.items())
        missing = f"; {int(empty.sum())} rows are empty, which counts as not done" if empty.any() else ""
        return Found(columns, empty, f"actions {counts}{missing}")


def as_bits(found: dict[str, Found], total: int) -> tuple[Int32, tuple[str, ...]]:
    """The bits of every event, [total], and the name of each bit. found: by column.

    An event about which no column says anything has the action `unrecorded`. Raises DataError for too many actions, and
    for two of one name.
    """
    bits = np.zeros(total, np.int32)
    names: list[str] = []
    for column, one in found.items():
        for name, done in one.columns.items():
            if name in names:
                raise DataError(f"{column}: there are two actions {name!r}: rename a column")
            names.append(name)
            if len(names) <= MAX_ACTIONS:
                bits |= done.astype(np.int32) << (len(names) - 1)
    silent = np.ones(total, bool)
    for one in found.values():
        silent &= one.empty
    if found and silent.any():
        if UNRECORDED not in names:
            names.append(UNRECORDED)
        if len(names) <= MAX_ACTIONS:
            bits |= silent.astype(np.int32) << names.index(UNRECORDED)
    if len(names) > MAX_ACTIONS:
        raise DataError(
            f"the columns {', '.join(found)} make {len(names)} actions, {MAX_ACTIONS} are the most: name those to "
            "keep with --actions=COLUMN,COLUMN:LEAST"
        )
    return bits, tuple(names)


def _as_number(value: Any) -> float | None:
    if isinstance(value, str) and value.lower() in _WORDS:
        return _WORDS[value.lower()]
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if np.isfinite(number) else None
