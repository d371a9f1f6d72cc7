# SPDX-License-Identifier: Apache-2.0
"""The life cycle at work (BAT-12): items move between workers' memories while requests read them.

Memories are numpy arrays of cells that hold what they stand for: token t of row r is 1000 r + t. A request finds out
where its items are, pins them, and reads them some time later, so that a cell that was filled too late, given away too
early or half filled shows as a wrong number.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from jgr.cache.entries import Content, Entry
from jgr.cache.meta import CacheMeta
from jgr.cache.pages import Pages, Room
from jgr.placement.items import ItemPlacement, Items, Workers, burst, hash_items, hrcs
from jgr.placement.lifecycle import Lifecycle, Step
from jgr.placement.worker import CacheWorker, item_name

WORKERS, CELLS, CELL_TOKENS, PAGES = 3, 4, 2, 14
Int64 = npt.NDArray[np.int64]


def content(row: int) -> Content:
    return Content.of(np.arange(1 + row * 7 % 5, dtype=np.int32) + 1000 * row)


def make_meta(pages: int) -> CacheMeta:
    """Items in cells of CELL_TOKENS bytes, a byte a token; CELLS of them share a page."""
    return CacheMeta(Pages(pages, CELLS * CELL_TOKENS), {"item": Room(CELL_TOKENS, step=CELL_TOKENS)})


class Reading(NamedTuple):
    """An item that a request has pinned. row: which it is."""

    worker: int
    row: int
    entry: Entry


class World:
    """Workers, their memories, and requests in flight."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.metas = [make_meta(PAGES) for _ in range(WORKERS)]
        self.memory = [np.full((PAGES * CELLS, CELL_TOKENS), -1) for _ in range(WORKERS)]
        self.workers = [CacheWorker(meta, content) for meta in self.metas]
        self.capacity = Workers(WORKERS, PAGES * CELLS * CELL_TOKENS)
        self.cycle = Lifecycle(self.capacity, step_bytes=8)
        self.frequency = self.rng.zipf(1.5, 60).clip(max=100).astype(np.float64)
        self.target = self.place(self.items())
        self.readings: list[list[Reading]] = []
        self.to_fill: list[tuple[int, tuple[int, ...]]] | None = None
        self.waited = self.read = self.remote = 0

    def items(self) -> Items:
        tokens = np.array([len(content(row)) for row in range(len(self.frequency))])
        return Items(self.frequency, tokens, bytes_per_token=1, cell_tokens=CELL_TOKENS)

    def place(self, items: Items) -> ItemPlacement:
        return hrcs(items, self.capacity, prefill_s=1.0, item_tokens=100.0, link_bytes_per_s=200.0)

    def ask(self) -> None:
        """A request starts: it pins what it reads. Items that are nowhere are its own to compute."""
        at = int(self.rng.integers(WORKERS))
        rows = self.rng.choice(len(self.frequency), 5, p=self.frequency / self.frequency.sum()).astype(
            np.int32
        )
        found = []
        for row, worker in zip(rows.tolist(), self.cycle.where(at, rows).tolist(), strict=True):
            if worker >= 0:
                entry = self.metas[worker].find(item_name(row), content(row))
                assert entry is not None, "the life cycle says that it is there"
                self.metas[worker].hold(entry)
                found.append(Reading(worker, row, entry))
                self.remote += worker != at
        self.readings.append(found)

    def answer(self) -> None:
        """Some request that is in flight reads, and ends."""
        if self.readings:
            for worker, row, entry in self.readings.pop(int(self.rng.integers(len(self.readings)))):
                assert self.values(worker, row, entry).tolist() == content(row).tokens.tolist()
                self.metas[worker].release(entry)
                self.read += 1

    def values(self, worker: int, row: int, entry: Entry) -> Int64:
        return self.memory[worker][list(entry.cells)].ravel()[: len(content(row))]

    def advance(self) -> None:
        """The next piece of the next step; one item of a copy at a time."""
        if not self.cycle.steps:
            return
        step = self.cycle.steps[0]
        if step.kind == "copy":
            self.copy(step)
            return
        worker = self.workers[step.worker]
        if step.kind == "publish":
            worker.publish()
        else:
            worker.drop(step.rows.tolist())
        self.cycle.commit(step)

    def copy(self, step: Step) -> None:
        worker = self.workers[step.worker]
        if self.to_fill is None:
            to_fill = worker.copy(step.rows.tolist())
            if to_fill is None:
                self.waited += 1
            else:
                self.to_fill = list(to_fill.items())
        elif self.to_fill:
            row, cells_of_row = self.to_fill.pop()
            source = row % WORKERS if step.source is None else step.source
            for number, cell in enumerate(cells_of_row):
                part: npt.NDArray[np.integer] = content(row).tokens[number * CELL_TOKENS :][:CELL_TOKENS]
                if step.source is not None:
                    entry = self.metas[source].find(item_name(row), content(row))
                    assert entry is not None, "a copy's source is published"
                    part = self.values(source, row, entry)[number * CELL_TOKENS :][:CELL_TOKENS]
                self.memory[step.worker][cell, : len(part)] = part
        elif self.rng.random() < 0.1:
            worker.fail()
            self.cycle.fail(step)
            self.to_fill = None
            self.cycle.plan(self.target)
        else:
            self.cycle.commit(step)
            self.to_fill = None

    def change(self) -> None:
        """Between two steps: a refresh by what is popular now, a burst, or new items."""
        if self.to_fill is not None:
            return
        if self.rng.integers(2):
            self.rng.shuffle(self.frequency)
            self.target = self.place(self.items())
        else:
            rows = self.rng.integers(0, len(self.frequency), 2)
            self.frequency[rows] = self.frequency.max()
            self.target = burst(self.target, rows.tolist())
        self.cycle.plan(self.target)

    def check(self) -> None:
        self.cycle.check()
        for worker in self.workers:
            worker.check()

    def finish(self) -> None:
        while self.readings:
            self.answer()
        while self.cycle.steps:
            self.advance()
        self.check()


