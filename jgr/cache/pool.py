# SPDX-License-Identifier: Apache-2.0
"""The device's cache memory: one array of neutral pages, its one owner, and one way to lose it (DESIGN idea 3).

The one idea: the array is lent to every program that reads it, and given for good (donation) to every program that
writes it, which hands back the next one. `DevicePool` alone has it. Programs of any model and any thread are dispatched
in turn, under a lock that is held for a dispatch and never for the device. What a plan says is valid has been written
by a program that was dispatched before, so nobody waits.

A program that fails may have consumed the array. The pool is then empty and of the next epoch. Whatever was planned for
an earlier epoch is refused (`PoolLost`), since what it wants to read is gone; its planner forgets its entries
(`CacheMeta.renew`) and plans again.

`StateView` sees cells as a user's state (MODEL-13), `jgr.cache.histories` as what is kept of a user's history; a
decoder's keys and values are seen by `jgr.models.packed`.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jgr.cache.buffers import ALIGNMENT, BufferLayout
from jgr.cache.entries import Stored
from jgr.cache.pages import Room, pieces
from jgr.models import words
from jgr.models.devices import ONE, Devices
from jgr.models.params import PyTree
from jgr.models.replicated import Replicated

T = TypeVar("T")
_log = logging.getLogger(__name__)


class PoolLost(Exception):
    """The pool was emptied since the plan was made: nothing has run, and it must be planned again."""


class DevicePool:
    """The pool of one device: an array [pages, page_bytes / 4] uint32.

    devices: where several share a model, each has so many pages of this size, of its own part of every entry: the array
    is [pages, devices * page_bytes / 4], divided along its second axis.
    """

    def __init__(self, pages: int, page_bytes: int, devices: Devices = ONE) -> None:
        self.page_bytes, self.pages, self.devices = page_bytes, pages, devices
        self.sharding = self._divided()
        self.epoch = 0
        """How often the pool was lost."""
        self._lock = threading.Lock()
        self._array = self._empty()

    @property
    def example(self) -> jax.ShapeDtypeStruct:
        """The array's shape, dtype and placement, for which programs are compiled."""
        return jax.ShapeDtypeStruct(self._array.shape, jnp.uint32, sharding=self.sharding)

    @property
    def nbytes(self) -> int:
        return self._array.nbytes

    def read(self, program: Callable[[jax.Array], T], epoch: int) -> T:
        """Dispatch a program that reads the array. PoolLost where the pool is not of this epoch any more.

        What comes back may not be there yet. Who waits for it and finds that it failed calls `lose`.
        """
        with self._lock:
            self._require(epoch)
            try:
                return program(self._array)
            except Exception as error:
                self._lose(error)
                raise

    def write(self, program: Callable[[jax.Array], jax.Array], epoch: int) -> None:
        """Dispatch a program that is given the array and returns the next one; otherwise as `read`."""
        with self._lock:
            self._require(epoch)
            try:
                self._array = program(self._array)
            except Exception as error:
                self._lose(error)
                raise

    def lose(self, epoch: int, error: Exception) -> None:
        """A program of this epoch failed on the device. The first who says so empties the pool."""
        with self._lock:
            if epoch == self.epoch:
                self._lose(error)

    def _require(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise PoolLost(f"planned for epoch {epoch} of the cache's pool, which is in epoch {self.epoch}")

    def _lose(self, error: Exception) -> None:
        _log.error("the cache's pool is emptied, for a program that uses it failed", exc_info=error)
        self.epoch += 1
        self._array = self._empty()

    def _divided(self) -> jax.sharding.Sharding:
        return self.devices.along(1)

    def _shape(self) -> tuple[int, int]:
        return self.pages, self.devices.count * self.page_bytes // words.WORD

    def _empty(self) -> jax.Array:
        # Bound to its device, as what programs hand back is: an unbound array is another argument to them.
        return jnp.zeros(self._shape(), jnp.uint32, device=self.sharding)


class ReplicatedPool(DevicePool):
    """The pools of devices that each serve requests of their own: an array [devices * pages, page_bytes / 4] uint32,
    divided along its first axis, so that a program that each runs for itself sees [pages, page_bytes / 4].

    pages: of each device. It is lost as one, since a program runs on all of them.
    """

    devices: Replicated

    def _divided(self) -> jax.sharding.Sharding:
        return self.devices.rows_of_each

    def _shape(self) -> tuple[int, int]:
        return self.devices.count * self.pages, self.page_bytes // words.WORD


class UserView(ABC):
    """Cells of the pool as what is kept of users. room: that of an entry.

    catch_up: called before each write, since its cells may be of a page that another model gave up, whose copy to the
    host is planned and not made yet (`HostTier.catch_up`).
    """

    room: Room

    def __init__(self, pool: DevicePool, catch_up: Callable[[], None]) -> None:
        self.pool, self._catch_up = pool, catch_up

    @property
    @abstractmethod
    def longest(self) -> int:
        """The length of the longest entry, as `Room.of` takes it."""

    @abstractmethod
    def compile(self) -> Sequence[jax.stages.Compiled]:
        """The programs; memory_analysis shows that those which write the pool do so in place."""

    @abstractmethod
    def store(self, kept: PyTree, place: Stored) -> bool:
        """Write what is kept of a user to its cells. False: they are not of this epoch, or it failed and the pool is
        empty."""

    @abstractmethod
    def load(self, place: Stored, tokens: int | None = None) -> PyTree | None:
        """What is kept in some cells, once it is there. None: as for `store`.

        tokens: how many tokens must have places in it, at least those of `place`; None: those of the longest entry.
        """

    def _put(self, program: Callable[[jax.Array], jax.Array], epoch: int) -> bool:
        try:
            self._catch_up()
            self.pool.write(program, epoch)
        except Exception:  # the pool has told the log; what is kept is as good as ever
            return False
        return True

    def _get(self, program: Callable[[jax.Array], T], epoch: int) -> T | None:
        try:
            found: T = jax.block_until_ready(self.pool.read(program, epoch))
            return found
        except PoolLost:
            return None
        except Exception as error:  # also of the program that wrote it
            self.pool.lose(epoch, error)
            return None


class StateView(UserView):
    """Cells of the pool as users' states, which have the same shapes for every user.

    state: their shapes and dtypes. like: a view of such states over the same pool, whose compiled programs are used.
    catch_up: see `UserView`.
    """

    longest = 1

    def __init__(
        self,
        pool: DevicePool,
        state: PyTree,
        like: UserView | None = None,
        catch_up: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(pool, catch_up)
        leaves, self._tree = jax.tree.flatten(state)
        self._layout = BufferLayout.of({str(i): (leaf.shape, leaf.dtype) for i, leaf in enumerate(leaves)})
        grains = -(-self._layout.size // ALIGNMENT)
        cells, each = pieces(grains, ALIGNMENT, pool.page_bytes)
        self.room = Room(each * ALIGNMENT, cells)
        self._cells = words.Cells.of(self.room.bytes, pool.page_bytes)
        self._programs: tuple[jax.stages.Compiled, jax.stages.Compiled] | None = None
        if isinstance(like, StateView) and (like.pool, like._layout) == (pool, self._layout):
            self._programs = like._programs

    def compile(self) -> tuple[jax.stages.Compiled, jax.stages.Compiled]:
        """The programs that write and read a user's state."""
        if self._programs is None:
            cells = jax.ShapeDtypeStruct((self.room.cells,), np.int32)
            state = [jax.ShapeDtypeStruct(field.shape, field.dtype) for field in self._layout.fields]
            write = jax.jit(self._write, donate_argnums=0).lower(self.pool.example, state, cells).compile()
            self._programs = write, jax.jit(self._read).lower(self.pool.example, cells).compile()
        return self._programs

    def store(self, kept: PyTree, place: Stored) -> bool:
        """See UserView."""
        write, _ = self.compile()
        leaves, cells = jax.tree.leaves(kept), np.array(place.cells, np.int32)
        return self._put(lambda array: write(array, leaves, cells), place.epoch)

    def load(self, place: Stored, tokens: int | None = None) -> PyTree | None:
        """See UserView."""
        _, read = self.compile()
        cells = np.array(place.cells, np.int32)
        found = self._get(lambda array: read(array, cells), place.epoch)
        return None if found is None else jax.tree.unflatten(self._tree, found)

    def _write(self, array: jax.Array, leaves: list[jax.Array], cells: jax.Array) -> jax.Array:
        parts = []
        for leaf, place in zip(leaves, self._layout.fields, strict=True):
            numbers = leaf.reshape(-1)
            aligned = -(-place.size // ALIGNMENT) * ALIGNMENT // place.dtype.itemsize
            parts.append(words.as_words(jnp.pad(numbers, (0, aligned - numbers.size))))
        flat = jnp.concatenate(parts)
        flat = jnp.pad(flat, (0, self.room.cells * self._cells.words - flat.size))
        return words.write(array, *self._cells.place(cells), flat.reshape(self.room.cells, -1))

    def _read(self, array: jax.Array, cells: jax.Array) -> list[jax.Array]:
        found = words.read(array, *self._cells.place(cells), self._cells.words)
        return list(self._layout.unpack(found.reshape(-1)).values())
