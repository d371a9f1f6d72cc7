# SPDX-License-Identifier: Apache-2.0
"""The placed items of one cache worker, as entries of its meta service (BAT-7, BAT-12).

A worker does the steps of the life cycle. A copy takes cells, which nobody can read before they are published. A
published item is pinned, so that it is never evicted to make room for something else. A dropped item cannot be found
any more, but keeps its cells until the last of its readers has finished.

Everything here is pure: whoever moves the bytes fills the cells that `copy` names. The calls come in the order of the
life cycle's steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from jgr.cache.entries import Content, Entry, Name
from jgr.cache.meta import CacheMeta


def item_name(row: int) -> Name:
    """The name of a catalog's row in a meta service."""
    return Name("item", row, "item_prefix")


class CacheWorker:
    """The placed items of one worker.

    meta: the worker's meta service, which may have other entries as well; the pages that it allows to items must hold
    all that the placement puts here. content: gives the tokens of a row.
    """

    def __init__(self, meta: CacheMeta, content: Callable[[int], Content]) -> None:
        self._meta, self._content = meta, content
        self._placed: dict[int, Entry] = {}  # pinned
        self._arriving: dict[int, Entry] = {}

    def copy(self, rows: Iterable[int]) -> dict[int, tuple[int, ...]] | None:
        """The cells to be filled, by row; rows that are cached already, since a request computed them, are left out.

        None: there is no room before the readers of dropped items, or the writer of one of these rows, have finished.
        """
        assert not self._arriving, "one copy at a time"
        to_fill: dict[int, tuple[int, ...]] = {}
        for row in rows:
            name, content = item_name(row), self._content(row)
            entry = self._meta.find(name, content)
            if entry is not None and entry.tokens == len(content):
                self._meta.hold(entry)
            elif (entry := self._meta.extend(name, content)) is not None:
                to_fill[row] = entry.cells
            else:
                self.fail()
                return None
            self._arriving[row] = entry
        return to_fill

    def publish(self) -> None:
        """Report that the cells of the last copy are filled."""
        for row, entry in self._arriving.items():
            if entry.growing is not None:
                self._meta.written(entry)
            self._placed[row] = entry
        self._arriving.clear()

    def arriving(self, row: int) -> Entry:
        """The entry of a row of the last copy."""
        return self._arriving[row]

    def holds(self, row: int) -> bool:
        """Whether the row is published here."""
        return row in self._placed

    @property
    def count(self) -> int:
        """The number of published rows."""
        return len(self._placed)

    def fail(self) -> None:
        """Report that the last copy was given up; its cells are free again."""
        for entry in self._arriving.values():
            if entry.growing is not None:
                self._meta.failed(entry)
            self._meta.release(entry)
        self._arriving.clear()

    def drop(self, rows: Iterable[int]) -> None:
        """Drop published rows. ValueError names a row that is not published."""
        for row in rows:
            if row not in self._placed:
                raise ValueError(f"item {row} is not published here")
            self._meta.drop(item_name(row))
            self._meta.release(self._placed.pop(row))

    def clear(self) -> None:
        """Let all rows go: they are found for as long as nothing else needs their room."""
        self.fail()
        for entry in self._placed.values():
            self._meta.release(entry)
        self._placed.clear()

    def check(self) -> None:
        """Audit: each placed item is pinned, complete and can be found. AssertionError names one that is not."""
        self._meta.check()
        for row, entry in self._placed.items():
            content = self._content(row)
            assert entry.named and entry.pins and entry.tokens == len(content), f"item {row} is not whole"
            assert self._meta.valid_tokens(item_name(row), content), f"item {row} is lost"
