# SPDX-License-Identifier: Apache-2.0
"""Users' parts kept between requests, on pages of one device array (DESIGN idea 3, MODEL-13).

The one idea: a user's state has the same shapes whoever the user is, so it is so many words on so many pages, and a
block (`user_block.known_by`) says all that it depends on. An entry's content is the block: another history, context or
scenario, or time where what is kept depends on it, is other content, which finds the entry stale and frees it; where
users can grow, what is new is computed from it first, to other pages, since who reads the old ones is not to see more
events. Entries belong to an engine, so another model or catalog never finds them.

`cache.pool.StatePool` has the array; `UserCache` does the bookkeeping, on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from jgr.cache.entries import Content, Entry, Name, Stored
from jgr.cache.meta import SPLITS, CacheMeta
from jgr.cache.pages import Pages

Int32 = npt.NDArray[np.int32]
UInt8 = npt.NDArray[np.uint8]

PLACE = "rank"
"""The layout that the entries' names have."""


class UserPart(NamedTuple):
    """A user, by the name that an entry has, and the block that the user's part is computed from; None: not kept."""

    name: str
    block: UInt8 | None = None


class Found(NamedTuple):
    """A pinned entry, and where its state is or is to be put; `UserCache.end` it.

    before: where the state is that it can be computed from, of the user with `grown` fewer events; old: its entry,
    pinned too.
    """

    entry: Entry
    place: Stored
    before: Stored | None = None
    grown: int = 0
    old: Entry | None = None


class Generations(Protocol):
    """What the bookkeeping asks of the pool; `jgr.cache.pool.StatePool` is one."""

    @property
    def pages(self) -> int: ...

    @property
    def pages_per_user(self) -> int: ...

    @property
    def generation(self) -> int:
        """Changes when the pool lost what was in it."""


class UserCache:
    """Which users' states are in a pool. All calls are made on the event loop.

    block_bytes: of a user's block. growth: (old block, new block) -> by how many events the user grew, where the state
    can be computed from the old one's, else None.
    """

    def __init__(
        self, pool: Generations, block_bytes: int, growth: Callable[[UInt8, UInt8], int | None] | None = None
    ) -> None:
        self._pool, self._growth = pool, growth
        self._generation = pool.generation
        words = block_bytes // 4
        cell = -(-words // pool.pages_per_user)
        self._content_words = cell * pool.pages_per_user
        self.meta = CacheMeta(Pages(pool.pages, 1, SPLITS), cell)
        self.meta.set_limit("item", 0)

    def find(self, user: UserPart) -> Found | None:
        """None: it is being written, or there is no room."""
        self._forget_lost()
        assert user.block is not None
        block = user.block
        content = np.zeros(self._content_words, np.int32)
        words = block.view(np.int32)
        content[: len(words)] = words
        name, named = Name("user", user.name, PLACE), Content.of(content)
        old, grown = self._before(name, block)
        entry = self.meta.find(name, named)
        if entry is not None:
            self.meta.hold(entry)
            return Found(entry, Stored(entry.cells, self._generation, new=False))
        entry = self.meta.extend(name, named)
        if entry is None:
            if old is not None:
                self.meta.release(old)
            return None
        entry.note = block
        before = None if old is None else Stored(old.cells, self._generation, new=False)
        return Found(entry, Stored(entry.cells, self._generation, new=True), before, grown, old)

    def end(self, found: Found, well: bool) -> None:
        """Nobody reads or writes what was found any more. well: the run has not failed, and what was new is there."""
        entry, place = found.entry, found.place
        if found.old is not None:
            self.meta.release(found.old)
        if place.new:
            if well and place.generation == self._pool.generation:
                self.meta.written(entry)
            else:
                self.meta.failed(entry)
        self.meta.release(entry)
        self._forget_lost()

    def check(self) -> None:
        """Audit; AssertionError."""
        self.meta.check()

    def _before(self, name: Name, block: UInt8) -> tuple[Entry | None, int]:
        """The user's entry, pinned and not to be found any more, where the user grew since; and by how many events."""
        old = None if self._growth is None else self.meta.whatever(name)
        if old is None or self._growth is None or (old.note == block).all():
            return None, 0
        events = self._growth(old.note, block)
        if events is None:
            return None, 0
        self.meta.hold(old)
        self.meta.drop(name)
        return old, events

    def forget(self, user: str) -> int:
        """Drop a user's entry; how many there were."""
        return int(self.meta.drop(Name("user", user, PLACE)))

    def _forget_lost(self) -> None:
        if self._generation != self._pool.generation:
            self._generation = self._pool.generation
            self.meta.clear()
