# SPDX-License-Identifier: Apache-2.0
"""Rows of embedding tables in pages of the device's pool, and what becomes of those that are not there (HLEM-1, 10).

The one idea: a batch names rows, and gets an array of them in that order. What stands in the pool is gathered; what
does not is read once for each row from the shards, sent in one transfer, and stands in the pool from then on. Where no
page can be had, because there is none or all are pinned, the rows go to the batch past the pool: so the answer never
depends on how many pages the rows own, nor on what moves meanwhile.

Threads of executors call `rows`; the event loop moves pages (`grow`, `shrink`). The lock is held for bookkeeping alone,
never while a shard is read or a program runs. A page is pinned from the look-up until the program that gathers from it
is dispatched: whatever is dispatched later comes after it on the device. Rows get cells once they have been read, so a
shard that fails or is late costs the pool nothing.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jgr.cache.pool import DevicePool, PoolLost
from jgr.cache.refill import RefillBudget
from jgr.cache.row_programs import Kind, RowPrograms
from jgr.cache.rows import Hottest, RowPages, TableShape, words_of
from jgr.models.words import Cells

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt32 = npt.NDArray[np.uint32]
Bool = npt.NDArray[np.bool_]

TRIES = 3
"""How often a batch is tried again where the pool is lost meanwhile."""
REFILL_EVERY_S = 0.05
STEP_S = 5.0
"""The most seconds that the end of the background waits for a step to end."""
REFILL_AGAIN_S = 5.0
"""The refill waits twice as long after each step that fails, up to this."""
NONE_HOT = Hottest(np.zeros(0, np.int64), np.zeros(0, np.int64))


class RowSource(Protocol):
    """The tables behind the cache."""

    def read(self, table: str, rows: Int64) -> npt.NDArray[Any]:
        """The rows [n, width] of a table, in its own dtype. Raises a UserError where one cannot be had."""


@dataclass(frozen=True)
class Table:
    """rows: how many it has. width: numbers of a row. dtype: of these.

    brought: what its rows are where others bring them (`put`), as words that are not converted: none is read from the
    source, nor fetched ahead. Empty: rows of numbers, which the source has."""

    rows: int
    width: int
    dtype: np.dtype[Any]
    brought: str = ""

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    @property
    def given_as(self) -> np.dtype[Any]:
        """The dtype of the numbers that programs are given."""
        return self.dtype if self.brought else np.dtype(np.float32)


class Refilled(NamedTuple):
    """One step of the refill. copied: rows. more: whether the next one may follow at once: the budget was not used
    up. idle: there is nothing to copy, whatever the budget allows."""

    copied: int
    more: bool
    idle: bool = False


class Records(NamedTuple):
    """words: [n, words] uint32, on the device; None where rows that only the pool had are gone: their places [m]."""

    words: jax.Array | None
    gone: Int64


class EmbeddingCache:
    """tables: by name. source: where their rows are read. catch_up: see `StateView`. budget: how fast empty pages are
    filled; clock: in ns.

    Raises ValueError for rows that are no whole words, or larger than a page.
    """

    def __init__(
        self,
        pool: DevicePool,
        tables: Mapping[str, Table],
        source: RowSource,
        *,
        catch_up: Callable[[], None] = lambda: None,
        budget: RefillBudget | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.pool, self.tables, self.source, self._catch_up = pool, dict(tables), source, catch_up
        shapes = {name: TableShape(of.rows, of.row_bytes, not of.brought) for name, of in tables.items()}
        self.pages = RowPages(pool.pages, pool.page_bytes, shapes)
        self._kinds = {
            name: Kind(Cells.of(of.row_bytes, pool.page_bytes), of.dtype, of.given_as)
            for name, of in tables.items()
        }
        self._budget, self._clock = budget or RefillBudget(0.0), clock
        self._epoch = pool.epoch
        self._lock = threading.Lock()
        self._programs = RowPrograms(pool.example)
        self._zeros: dict[tuple[str, int], jax.Array] = {}
        self._counts: dict[str, Counter[str]] = {name: Counter() for name in tables}
        self._row_bytes = np.array([of.row_bytes for of in tables.values()], np.int64)
        self._hottest = NONE_HOT  # what is to be copied next, of the thread that refills
        self._refill = _Refill(self)

    # What executors' threads call.

    def compile(self, table: str, count: int) -> None:
        """Make the programs for batches of `count` rows of a table, so that none is made while requests wait."""
        of = self.tables[table]
        self._programs.compile(self._kinds[table], count)
        if (table, count) not in self._zeros:
            self._zeros[table, count] = jnp.zeros((count, of.width), of.given_as)

    def rows(self, table: str, rows: Int32) -> jax.Array:
        """The rows [n, width] float32 of a table; zeros where `rows` [n] is -1. `compile` was called for n.

        Raises what the source raises, and PoolLost where the pool is lost again and again.
        """
        unique, place = np.unique(rows, return_inverse=True)
        none = int(unique[0] < 0) if len(unique) else 0  # -1 sorts first
        wanted = unique[none:].astype(np.int64)
        if not len(wanted):
            return self._zeros[table, len(rows)]
        found = self._tried(table, wanted, place.reshape(-1).astype(np.int64) - none)
        assert found is not None
        return found

    def bring(self, table: str, rows: Int64) -> None:
        """Rows [n], each once, stand in the pool afterwards, as far as they may: as for `rows`, but nothing is
        gathered."""
        self._tried(table, rows, None)

    def _tried(self, table: str, unique: Int64, place: Int64 | None) -> jax.Array | None:
        for left in reversed(range(TRIES)):
            try:
                return self._rows(table, unique, place)
            except PoolLost:
                if not left:
                    raise
        raise AssertionError

    def _rows(self, table: str, unique: Int64, place: Int64 | None) -> jax.Array | None:
        with self._lock:
            epoch = self._present()
            cells, pages = self.pages.find(table, unique)
        pins, missing, values = [pages], np.flatnonzero(cells < 0), None
        try:
            if len(missing):
                rows = unique[missing]
                values = self._read(table, rows)  # before any page goes for them: it may fail
                self._budget.missed(values.nbytes, self._clock())
                cells[missing], _ = self._keep(table, rows, values, epoch, pins)
            if place is None:
                return None
            return self._gather(table, cells, missing, values, place, epoch)
        finally:
            self._unpin(pins)

    def _keep(
        self, table: str, rows: Int64, values: UInt32, epoch: int, pins: list[Int64], evict: bool = True
    ) -> tuple[Int32, int]:
        """Rows [n], each once, which were missing when their values were read, stand in the pool from now on, as far as
        pages can be had (evict: see `RowPages.take`).

        Gives their cells [n], -1 where there is none, and how many were written: others came meanwhile. The pages that
        are pinned for it are added to `pins`.
        """
        with self._lock:
            if self._present() != epoch:
                raise PoolLost("the cache's pool was emptied while rows were read for it")
            found = self.pages.find(table, rows, counted=False)
            new = np.flatnonzero(found.cells < 0)
            taken = self.pages.take(table, len(new), evict)
            pins += [found.pages, taken.pages]
        new = new[: len(taken.cells)]
        found.cells[new] = taken.cells
        self._fill(table, rows[new], taken.cells, values[new], epoch)
        return found.cells, len(new)

    def _unpin(self, pins: list[Int64]) -> None:
        with self._lock:
            for pages in pins:
                self.pages.unpin(pages)

    def _read(self, table: str, rows: Int64) -> npt.NDArray[np.uint32]:
        begun_ns = self._clock()
        values = words_of(self.source.read(table, rows))
        with self._lock:
            counts = self._counts[table]
            counts["read_ns"] += self._clock() - begun_ns
            counts["transfers"] += 1
            counts["bytes"] += values.nbytes
        return values

    def _fill(
        self, table: str, rows: Int64, cells: Int32, values: npt.NDArray[np.uint32], epoch: int
    ) -> None:
        """Write the first rows of `values` to their cells, and let them be found."""
        self._copy(table, cells, values, epoch)
        with self._lock:
            if self._epoch == epoch:
                self.pages.publish(table, rows, cells)

    def _copy(self, table: str, cells: Int32, values: UInt32, epoch: int) -> None:
        for write in self._programs.writes(self._kinds[table], cells, values):
            self._catch_up()
            self.pool.write(write, epoch)

    def _gather(
        self,
        table: str,
        cells: Int32,
        missing: Int64,
        values: npt.NDArray[np.uint32] | None,
        place: Int64,
        epoch: int,
    ) -> jax.Array:
        """The rows of a batch. cells: of each different row, -1 for what goes past the pool; values: of those of them
        that were read, the `missing` ones; None: all stand there."""
        places = np.where(place >= 0, cells[place], -1).astype(np.int32)
        staged = None
        beyond = np.flatnonzero(cells[missing] < 0)
        if values is not None and len(beyond):
            with self._lock:
                self._counts[table]["past"] += len(beyond)
            every = np.zeros((len(cells), values.shape[1]), np.uint32)
            every[missing[beyond]] = values[beyond]
            staged = np.where((place >= 0)[:, None], every[place], 0).astype(np.uint32)
        found: jax.Array = self.pool.read(self._programs.gather(self._kinds[table], places, staged), epoch)
        return found

    # Records, which others bring.

    def here(self, table: str, rows: Int32) -> Bool:
        """Whether each of rows [n] stands in the pool now: a use of them, which counts hits and misses."""
        with self._lock:
            self._present()
            found = self.pages.find(table, rows.astype(np.int64))
            self.pages.unpin(found.pages)
        return found.cells >= 0

    def put(self, table: str, rows: Int64, values: UInt32) -> None:
        """Rows [n], each once, are `values` [n, words] from now on, by one transfer.

        What stands in the pool is written over: a program that was dispatched before reads what was there, one that is
        dispatched later reads this, and none reads a part of each. Others get cells, as far as there are some.
        """
        with self._lock:
            epoch = self._present()
            found = self.pages.find(table, rows, counted=False)
            new = np.flatnonzero(found.cells < 0)
            taken = self.pages.take(table, len(new))
            new, past = new[: len(taken.cells)], len(new) - len(taken.cells)
            self._counts[table].update(transfers=1, bytes=values.nbytes, past=past)
        try:
            old = np.flatnonzero(found.cells >= 0)
            self._copy(table, found.cells[old], values[old], epoch)
            self._fill(table, rows[new], taken.cells, values[new], epoch)
        except PoolLost:
            return  # nothing stands in the pool now, and who asks finds that out
        finally:
            self._unpin([found.pages, taken.pages])

    def records(self, table: str, rows: Int32, given: UInt32, kept: Bool, sent: Bool) -> Records:
        """Records of rows [n], each once, as words [n, words] uint32. `compile` was called for n.

        kept [n]: rows that only the pool has; sent [n]: those that stand in `given` [n, words] too, and cross where the
        pool has not got them. The others are zeros. Raises PoolLost where the pool is lost again and again.
        """
        for left in reversed(range(TRIES)):
            try:
                return self._records(table, rows, given, kept, sent)
            except PoolLost:
                if not left:
                    raise
        raise AssertionError

    def _records(self, table: str, rows: Int32, given: UInt32, kept: Bool, sent: Bool) -> Records:
        wanted, places = np.flatnonzero(kept | sent), np.full(len(rows), -1, np.int32)
        with self._lock:
            epoch = self._present()
            found = self.pages.find(table, rows[wanted].astype(np.int64), counted=False)
        try:
            places[wanted] = found.cells
            gone = np.flatnonzero(kept & (places < 0))
            if len(gone):
                return Records(None, gone)
            beyond = sent & (places < 0)
            staged = np.where(beyond[:, None], given, np.uint32(0)) if beyond.any() else None
            gather = self._programs.gather(self._kinds[table], places, staged)
            return Records(self.pool.read(gather, epoch), gone)
        finally:
            self._unpin([found.pages])

    # What moves pages, on the event loop.

    def grow(self, pages: list[int]) -> None:
        """Own these pages of the pool, which nobody else has; they are filled in the background."""
        with self._lock:
            self.pages.add(pages)
        self._refill.wake()

    def shrink(self, count: int) -> list[int]:
        """Give away at most so many pages, the coldest that nobody has pinned."""
        with self._lock:
            return self.pages.remove(count)

    @property
    def owned(self) -> int:
        return self.pages.owned

    # The background.

    def start(self) -> None:
        """Fill empty pages in a thread from now on."""
        self._refill.start()

    def close(self) -> None:
        """End the thread."""
        self._refill.close()

    def refill(self) -> Refilled:
        """One step: copy some of the hottest rows that are missing into cells that hold nothing, as far as the budget
        allows."""
        with self._lock:
            self._present()
            room = self.pages.empty * self.pool.page_bytes
        if not len(self._hottest.rows) and room:
            self._hottest = self.pages.hottest_missing(room)  # looks at all rows, so once for many steps
        tables, rows = self._hottest if room else NONE_HOT
        if not len(rows):
            self._hottest = NONE_HOT
            return Refilled(0, False, idle=True)
        step = max(self._budget.step, int(self._row_bytes.max()))
        sizes = np.cumsum(self._row_bytes[tables[: step // self._row_bytes.min()]])
        asked = min(room, step, int(sizes[-1]))
        allowed = self._budget.take(asked, self._clock())
        count = int(np.searchsorted(sizes, allowed, "right"))
        # Less than a row is saved up: else a link that leaves so little for each step would never have one.
        self._budget.give_back(allowed - int(sizes[count - 1] if count else 0))
        self._hottest = Hottest(tables[count:], rows[count:])
        copied = 0
        for number in np.unique(tables[:count]).tolist():
            copied += self._warm(self.pages.names[number], rows[:count][tables[:count] == number])
        return Refilled(copied, copied > 0 and allowed == asked)

    def _warm(self, table: str, rows: Int64) -> int:
        with self._lock:
            epoch = self._present()
            rows = self.pages.missing(table, rows)  # some came meanwhile
        values, pins = words_of(self.source.read(table, rows)), list[Int64]()
        try:
            _, copied = self._keep(table, rows, values, epoch, pins, evict=False)
        except PoolLost:
            return 0
        finally:
            self._unpin(pins)
        with self._lock:
            self._counts[table]["refilled"] += copied
        return copied

    # What is told of it.

    def counts(self, table: str) -> Mapping[str, int]:
        """Counts of a table since the start. hits, misses: rows of batches, each once a batch; transfers, bytes,
        read_ns: of misses, the latter what reading them from the shards took; past: rows that went past the pool;
        refilled, evicted, collateral, duplicates: rows."""
        return self.pages.counts[table] + self._counts[table]

    def check(self) -> None:
        """Audit; AssertionError."""
        with self._lock:
            self.pages.check()

    def _present(self) -> int:
        """The pool's epoch; what stood in another is forgotten."""
        epoch = self.pool.epoch
        if epoch != self._epoch:
            self.pages.clear()
            self._epoch = epoch
            self._refill.wake()
        return epoch


class _Refill:
    """The thread that fills empty pages."""

    def __init__(self, cache: EmbeddingCache) -> None:
        self._cache, self._wanted, self._ended = cache, threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="jgr-refill", daemon=True)
            self._thread.start()

    def wake(self) -> None:
        self._wanted.set()

    def close(self) -> None:
        self._ended.set()
        self._wanted.set()
        if self._thread is not None:
            self._thread.join(STEP_S)

    def _run(self) -> None:
        while not self._ended.is_set():
            self._wanted.wait()
            self._wanted.clear()
            self._fill()

    def _fill(self) -> None:
        """Copy until there is nothing to copy any more, or the end comes."""
        pause_s = REFILL_EVERY_S
        while not self._ended.wait(pause_s):
            try:
                step = self._cache.refill()
            except Exception:  # a shard that fails is told to whoever misses its rows, and may come back
                pause_s = min(max(2 * pause_s, REFILL_EVERY_S), REFILL_AGAIN_S)
                continue
            if step.idle:
                return
            pause_s = 0.0 if step.more else REFILL_EVERY_S
