# SPDX-License-Identifier: Apache-2.0
"""Users' states kept between requests, in cells of the device's pool (DESIGN idea 3, MODEL-13).

The one idea: a user's state has the same shapes whoever the user is, so an entry takes the same cells whatever it is
computed from, and a block (`user_block.known_by`) says all that it depends on. An entry's content is the block: another
history, context or scenario, or time where what is kept depends on it, is other content, which finds the entry stale
and frees it; where users can grow, what is new is computed from it first, to other cells, since who reads the old ones
is not to see more events. Entries belong to one revision of a model, so another never finds them.

`cache.pool.StateView` writes and reads the states; `UserCache` does the bookkeeping, on the event loop.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jgr.cache.entries import Entry, Name, Stored
from jgr.cache.meta import CacheMeta
from jgr.serving.policies.jobs import UserPart

UInt8 = npt.NDArray[np.uint8]
Growth = Callable[[UInt8, UInt8], int | None]
"""(old block, new block) -> by how many events the user grew, where the state can be computed from the old one's."""

LAYOUT = "state"
"""The layout that the entries' names have."""


class WholeContent:
    """A content that is reused whole or not at all: any bytes, of length 1."""

    def __init__(self, data: bytes) -> None:
        self.digest = hashlib.blake2b(data, digest_size=16).digest()

    def __len__(self) -> int:
        return 1

    def prefix(self, count: int) -> bytes:
        """See `jgr.cache.entries.Valued`; there is one prefix."""
        return self.digest


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


class UserCache:
    """Which users' states are in the pool. All calls are made on the event loop.

    meta: a service with entries of kind "user", of one room; other engines of the same model may share it. growth: None
    where users cannot grow.
    """

    def __init__(self, meta: CacheMeta, growth: Growth | None = None) -> None:
        self.meta, self._growth = meta, growth

    def find(self, user: UserPart) -> Found | None:
        """None: it is being written, or there is no room."""
        assert user.key is not None
        block = np.frombuffer(user.key, np.uint8)
        name, content = Name("user", user.name, LAYOUT), WholeContent(user.key)
        old, grown = self._before(name, block)
        entry = self.meta.find(name, content)
        if entry is not None:
            self.meta.hold(entry)
            return Found(entry, Stored(entry.cells, self.meta.epoch, new=False))
        entry = self.meta.extend(name, content)
        if entry is None:
            if old is not None:
                self.meta.release(old)
            return None
        entry.made_from = block
        before = None if old is None else Stored(old.cells, self.meta.epoch, new=False)
        return Found(entry, Stored(entry.cells, self.meta.epoch, new=True), before, grown, old)

    def holds(self, user: UserPart) -> bool:
        """Whether the user's part is kept, just as it is now. Changes nothing."""
        assert user.key is not None
        return self.meta.valid_tokens(Name("user", user.name, LAYOUT), WholeContent(user.key)) > 0

    def end(self, found: Found, well: bool) -> None:
        """Nobody reads or writes what was found any more. well: the run has not failed, and what was new is there."""
        entry, place = found.entry, found.place
        if found.old is not None:
            self.meta.release(found.old)
        if place.new:
            if well and place.epoch == self.meta.epoch:
                self.meta.written(entry)
            else:
                self.meta.failed(entry)
        self.meta.release(entry)

    def renew(self, epoch: int) -> None:
        """Where the pool is of another epoch: forget the entries."""
        self.meta.renew(epoch)

    def check(self) -> None:
        """Audit; AssertionError."""
        self.meta.check()

    def _before(self, name: Name, block: UInt8) -> tuple[Entry | None, int]:
        """The user's entry, pinned and not to be found any more, where the user grew since; and by how many events."""
        old = None if self._growth is None else self.meta.by_name(name)
        if old is None or self._growth is None or (old.made_from == block).all():
            return None, 0
        events = self._growth(old.made_from, block)
        if events is None:
            return None, 0
        self.meta.hold(old)
        self.meta.drop(name)
        return old, events

    def forget(self, user: str) -> int:
        """Drop a user's entry; how many there were."""
        return int(self.meta.drop(Name("user", user, LAYOUT)))
