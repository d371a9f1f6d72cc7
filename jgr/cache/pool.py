# SPDX-License-Identifier: Apache-2.0
"""The device array of users' states, and its one owner (DESIGN idea 3, MODEL-13).

The one idea: a user's state has the same shapes whoever the user is, so it is so many words on so many pages.
`StatePool` owns the array, and is the only one who dispatches programs that read or write it: in turn, under a lock
that is held for a dispatch and never for the device. A program that writes is given the array for good (donation). One
that fails may lose it. The pool is empty then, of the next generation, and what was planned for an earlier one reads
nothing and writes nothing.
"""

from __future__ import annotations

import logging
import math
import threading

import jax
import jax.numpy as jnp
import numpy as np

from jgr.cache.buffers import ALIGNMENT, BufferLayout
from jgr.cache.entries import Stored
from jgr.config import ConfigError
from jgr.models.params import PyTree

PAGE_BYTES = 1 << 16
"""The most bytes that a page has."""

_log = logging.getLogger(__name__)


class StatePool:
    """Room for users' states on the device; ConfigError where there is none for one.

    state: its shapes and dtypes. size_mb: of the array. like: another pool for such states, of which no more is used
    than the programs.
    """

    def __init__(self, state: PyTree, size_mb: float, like: StatePool | None = None) -> None:
        leaves, self._tree = jax.tree.flatten(state)
        self._layout = BufferLayout.of({str(i): (leaf.shape, leaf.dtype) for i, leaf in enumerate(leaves)})
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
            state = [jax.ShapeDtypeStruct(field.shape, field.dtype) for field in self._layout.fields]
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
        for leaf, place in zip(leaves, self._layout.fields, strict=True):
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
