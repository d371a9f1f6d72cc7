# SPDX-License-Identifier: Apache-2.0
"""The host tier against copies in plain numpy: whatever is planned, joined moves leave what the moves would leave, made
one by one."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jgr.cache import host
from jgr.cache.entries import Move
from jgr.cache.host import HostTier, read_cells
from jgr.cache.pool import DevicePool
from jgr.models.words import Cells

Direction = Literal["to_host", "to_device"]
Words = npt.NDArray[np.uint32]
PATIENCE_S = 30.0
PAGE_BYTES, DEVICE_PAGES, HOST_PAGES, BEYOND = 1024, 10, 8, 4
SIZES = {"small": Cells.of(64, PAGE_BYTES), "large": Cells.of(400, PAGE_BYTES)}


class Both:
    """A host tier, and what it should do: each move by itself, in its turn, of numbers in two arrays."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.pool = DevicePool(DEVICE_PAGES, PAGE_BYTES)
        self.tier = HostTier(self.pool, HOST_PAGES, BEYOND)
        self.device: Words = rng.integers(1, 2**32, (DEVICE_PAGES, PAGE_BYTES // 4), np.uint32)
        self.host = np.zeros((HOST_PAGES + BEYOND, PAGE_BYTES // 4), np.uint32)
        self.planned: list[tuple[int, Move | tuple[tuple[int, ...], Words], Cells]] = []
        self._become(self.device)

    def _become(self, words: Words) -> None:
        sharding = self.pool.sharding
        self.pool.write(lambda array: jax.device_put(words.copy(), sharding), self.pool.epoch)

    def move(self, direction: Direction, cells: Cells, device: Sequence[int], on_host: Sequence[int]) -> None:
        move = Move(direction, "m", tuple(device), tuple(on_host))
        self.tier.plan([move], cells, self.pool.epoch)
        self.planned.append((self.pool.epoch, move, cells))

    def fill(self, cells: Cells, on_host: Sequence[int], value: int) -> None:
        values: Words = np.arange(len(on_host) * cells.words, dtype=np.uint32).reshape(-1, cells.words)
        values += np.uint32(value)
        self.tier.fill(tuple(on_host), values, cells)
        self.planned.append((self.pool.epoch, (tuple(on_host), values), cells))

    def lose(self) -> None:
        self.pool.lose(self.pool.epoch, ArithmeticError())
        self.device = np.zeros_like(self.device)

    def run(self, page: int, value: int) -> None:
        """A program that writes a page, which is dispatched after all that was planned."""
        self.catch_up()
        self.device[page] = value
        self.pool.write(lambda array: array.at[page].set(np.uint32(value)), self.pool.epoch)

    def catch_up(self) -> None:
        self.tier.catch_up()
        for epoch, what, cells in self.planned:
            if not isinstance(what, Move):
                for cell, values in zip(*what, strict=True):
                    at(self.host, cell, cells)[:] = values
            elif epoch == self.pool.epoch:
                for there, here in zip(what.device, what.host, strict=True):
                    on_device, on_host = at(self.device, there, cells), at(self.host, here, cells)
                    into, source = (
                        (on_host, on_device) if what.direction == "to_host" else (on_device, on_host)
                    )
                    into[:] = source
        self.planned.clear()

    def check(self) -> None:
        self.catch_up()
        self.tier._copies.submit(int).result()  # the copies so far have ended
        np.testing.assert_array_equal(self.pool.read(np.asarray, self.pool.epoch), self.device)
        np.testing.assert_array_equal(self.tier._array, self.host)


def at(array: Words, cell: int, cells: Cells) -> Words:
    page, place = divmod(cell, cells.per_page)
    return array[page, place * cells.words : (place + 1) * cells.words]


EVENTS = st.tuples(
    st.sampled_from(
        ("to_host", "to_device", "to_host", "to_device", "again", "fill", "run", "lose", "catch_up")
    ),
    st.sampled_from(("small", "small", "large")),
    st.integers(1, 40),
    st.integers(0, 2**16),
)


@given(st.lists(EVENTS, max_size=30))
@settings(max_examples=150, deadline=None)
def test_joined_moves_leave_what_the_moves_leave_one_by_one(events: list[tuple[Any, str, int, int]]) -> None:
    """Cells of two sizes share pages, and the same cells are read and written time and again."""
    both, last = Both(), "to_host"
    for what, size, most, seed in events:
        rng, cells = np.random.default_rng(seed), SIZES[size]
        on_device, on_host = DEVICE_PAGES * cells.per_page, (HOST_PAGES + BEYOND) * cells.per_page
        count = min(most, on_device, on_host)
        if what in ("to_host", "to_device", "again"):  # again: as the one before, so that it joins it
            last = last if what == "again" else what
            device, there = (rng.choice(n, count, replace=False).tolist() for n in (on_device, on_host))
            both.move(last, cells, device, there)  # type: ignore[arg-type]
        elif what == "fill":
            both.fill(cells, rng.choice(on_host, count, replace=False).tolist(), seed)
        elif what == "run":
            both.run(seed % DEVICE_PAGES, seed)
        elif what == "lose":
            both.lose()
        else:
            both.catch_up()
    both.check()


class Dispatched:
    """Counts the programs that a pool is given."""

    def __init__(self, pool: DevicePool, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads = self.writes = 0
        read, write = pool.read, pool.write

        def counted_read(*given: Any) -> Any:
            self.reads += 1
            return read(*given)

        def counted_write(*given: Any) -> None:
            self.writes += 1
            write(*given)

        monkeypatch.setattr(pool, "read", counted_read)
        monkeypatch.setattr(pool, "write", counted_write)


@pytest.mark.parametrize(("moves", "each", "programs"), [(1, 3, 1), (8, 2, 1), (30, 4, 1), (40, 4, 2)])
def test_moves_that_follow_each_other_are_made_by_few_programs(
    monkeypatch: pytest.MonkeyPatch, moves: int, each: int, programs: int
) -> None:
    """More than the largest program moves are made by several."""
    both, cells = Both(), SIZES["small"]
    dispatched = Dispatched(both.pool, monkeypatch)
    for number in range(moves):
        some = range(number * each, (number + 1) * each)
        both.move("to_host", cells, some, [159 - cell for cell in some])
    both.catch_up()
    assert (dispatched.reads, dispatched.writes) == (programs, 0)
    for number in range(moves):
        some = range(number * each, (number + 1) * each)
        both.move("to_device", cells, some, [159 - (7 * cell) % 160 for cell in some])
    both.catch_up()
    assert (dispatched.reads, dispatched.writes) == (programs, programs)
    both.check()


@pytest.mark.parametrize("between", ["nothing", "fill", "other size", "other direction", "lost"])
def test_what_stands_between_moves_keeps_its_turn(monkeypatch: pytest.MonkeyPatch, between: str) -> None:
    """The first move brings up what stood in a cell of the host before something else is put there."""
    both, small, large = Both(), SIZES["small"], SIZES["large"]
    both.fill(small, range(16), 5)
    both.catch_up()
    dispatched = Dispatched(both.pool, monkeypatch)
    both.move("to_device", small, (0, 1), (3, 4))
    if between == "fill":
        both.fill(small, (3,), 9)
    elif between == "other size":
        both.move("to_device", large, (8,), (0,))
    elif between == "other direction":
        both.move("to_host", small, (1,), (3,))
    elif between == "lost":
        both.lose()
    both.move("to_device", small, (2, 1), (3, 5))
    both.catch_up()
    assert dispatched.writes == {"nothing": 1, "other size": 3, "lost": 1}.get(between, 2)
    both.check()


def test_of_two_moves_to_one_cell_the_later_one_counts() -> None:
    both, cells = Both(), SIZES["small"]
    both.move("to_host", cells, (7, 8), (0, 1))
    both.move("to_host", cells, (9, 10), (1, 2))
    both.move("to_device", cells, (3, 4), (0, 1))
    both.move("to_device", cells, (4, 5), (2, 0))
    nine = at(both.device, 9, cells).copy()
    both.check()
    assert (at(both.host, 1, cells) == nine).all()


def test_a_fill_waits_for_a_copy_of_larger_cells_to_the_same_page(monkeypatch: pytest.MonkeyPatch) -> None:
    both, small, large = Both(), SIZES["small"], SIZES["large"]
    both.move("to_host", large, (0, 1), (4, 5))
    both.catch_up()
    both.check()
    keep, fill, begun, order = both.tier._keep, both.tier._fill, threading.Event(), list[str]()

    def kept(*arguments: Any) -> None:
        assert begun.wait(PATIENCE_S)
        keep(*arguments)
        order.append("copied")

    def filled(*arguments: Any) -> None:
        begun.set()
        fill(*arguments)

    monkeypatch.setattr(both.tier, "_keep", kept)
    monkeypatch.setattr(both.tier, "_fill", filled)
    both.move("to_host", large, (2, 3), (4, 5))
    both.fill(small, (2 * small.per_page,), 77)
    both.tier.catch_up()
    assert order == ["copied"], "the page was filled before what was to stand there earlier"
    both.check()


def test_no_program_is_compiled_after_the_warm_up_however_many_cells_are_moved() -> None:
    cells = Cells.of(128, PAGE_BYTES)  # of no other test
    pool = DevicePool(DEVICE_PAGES * 2, PAGE_BYTES)
    tier = HostTier(pool, DEVICE_PAGES * 2)
    tier.warm_up(cells)
    programs: tuple[Any, ...] = (host._read, host._write)
    before = [program._cache_size() for program in programs]
    for count in (1, 7, 8, 9, 32, 33, 128, 140, 160):
        some = tuple(range(count))
        for direction in ("to_host", "to_device"):
            tier.plan([Move(direction, "m", some, some)], cells, 0)
            tier.catch_up()
        assert len(read_cells(pool, some, cells, 0)) == count
    assert [program._cache_size() for program in programs] == before
    assert len(read_cells(pool, (), cells, 0)) == 0


def test_what_a_copy_from_a_lost_pool_raised_loses_no_other_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    both, cells = Both(), SIZES["small"]

    def fails(*arguments: Any) -> None:
        raise RuntimeError("the device failed")

    with monkeypatch.context() as broken:
        broken.setattr(both.tier, "_keep", fails)
        both.tier.plan([Move("to_host", "m", (0, 1), (4, 5))], cells, both.pool.epoch)
        both.tier.catch_up()
        both.tier._copies.submit(int).result()
    both.lose()
    epoch = both.pool.epoch
    both.move("to_host", cells, (2, 3), (6, 7))
    both.catch_up()
    assert both.pool.epoch == epoch
    both.check()


def test_what_a_copy_raised_is_raised_by_the_next_move(monkeypatch: pytest.MonkeyPatch) -> None:
    both, cells = Both(), SIZES["small"]

    def fails(*arguments: Any) -> None:
        raise RuntimeError("the host failed")

    monkeypatch.setattr(both.tier, "_keep", fails)
    both.tier.plan([Move("to_host", "m", (0, 1), (4, 5))], cells, both.pool.epoch)
    both.tier.catch_up()
    both.tier._copies.submit(int).result()
    epoch = both.pool.epoch
    both.tier.plan([Move("to_host", "m", (2, 3), (6, 7))], cells, epoch)
    with pytest.raises(RuntimeError, match="the host failed"):
        both.tier.catch_up()
    assert both.pool.epoch == epoch + 1


def test_values_are_filled_in_after_an_older_copy_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    both, cells = Both(), SIZES["small"]

    def fails(*arguments: Any) -> None:
        raise RuntimeError("the host failed")

    with monkeypatch.context() as broken:
        broken.setattr(both.tier, "_keep", fails)
        both.tier.plan([Move("to_host", "m", (0, 1), (4, 5))], cells, both.pool.epoch)
        both.tier.catch_up()
        both.tier._copies.submit(int).result()
    epoch = both.pool.epoch
    both.fill(cells, (6, 7), 9)
    both.fill(cells, (7, 8), 900)
    with pytest.raises(RuntimeError, match="the host failed"):
        both.tier.catch_up()
    assert both.pool.epoch == epoch + 1
    both.device[:] = 0
    both.check()
