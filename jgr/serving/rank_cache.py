# SPDX-License-Identifier: Apache-2.0
"""Users' parts kept between requests, on pages of one device array (DESIGN idea 3, MODEL-13).

The one idea: a user's state has the same shapes whoever the user is, so it is so many words on so many pages, and a
block (`rank_inputs`) says all that it depends on. An entry's content is the block: another history, time, context or
scenario is other content, which finds the entry stale and frees it; where users can grow, what is new is computed from
it first, to other pages, since who reads the old ones is not to see more events. Entries belong to an engine, so
another model or catalog never finds them.

`StatePool` owns the array, and is the only one who dispatches programs that read or write it: in turn, under a lock
that is held for a dispatch and never for the device. A program that writes is given the array for good (donation). One
that fails may lose it. The pool is empty then, of the next generation, and what was planned for an earlier one reads
nothing and writes nothing. `UserCache` does the bookkeeping, on the event loop.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jgr.cache.entries import Content, Entry, Name
from jgr.cache.meta import SPLITS, CacheMeta
from jgr.cache.pages import Pages
from jgr.config import ConfigError
from jgr.features.packed import ALIGNMENT, Layout
from jgr.models.params import PyTree

Int32 = npt.NDArray[np.int32]
UInt8 = npt.NDArray[np.uint8]

PAGE_BYTES = 1 << 16
"""Of a page at most."""
PLACE = "rank"
"""The layout that the entries' names have."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Stored:
    """Where a user's state is in the pool, or where a new one is to be put. pages: [pages_per_user] int32."""

    pages: Int32
    generation: int
    new: bool


