# SPDX-License-Identifier: Apache-2.0
"""A pool as `jgr serve` has it, driven in virtual time: the part of `benchmarks.hlem_split` that serves.

Real: the array of the pool and its pages, their bookkeeping (`CacheMeta`, `Border`, `EmbeddingCache`), the table's
file, what is copied of it to the device on a miss and by the refill, whole pages that are written for users, and what
decides (`BorderControl` with a controller of `jgr serve`). Emulated: time. A batch takes what its rows take over a link
of a given speed, which the refill uses too, and then what its runs take by measured costs; there is one executor.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from benchmarks import hlem_world
from benchmarks.hlem_world import EVENT_BYTES, GROWTH, LONGEST, Costs, Requests, World
from jgr.cache.border import Border
from jgr.cache.embeddings import REFILL_EVERY_S, EmbeddingCache, Table
from jgr.cache.entries import Entry, Name
from jgr.cache.meta import CacheMeta
from jgr.cache.pages import Pages, Room
from jgr.cache.pool import DevicePool
from jgr.cache.refill import RefillBudget
from jgr.config import MemoryConfig
from jgr.embeddings.shards import LocalShard, Shards
from jgr.models.table_file import TableFile
from jgr.models.words import Cells, read, write
from jgr.serving.policies.memory_control import Controller
from jgr.serving.scorers.border_control import BorderControl

PAGE_BYTES = 16 << 10
POOL_BYTES = 48 << 20
STEP = PAGE_BYTES // EVENT_BYTES
"""Events of a page."""
BATCH, WINDOW_S = 8, 0.008
"""A batch has so many requests, or those that came within so long."""
TRANSFER_S = 20e-6
"""What a transfer takes beside its bytes."""
EPOCH_S = 1.0
CHECK_EVERY, CHECKED = 100, 256
"""Every so many batches, so many rows and the pages of a user are read back and compared."""
WRITES = (16, 64, 256)


@dataclass(frozen=True)
class History:
    """The first events of a user's history, as the content of an entry: it only ever grows."""

    user: int
    count: int

    def __len__(self) -> int:
        return self.count

    @property
    def digest(self) -> bytes:
        return self.prefix(self.count)

    def prefix(self, count: int) -> bytes:
        return self.user.to_bytes(8, "little") + count.to_bytes(8, "little")


class Epochs(NamedTuple):
    """What a run gave by epoch of 1 s, f64 [epochs]: 99th percentiles of the latency in ms, hit rates of users and of
    rows, the split in force at its end. latency_ms: of every request. busy: of all the time; work_s, link_s: of it,
    runs and waiting for rows.

    checked: rows and pages that were read back and were right.
    """

    p99_ms: npt.NDArray[np.float64]
    user_hits: npt.NDArray[np.float64]
    row_hits: npt.NDArray[np.float64]
    split: npt.NDArray[np.float64]
    latency_ms: npt.NDArray[np.float64]
    busy: float
    work_s: float
    link_s: float
    checked: int
    moved: int


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> int:
        return round(self.now_s * 1e9)


