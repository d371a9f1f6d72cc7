# SPDX-License-Identifier: Apache-2.0
"""Copies of cached items between the pools of a process's devices, in front of the programs that read them (BAT-7, 11).

Planned copies (`Fetch`) are queued by the event loop and made by whoever dispatches next, as a host tier's moves are.
Two ways to make them, of which none goes before they have been measured on several GPUs:

- `Exchange`: one program that every device runs, with an all_to_all in it. It is one dispatch, and moves equally much
  between all pairs of devices, as much as the fullest pair needs.
- `Copies`: where an item is, a program gathers its cells, a copy goes over the link between the two devices, and where
  it is wanted a program puts them into their places. A pair that has nothing to say costs nothing.

Numbers of cells are padded to a few sizes, whose programs are compiled before the first request.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from functools import partial

import jax
import numpy as np
import numpy.typing as npt

from jgr.cache.entries import Fetch
from jgr.cache.pool import ReplicatedPool
from jgr.models import words
from jgr.models.replicated import ROWS, Replicated, exchange
from jgr.models.words import Cells

Int32 = npt.NDArray[np.int32]
SMALLEST, GROWTH, LARGEST, MOST_BYTES = 8, 8, 64, 64 << 20
"""Cells of a pair in the smallest copy, how many times larger the next size is, the largest, and the most bytes that a
copy moves where all pairs have so many."""
NOWHERE = np.iinfo(np.int32).max
"""A cell that no pool has."""


class DeviceReads(ABC):
    """The copies between the devices of a pool that are planned and not made yet.

    bytes: [devices, devices] int64, what was copied from each device to each other one. sent: bytes that went between
    devices for that, padding included.
    """

    def __init__(self, pool: ReplicatedPool) -> None:
        self._pool, self._devices = pool, pool.devices
        self.bytes = np.zeros((self._devices.count, self._devices.count), np.int64)
        self.sent = 0
        self._planned: deque[tuple[int, Fetch, Cells]] = deque()
        self._lock = threading.Lock()  # held by the thread that catches up

    def plan(self, fetches: Sequence[Fetch], cells: Cells, epoch: int) -> None:
        """Queue copies of one model's entries, which were planned in this epoch of the pool."""
        self._planned.extend((epoch, fetch, cells) for fetch in fetches)

    def catch_up(self) -> None:
        """Make every planned copy. Raises what one raised; the pool is empty then."""
        with self._lock:  # even where nothing is planned: another thread may be about to make the last one
            while self._planned:
                epoch, cells, fetches = self._next()
                if epoch == self._pool.epoch:  # else they are of what was lost
                    self._copy(fetches, cells, epoch)

    def warm_up(self, cells: Cells) -> None:
        """Compile the copies of cells of this size."""
        for size in self._sizes(cells):
            self._warm_up(size, cells)

    def _next(self) -> tuple[int, Cells, list[Fetch]]:
        """The first of the planned copies that can be made in any order: none reads or writes what another writes."""
        read: set[tuple[int, int]] = set()
        written: set[tuple[int, int]] = set()
        found: list[Fetch] = []
        epoch, _, cells = self._planned[0]
        while self._planned and (self._planned[0][0], self._planned[0][2]) == (epoch, cells):
            fetch = self._planned[0][1]
            reads = {(fetch.source, cell) for cell in fetch.cells}
            writes = {(fetch.to, cell) for cell in fetch.into}
            if not (written.isdisjoint(reads | writes) and read.isdisjoint(writes)):
                break
            read |= reads
            written |= writes
            found.append(fetch)
            self._planned.popleft()
        return epoch, cells, found

    def _copy(self, fetches: Sequence[Fetch], cells: Cells, epoch: int) -> None:
        pairs: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        for fetch in fetches:
            from_, into = pairs.setdefault((fetch.source, fetch.to), ([], []))
            from_.extend(fetch.cells)
            into.extend(fetch.into)
            self.bytes[fetch.source, fetch.to] += len(fetch.cells) * cells.words * words.WORD
        most = self._sizes(cells)[-1]
        for at in range(0, max(len(from_) for from_, _ in pairs.values()), most):
            some = {
                pair: (from_[at : at + most], into[at : at + most])
                for pair, (from_, into) in pairs.items()
                if from_[at:]
            }
            self._make(some, cells, epoch)

    @abstractmethod
    def _make(
        self, pairs: dict[tuple[int, int], tuple[list[int], list[int]]], cells: Cells, epoch: int
    ) -> None:
        """Copy cells of pairs (source, to), no more of a pair than the largest size."""

    @abstractmethod
    def _warm_up(self, size: int, cells: Cells) -> None:
        """Compile the copies of so many cells."""

    def _sizes(self, cells: Cells) -> list[int]:
        """The numbers of cells of a pair that copies are padded to."""
        room = MOST_BYTES // (self._devices.count**2 * cells.words * words.WORD)
        sizes = [SMALLEST]
        while sizes[-1] * GROWTH <= min(room, LARGEST):
            sizes.append(sizes[-1] * GROWTH)
        return sizes

    def _padded(self, number: int, cells: Cells) -> int:
        return next(size for size in self._sizes(cells) if size >= number)


