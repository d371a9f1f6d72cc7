# SPDX-License-Identifier: Apache-2.0
"""Rows in pages of a real pool beside kept users, while the border moves: whatever happens, a batch gets the table's
rows, free and used pages are all pages, and no page has two owners (HLEM-10, HLEM-16)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jgr.cache.border import Border
from jgr.cache.embeddings import EmbeddingCache, Table
from jgr.cache.entries import Entry, Name
from jgr.cache.meta import CacheMeta
from jgr.cache.pages import Pages, Room
from jgr.cache.pool import DevicePool
from jgr.cache.refill import RefillBudget
from jgr.config import ConfigError
from jgr.serving.policies.user_cache import WholeContent

PAGES, PAGE_BYTES, BATCH = 12, 1024, 24
RNG = np.random.default_rng(7)
VALUES: dict[str, npt.NDArray[Any]] = {
    "wide": RNG.standard_normal((150, 64), np.float32),  # 4 rows in a page
    "half": RNG.standard_normal((90, 16), np.float32).astype(np.float16),  # 32
}
TABLES = {name: Table(len(of), of.shape[1], of.dtype) for name, of in VALUES.items()}


class Source:
    """The arrays; each read is remembered. `during` runs while a batch has read and not written yet."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[int]]] = []
        self.during: Any = lambda: None

    def read(self, table: str, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        self.asked.append((table, rows.tolist()))
        self.during()
        return VALUES[table][rows]


def make(
    embeddings: int = 6, budget: RefillBudget | None = None
) -> tuple[EmbeddingCache, Border, CacheMeta, Pages, Source, DevicePool]:
    source, pages, pool = Source(), Pages(PAGES, PAGE_BYTES), POOL
    cache = EmbeddingCache(pool, TABLES, source, budget=budget, clock=lambda: NOW[0])
    cache._programs, cache._zeros = PROGRAMS, ZEROS
    for table in TABLES:
        cache.compile(table, BATCH)
    meta = CacheMeta(pages, {"user": Room(PAGE_BYTES // 2)})
    return cache, Border(cache, meta, pages, "rows", PAGES, embeddings), meta, pages, source, pool


POOL = DevicePool(PAGES, PAGE_BYTES)
PROGRAMS: dict[Any, Any] = {}
ZEROS: dict[Any, Any] = {}
NOW = [0]


def batch(rows: list[int]) -> npt.NDArray[np.int32]:
    return np.array((rows + [-1] * BATCH)[:BATCH], np.int32)


def right(cache: EmbeddingCache, table: str, rows: list[int]) -> None:
    """The batch's rows are the table's, bit for bit, and zeros where there is none."""
    asked = batch(rows)
    wanted = np.where((asked >= 0)[:, None], VALUES[table][np.maximum(asked, 0)].astype(np.float32), 0)
    np.testing.assert_array_equal(np.asarray(cache.rows(table, asked)), wanted)


def audit(cache: EmbeddingCache, border: Border, meta: CacheMeta, pages: Pages) -> None:
    border.check()
    meta.check()
    assert pages.free + border.rows.owned + meta.used("user") == PAGES
    owned = set(np.flatnonzero(cache.pages._table != -2).tolist())
    used = set(pages._classes["user"].used)
    assert not owned & used and not (owned | used) & set(pages._free)


STEPS = st.one_of(
    st.tuples(st.just("rows"), st.sampled_from(list(TABLES)), st.lists(st.integers(0, 89), max_size=BATCH)),
    st.tuples(st.just("border"), st.integers(0, PAGES)),
    st.tuples(st.just("user"), st.integers(0, 30), st.booleans()),
    st.tuples(st.just("end"), st.integers(0, 30)),
    st.tuples(st.just("during"), st.integers(0, PAGES), st.lists(st.integers(0, 149), max_size=BATCH)),
    st.tuples(st.just("refill")),
    st.tuples(st.just("lose")),
    st.tuples(st.just("retry")),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(STEPS, max_size=30))
def test_whatever_moves_a_batch_gets_its_rows_and_no_page_has_two_owners(steps: list[Any]) -> None:
    cache, border, meta, pages, source, pool = make()
    pinned: list[Entry] = []
    for number, (kind, *of) in enumerate(steps):
        if kind == "rows":
            right(cache, *of)
        elif kind == "border":
            border.set_limit(*of)
        elif kind == "user":
            entry = meta.extend(Name("user", of[0], ""), WholeContent(bytes([number])))
            if entry is not None:
                meta.written(entry)
                pinned.append(entry) if of[1] else meta.release(entry)
        elif kind == "end" and pinned:
            meta.release(pinned.pop(of[0] % len(pinned)))
        elif kind == "during":  # the border moves, and another batch comes, while this one reads its shards

            def during(limit: int = of[0], rows: list[int] = of[1]) -> None:
                source.during = lambda: None
                border.set_limit(limit)
                right(cache, "wide", rows[:5])

            source.during = during
            right(cache, "wide", of[1])
            source.during = lambda: None
        elif kind == "refill":
            cache.refill()
        elif kind == "lose":
            pool.lose(pool.epoch, RuntimeError("lost on purpose"))
            meta.renew(pool.epoch)
        border.retry()
        audit(cache, border, meta, pages)
    for entry in pinned:
        meta.release(entry)
    border.retry()
    assert border.delayed == 0 and not cache.pages._pins.any()
    audit(cache, border, meta, pages)
    border.close()
    meta.close()
    assert pages.free == PAGES


def test_a_row_crosses_once_however_often_it_is_asked_for() -> None:
    cache, _, _, _, source, _ = make()
    right(cache, "wide", [3, 3, 9, 3, 149])
    right(cache, "wide", [149, 9, 4])
    assert source.asked == [("wide", [3, 9, 149]), ("wide", [4])]
    assert cache.counts("wide")["hits"] == 2 and cache.counts("wide")["misses"] == 4
    assert cache.counts("wide")["bytes"] == 4 * 256 and cache.counts("half")["misses"] == 0


def test_without_a_page_rows_go_past_the_pool() -> None:
    cache, *_ = make(embeddings=0)
    for _ in range(2):
        right(cache, "half", [1, 2])
    assert cache.counts("half")["past"] == 4 and cache.pages.resident("half") == 0


def test_the_page_that_was_not_used_for_longest_goes_and_rows_in_use_with_it_are_collateral() -> None:
    cache, border, *_ = make(embeddings=3)
    for first in (0, 4, 8):
        right(cache, "wide", list(range(first, first + 4)))
    right(cache, "wide", [1, 9])  # the page of 4 to 7 is the coldest
    right(cache, "wide", [20])
    assert cache.pages.resident("wide") == 9
    assert cache.counts("wide")["evicted"] == 4 and cache.counts("wide")["collateral"] == 0
    border.set_limit(1)  # now the one of 0 to 3, and the one of 8 to 11; 1 and 9 were used twice
    assert cache.counts("wide")["evicted"] == 12 and cache.counts("wide")["collateral"] == 2


def test_pages_that_are_pinned_move_when_they_are_let_go() -> None:
    cache, border, _, pages, source, _ = make(embeddings=3)
    source.during = lambda: border.set_limit(0)
    right(cache, "wide", list(range(8)))  # pins two of the three while it reads
    assert border.delayed == 2
    assert border.retry() == 2 and border.delayed == 0 and pages.free == PAGES


def test_new_pages_are_filled_with_the_hottest_rows_that_are_missing_by_what_misses_leave() -> None:
    NOW[0] = 0
    cache, border, *_ = make(embeddings=0, budget=RefillBudget(256 * 100))  # 100 rows a second
    for times, row in ((5, 40), (3, 41), (2, 42), (1, 43)):
        for _ in range(times):
            right(cache, "wide", [row])
    border.set_limit(2)
    assert cache.refill() == 0  # misses took all of the link a moment ago
    NOW[0] += 3_000_000_000
    right(cache, "half", [0])
    assert cache.refill() > 0
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


def test_a_border_without_room_for_a_batch_or_a_user_is_refused_with_the_figures() -> None:
    cache, border, meta, pages, *_ = make()
    with pytest.raises(ConfigError, match="5 of 12 pages of 1 KB for rows; a batch needs 6, and one user 2"):
        Border(cache, meta, pages, "more", PAGES, 5, 6, 2)
    with pytest.raises(ValueError, match="13 pages of 12 for rows: 0 to 12 can be"):
        border.set_limit(13)
    with pytest.raises(ValueError, match="rows of 2048 bytes in pages of 1024"):
        EmbeddingCache(POOL, {"x": Table(4, 512, np.dtype(np.float32))}, Source())
