# SPDX-License-Identifier: Apache-2.0
"""The cache meta services of devices that each serve requests of their own, and the items that they have for each other
(BAT-7, BAT-11: hot items are replicated, cold ones sharded).

The one idea: an item's home is one of the devices, by its row. Whoever computed it keeps it until its batch has ended;
with the next batch it goes to its home. A device that lacks it copies it from there (`Fetch`) in front of the batch
that reads it, and keeps that copy only if the item is one of the hottest. Users' entries stay where they were computed.

Only what stands in its cells is copied: what a batch in flight is still to write is read by no other device. Copies are
made in the order in which they were planned, in front of all programs that are planned after them, as the moves of a
host tier are. So neither what is copied nor where it goes needs a pin.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from jgr.cache.entries import Below, Entry, Fetch, Name, Valued
from jgr.cache.hotness import Hotness, ItemFrequencies
from jgr.cache.meta import CacheMeta
from jgr.cache.pages import Pages, Room

REFRESH_NS = 1_000_000_000
"""How often it is found out which items are hot."""


class Neighbour(CacheMeta):
    """The meta service of one device. number: the device's."""

    def __init__(
        self,
        number: int,
        pages: Pages,
        rooms: Mapping[str, Room],
        hotness: Hotness | None = None,
        owner: str = "",
    ) -> None:
        super().__init__(pages, rooms, hotness, owner=owner)
        self.device = number
        self.others: Neighbours | None = None
        """Whose items are copied here; None: nobody's."""
        self.strangers: dict[Name, Entry] = {}
        """Items of other homes, whose stay is still to be decided."""

    def valid_tokens(self, name: Name, content: Valued, lane: object = None) -> int:
        """See CacheMeta; of items also those that would be copied from another device."""
        found = super().valid_tokens(name, content, lane)
        if found or self.others is None or name.kind != "item" or name in self._entries["item"]:
            return found
        return len(content) if self.others.source(self, name, content.digest) else 0

    def limit(self, kind: str) -> int:
        """Pages that entries of a kind may hold."""
        return self.pages.limit(self._classes[kind])

    def whole(self, name: Name, digest: bytes) -> Entry | None:
        """The entry that has all of this content in its cells, for programs of every device."""
        entry = self._entries[name.kind].get(name)
        there = entry is not None and entry.tokens and entry.digest == digest and entry.ahead is None
        return entry if there else None

    def copy(self, name: Name, tokens: int, digest: bytes, source: Neighbour, entry: Entry) -> Entry | None:
        """An entry with the same content as one of another device, copied from there. None: there is no room."""
        assert self.others is not None
        held = Entry(name, tokens, digest, ())
        if name in self._entries[name.kind] or not self._widen(held, tokens):
            return None
        used = entry.cells[: self.cells(name.kind, tokens)]
        self.others.fetches.append(Fetch(source.device, self.device, used, held.cells))
        self._add(held)
        self.counts["from_device"] += 1
        return held

    def _bring_back(self, name: Name, content: Valued) -> Entry | None:
        found = super()._bring_back(name, content)
        if found is not None or self.others is None or name.kind != "item":
            return found
        source = self.others.source(self, name, content.digest)
        return None if source is None else self.copy(name, len(content), content.digest, *source)

    def _add(self, entry: Entry) -> None:
        super()._add(entry)
        others, name = self.others, entry.name
        if others is not None and name.kind == "item" and others.home(name) != self.device:
            self.strangers[name] = entry


class Copied(Protocol):
    """What was copied between devices; see jgr.cache.device_reads."""

    bytes: npt.NDArray[np.int64]
    sent: int


@dataclass(frozen=True)
class AllPages:
    """Pages of all devices, and how many of them nobody holds."""

    count: int
    free: int