class Exchange(DeviceReads):
    """The way by one all_to_all. See the module."""

    def __init__(self, pool: ReplicatedPool) -> None:
        super().__init__(pool)
        self._programs: dict[tuple[int, Cells], jax.stages.Compiled] = {}

    def _make(
        self, pairs: dict[tuple[int, int], tuple[list[int], list[int]]], cells: Cells, epoch: int
    ) -> None:
        count = self._devices.count
        size = self._padded(max(len(from_) for from_, _ in pairs.values()), cells)
        send = np.zeros((count, count, size), np.int32)
        into = np.full((count, count, size), NOWHERE, np.int32)
        for (source, to), (from_, places) in pairs.items():
            send[source, to, : len(from_)] = from_
            into[to, source, : len(places)] = places
        program = self._program(size, cells)
        self._pool.write(lambda array: program(array, send, into), epoch)
        self.sent += count * (count - 1) * size * cells.words * words.WORD

    def _warm_up(self, size: int, cells: Cells) -> None:
        self._program(size, cells)

    def _program(self, size: int, cells: Cells) -> jax.stages.Compiled:
        lists = jax.ShapeDtypeStruct(
            (self._devices.count, self._devices.count, size), np.int32, sharding=self._devices.rows_of_each
        )
        given = self._pool.example, lists, lists
        found = self._programs.get((size, cells))
        if found is None:
            call = partial(_exchange, devices=self._devices, cells=cells)
            found = jax.jit(call, donate_argnums=0).lower(*given).compile()
            self._programs[size, cells] = found
        return found


class Copies(DeviceReads):
    """The way from device to device. See the module."""

    def _make(
        self, pairs: dict[tuple[int, int], tuple[list[int], list[int]]], cells: Cells, epoch: int
    ) -> None:
        self._pool.write(lambda array: self._copied(array, pairs, cells), epoch)

    def _copied(
        self, array: jax.Array, pairs: dict[tuple[int, int], tuple[list[int], list[int]]], cells: Cells
    ) -> jax.Array:
        parts, each = self._devices.parts(array), self._devices.each
        sent = []
        for (source, to), (from_, _) in pairs.items():  # all are read before any is written
            size = self._padded(len(from_), cells)
            numbers = jax.device_put(_filled(from_, size, 0), each[source])
            sent.append(jax.device_put(_gather(parts[source], numbers, cells=cells), each[to]))
            self.sent += size * cells.words * words.WORD
        for ((_, to), (_, places)), values in zip(pairs.items(), sent, strict=True):
            numbers = jax.device_put(_filled(places, len(values), NOWHERE), each[to])
            parts[to] = _put(parts[to], numbers, values, cells=cells)
        return self._devices.whole(parts)

    def _warm_up(self, size: int, cells: Cells) -> None:
        sent, last = self.sent, self._devices.count - 1
        for to in range(self._devices.count):  # every device gathers once, and puts once
            pair = last if to == 0 else to - 1, to
            self._pool.write(
                partial(self._copied, pairs={pair: ([0] * size, [int(NOWHERE)] * size)}, cells=cells),
                self._pool.epoch,
            )
        self.sent = sent


def make_reads(by: str, pool: ReplicatedPool) -> DeviceReads:
    """The way of the flag data_parallel.reads; for `compute`, which never copies, any."""
    return Exchange(pool) if by == "all_to_all" else Copies(pool)


def _filled(numbers: Sequence[int], size: int, padding: int) -> Int32:
    found = np.full(size, padding, np.int32)
    found[: len(numbers)] = numbers
    return found


def _exchange(
    pool: jax.Array, send: jax.Array, into: jax.Array, *, devices: Replicated, cells: Cells
) -> jax.Array:
    """The pool with what each device sends to each other one, send [D, D, Q], in the cells into [D, D, Q] of that."""

    def each(pool: jax.Array, send: jax.Array, into: jax.Array) -> jax.Array:
        found = words.read(pool, *cells.place(send[0]), cells.words)  # [D, Q, words of a cell]
        return words.write(pool, *cells.place(into[0]), exchange(found))

    made: jax.Array = devices.spread(each, (ROWS, ROWS, ROWS), ROWS)(pool, send, into)
    return made


@partial(jax.jit, static_argnames="cells")
def _gather(part: jax.Array, numbers: jax.Array, *, cells: Cells) -> jax.Array:
    """Cells [n, words of a cell] of one device's part of the pool."""
    return words.read(part, *cells.place(numbers), cells.words)


@partial(jax.jit, static_argnames="cells", donate_argnums=0)
def _put(part: jax.Array, numbers: jax.Array, values: jax.Array, *, cells: Cells) -> jax.Array:
    """The part with these values in its cells; a number that it lacks is left out."""
    return words.write(part, *cells.place(numbers), values)
