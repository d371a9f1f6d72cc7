# SPDX-License-Identifier: Apache-2.0
"""Which rows of embedding tables stand where in pages of the pool: bookkeeping in arrays (HLEM-2, HLEM-10).

The one idea: all work is on arrays of rows and of pages, never on one row. A page that the rows own is of one table at
a time, and is filled from its first cell on. It goes as a whole: the page whose newest use is longest ago, with all the
rows in it (page LRU, HLEM-10 b). A row that was in use and went with its page is counted as collateral.

A cell that was given out is not found before it was `published`, which is once its copy is dispatched. A page that
somebody reads or writes is pinned, and is neither emptied nor given away.

No thread and no device is known here: whoever calls holds a lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jgr.cache.hotness import RowFrequencies
from jgr.fields import ConfigError

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

MOST_CELLS = 2**31 - 1
"""Cells are numbered in 32 bits, and one number more stands for none."""
FOREIGN, EMPTY = -2, -1
"""The table of a page that the rows do not own, and of one that holds no row."""


@dataclass(frozen=True)
class TableShape:
    """rows: of the table. row_bytes: of one of them, a multiple of 4 and at most a page. ahead: whether rows that were
    used much may be fetched before they are asked for."""

    rows: int
    row_bytes: int
    ahead: bool = True


class Sought(NamedTuple):
    """cells: [n] int32 of each row, -1 for a miss. pages: those that are pinned for it, each once."""

    cells: Int32
    pages: Int64


class Hottest(NamedTuple):
    """Rows of several tables: tables [n] their numbers, rows [n]."""

    tables: Int64
    rows: Int64


class RowPages:
    """Rows in pages [0, pages) of a pool, of which they own some.

    Raises ValueError for a row that no page holds, or whose bytes are no whole words, and ConfigError for a pool of
    more cells than can be numbered.
    """

    def __init__(self, pages: int, page_bytes: int, tables: Mapping[str, TableShape]) -> None:
        for name, of in tables.items():
            if not 0 < of.row_bytes <= page_bytes or of.row_bytes % 4:
                raise ValueError(f"table {name}: rows of {of.row_bytes} bytes in pages of {page_bytes}")
            if pages * (page_bytes // of.row_bytes) > MOST_CELLS:
                raise ConfigError(
                    f"cache.device_mb: a pool of {pages * page_bytes / 2**20:.0f} MB has more than {MOST_CELLS} places "
                    f"for rows of {of.row_bytes} bytes ({name}), which is more than their numbers can count"
                )
        self.names = list(tables)
        self._per_page = [page_bytes // of.row_bytes for of in tables.values()]
        self._row_bytes = [of.row_bytes for of in tables.values()]
        self._ahead = [of.ahead for of in tables.values()]
        self._cell_of = [np.full(of.rows, -1, np.int32) for of in tables.values()]
        self.frequencies = [RowFrequencies(of.rows) for of in tables.values()]
        self._row_in = np.full((pages, max(self._per_page)), -1, np.int32)
        self._table = np.full(pages, FOREIGN, np.int16)
        self._filled = np.zeros(pages, np.int32)
        self._pins = np.zeros(pages, np.int32)
        self._used = np.zeros(pages, np.int64)
        self._tick = 0
        self._open = [-1] * len(self.names)
        self.counts: dict[str, Counter[str]] = {name: Counter() for name in self.names}
        """By table: hits, misses, evicted, collateral, duplicates."""

    def number(self, table: str) -> int:
        return self.names.index(table)

    @property
    def owned(self) -> int:
        """Pages that the rows own."""
        return int((self._table != FOREIGN).sum())

    @property
    def empty(self) -> int:
        """Owned pages without a row."""
        return int((self._table == EMPTY).sum())

    def resident(self, table: str) -> int:
        """Rows of a table that are found."""
        return int((self._cell_of[self.number(table)] >= 0).sum())

    def per_page(self, table: str) -> int:
        return self._per_page[self.number(table)]

    def find(self, table: str, rows: Int64, counted: bool = True) -> Sought:
        """Where rows [n], each once, stand; the pages are pinned until `unpin`. counted: whether it counts hits and
        misses, and is a use of each row; it is one of the pages in any case."""
        number = self.number(table)
        cells = self._cell_of[number][rows]
        read = np.zeros(len(self._table), bool)  # faster than np.unique
        read[cells[cells >= 0] // self._per_page[number]] = True
        pages = np.flatnonzero(read)
        self._tick += 1
        self._used[pages] = self._tick
        self._pins[pages] += 1
        if not counted:
            return Sought(cells, pages)
        missed = int((cells < 0).sum())
        counts = self.counts[table]
        counts["hits"] += len(rows) - missed
        counts["misses"] += missed
        self.frequencies[number].touch(rows)
        return Sought(cells, pages)

    def take(self, table: str, count: int, evict: bool = True) -> Sought:
        """At most `count` cells for new rows of a table; their pages are pinned until `unpin`. evict: whether others'
        rows may go for them; else only cells that hold nothing are given."""
        number = self.number(table)
        per_page, opened = self._per_page[number], self._open[number]
        pages = np.array([opened] if opened >= 0 and count else [], np.int64)
        room = per_page - int(self._filled[opened]) if len(pages) else 0
        self._pins[pages] += 1  # before others go for new ones
        new = self._new_pages(number, -(-(count - room) // per_page), evict)
        self._pins[new] += 1
        pages = np.concatenate([pages, new])
        first = self._filled[pages].astype(np.int64)
        free = per_page - first
        some = np.clip(count - (np.cumsum(free) - free), 0, free)
        begin = np.repeat(pages * per_page + first - (np.cumsum(some) - some), some)
        cells = (begin + np.arange(len(begin))).astype(np.int32)
        self._filled[pages] += some.astype(np.int32)
        self._used[pages] = self._tick
        if len(pages):
            last = int(pages[-1])
            self._open[number] = last if self._filled[last] < per_page else -1
        return Sought(cells, pages)

    def publish(self, table: str, rows: Int64, cells: Int32) -> None:
        """The rows [n] are in these cells [n] of `take`. A row that another put elsewhere meanwhile stays there."""
        number = self.number(table)
        of = self._cell_of[number]
        new = of[rows] < 0
        self.counts[table]["duplicates"] += int((~new).sum())
        rows, cells = rows[new], cells[new]
        of[rows] = cells
        per_page = self._per_page[number]
        self._row_in[cells // per_page, cells % per_page] = rows

    def unpin(self, pages: Int64) -> None:
        """End the pins of a `find` or of a `take`."""
        self._pins[pages] -= 1

    def add(self, pages: list[int]) -> None:
        """Own these pages, which hold nothing."""
        self._table[pages] = EMPTY
        self._filled[pages] = 0

    def remove(self, count: int) -> list[int]:
        """Give away at most so many pages: those that hold nothing, then those that were not used for longest. Fewer
        where the others are pinned."""
        free = np.flatnonzero((self._table == EMPTY) & (self._pins == 0))[:count]
        gone = free
        if len(free) < count:
            cold = self._coldest(count - len(free))
            self._drop(cold)
            gone = np.concatenate([free, cold])
        self._table[gone] = FOREIGN
        given: list[int] = gone.tolist()
        return given

    def clear(self) -> None:
        """Forget all rows, for the pool was emptied. Pages stay owned, and pinned by whoever still has them."""
        for of in self._cell_of:
            of[:] = -1
        self._row_in[:] = -1
        self._table[self._table >= 0] = EMPTY
        self._filled[:] = 0
        self._open = [-1] * len(self.names)

    def hottest_missing(self, most_bytes: int) -> Hottest:
        """The rows of all tables that were used most and are not here, the most frequent first, as many as fit."""
        numbers, rows, counts, sizes = list[Int64](), list[Int64](), list[Int64](), list[Int64]()
        for number, of in enumerate(self._cell_of):
            frequency, size = self.frequencies[number], self._row_bytes[number]
            found = frequency.hottest((of < 0) & self._ahead[number], most_bytes // size)
            numbers.append(np.full(len(found), number))
            rows.append(found)
            counts.append(frequency.counts(found))
            sizes.append(np.full(len(found), size))
        order = np.argsort(-np.concatenate(counts), kind="stable")
        order = order[np.cumsum(np.concatenate(sizes)[order]) <= most_bytes]
        return Hottest(np.concatenate(numbers)[order], np.concatenate(rows)[order])

    @property
    def batches(self) -> int:
        """How often rows were looked up."""
        return self._tick

    def used_and_there(self, table: str) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """For each row of a table, [rows] each: whether it was used more than once of late, and whether it is found."""
        number = self.number(table)
        of = self._cell_of[number]
        return self.frequencies[number].in_use(np.arange(len(of))), of >= 0

    def missing(self, table: str, rows: Int64) -> Int64:
        """The rows [m] of `rows` [n] that are not found, in their order."""
        return rows[self._cell_of[self.number(table)][rows] < 0]

    def check(self) -> None:
        """Audit; AssertionError."""
        assert (self._pins >= 0).all(), "a page is pinned less than not at all"
        seen = 0
        for number, of in enumerate(self._cell_of):
            rows = np.flatnonzero(of >= 0)
            cells, per_page = of[rows], self._per_page[number]
            assert len(np.unique(cells)) == len(cells), "a cell is of two rows"
            pages = cells // per_page
            assert (self._table[pages] == number).all(), "a row stands in a page of another owner"
            assert (self._row_in[pages, cells % per_page] == rows).all(), "a cell does not know its row"
            assert (cells % per_page < self._filled[pages]).all(), "a row stands in a cell that was not given"
            seen += len(rows)
        assert seen == int((self._row_in >= 0).sum()), "a cell names a row that is not there"
        assert not self._filled[self._table < 0].any(), "a page without rows is filled"
        assert all(page < 0 or self._table[page] == n for n, page in enumerate(self._open)), (
            "an open page left"
        )

    def _new_pages(self, number: int, count: int, evict: bool) -> Int64:
        """At most `count` owned pages without rows, which are a table's from now on."""
        if count <= 0:
            return np.zeros(0, np.int64)
        pages = np.flatnonzero((self._table == EMPTY) & (self._pins == 0))[:count]
        if evict and len(pages) < count:
            cold = self._coldest(count - len(pages))
            self._drop(cold)
            pages = np.concatenate([pages, cold])
        self._table[pages] = number
        return pages

    def _coldest(self, count: int) -> Int64:
        """The unpinned pages with rows whose last use is longest ago, at most so many."""
        pages = np.flatnonzero((self._table >= 0) & (self._pins == 0))
        if len(pages) > count:
            pages = pages[np.argpartition(self._used[pages], count)[:count]]
        return pages

    def _drop(self, pages: Int64) -> None:
        """Forget the rows of pages, which hold nothing then."""
        for number in np.unique(self._table[pages]).tolist():
            own = pages[self._table[pages] == number]
            rows = self._row_in[own]
            rows = rows[rows >= 0]
            self._cell_of[number][rows] = -1
            counts = self.counts[self.names[number]]
            counts["evicted"] += len(rows)
            counts["collateral"] += int(self.frequencies[number].in_use(rows).sum())
            if self._open[number] in own:
                self._open[number] = -1
        self._row_in[pages] = -1
        self._table[pages] = EMPTY
        self._filled[pages] = 0


def words_of(values: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    """Rows [n, width] of any type as words [n, row_bytes / 4] uint32."""
    return np.ascontiguousarray(values).view(np.uint32)
