# SPDX-License-Identifier: Apache-2.0
"""Meta services of several devices: whatever is asked in whatever order, cells hold what their entries say.

The pools are here dictionaries, and copies are made in them in their order.
"""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jgr.cache.entries import Content, Entry, Name
from jgr.cache.hotness import ItemFrequencies
from jgr.cache.neighbours import Neighbour, Neighbours
from jgr.cache.pages import Pages, Room

DEVICES, ITEMS = 3, 7


def content(item: int, version: int) -> Content:
    return Content.of(np.array([item, version, *range(item % 3)], np.int32))


class Devices(RuleBasedStateMachine):
    @initialize(pages=st.integers(1, 6), hot=st.sampled_from([0.0, 0.5, 1.0]))
    def begin(self, pages: int, hot: float) -> None:
        metas = [Neighbour(n, Pages(pages, 64), {"item": Room(32, 1, 2)}) for n in range(DEVICES)]
        self.all = Neighbours(metas, True, hot)
        self.all.set_limit("item", pages)
        self.all.frequencies = ItemFrequencies(ITEMS, 10**9)
        self.held: list[dict[int, bytes]] = [{} for _ in metas]  # by cell: the content's hash
        self.batches: list[tuple[int, list[Entry], list[Entry]]] = []
        self.now_ns = 0

    def copies(self) -> None:
        for fetch in self.all.take_fetches():
            for cell, into in zip(fetch.cells, fetch.into, strict=True):
                self.held[fetch.to][into] = self.held[fetch.source][cell]

    @rule(
        device=st.integers(0, DEVICES - 1),
        items=st.sets(st.integers(0, ITEMS - 1), min_size=1),
        version=st.integers(0, 1),
    )
    def batch(self, device: int, items: set[int], version: int) -> None:
        """A batch of a device reads what is cached and writes the others, as a planner has it."""
        meta, read, written = self.all.metas[device], list[Entry](), list[Entry]()
        self.now_ns += 10**8
        self.all.refresh(self.now_ns)
        assert meta.frequencies is not None
        meta.frequencies.touch(sorted(items), 1, self.now_ns)
        for item in sorted(items):
            name, of = Name("item", str(item), "item_prefix"), content(item, version)
            foreseen = meta.valid_tokens(name, of, device)
            found = meta.find(name, of, device)
            if found is not None:
                assert found.tokens == len(of) == foreseen
                meta.hold(found)
                read.append(found)
                continue
            writer = meta.extend(name, of, device)
            if writer is not None:
                written.append(writer)
        for entry in written:
            meta.planned(entry, device)
        self.copies()  # in front of the program
        for entry in read:
            if entry.writers == 0:
                assert {self.held[device].get(cell) for cell in entry.cells} == {entry.digest}
        for entry in written:
            self.held[device].update(dict.fromkeys(entry.cells, entry.digest))
        self.batches.append((device, read, written))

    @rule(well=st.booleans(), last=st.booleans())
    def end(self, well: bool, last: bool) -> None:
        """A batch ends, and what it read and wrote is tidied."""
        if not self.batches:
            return
        device, read, written = self.batches.pop(-1 if last else 0)
        meta = self.all.metas[device]
        for entry in written:
            meta.settled(entry) if well else meta.spoiled(entry)
            meta.release(entry)
        for entry in read:
            meta.release(entry)
        self.all.tidy()

    @rule()
    def lose(self) -> None:
        if not self.batches:
            self.all.renew(self.all.epoch + 1)
            self.held = [{} for _ in self.held]

    @invariant()
    def entries_are_in_their_cells(self) -> None:
        if not hasattr(self, "all"):
            return
        self.copies()
        self.all.check()
        for meta in self.all.metas:
            for entry in meta._entries["item"].values():
                if entry.tokens and entry.writers == 0:
                    assert {self.held[meta.device].get(cell) for cell in entry.cells} == {entry.digest}
            if not self.batches:
                strangers = [n for n in meta.names("item") if self.all.home(n) != meta.device]
                assert not meta.strangers or not strangers

    def teardown(self) -> None:
        while getattr(self, "batches", []):
            self.end(True, True)
        if hasattr(self, "all"):
            self.entries_are_in_their_cells()


TestDevices = Devices.TestCase
TestDevices.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)


def neighbours(hot_share: float, pages: int = 20) -> Neighbours:
    metas = [Neighbour(n, Pages(pages, 64), {"item": Room(32, 1, 2)}) for n in range(DEVICES)]
    found = Neighbours(metas, True, hot_share)
    found.set_limit("item", pages)
    found.frequencies = ItemFrequencies(ITEMS, 10**9)
    return found


def compute(found: Neighbours, device: int, item: int) -> None:
    meta, name, of = found.metas[device], Name("item", str(item), "item_prefix"), content(item, 0)
    entry = meta.extend(name, of, device)
    assert entry is not None
    meta.planned(entry, device)
    meta.settled(entry)
    meta.release(entry)
    found.tidy()


def there(found: Neighbours, item: int) -> list[int]:
    name = Name("item", str(item), "item_prefix")
    return [meta.device for meta in found.metas if meta.by_name(name) is not None]


def test_a_cold_item_goes_home_and_a_hot_one_stays_too() -> None:
    found = neighbours(0.0)
    compute(found, 0, 4)  # whose home is device 1
    assert there(found, 4) == [1]
    assert [(fetch.source, fetch.to) for fetch in found.take_fetches()] == [(0, 1)]
    meta, name = found.metas[2], Name("item", "4", "item_prefix")
    assert meta.valid_tokens(name, content(4, 0)) == len(content(4, 0))
    assert meta.valid_tokens(name, content(4, 1)) == 0  # of another content
    assert meta.find(name, content(4, 0)) is not None
    assert [(fetch.source, fetch.to) for fetch in found.take_fetches()] == [(1, 2)]
    found.tidy()  # no batch reads the copy
    assert there(found, 4) == [1]
    found.hot = frozenset({4})
    assert meta.find(name, content(4, 0)) is not None
    found.tidy()
    assert there(found, 4) == [1, 2]


def test_what_a_batch_is_still_to_write_is_read_by_no_other_device() -> None:
    found = neighbours(1.0)
    meta, name, of = found.metas[1], Name("item", "1", "item_prefix"), content(1, 0)
    entry = meta.extend(name, of, 1)
    assert entry is not None
    meta.planned(entry, 1)
    assert found.metas[0].valid_tokens(name, of, 0) == 0
    assert found.metas[0].find(name, of, 0) is None
    meta.settled(entry)
    assert found.metas[0].find(name, of, 0) is not None


def test_only_items_as_hot_as_there_is_room_for_are_hot() -> None:
    found = neighbours(0.5, pages=4)
    for item in range(ITEMS):
        compute(found, item % DEVICES, item)
    assert found.frequencies is not None
    for at, item in enumerate((5, 5, 5, 2, 2, 0), start=1):
        found.frequencies.touch([item], 1, at)
    found.refresh(10)
    room = int(0.5 * 4 * found.number("item") / found.used("item"))
    assert len(found.hot) == min(3, room)
    assert 5 in found.hot
    before = found.hot
    found.frequencies.touch([1] * 1, 1, 11)
    found.refresh(12)  # a moment later: as it was
    assert found.hot == before


def test_homes_are_spread_evenly() -> None:
    found = neighbours(0.0)
    homes = [found.home(Name("item", str(item), "item_prefix")) for item in range(9)]
    assert homes == [0, 1, 2] * 3
