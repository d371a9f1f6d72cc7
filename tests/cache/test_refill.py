# SPDX-License-Identifier: Apache-2.0
"""The refill of empty pages: by heat, by what misses leave of the link, and on after whatever fails (HLEM-10)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from jgr.cache.embeddings import EmbeddingCache
from jgr.cache.refill import RefillBudget
from jgr.embeddings.shards import ShardError
from tests.cache.test_embeddings import BATCH, NOW, fail, make, resident, right
from tests.serving.fakes import PATIENCE_S


def test_new_pages_are_filled_with_the_hottest_rows_that_are_missing_by_what_misses_leave() -> None:
    NOW[0] = 0
    cache, border, *_ = make(embeddings=0, budget=RefillBudget(256 * 100))  # 100 rows a second
    for times, row in ((5, 40), (3, 41), (2, 42), (1, 43)):
        for _ in range(times):
            right(cache, "wide", [row])
    border.set_limit(2)
    assert cache.refill() == (0, False, False)  # misses took all of the link a moment ago
    NOW[0] += 3_000_000_000
    right(cache, "half", [0])
    assert cache.refill().copied > 0
    found = [row for row in range(150) if cache.pages._cell_of[0][row] >= 0]
    assert set(found) <= {40, 41, 42} and 40 in found  # 43 came once


def test_the_refill_has_what_misses_leave_of_the_link() -> None:
    budget = RefillBudget(1000.0)
    assert budget.take(10_000, 0) == 0
    assert budget.take(10_000, 10**9) == 50  # the bucket's depth, not a second's worth
    budget.missed(10_000, 10**9)
    assert budget.take(10_000, 10**9 + 100_000_000) == 0  # a burst has it all
    assert budget.take(10_000, 5 * 10**9) == 50
    assert RefillBudget(0).take(7, 0) == 7
    # A miss waits for one copy of the refill at most: a millisecond of the link, or a megabyte.
    assert [RefillBudget(speed).step for speed in (0.0, 10e6, 16e9)] == [1 << 20, 10_000, 1 << 20]


def test_what_is_too_little_for_a_row_is_saved_up() -> None:
    cache, border, *_ = make(embeddings=0)
    for row in range(0, 12, 3):
        right(cache, "wide", [row, row + 1, row + 2] * 2)
        right(cache, "wide", [row, row + 1, row + 2])
    border.set_limit(6)
    cache._budget = RefillBudget(100.0 * cache.tables["wide"].row_bytes)
    while cache.refill().copied:
        pass  # what the bucket has at first
    copied = []
    for _ in range(20):
        NOW[0] += 3_125_000  # a quarter of a row, of what the refill has of the link
        copied.append(cache.refill().copied)
    assert copied == [0, 0, 0, 1] * 5


def test_the_refill_goes_by_heat_over_all_tables_and_on_at_once_where_the_budget_is_left() -> None:
    cache, border, *_ = make(embeddings=0)
    for times, table, row in ((4, "half", 7), (3, "wide", 40), (2, "half", 8)):
        for _ in range(times):
            right(cache, table, [row])
    assert [each.tolist() for each in cache.pages.hottest_missing(3000)] == [[1, 0, 1], [7, 40, 8]]
    assert [each.tolist() for each in cache.pages.hottest_missing(300)] == [[1, 0], [7, 40]]
    border.set_limit(4)
    assert cache.refill() == (3, True, False)  # nothing is throttled
    assert cache.refill() == (0, False, True)  # nobody asked for others twice
    right(cache, "half", [7, 8])
    assert cache.counts("half")["hits"] == 2


def test_a_shard_that_fails_the_refill_leaves_empty_pages_empty() -> None:
    cache, border, _, _, source, _ = make(embeddings=0)
    for _ in range(2):
        right(cache, "wide", list(range(BATCH)))
    border.set_limit(6)
    source.during = fail
    for _ in range(9):
        with pytest.raises(ShardError):
            cache.refill()
        assert cache.pages.empty == 6
    source.during = lambda: None
    assert cache.refill() == (BATCH, True, False)


class Refilling:
    """The refill's thread, run by the test: a pause passes at once, after `paused` was called with how many there were,
    and the end comes where the thread would wait to be woken."""

    def __init__(self, cache: EmbeddingCache, paused: Callable[[int], None] = lambda count: None) -> None:
        self.pauses: list[float] = []
        self._refill, self._paused, self._ended = cache._refill, paused, False
        self._woken = self._refill._wanted.is_set()
        wanted = SimpleNamespace(
            wait=self._wait, set=lambda: self._mark(True), clear=lambda: self._mark(False)
        )
        ended = SimpleNamespace(wait=self._pause, is_set=lambda: self._ended)
        self._refill._wanted, self._refill._ended = wanted, ended  # type: ignore[assignment]

    def run(self) -> list[float]:
        """The seconds of the pauses until the thread waits to be woken."""
        self.pauses, self._ended = [], False
        self._refill._run()
        return self.pauses

    def _mark(self, woken: bool) -> None:
        self._woken = woken

    def _wait(self) -> None:
        self._ended = not self._woken

    def _pause(self, seconds: float) -> bool:
        if not self._ended:
            self.pauses.append(seconds)
            assert len(self.pauses) < 500, "it never ends"
            self._paused(len(self.pauses))
        return self._ended


def hot(cache: EmbeddingCache, rows: list[int]) -> None:
    for _ in range(3):
        right(cache, "wide", rows)


def test_the_refill_waits_for_a_link_that_is_busy_for_long() -> None:
    NOW[0] = 0
    cache, border, *_ = make(embeddings=0, budget=RefillBudget(256 * 100))
    hot(cache, [40, 41, 42])

    def paused(count: int) -> None:
        NOW[0] += 0 if count < 100 else 3_000_000_000

    refilling = Refilling(cache, paused)
    border.set_limit(2)
    pauses = refilling.run()
    assert len(pauses) > 100 and set(pauses[:100]) == {0.05}
    assert resident(cache, "wide") == [40, 41, 42]
    assert refilling.run() == []  # it has ended, for there is nothing to copy any more


def test_the_refill_goes_on_after_a_shard_that_failed_and_waits_longer_each_time() -> None:
    cache, border, _, _, source, _ = make(embeddings=0)
    hot(cache, [40, 41, 42])
    source.during = fail

    def paused(count: int) -> None:
        if count == 10:
            source.during = lambda: None

    refilling = Refilling(cache, paused)
    border.set_limit(2)
    waited = [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]
    assert refilling.run() == [pytest.approx(seconds) for seconds in [*waited, 0.0]]
    assert resident(cache, "wide") == [40, 41, 42]


def test_a_pool_that_was_lost_is_filled_again() -> None:
    cache, *_, pool = make(embeddings=3)
    hot(cache, [40, 41, 42])
    refilling = Refilling(cache)
    refilling.run()
    pool.lose(pool.epoch, RuntimeError("lost on purpose"))
    right(cache, "wide", [100])
    refilling.run()
    assert resident(cache, "wide") == [40, 41, 42, 100] and cache.counts("wide")["refilled"] == 3


def test_the_refill_ends_while_it_waits_for_a_shard_to_come_back() -> None:
    cache, border, _, _, source, _ = make(embeddings=0)
    hot(cache, [40, 41, 42])
    twice = threading.Semaphore(0)

    def during() -> None:
        twice.release()
        fail()

    source.during = during
    cache.start()
    border.set_limit(2)
    for _ in range(2):
        assert twice.acquire(timeout=PATIENCE_S)
    cache.close()
    thread = cache._refill._thread
    assert thread is not None and not thread.is_alive()