class Live:
    """A pool of POOL_BYTES at a split, over a table's file. controller: moves the border each epoch; None: nothing
    does. link: bytes a second of the emulated link. table: one file with the rows of all tables, or a folder with a
    file for each; then each has its own pages, and its own transfer in a batch."""

    def __init__(
        self,
        world: World,
        costs: Costs,
        table: Path,
        link: float,
        split: float,
        controller: Controller | None = None,
        limit_ms: float = 30.0,
    ) -> None:
        self._world, self._costs, self._link = world, costs, link
        self._clock = Clock()
        self._lengths, self._most = world.lengths.copy(), world.lengths + GROWTH
        pages = Pages(POOL_BYTES // PAGE_BYTES, PAGE_BYTES)
        self.pool = DevicePool(pages.count, PAGE_BYTES)
        names = [hlem_world.name_of(number) for number in range(len(world.firsts))]
        files = {
            name: TableFile(table / f"{name}.table" if table.is_dir() else table)
            for name in (names if table.is_dir() else ["rows"])
        }
        self._firsts = np.array(world.firsts if table.is_dir() else (0,), np.int64)
        self.rows = EmbeddingCache(
            self.pool,
            {
                name: Table(file.header.rows, file.header.width, file.header.numpy_dtype)
                for name, file in files.items()
            },
            Shards({name: [LocalShard(file)] for name, file in files.items()}),
            budget=RefillBudget(link),
            clock=self._clock,
        )
        for name in files:
            self.rows.compile(name, CHECKED)
        self.users = CacheMeta(pages, {"user": Room(PAGE_BYTES, 1, STEP)}, moving=True)
        least_users = -(-LONGEST // STEP)
        self.border = Border(
            self.rows, self.users, pages, "rows", pages.count, round(split * pages.count), BATCH, least_users
        )
        self.border.start()
        self._control = None
        if controller is not None:
            config = MemoryConfig(epoch_s=EPOCH_S, limit_ms=limit_ms)
            self._control = BorderControl(controller, self.border, config, self._counts, self._clock)
        self._cells = Cells.of(PAGE_BYTES, PAGE_BYTES)
        self._write = jax.jit(_write, static_argnames="cells", donate_argnums=0)
        self._read = jax.jit(_read, static_argnames="cells")
        self._link_free_s = self._ticked_s = 0.0
        self._work_s = self._waited_s = 0.0
        self._checked = self._batches = 0

    def run(self, asked: Requests, epochs: int) -> Epochs:
        """Serve requests in their order, in virtual time."""
        count, free_s, at = len(asked.at_s), 0.0, 0
        latency_ms = np.empty(count)
        kept = np.empty(count, bool)
        row_hits, split = np.zeros(epochs), np.full(epochs, np.nan)
        before, epoch = self._counts(), 0
        while at < count:
            whole = min(at + BATCH, count) - 1
            begin_s = max(free_s, min(asked.at_s[at] + WINDOW_S, asked.at_s[whole]))
            here = slice(at, int(np.searchsorted(asked.at_s[: whole + 1], begin_s, "right")))
            now = int(asked.epoch[here.start])
            if now != epoch:
                row_hits[epoch], before = self._row_hits(before)
                split[epoch], epoch = self.border.wanted / self.border.total, now
            free_s, found = self._serve(asked.user[here], begin_s)
            latency_ms[here], kept[here] = (free_s - asked.at_s[here]) * 1e3, found
            self._answered(asked, here, found, free_s)
            at = here.stop
        row_hits[epoch], _ = self._row_hits(before)
        split[epoch] = self.border.wanted / self.border.total
        self.border.check()
        self.users.check()
        of = [asked.epoch == each for each in range(epochs)]
        return Epochs(
            np.array([np.quantile(latency_ms[each], 0.99) for each in of]),
            np.array([kept[each].mean() for each in of]),
            row_hits,
            split,
            latency_ms,
            (self._work_s + self._waited_s) / free_s,
            self._work_s,
            self._waited_s,
            self._checked,
            self.border.counts["to_rows"] + self.border.counts["to_users"],
        )

    def _serve(self, users: npt.NDArray[np.int32], begin_s: float) -> tuple[float, list[bool]]:
        """One batch: when it ends, and which of its users were kept."""
        self._refill(begin_s)
        self._clock.now_s = begin_s
        work_s, kept, pinned = 0.0, list[bool](), list[tuple[Entry, bool, int]]()
        ids = list[npt.NDArray[np.int32]]()
        for number, user in enumerate(users.tolist()):
            events = int(self._lengths[user])
            if events < self._most[user]:
                self._lengths[user] = events = events + 1
            known, entry, grows = self._find(user, events)
            if entry is not None:
                pinned.append((entry, grows, known))
            kept.append(known > 0)
            work_s += self._costs.of(known, events)
            begin = self._world.begins[user]
            ids.append(self._world.rows[begin + min(known, events - 1) : begin + events].ravel())
            drawn = self._world.drawn
            ids.append(drawn[(self._batches * BATCH + number) % len(drawn)].ravel())
        before = self._counts()
        unique = _unique(np.concatenate(ids))
        for name, _, rows in self._by_table(unique):
            self.rows.bring(name, rows)
        sent, transfers = (self._counts()[of] - before[of] for of in ("bytes", "transfers"))
        there_s = begin_s
        if sent:
            took_s = transfers * TRANSFER_S + sent / self._link
            self._link_free_s = there_s = max(self._link_free_s, begin_s) + took_s
        self._keep(pinned)
        self._batches += 1
        if self._batches % CHECK_EVERY == 0:
            self._check(unique[:: max(1, len(unique) // CHECKED)][:CHECKED], pinned)
        for entry, _, _ in pinned:
            self.users.release(entry)
        self._work_s += work_s
        self._waited_s += there_s - begin_s
        return there_s + work_s, kept

    def _find(self, user: int, events: int) -> tuple[int, Entry | None, bool]:
        """Events that are kept, the pinned entry if there is one, and whether it is to be written."""
        name, content = Name("user", user, ""), History(user, events)
        entry = self.users.find(name, content)
        known = 0 if entry is None else entry.tokens
        grown = self.users.extend(name, content)
        if grown is None and entry is not None:
            self.users.hold(entry)
        return known, grown or entry, grown is not None

    def _keep(self, entries: list[tuple[Entry, bool, int]]) -> None:
        """Write the pages of new events: all of a page is the number of the user and the page's place."""
        cells, stamps = list[int](), list[int]()
        for entry, grows, known in entries:
            if grows:
                first = known // STEP
                cells += entry.cells[first:]
                stamps += [_stamp(entry, place) for place in range(first, len(entry.cells))]
        for first in range(0, len(cells), WRITES[-1]):
            some = slice(first, first + WRITES[-1])
            size = next(size for size in WRITES if size >= len(cells[some]))
            numbers, values = np.full(size, np.iinfo(np.int32).max, np.int32), np.zeros((size, 1), np.uint32)
            numbers[: len(cells[some])] = cells[some]
            values[: len(cells[some]), 0] = stamps[some]
            self.pool.write(partial(self._write_stamps, numbers=numbers, values=values), 0)
        for entry, grows, _ in entries:
            if grows:
                self.users.written(entry)

    def _write_stamps(self, array: Any, numbers: Any, values: Any) -> Any:
        return self._write(array, numbers, values, cells=self._cells)

    def _read_pages(self, array: Any, numbers: Any) -> Any:
        return self._read(array, numbers, cells=self._cells)

    def _check(self, rows: npt.NDArray[np.int64], entries: list[tuple[Entry, bool, int]]) -> None:
        """Read rows and a user's pages back. AssertionError where they are not what they should be."""
        for name, first, of in self._by_table(rows):
            asked = np.full(CHECKED, -1, np.int32)
            asked[: len(of)] = of
            found = np.asarray(self.rows.rows(name, asked))[: len(of)]
            wanted = hlem_world.expected(of + first)
            assert (found == wanted).all(), "a row is not the table's"
        for entry, _, _ in entries[:1]:
            numbers = np.full(WRITES[1], entry.cells[0], np.int32)
            numbers[: len(entry.cells)] = entry.cells
            pages: Any = self.pool.read(partial(self._read_pages, numbers=numbers), 0)
            stamps = [_stamp(entry, place) for place in range(len(entry.cells))]
            assert (np.asarray(pages)[: len(stamps)] == np.array(stamps)[:, None]).all(), (
                "a page is another's"
            )
            self._checked += len(stamps)
        self._checked += len(rows)

    def _refill(self, until_s: float) -> None:
        """What the thread of the refill does until then: a step every REFILL_EVERY_S, more while its budget lasts."""
        while self._ticked_s + REFILL_EVERY_S <= until_s:
            self._ticked_s += REFILL_EVERY_S
            if not self.rows.pages.empty:
                continue
            self._clock.now_s, more = self._ticked_s, True
            while more:
                step = self.rows.refill()
                sent = step.copied * 2 * hlem_world.WIDTH
                self._link_free_s = max(self._link_free_s, self._ticked_s) + sent / self._link
                more = step.more

    def _answered(self, asked: Requests, here: slice, kept: list[bool], end_s: float) -> None:
        self.border.retry()
        if self._control is None:
            return
        self._clock.now_s = end_s
        for user, at_s, cached in zip(
            asked.user[here].tolist(), asked.at_s[here].tolist(), kept, strict=True
        ):
            self._control.answered(user, round(at_s * 1e9), int(self._lengths[user]), cached)
            if self._control._learning is not None:
                self._control._learning.join()

    def _by_table(self, rows: npt.NDArray[np.int64]) -> list[tuple[str, int, npt.NDArray[np.int64]]]:
        """Rows of all tables, rising, as each table's own: (name, its first row, rows), of those that have any."""
        parts = np.split(rows, np.searchsorted(rows, self._firsts[1:]))
        return [
            (name, int(first), part - first)
            for name, first, part in zip(self.rows.tables, self._firsts, parts, strict=True)
            if len(part)
        ]

    def _counts(self) -> Counter[str]:
        """The counts of all tables together."""
        found = Counter[str]()
        for name in self.rows.tables:
            found.update(self.rows.counts(name))
        return found

    def _row_hits(self, before: Counter[str]) -> tuple[float, Counter[str]]:
        now = self._counts()
        hits, misses = (now.get(name, 0) - before.get(name, 0) for name in ("hits", "misses"))
        return hits / max(1, hits + misses), now


def _unique(ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    ids.sort()  # np.unique hashes, which is slower here
    found: npt.NDArray[np.int64] = ids[np.concatenate([[True], ids[1:] != ids[:-1]])].astype(np.int64)
    return found


def _stamp(entry: Entry, place: int) -> int:
    return int(entry.name.id) * 64 + place + 1


def _write(array: jax.Array, numbers: jax.Array, stamps: jax.Array, *, cells: Cells) -> jax.Array:
    return write(array, *cells.place(numbers), jnp.broadcast_to(stamps, (len(stamps), cells.words)))


def _read(array: jax.Array, numbers: jax.Array, *, cells: Cells) -> jax.Array:
    return read(array, *cells.place(numbers), cells.words)