class StatePool:
    """Room for users' states on the device; ConfigError where there is none for one.

    state: its shapes and dtypes. size_mb: of the array. like: another pool for such states, of which no more is used
    than the programs.
    """

    def __init__(self, state: PyTree, size_mb: float, like: StatePool | None = None) -> None:
        leaves, self._tree = jax.tree.flatten(state)
        self._layout = Layout.of({str(i): (leaf.shape, leaf.dtype) for i, leaf in enumerate(leaves)})
        self.pages_per_user = -(-self._layout.size // PAGE_BYTES)
        page = -(-self._layout.size // self.pages_per_user // ALIGNMENT) * ALIGNMENT
        self.pages = int(size_mb * 2**20) // page
        if self.pages < self.pages_per_user:
            need = self.pages_per_user * page / 2**20
            raise ConfigError(f"cache.device_mb: {size_mb} is less than one user's state of {need:.3g} MB")
        self.generation = 0
        self._shape = (self.pages, page // 4)
        self._programs: tuple[jax.stages.Compiled, jax.stages.Compiled] | None
        self._lock = threading.Lock()
        self._array = self._empty()
        self._programs = like._programs if like is not None and like._shape == self._shape else None

    def compile(self) -> tuple[jax.stages.Compiled, jax.stages.Compiled]:
        """The programs that write and read a user's state; memory_analysis shows that the pool is written in place."""
        if self._programs is None:
            pages = jax.ShapeDtypeStruct((self.pages_per_user,), np.int32)
            state = [jax.ShapeDtypeStruct(place.shape, place.dtype) for place in self._layout.places]
            write = jax.jit(self._write, donate_argnums=0).lower(self._array, state, pages).compile()
            self._programs = write, jax.jit(self._read).lower(self._array, pages).compile()
        return self._programs

    def store(self, state: PyTree, place: Stored) -> bool:
        """Write a state to its pages. False: they are not of this generation, or it failed and the pool is empty."""
        write, _ = self.compile()
        with self._lock:
            if place.generation != self.generation:
                return False
            try:
                self._array = write(self._array, jax.tree.leaves(state), place.pages)
            except Exception as error:
                self._lose(error)
                return False
        return True

    def load(self, place: Stored) -> PyTree | None:
        """The state on some pages, once it is there. None: as for `store`."""
        _, read = self.compile()
        with self._lock:
            if place.generation != self.generation:
                return None
            found = read(self._array, place.pages)
        try:
            return jax.block_until_ready(jax.tree.unflatten(self._tree, found))
        except Exception as error:  # also of the program that wrote it
            with self._lock:
                if place.generation == self.generation:
                    self._lose(error)
            return None

    def _lose(self, error: Exception) -> None:
        _log.error("the pool of users' states failed, and is emptied", exc_info=error)
        self.generation += 1
        self._array = self._empty()

    def _empty(self) -> jax.Array:
        return jnp.zeros(self._shape, jnp.uint32)

    def _write(self, pool: jax.Array, leaves: list[jax.Array], pages: jax.Array) -> jax.Array:
        parts = []
        for leaf, place in zip(leaves, self._layout.places, strict=True):
            numbers = leaf.reshape(-1)
            per_word = 4 // place.dtype.itemsize
            aligned = -(-place.size // ALIGNMENT) * ALIGNMENT // place.dtype.itemsize
            numbers = jnp.pad(numbers, (0, aligned - numbers.size))
            numbers = numbers if per_word == 1 else numbers.reshape(-1, per_word)
            parts.append(jax.lax.bitcast_convert_type(numbers, jnp.uint32))
        words = jnp.concatenate(parts)
        room = math.prod((self.pages_per_user, self._shape[1]))
        words = jnp.pad(words, (0, room - words.size)).reshape(self.pages_per_user, -1)
        written: jax.Array = pool.at[pages].set(words, mode="promise_in_bounds", unique_indices=True)
        return written

    def _read(self, pool: jax.Array, pages: jax.Array) -> list[jax.Array]:
        words = pool.at[pages].get(mode="promise_in_bounds").reshape(-1)
        return list(self._layout.unpack(words).values())


class Before(NamedTuple):
    """A pinned entry from which a user's state can be computed, and by how many events that has grown."""

    entry: Entry
    place: Stored
    events: int


class Found(NamedTuple):
    """A pinned entry, where its state is or is to be put, and what it may be computed from. `UserCache.end` it."""

    entry: Entry
    place: Stored
    before: Before | None = None


class UserCache:
    """Which users' states are in a pool. All calls are made on the event loop.

    block_bytes: of a user's block. growth: (old block, new block) -> by how many events the user grew, where the state
    can be computed from the old one's, else None.
    """

    def __init__(
        self, pool: StatePool, block_bytes: int, growth: Callable[[UInt8, UInt8], int | None] | None = None
    ) -> None:
        self._pool, self._growth = pool, growth
        self._generation = pool.generation
        words = block_bytes // 4
        cell = -(-words // pool.pages_per_user)
        self._content_words = cell * pool.pages_per_user
        self.meta = CacheMeta(Pages(pool.pages, 1, SPLITS), cell)
        self.meta.set_limit("item", 0)

    def find(self, user: str, block: UInt8) -> Found | None:
        """None: it is being written, or there is no room."""
        self._forget_lost()
        content = np.zeros(self._content_words, np.int32)
        words = block.view(np.int32)
        content[: len(words)] = words
        name, named = Name("user", user, PLACE), Content(content)
        before = self._before(name, block)
        entry = self.meta.find(name, named)
        if entry is not None:
            self.meta.hold(entry)
            return Found(entry, Stored(entry.cells, self._generation, new=False))
        entry = self.meta.extend(name, named)
        if entry is None:
            if before is not None:
                self.meta.release(before.entry)
            return None
        entry.note = block
        return Found(entry, Stored(entry.cells, self._generation, new=True), before)

    def end(self, found: Found, kept: bool) -> None:
        """Nobody reads or writes what was found any more. kept: what was new is there."""
        entry, place, before = found
        if before is not None:
            self.meta.release(before.entry)
        if place.new:
            if kept and place.generation == self._pool.generation:
                self.meta.written(entry)
            else:
                self.meta.failed(entry)
        self.meta.release(entry)
        self._forget_lost()

    def _before(self, name: Name, block: UInt8) -> Before | None:
        """The user's entry, pinned and not to be found any more, where the user grew since."""
        old = None if self._growth is None else self.meta.whatever(name)
        if old is None or self._growth is None or (old.note == block).all():
            return None
        events = self._growth(old.note, block)
        if events is None:
            return None
        self.meta.hold(old)
        self.meta.drop(name)
        return Before(old, Stored(old.cells, self._generation, new=False), events)

    def forget(self, user: str) -> int:
        """Drop a user's entry; how many there were."""
        return int(self.meta.drop(Name("user", user, PLACE)))

    def _forget_lost(self) -> None:
        if self._generation != self._pool.generation:
            self._generation = self._pool.generation
            self.meta.clear()
