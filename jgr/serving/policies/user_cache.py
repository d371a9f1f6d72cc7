# SPDX-License-Identifier: Apache-2.0
"""Users' states kept between requests, in cells of the device's pool (DESIGN idea 3, MODEL-13, MODEL-14).

The one idea: an entry is what was computed from a content, which says all that it depends on
(`user_block.UserContent`). Another history, context or scenario, or time where what is kept depends on it, is other
content, which finds the entry stale and frees it. Where users can grow, an entry of the first events serves who has
more: what is new is computed from it and written behind it, in the same cells and in new ones for what they do not
hold. Others may read the first events meanwhile, as one may who asks with fewer events than are kept, and where the
writer fails they are still there. Whoever cannot write, since somebody else does or there is no room, computes what is
new for itself. Entries belong to one revision of a model, so another never finds them.

`cache.histories` and `cache.pool.StateView` write and read the states; `UserCache` does the bookkeeping, on the event
loop.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple

from jgr.cache.entries import Entry, Name, Stored, Valued, serves
from jgr.cache.meta import CacheMeta
from jgr.serving.policies.jobs import Kept, UserPart

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

    place: None: nowhere. before: where the state is that it can be computed from, of the user with `grown` fewer
    events, in the same entry; None: nowhere.
    """

    entry: Entry
    place: Stored | None
    before: Stored | None = None
    grown: int = 0


class UserCache:
    """Which users' states are in the pool. All calls are made on the event loop.

    meta: a service with entries of kind "user", of one room; other engines of the same model may share it. content: of
    a UserPart's key. growth: the most new events that are computed from an entry; 0: none are.
    """

    def __init__(
        self, meta: CacheMeta, content: Callable[[bytes], Valued] = WholeContent, growth: int = 0
    ) -> None:
        self.meta, self._content, self._growth = meta, content, growth

    def find(self, user: UserPart) -> Found | None:
        """None: it is being written, there is no room, or there is nothing to be kept."""
        name, content = self._named(user)
        length, epoch = len(content), self.meta.epoch
        if length == 0:
            return None
        if (entry := self._covering(name, content)) is not None:
            self.meta.find(name, entry.made_from)  # it was used
            self.meta.hold(entry)
            return Found(entry, Stored(entry.cells, epoch, False, length))
        entry = self.meta.find(name, content)
        known = 0 if entry is None else entry.tokens
        grown = length - known if entry is not None and length - known <= self._growth else 0
        extended = self.meta.extend(name, content)
        pinned = extended or (entry if grown else None)
        if pinned is None:
            return None
        if extended is None:
            self.meta.hold(pinned)
        else:
            extended.made_from = content
        place = None if extended is None else Stored(extended.cells, epoch, True, length, known)
        return Found(pinned, place, Stored(pinned.cells, epoch, False, known) if grown else None, grown)

    def holds(self, user: UserPart) -> bool:
        """Whether the user's part is kept, just as it is now. Changes nothing."""
        return self.kept(user) == "kept"

    def kept(self, user: UserPart) -> Kept:
        """Whether the user's part is kept on the device, or what it has grown from, or neither. Changes nothing."""
        entry = self.meta.by_name(Name("user", user.name, LAYOUT))
        if entry is None:  # a content takes the hash of all that the part depends on
            return ""
        _, content = self._named(user)
        if _covers(entry, content):
            return "kept"
        return "grown" if serves(entry, content) and len(content) - entry.tokens <= self._growth else ""

    def end(self, found: Found, well: bool) -> None:
        """Nobody reads or writes what was found any more. well: the run has not failed, and what was new is there."""
        entry, place = found.entry, found.place
        if place is not None and place.new:
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

    def forget(self, user: str) -> int:
        """Drop a user's entry; how many there were."""
        return int(self.meta.drop(Name("user", user, LAYOUT)))

    def _covering(self, name: Name, content: Valued) -> Entry | None:
        """The entry that has all of the content, and may have more events behind it."""
        entry = self.meta.by_name(name)
        return entry if entry is not None and _covers(entry, content) else None

    def _named(self, user: UserPart) -> tuple[Name, Valued]:
        assert user.key is not None
        return Name("user", user.name, LAYOUT), self._content(user.key)


def _covers(entry: Entry, content: Valued) -> bool:
    length = len(content)
    if not 0 < length <= entry.tokens:
        return False
    known = entry.digest if length == entry.tokens else entry.made_from.prefix(length)
    return known == content.digest
