# SPDX-License-Identifier: Apache-2.0
"""What runs the batches of several schedulers of one engine, in the order in which these planned them."""

from __future__ import annotations

from collections.abc import Set
from itertools import chain

from jgr.cache.entries import Entry


class Lane:
    """The batches in flight of all kinds of request, since one kind's may read what another one's writes.

    pinned: of each batch, by its jobs, the entries that each of its requests reads and writes.
    """

    def __init__(self) -> None:
        self.pinned: dict[tuple[int, ...], list[tuple[list[Entry], list[Entry]]]] = {}

    def using(self, entries: Set[Entry]) -> set[tuple[int, ...]]:
        """The batches that read one of these entries, or write it."""
        return {
            jobs
            for jobs, pins in self.pinned.items()
            if any(not entries.isdisjoint(chain(read, written)) for read, written in pins)
        }