@pytest.mark.parametrize("seed", range(4))
def test_no_request_reads_a_half_moved_item(seed: int) -> None:
    world = World(seed)
    world.cycle.plan(world.target)
    for turn in range(3000):
        move = world.rng.choice(["ask", "answer", "advance", "change"], p=[0.2, 0.2, 0.59, 0.01])
        getattr(world, move)()
        if turn % 10 == 0:
            world.check()
    world.finish()
    # Every item is where the target wants it, whole, and the memory holds nothing else.
    for number, (meta, memory) in enumerate(zip(world.metas, world.memory, strict=True)):
        held = np.flatnonzero(world.target.held()[number]).tolist()
        assert meta.number("item") == len(held) and meta.pinned == len(held)
        for row in held:
            entry = meta.find(item_name(row), content(row))
            assert entry is not None
            assert memory[list(entry.cells)].ravel()[: entry.tokens].tolist() == content(row).tokens.tolist()
        assert meta.pages.cells_used("item") * CELL_TOKENS == world.target.used_bytes()[number]
    assert world.read > 1000 and world.remote > 100 and world.waited > 10, "everything that can happen did"


def test_an_item_that_is_there_already_is_not_copied_but_kept() -> None:
    meta = make_meta(2)
    own = meta.extend(item_name(4), content(4))
    assert own is not None
    worker = CacheWorker(meta, content)
    assert worker.copy([3, 4]) is None, "somebody is writing it"
    assert meta.number("item") == 1 and meta.pages.cells_used("item") == len(own.cells)
    meta.written(own)
    meta.release(own)
    cells = worker.copy([3, 4])
    assert cells is not None and list(cells) == [3] and len(cells[3]) == 1
    worker.publish()
    assert meta.find(item_name(4), content(4)) is own
    # What is placed stays when something else wants room, and goes when it is dropped.
    for row in range(10, 20):
        other = meta.extend(item_name(row), content(row))
        if other is not None:
            meta.written(other)
            meta.release(other)
    worker.check()
    worker.drop([4])
    assert not meta.valid_tokens(item_name(4), content(4)) and meta.valid_tokens(item_name(3), content(3))
    with pytest.raises(ValueError, match="item 4 is not published here"):
        worker.drop([4])


def test_a_copy_that_fails_leaves_nothing() -> None:
    meta = make_meta(1)
    worker = CacheWorker(meta, content)
    placement = hash_items(Items(np.ones(5), np.array([len(content(r)) for r in range(5)]), 1), Workers(1, 8))
    assert worker.copy(np.flatnonzero(placement.held()[0]).tolist()) is not None
    worker.fail()
    assert meta.number("item") == meta.pages.cells_used("item") == 0
    assert worker.copy([1, 2, 3, 4]) is None, "eleven tokens do not fit in four cells of two"
    assert meta.number("item") == meta.pages.cells_used("item") == 0
