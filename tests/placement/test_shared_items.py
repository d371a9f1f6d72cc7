# SPDX-License-Identifier: Apache-2.0
"""The store of a node's shared items, in real host memory: placed ones stay, fetched ones go, bytes are never mixed up.

An item's bytes say whose they are, so that a cell that was given away too early, or filled too late, shows.
"""

from __future__ import annotations

import numpy as np
import pytest

from jgr.cache.entries import Content, Entry
from jgr.cache.host import HostTier, read_cells
from jgr.cache.meta import CacheMeta
from jgr.cache.pages import Pages, Room
from jgr.cache.pool import DevicePool
from jgr.models.words import Cells
from jgr.placement.shared_items import Block, SharedItems, block_of, capacity_bytes
from jgr.placement.worker import item_name

PAGE_BYTES, PAGES, WORDS, TOKENS, ROWS = 1024, 6, 64, 2, 30
CELLS = Cells.of(WORDS * 4, PAGE_BYTES)
CELL_COUNT = PAGES * CELLS.per_page


def content(row: int) -> Content:
    return Content.of(np.arange(1 + row % 5, dtype=np.int32) + 100 * row)


def cells_of(row: int) -> int:
    return -(-len(content(row)) // TOKENS)


def block(row: int) -> Block:
    return block_of(np.full((cells_of(row), WORDS), row, np.uint32))


class World:
    """A store, and what is going on. pinned: rows that others asked for, and the entries that they got."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        pool = DevicePool(2, PAGE_BYTES)
        self.host = HostTier(pool, 1, PAGES)
        room = {"item": Room(WORDS * 4, step=TOKENS)}
        self.meta = CacheMeta(self.host.beyond, room, owner="placed")
        limit = capacity_bytes(PAGES, PAGE_BYTES, CELLS, 1)
        self.items = SharedItems(self.meta, self.host, CELLS, content, limit)
        self.placed: set[int] = set()
        self.reserved: dict[int, Entry] = {}
        self.pinned: list[tuple[list[int], list[Entry | None]]] = []
        self.read = self.went = 0

    def draw(self, count: int) -> list[int]:
        return self.rng.choice(ROWS, count, replace=False).tolist()

    def fetch(self) -> None:
        """Items of another node come for a request."""
        for row in self.draw(3):
            there = self.items.valid_tokens(item_name(row), content(row))
            entry = self.items.reserve(row)
            assert entry is None or not there, "what is there is not fetched"
            if entry is not None:
                assert self.items.find(item_name(row), content(row)) is None, "it is not found before it came"
                assert self.items.reserve(row) is None, "nobody fetches it twice"
                self.reserved[row] = entry

    def arrive(self) -> None:
        for row, entry in self.reserved.items():
            if self.rng.random() < 0.2:
                self.items.give_up(entry)
            elif self.rng.random() < 0.1:
                with pytest.raises(ValueError, match="another size"):
                    self.items.publish(entry, block_of(np.zeros((9, WORDS), np.uint32)))
            else:
                self.items.publish(entry, block(row))
                assert self.items.valid_tokens(item_name(row), content(row)) == len(content(row))
        self.reserved.clear()

    def place(self) -> None:
        """A step of the placement, of no more than half of the room."""
        room = CELL_COUNT // 2 - sum(map(cells_of, self.placed))
        rows = [row for row in self.draw(4) if row not in self.placed]
        rows = [row for at, row in enumerate(rows) if sum(map(cells_of, rows[: at + 1])) <= room]
        to_fill = self.items.copy(rows)
        if to_fill is None:  # somebody still fetches one of them, or reads what was dropped
            assert self.reserved or self.pinned
            return
        for row in to_fill:
            self.items.place(row, block(row))
        if self.rng.random() < 0.2:
            self.items.give_up_placing()
        else:
            self.items.publish_placed()
            self.placed |= set(rows)

    def drop(self) -> None:
        rows = [row for row in self.placed if self.rng.random() < 0.3]
        self.items.drop([*rows, ROWS + 1])
        self.placed -= set(rows)

    def pin(self) -> None:
        rows = self.draw(4)
        found = self.items.pin(rows, [content(row).digest for row in rows])
        assert [row for row, entry in zip(rows, found, strict=True) if entry] == [
            row for row in rows if row in self.placed
        ], "others read just what is placed here"
        self.pinned.append((rows, found))

    def unpin(self) -> None:
        self.host.catch_up()
        for rows, found in self.pinned:
            for row, entry in zip(rows, found, strict=True):
                if entry is not None:
                    stored = self.items.stored(entry)
                    np.testing.assert_array_equal(stored.words, block(row).words)
                    assert stored.checksum == block(row).checksum
                    self.read += 1
            self.items.unpin(found)
        self.pinned.clear()

    def check(self) -> None:
        self.items.check()
        for row in self.placed:
            assert self.items.holds(item_name(row), content(row).digest), f"item {row} has gone for others"
        assert self.meta.used("item") <= PAGES
        assert self.items.placed == len(self.placed)
        self.host.catch_up()
        for row in range(ROWS):
            found = self.items.find(item_name(row), content(row))
            if found is None:
                self.went += 1
                continue
            tokens, cells = found
            assert tokens == len(content(row))
            assert min(cells) >= CELLS.per_page, "beyond the pages of what the device gives up"
            np.testing.assert_array_equal(self.host.stored(cells, CELLS), block(row).words)


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_steps_keeps_what_is_placed_and_mixes_nothing_up(seed: int) -> None:
    world = World(seed)
    actions = [world.fetch, world.arrive, world.place, world.drop, world.pin, world.unpin]
    for _ in range(150):
        actions[int(world.rng.integers(len(actions)))]()
        world.check()
    assert world.read and world.went, "items were read, and some made room"
    world.arrive()
    world.unpin()
    world.items.clear()
    world.meta.clear()
    assert world.host.beyond.free == PAGES


def test_an_item_of_other_tokens_is_not_given_to_others() -> None:
    world = World(0)
    (row,) = world.items.copy([7]) or ()
    world.items.place(row, block(row))
    world.items.publish_placed()
    assert world.items.pin([7], [content(8).digest]) == [None]


def test_what_is_placed_takes_no_more_than_the_limit() -> None:
    world = World(0)
    rows = list(range(ROWS))
    assert world.items.copy(rows) is None, "all of them do not fit"
    assert world.host.beyond.free == PAGES, "and nothing is left of the try"


def test_a_store_is_closed_once_nobody_uses_it() -> None:
    world, closed = World(0), []
    (row,) = world.items.copy([7]) or ()
    world.items.place(row, block(row))
    world.items.publish_placed()
    entries = world.items.pin([7], [content(7).digest])
    reserved = world.items.reserve(8)
    assert reserved is not None
    world.items.close(lambda: closed.append(True))
    assert not closed
    world.items.unpin(entries)
    world.items.give_up(reserved)
    assert closed == [True]
    world.meta.close()


def test_the_device_finds_items_below_itself_and_does_not_copy_them_back() -> None:
    """The moves that bring an item up are those of the host tier, and the bytes arrive in the pool."""
    world = World(0)
    pool = world.host._pool
    pages = Pages(2, PAGE_BYTES)
    device = CacheMeta(pages, {"item": Room(WORDS * 4, step=TOKENS)}, host=world.host.pages)
    device.below = world.items
    entry = world.items.reserve(3)
    assert entry is not None
    world.items.publish(entry, block(3))
    assert device.valid_tokens(item_name(3), content(3)) == len(content(3))
    up = device.find(item_name(3), content(3))
    assert up is not None
    world.host.plan(device.take_moves(), CELLS, 0)
    world.host.catch_up()
    np.testing.assert_array_equal(read_cells(pool, up.cells, CELLS, 0), block(3).words)
    device.set_limit("item", 0)  # it goes
    assert device.take_moves() == []
    assert device.valid_tokens(item_name(3), content(3)) == len(content(3)), "it is still below"
    assert device.find(item_name(3), content(4)) is None, "of other tokens it is of no use"
