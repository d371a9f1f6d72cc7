# SPDX-License-Identifier: Apache-2.0
"""The host's memory below the device pool: entries that the device gives up stay here until they are asked for again.

The one idea: moves are made in the order in which they were planned, and before any program that was planned after
them, whichever model and thread it belongs to. `plan` is called as soon as a policy has planned; `catch_up` by every
thread that is about to dispatch. A move that is made early harms nobody, since it touches only what no plan uses.

Moves that follow each other are made as one where that is the same: those of one direction, size of cells and epoch.
None of them reads what another one writes, and of two that write one cell the later one counts. A request may need tens
of small items, and what a program costs beside its bytes is then most of it.

Cells of the host may also be filled with bytes from elsewhere (`fill`): in its turn among the moves, since an earlier
one may still be about to read what stood there.

Copies to the host go on while programs run, for which they wait. A copy back waits for those of its own cells alone:
whoever makes it is about to dispatch the next program, and the device would be idle meanwhile.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from jgr.cache.entries import Move
from jgr.cache.pages import Pages
from jgr.cache.pool import DevicePool
from jgr.models import words
from jgr.models.devices import Devices
from jgr.models.words import Cells

Int32 = npt.NDArray[np.int32]
MOVED_BYTES, MOVED_CELLS = 16 << 20, (16, 128)
"""The most bytes that one program moves, and the numbers of cells that programs are compiled for: a few, for each of
them costs start time and memory."""


class _Fill(NamedTuple):
    """Values for cells of the host, [n, words of a cell] uint32."""

    host: tuple[int, ...]
    values: npt.NDArray[np.uint32]


class _Joined(NamedTuple):
    """Moves that are made as one: from the n-th cell of `source` to the n-th of `into`, all of `into` different."""

    direction: Literal["to_host", "to_device"]
    source: Int32
    into: Int32


class HostTier:
    """Pages on the host, [pages, page_bytes / 4] uint32, and the moves between them and a pool.

    pages: for entries that the device gives up; who holds them. beyond: more pages, behind those, for items that are
    held for all nodes (`jgr.placement.shared_items`); who holds these. Of a pool on several devices a page here has all
    of their parts, one after the other.
    """

    def __init__(self, pool: DevicePool, pages: int, beyond: int = 0) -> None:
        self._devices = pool.devices
        page_bytes = self._devices.count * pool.page_bytes
        self.pages, self.beyond = Pages(pages, page_bytes), Pages(beyond, page_bytes)
        self._pool = pool
        self._array = np.zeros((pages + beyond, page_bytes // words.WORD), np.uint32)
        self._staging = _pinned(pool)
        self._copies = ThreadPoolExecutor(1, "jgr-host-tier")
        self._copying: list[tuple[Future[None], int, Cells, Int32]] = []  # with the epoch of the pool
        self._planned: deque[tuple[int, Move | _Fill, Cells]] = deque()
        self._lock = threading.Lock()  # held by the thread that catches up

    @property
    def nbytes(self) -> int:
        return self._array.nbytes

    def plan(self, moves: Iterable[Move], cells: Cells, epoch: int) -> None:
        """Queue moves of one model's entries, which were planned in this epoch of the pool."""
        self._planned.extend((epoch, move, cells) for move in moves)

    def fill(self, host: tuple[int, ...], values: npt.NDArray[np.uint32], cells: Cells) -> None:
        """Queue these values, [n, words of a cell], for cells of the host. They must not change until they are there:
        `catch_up` puts them there."""
        self._planned.append((self._pool.epoch, _Fill(host, values), cells))

    def stored(self, host: tuple[int, ...], cells: Cells) -> npt.NDArray[np.uint32]:
        """A copy of what stands in cells of the host, [n, words of a cell], which nobody fills meanwhile."""
        numbers = np.array(host, np.int32)
        return self._view(cells)[numbers // cells.per_page, numbers % cells.per_page]

    def warm_up(self, cells: Cells) -> None:
        """Compile the moves of cells of this size."""
        none = np.zeros(0, np.int32)
        for size in _sizes(cells):
            for direction in (self._out, self._back):
                direction(np.zeros(size, np.int32), none, cells, self._pool.epoch)

    def catch_up(self) -> None:
        """Make every planned move. Raises what a copy raised; the pool is empty then."""
        with self._lock:  # even where nothing is planned: another thread may be about to make the last move
            epoch, filled = self._pool.epoch, None
            try:
                while self._planned:
                    epoch, what, cells = self._next()
                    filled = None
                    if isinstance(what, _Fill):
                        filled = epoch, what, cells
                        self._fill(what, cells)
                    elif epoch == self._pool.epoch:  # else it is of what was lost
                        direction = self._to_host if what.direction == "to_host" else self._to_device
                        direction(what, cells, epoch)
            except Exception as error:
                for copied, *_ in self._copying:
                    copied.exception()  # until it has ended, since nobody waits for it any more
                self._copying.clear()
                if filled is not None:  # an older copy failed, of which what is to be filled in knows nothing
                    self._planned.appendleft(filled)
                self._pool.lose(epoch, error)
                raise

    def _next(self) -> tuple[int, _Joined | _Fill, Cells]:
        """What is to be done next, taken from what is planned: with a move all those behind it that can join it."""
        epoch, first, cells = self._planned.popleft()
        if isinstance(first, _Fill):
            return epoch, first, cells
        source_of = _pairs(first)
        while self._planned:
            later, move, size = self._planned[0]
            if isinstance(move, _Fill) or (later, move.direction, size) != (epoch, first.direction, cells):
                break
            source_of.update(_pairs(move))
            self._planned.popleft()
        count = len(source_of)
        into, source = (np.fromiter(of, np.int32, count) for of in (source_of.keys(), source_of.values()))
        return epoch, _Joined(first.direction, source, into), cells

    def _fill(self, fill: _Fill, cells: Cells) -> None:
        numbers = np.array(fill.host, np.int32)
        self._wait(numbers, cells)  # for copies of an entry that has left already
        self._view(cells)[numbers // cells.per_page, numbers % cells.per_page] = fill.values

    def _wait(self, host: Int32, cells: Cells) -> None:
        """Until no copy to these cells is still to be made."""
        self._end_copies()
        for copied, epoch, size, kept in self._copying:
            if size == cells:
                shared = np.isin(kept, host)
            else:
                shared = np.isin(kept // size.per_page, host // cells.per_page)
            if shared.any():
                self._end(copied, epoch)

    def _end_copies(self) -> None:
        """Forget the copies that were made. Raises what one of them raised."""
        ended = {copied: epoch for copied, epoch, _, _ in self._copying if copied.done()}
        self._copying = [copy for copy in self._copying if copy[0] not in ended]
        for copied, epoch in ended.items():
            self._end(copied, epoch)

    def _end(self, copied: Future[None], epoch: int) -> None:
        """Wait for a copy. Raises what it raised, unless it is of what was lost: nothing is read there again."""
        error = copied.exception()
        if error is not None and epoch == self._pool.epoch:
            raise error

    def _to_host(self, moves: _Joined, cells: Cells, epoch: int) -> None:
        self._end_copies()
        for numbers, host in _portions(moves.source, moves.into, cells):
            self._out(numbers, host, cells, epoch)

    def _out(self, numbers: Int32, host: Int32, cells: Cells, epoch: int) -> None:
        """Copy cells of the pool, by one program; of those the first ones go to the host's cells, in their order."""
        read = functools.partial(_read, numbers=numbers, cells=cells, devices=self._devices)
        found = self._pool.read(read, epoch)
        found = jax.device_put(found, self._staging)  # by the device itself, in its turn
        self._copying.append((self._copies.submit(self._keep, found, host, cells), epoch, cells, host))

    def _keep(self, found: jax.Array, host: Int32, cells: Cells) -> None:
        at = host // cells.per_page, host % cells.per_page
        self._view(cells)[at] = np.asarray(found)[: len(host)]

    def _to_device(self, moves: _Joined, cells: Cells, epoch: int) -> None:
        self._wait(moves.source, cells)
        for numbers, host in _portions(moves.into, moves.source, cells):
            self._back(numbers, host, cells, epoch)

    def _back(self, numbers: Int32, host: Int32, cells: Cells, epoch: int) -> None:
        """Copy the host's cells to the first ones of these cells of the pool, by one program."""
        at = np.zeros(len(numbers), np.int32)  # what is beyond those asked for is read and goes nowhere
        at[: len(host)] = host
        values = self._view(cells)[at // cells.per_page, at % cells.per_page]
        sent = jax.device_put(jax.device_put(values, self._staging), self._pool.sharding)
        into = _beyond(numbers, len(host))
        write = functools.partial(_write, numbers=into, values=sent, cells=cells, devices=self._devices)
        self._pool.write(write, epoch)

    def _view(self, cells: Cells) -> npt.NDArray[np.uint32]:
        """The host's array as cells, [pages, cells of a page, words of a cell]."""
        size = self._devices.count * cells.words
        used = self._array[:, : cells.per_page * size]
        return np.lib.stride_tricks.as_strided(
            used, (len(used), cells.per_page, size), (used.strides[0], size * words.WORD, words.WORD)
        )


def read_cells(pool: DevicePool, device: tuple[int, ...], cells: Cells, epoch: int) -> npt.NDArray[np.uint32]:
    """What stands in cells of the pool, [n, words of a cell], once the programs dispatched so far have ended.

    PoolLost where the pool is not of this epoch any more.
    """
    read = functools.partial(_read, cells=cells, devices=pool.devices)
    every = np.array(device, np.int32)
    found = [
        np.asarray(pool.read(functools.partial(read, numbers=numbers), epoch))[: len(some)]
        for numbers, some in _portions(every, every, cells)
    ]
    return np.concatenate(found) if found else np.zeros((0, pool.devices.count * cells.words), np.uint32)


@functools.partial(jax.jit, static_argnames=("cells", "devices"))
def _read(array: jax.Array, *, numbers: jax.Array, cells: Cells, devices: Devices) -> jax.Array:
    """Gather cells of the pool, [n, words of a cell] uint32; of several devices, [n, devices * words], divided as the
    pool is. numbers: [n] int32."""

    def read(array: jax.Array, numbers: jax.Array) -> jax.Array:
        return words.read(array, *cells.place(numbers), cells.words)

    return devices.on_each(read, (array, numbers), divided=(True, False))


@functools.partial(jax.jit, static_argnames=("cells", "devices"), donate_argnums=0)
def _write(
    array: jax.Array, *, numbers: jax.Array, values: jax.Array, cells: Cells, devices: Devices
) -> jax.Array:
    """The pool with cells, as `_read` gives them, in their places; a number that the pool lacks is left out."""

    def write(array: jax.Array, numbers: jax.Array, values: jax.Array) -> jax.Array:
        return words.write(array, *cells.place(numbers), values)

    return devices.on_each(write, (array, numbers, values), divided=(True, False, True))


def _pairs(move: Move) -> dict[int, int]:
    """For each cell that a move writes the one that it reads."""
    if move.direction == "to_host":
        return dict(zip(move.host, move.device, strict=True))
    return dict(zip(move.device, move.host, strict=True))


def _sizes(cells: Cells) -> list[int]:
    """The numbers of cells that programs move, the smallest first."""
    most = max(1, MOVED_BYTES // (cells.words * words.WORD))
    return sorted({min(size, most) for size in MOVED_CELLS})


def _portions(device: Int32, host: Int32, cells: Cells) -> Iterable[tuple[Int32, Int32]]:
    """The cells of a move in parts: the device's, with zeros at the end up to one of the sizes, and the host's."""
    sizes = _sizes(cells)
    for at in range(0, len(device), sizes[-1]):
        some = host[at : at + sizes[-1]]
        numbers = np.zeros(next(size for size in sizes if size >= len(some)), np.int32)
        numbers[: len(some)] = device[at : at + sizes[-1]]
        yield numbers, some


def _beyond(numbers: Int32, count: int) -> Int32:
    """The first `count` of the numbers; in the place of the others one that no pool has."""
    return np.where(np.arange(len(numbers)) < count, numbers, np.iinfo(np.int32).max).astype(np.int32)


def _pinned(pool: DevicePool) -> jax.sharding.Sharding:
    """Where copies between host and device pass through: host memory that the device reads and writes by itself, where
    the backend has it; else the device's own, which is no stop at all."""
    device: jax.Device = next(iter(pool.sharding.device_set))
    if "pinned_host" not in {memory.kind for memory in device.addressable_memories()}:
        return pool.sharding
    return pool.sharding.with_memory_kind("pinned_host")