class Neighbours:
    """The meta services of all devices of a model; of what CacheMeta tells and takes, that of all of them together.

    shares: whether items are copied from device to device. hot_share: of the pages for items, those that copies of hot
    ones may take. reads: makes the copies; None: nobody does.
    """

    def __init__(
        self, metas: Sequence[Neighbour], shares: bool, hot_share: float, reads: Copied | None = None
    ) -> None:
        self.metas, self.reads = tuple(metas), reads
        self.below: Below | None = None  # there is nothing below the pools
        self.fetches: list[Fetch] = []
        self.hot: frozenset[int] = frozenset()
        self._hot_share, self._refreshed_ns = hot_share, 0
        self._frequencies: ItemFrequencies | None = None
        if shares:
            for meta in self.metas:
                meta.others = self

    # Where items are.

    def home(self, name: Name) -> int:
        """The device that keeps an item whether it is hot or not."""
        return int(name.id) % len(self.metas)

    def source(self, asks: Neighbour, name: Name, digest: bytes) -> tuple[Neighbour, Entry] | None:
        """A device that has an item, its home before others, and its entry there."""
        home = self.home(name)
        for meta in (*self.metas[home:], *self.metas[:home]):
            entry = None if meta is asks else meta.whole(name, digest)
            if entry is not None:
                return meta, entry
        return None

    def tidy(self) -> None:
        """Bring what devices computed to its homes, and drop the copies that no batch reads any more but hot ones."""
        for meta in self.metas:
            for name, entry in list(meta.strangers.items()):
                if entry.named and (entry.pins or entry.ahead is not None):
                    continue
                del meta.strangers[name]
                if not entry.named:
                    continue
                home = self.metas[self.home(name)]
                kept = home.whole(name, entry.digest) or home.copy(
                    name, entry.tokens, entry.digest, meta, entry
                )
                if kept is not None and int(name.id) not in self.hot:
                    meta.drop(name)

    def refresh(self, now_ns: int) -> None:
        """Find out which items are hot, where that was long ago."""
        if self._frequencies is None or (self.hot and now_ns - self._refreshed_ns < REFRESH_NS):
            return
        self._refreshed_ns = now_ns
        rows, _ = self._frequencies.hottest(self._hot_items(), now_ns)
        self.hot = frozenset(rows.tolist())

    def _hot_items(self) -> int:
        """How many items as large as those that are kept fit into the share of a device's pages that is for hot
        ones."""
        number, used = self.number("item"), sum(meta.used("item") for meta in self.metas)
        if not used:
            return 0
        pages = min(meta.limit("item") for meta in self.metas)
        return int(self._hot_share * pages * number / used)

    def take_fetches(self) -> tuple[Fetch, ...]:
        """The copies to be made, in this order, before the programs that are planned from now on.

        Each is given once.
        """
        fetches, self.fetches = tuple(self.fetches), []
        return fetches

    # What CacheMeta has too.

    @property
    def epoch(self) -> int:
        return self.metas[0].epoch

    @property
    def kinds(self) -> tuple[str, ...]:
        return self.metas[0].kinds

    @property
    def counts(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for meta in self.metas:
            found.update(meta.counts)
        return found

    @property
    def frequencies(self) -> ItemFrequencies | None:
        return self._frequencies

    @frequencies.setter
    def frequencies(self, counts: ItemFrequencies | None) -> None:
        self._frequencies = counts
        for meta in self.metas:
            meta.frequencies = counts

    @property
    def pinned(self) -> int:
        return sum(meta.pinned for meta in self.metas)

    def renew(self, epoch: int) -> None:
        """See CacheMeta."""
        if epoch != self.epoch:
            self.fetches = []
        for meta in self.metas:
            meta.renew(epoch)
            meta.strangers = {name: entry for name, entry in meta.strangers.items() if entry.named}

    def clear(self) -> None:
        """See CacheMeta."""
        self.fetches = []
        for meta in self.metas:
            meta.clear()

    def close(self) -> None:
        """See CacheMeta."""
        self.fetches = []
        for meta in self.metas:
            meta.close()

    def check(self) -> None:
        """Audit; AssertionError."""
        for meta in self.metas:
            meta.check()
            for name, entry in meta.strangers.items():
                assert not entry.named or self.home(name) != meta.device, "an item is a stranger at home"

    def set_limit(self, kind: str, pages: int) -> None:
        """Pages of each device that entries of a kind may hold."""
        for meta in self.metas:
            meta.set_limit(kind, pages)

    def used(self, kind: str) -> int:
        """See CacheMeta."""
        return sum(meta.used(kind) for meta in self.metas)

    def number(self, kind: str) -> int:
        """Entries of a kind on all devices, copies included."""
        return sum(meta.number(kind) for meta in self.metas)

    def names(self, kind: str) -> Iterator[Name]:
        """See CacheMeta; each name once."""
        return iter(dict.fromkeys(name for meta in self.metas for name in meta.names(kind)))

    def fragmentation(self, kind: str) -> float:
        """The mean of the devices'."""
        return sum(meta.fragmentation(kind) for meta in self.metas) / len(self.metas)

    @property
    def pages(self) -> AllPages:
        """The pages of all devices together."""
        every = [meta.pages for meta in self.metas]
        return AllPages(sum(pages.count for pages in every), sum(pages.free for pages in every))
