# SPDX-License-Identifier: Apache-2.0
"""The border between kept users and embedding rows in a model's part of the pool, moved while it serves (HLEM-10, 16).

The one idea: a move is bookkeeping. Rows get free pages, and then those of the users that come last by the meta
service's order; they give away their coldest pages. Nothing is copied and nobody waits: what was dispatched before
reads what stood there before. Pages that somebody has pinned stay, and are asked for again by `retry`.

A border may be made in any thread, as when a version is loaded: nothing is taken then. All calls are made on the event
loop, which alone gives pages out; the first of them is `start`.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from jgr.cache.pages import Pages
from jgr.config import ConfigError


class Rows(Protocol):
    """The side that gives and takes whole pages: `EmbeddingCache`."""

    @property
    def owned(self) -> int: ...

    def grow(self, pages: list[int]) -> None: ...

    def shrink(self, count: int) -> list[int]: ...

    def check(self) -> None: ...

    def close(self) -> None: ...


class Users(Protocol):
    """The side whose entries go where room is needed: `CacheMeta`."""

    def set_limit(self, kind: str, pages: int) -> None: ...


class Border:
    """rows, users: the two sides; users: None where none are kept. pages: the pool's; name: of the rows' class there.

    total: pages of the model's part. least_rows, least_users: the fewest pages of each side. embeddings: pages that the
    rows want at first, and have once `start` was called. ConfigError, with the figures, where the part is too small for
    both sides, or this leaves one of them too few.
    """

    def __init__(
        self,
        rows: Rows,
        users: Users | None,
        pages: Pages,
        name: str,
        total: int,
        embeddings: int,
        least_rows: int = 0,
        least_users: int = 0,
    ) -> None:
        self.rows, self._users, self._pages, self._name = rows, users, pages, name
        self.total, self.least, self.most = total, least_rows, total - least_users
        page_kb = pages.page_bytes / 1024
        if not self.least <= embeddings <= self.most:
            if total < least_rows + least_users:
                raise ConfigError(
                    f"cache.device_mb: {total} pages of {page_kb:.3g} KB; a batch needs {least_rows} for rows, and one "
                    f"user {least_users}"
                )
            raise ConfigError(
                f"memory.split: {embeddings} of {total} pages of {page_kb:.3g} KB for rows; a batch needs "
                f"{least_rows}, and one user {least_users} of the others"
            )
        self.wanted, self._begun = embeddings, False
        self.control: object | None = None
        """What moves it, kept here since both are of the same weights: it outlives the engines over them."""
        self.counts: Counter[str] = Counter()
        """moves; to_rows and to_users, pages that changed sides."""
        pages.add(name, pages.page_bytes)

    def start(self) -> None:
        """Let both sides have what they want at first. Each engine over it calls this; all but the first do nothing."""
        if not self._begun:
            self._begun = True
            self.set_limit(self.wanted)

    @property
    def delayed(self) -> int:
        """Pages that have not changed sides yet, for they are pinned or somebody else's."""
        return abs(self.wanted - self.rows.owned)

    def set_limit(self, embeddings: int) -> int:
        """Let rows have so many pages, and users the others. Gives how many changed sides at once; `retry` moves what
        is delayed. ValueError, with the figures, where this leaves one side too little."""
        if not self.least <= embeddings <= self.most:
            raise ValueError(
                f"{embeddings} pages of {self.total} for rows: {self.least} to {self.most} can be"
            )
        self.wanted = embeddings
        self.counts["moves"] += 1
        return self._move()

    def retry(self) -> int:
        """Move what was delayed, as far as it can be now. Gives how many pages changed sides."""
        return self._move() if self.wanted != self.rows.owned else 0

    def _move(self) -> int:
        owned = self.rows.owned
        if self.wanted < owned:
            given = self.rows.shrink(owned - self.wanted)
            self._pages.give_pages(self._name, given)
            self.counts["to_users"] += len(given)
            self._limit_users(owned - len(given))
            return len(given)
        self._limit_users(self.wanted)  # before pages are taken: users that are beyond it go
        taken = self._pages.take_pages(self._name, self.wanted - owned)
        if taken:
            self.rows.grow(taken)
        self.counts["to_rows"] += len(taken)
        return len(taken)

    def _limit_users(self, embeddings: int) -> None:
        if self._users is not None:
            self._users.set_limit("user", self.total - embeddings)

    def renew(self, epoch: int) -> None:
        """The rows find out by themselves that the pool was emptied."""

    def close(self) -> None:
        """Give all pages back. ValueError where one is pinned. Where nothing was started, any thread may call it."""
        self.control = None  # which holds this border and its rows: a cycle would keep their device memory
        self.rows.close()
        self._pages.give_pages(self._name, self.rows.shrink(self.rows.owned))
        self._pages.remove(self._name)

    def check(self) -> None:
        """Audit; AssertionError."""
        self.rows.check()
        assert self._pages.used(self._name) == self.rows.owned, "rows own other pages than they were given"
