# SPDX-License-Identifier: Apache-2.0
"""Rows in pages of a real pool beside kept users, while the border moves: whatever happens, a batch gets the table's
rows, free and used pages are all pages, and no page has two owners (HLEM-10, HLEM-16)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jgr.cache import rows as row_pages
from jgr.cache.border import Border
from jgr.cache.embeddings import EmbeddingCache, Table
from jgr.cache.entries import Content, Entry, Name
from jgr.cache.histories import HistoryView
from jgr.cache.meta import CacheMeta
from jgr.cache.pages import Pages, Room
from jgr.cache.pool import DevicePool
from jgr.cache.refill import RefillBudget
from jgr.cache.row_programs import RowPrograms
from jgr.cache.rows import RowPages, TableShape
from jgr.config import ConfigError
from jgr.embeddings.shards import ShardError
from jgr.serving.policies.jobs import UserPart
from jgr.serving.policies.user_cache import LAYOUT, Found, UserCache, WholeContent

PAGES, PAGE_BYTES, BATCH = 12, 1024, 24
RNG = np.random.default_rng(7)
VALUES: dict[str, npt.NDArray[Any]] = {
    "wide": RNG.standard_normal((150, 64), np.float32),  # 4 rows in a page
    "half": RNG.standard_normal((90, 16), np.float32).astype(np.float16),  # 32
}
TABLES = {name: Table(len(of), of.shape[1], of.dtype) for name, of in VALUES.items()}
RECORDS = 24
ALL_TABLES = TABLES | {"records": Table(RECORDS, 16, np.dtype(np.uint32), brought="a schema")}


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
    border = Border(cache, meta, pages, "rows", PAGES, embeddings)
    border.start()
    return cache, border, meta, pages, source, pool


POOL = DevicePool(PAGES, PAGE_BYTES)
PROGRAMS = RowPrograms(POOL.example)
ZEROS: dict[Any, Any] = {}
NOW = [0]


def batch(rows: list[int]) -> npt.NDArray[np.int32]:
    return np.array((rows + [-1] * BATCH)[:BATCH], np.int32)


def right(cache: EmbeddingCache, table: str, rows: list[int]) -> None:
    """The batch's rows are the table's, bit for bit, and zeros where there is none."""
    asked = batch(rows)
    wanted = np.where((asked >= 0)[:, None], VALUES[table][np.maximum(asked, 0)].astype(np.float32), 0)
    np.testing.assert_array_equal(np.asarray(cache.rows(table, asked)), wanted)


def fail() -> None:
    raise ShardError("table wide: failed on purpose")


def resident(cache: EmbeddingCache, table: str) -> list[int]:
    """The rows of a table that a batch would find now."""
    cache.here(table, np.zeros(0, np.int32))  # a lost pool is noticed
    found: list[int] = np.flatnonzero(cache.pages._cell_of[cache.pages.number(table)] >= 0).tolist()
    return found


USERS = st.integers(0, 7)
ROWS = st.lists(st.integers(0, 89), min_size=1, max_size=BATCH)
RECORD_ROWS = st.builds(
    lambda first, count: [(first + at) % RECORDS for at in range(count)],
    st.integers(0, RECORDS - 1),
    st.integers(8, BATCH),
)
"""Most of all records, so that they come anew and are read while they stand there."""
LIMITED = PAGES - 2  # of the border; the other two are for items alone
WINDOW, GROWTH = 6, 2
KEPT = {
    "k": jax.ShapeDtypeStruct((1, WINDOW, 64), np.float32),
    "number": jax.ShapeDtypeStruct((1,), np.int32),
}
LENGTHS = (2, 4, WINDOW)
"""Numbers of events that programs read: each user's is the least that holds the history."""
VIEW = HistoryView(POOL, KEPT, {"k": -2, "number": "number"}, 1, GROWTH, LENGTHS)  # four events in a page
VIEW.compile()
History = tuple[int, ...]
"""A user's events, which are what the user's state depends on."""


def computed(history: History) -> dict[str, npt.NDArray[Any]]:
    """What is kept of a history, in its window; behind its end there is anything."""
    k = np.full((1, next(x for x in LENGTHS if len(history) <= x), 64), np.nan, np.float32)
    for place, event in enumerate(history):
        k[0, place] = np.random.default_rng((event, place)).standard_normal(64, np.float32)
    return {"k": k, "number": np.array([len(history)], np.int32)}


def state_of(kept: Any) -> npt.NDArray[np.float32]:
    """What candidates are scored with: of the events that there are."""
    there = np.arange(kept["k"].shape[1]) < np.asarray(kept["number"])
    found: npt.NDArray[np.float32] = np.where(there[:, None], np.asarray(kept["k"]), 0).sum(
        (0, 1), np.float32
    )
    return found


def whole(history: History) -> npt.NDArray[np.float32]:
    return state_of(computed(history))


def content_of(key: bytes) -> Content:
    return Content.of(np.frombuffer(key, np.int32))


class Pool(RuleBasedStateMachine):
    """Rows, users and items over one real pool. A request's score, of its user's state and its rows, is compared with
    that of an engine that keeps nothing."""

    @initialize(embeddings=st.integers(1, LIMITED))
    def begin(self, embeddings: int) -> None:
        self.source, self.pages = Source(), Pages(PAGES, PAGE_BYTES)
        self.cache = EmbeddingCache(POOL, ALL_TABLES, self.source, clock=lambda: NOW[0])
        self.cache._programs, self.cache._zeros = PROGRAMS, ZEROS
        for table in ALL_TABLES:
            self.cache.compile(table, BATCH)
        self.brought: dict[int, int] = {}
        self.meta = CacheMeta(self.pages, {"user": VIEW.room, "item": Room(PAGE_BYTES // 4)}, moving=True)
        self.meta.renew(POOL.epoch)
        self.meta.set_limit("item", 2)
        self.border = Border(self.cache, self.meta, self.pages, "rows", LIMITED, embeddings)
        self.border.start()
        self.users = UserCache(self.meta, content_of, GROWTH)
        self.histories: dict[int, History] = dict.fromkeys(range(8), (0,))
        self.pinned: list[Entry] = []
        self.flying: list[tuple[Found, History]] = []

    @rule(user=USERS, rows=ROWS)
    def ask(self, user: int, rows: list[int]) -> None:
        history = self.histories[user]
        kept = self._run(self._find(user, history), history)
        found = np.asarray(self.cache.rows("wide", batch(rows)))[: len(rows)]
        np.testing.assert_allclose(found @ kept, VALUES["wide"][rows] @ whole(history), atol=1e-4)

    def _find(self, user: int, history: History) -> Found | None:
        return self.users.find(UserPart(str(user), np.array(history, np.int32).tobytes()))

    def _run(self, found: Found | None, history: History, fails: bool = False) -> npt.NDArray[np.float32]:
        """What a run does with what was found: load, compute what is new, store. fails: after all of it."""
        if found is None:
            return whole(history)
        place, before = found.place, found.before
        if place is not None and not place.new:
            kept = VIEW.load(place, len(history))
        else:
            kept = None if before is None else VIEW.load(before, len(history))
            own = computed(history)
            if kept is not None and before is not None:  # what is new, behind what was kept
                new = np.arange(own["k"].shape[1]) >= before.tokens
                own["k"] = np.where(new[:, None], own["k"], kept["k"])
            kept = own
            if place is not None:
                stored = VIEW.store(jax.tree.map(jnp.asarray, kept), place)
                assert stored or place.epoch != POOL.epoch
        self.users.end(found, well=kept is not None and not fails)
        return whole(history) if kept is None else state_of(kept)  # an engine computes it anew

    @rule(user=USERS, more=st.integers(0, GROWTH + 1), less=st.integers(0, 2))
    def begin_one_that_goes_on(self, user: int, more: int, less: int) -> None:
        """A run that others overtake: of a user who has more events by then, or of one who asks with fewer."""
        self.grow(user, more)
        history = self.histories[user]
        history = history[: max(1, len(history) - less)]
        found = self._find(user, history)
        if found is not None:
            self.flying.append((found, history))

    @precondition(lambda self: self.flying)
    @rule(which=st.integers(0, 30), fails=st.booleans())
    def end_one(self, which: int, fails: bool) -> None:
        found, history = self.flying.pop(which % len(self.flying))
        np.testing.assert_allclose(self._run(found, history, fails), whole(history), atol=1e-4)

    @rule(table=st.sampled_from(list(TABLES)), rows=ROWS)
    def rows(self, table: str, rows: list[int]) -> None:
        right(self.cache, table, rows)

    @rule(rows=RECORD_ROWS, value=st.integers(1, 2**31))
    def bring(self, rows: list[int], value: int) -> None:
        """Records of the feature store come, for the first time or anew."""
        self.brought |= {row: value + row for row in rows}
        self.cache.put("records", np.array(rows, np.int64), self.words(rows)[: len(rows)])
        self._read_records(rows, keeps=True)

    @rule(rows=RECORD_ROWS, moved=st.integers(0, LIMITED), keeps=st.booleans())
    def read_records(self, rows: list[int], moved: int, keeps: bool) -> None:
        """As a request does: look, and read when pages have moved meanwhile; what came with it is at hand (keeps)."""
        self._read_records(rows, keeps, moved)

    def _read_records(self, rows: list[int], keeps: bool, moved: int | None = None) -> None:
        asked, known = batch(rows), np.zeros(BATCH, bool)
        known[: len(rows)] = [row in self.brought for row in rows]
        here = np.zeros(BATCH, bool)
        here[: len(rows)] = self.cache.here("records", np.array(rows, np.int32))
        assert not (here & ~known).any()
        if moved is not None:
            self.border.set_limit(moved)
        sent = known & ~here if keeps else np.zeros(BATCH, bool)
        found = self.cache.records("records", asked, self.words(rows), here, sent)
        if found.words is None:
            assert here[found.gone].all() and len(found.gone)
        else:
            wanted = np.where((here | sent)[:, None], self.words(rows), 0)
            np.testing.assert_array_equal(np.asarray(found.words), wanted)

    def words(self, rows: list[int]) -> npt.NDArray[np.uint32]:
        """The newest record of each row, [BATCH, 16]."""
        found = np.zeros((BATCH, 16), np.uint32)
        found[: len(rows)] = np.array([self.brought.get(row, 0) for row in rows])[:, None] + np.arange(16)
        return found

    @rule(user=USERS, more=st.integers(1, GROWTH + 1))
    def grow(self, user: int, more: int) -> None:
        """A window that is full begins anew, with other events."""
        history = self.histories[user]
        history += tuple(range(history[-1] + 1, history[-1] + 1 + more))
        self.histories[user] = history if len(history) <= WINDOW else (history[-1] + 1,)

    @rule(user=USERS)
    def erase(self, user: int) -> None:
        self.users.forget(str(user))

    @rule(item=st.integers(0, 12))
    def item(self, item: int) -> None:
        entry = self.meta.extend(Name("item", item, ""), WholeContent(bytes([item])))
        if entry is not None:
            self.meta.written(entry)
            self.meta.release(entry)

    @rule(user=USERS)
    def pin(self, user: int) -> None:
        entry = self.meta.by_name(Name("user", str(user), LAYOUT))
        if entry is not None:
            self.meta.hold(entry)
            self.pinned.append(entry)

    @precondition(lambda self: self.pinned)
    @rule(which=st.integers(0, 30))
    def unpin(self, which: int) -> None:
        self.meta.release(self.pinned.pop(which % len(self.pinned)))

    @rule(limit=st.integers(0, LIMITED))
    def move(self, limit: int) -> None:
        self.border.set_limit(limit)

    @rule(limit=st.integers(0, LIMITED), rows=ROWS, others=ROWS)
    def move_while_a_batch_reads(self, limit: int, rows: list[int], others: list[int]) -> None:
        def during() -> None:
            self.source.during = lambda: None
            self.border.set_limit(limit)
            right(self.cache, "wide", others[:5])

        self.source.during = during
        right(self.cache, "wide", rows)
        self.source.during = lambda: None

    @rule(table=st.sampled_from(list(TABLES)), rows=ROWS, times=st.integers(1, 9), refills=st.booleans())
    def a_shard_fails(self, table: str, rows: list[int], times: int, refills: bool) -> None:
        """However often batches, and the refill, fail: what stands on the device does, and is served."""
        before = {name: resident(self.cache, name) for name in TABLES}
        self.source.during = fail
        for first in range(times):
            asked = [(row + 7 * first) % 90 for row in rows]
            if set(asked) <= set(before[table]):
                right(self.cache, table, asked)
                continue
            with pytest.raises(ShardError):
                self.cache.rows(table, batch(asked))
            if refills:
                self._refill_that_fails()
        for name, there in before.items():
            assert resident(self.cache, name) == there
            right(self.cache, name, there[:BATCH])
        self.source.during = lambda: None

    def _refill_that_fails(self) -> None:
        empty = self.cache.pages.empty
        try:
            assert self.cache.refill().copied == 0  # nothing is to be copied
        except ShardError:
            pass
        assert self.cache.pages.empty == empty

    @rule()
    def refill(self) -> None:
        self.cache.refill()

    @rule()
    def lose(self) -> None:
        POOL.lose(POOL.epoch, RuntimeError("lost on purpose"))
        self.meta.renew(POOL.epoch)

    @rule()
    def retry(self) -> None:
        self.border.retry()

    @invariant()
    def every_page_has_one_owner(self) -> None:
        self.border.check()
        self.meta.check()
        used = self.meta.used("user") + self.meta.used("item")
        assert self.pages.free + self.border.rows.owned + used == PAGES
        owners = [
            set(np.flatnonzero(self.cache.pages._table != -2).tolist()),
            *(set(self.pages._classes[kind].used) for kind in ("user", "item")),
            set(self.pages._free),
        ]
        assert set.union(*owners) == set(range(PAGES)) and sum(map(len, owners)) == PAGES
        assert not self.cache.pages._pins.any(), "a batch that ended has pins"
        found = sum(self.cache.pages.resident(table) for table in ALL_TABLES)
        assert self.cache.pages._filled.sum() == found, "a cell was given out and has no row"
        for entry in self.meta._all("user"):
            length = len(entry.growing) if entry.growing else entry.tokens
            assert len(entry.cells) == VIEW.room.of(length), "an entry is longer than its user"

    def teardown(self) -> None:
        if not hasattr(self, "border"):
            return
        for entry in self.pinned:
            self.meta.release(entry)
        for found, _ in self.flying:
            self.users.end(found, well=False)
        self.border.retry()
        assert self.border.delayed == 0
        self.border.close()
        self.meta.close()
        assert self.pages.free == PAGES


Pool.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_whatever_moves_every_score_is_that_of_an_engine_without_a_cache = Pool.TestCase


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
    right(cache, "wide", list(range(8)))
    source.during = lambda: border.set_limit(0)
    right(cache, "wide", list(range(9)))  # pins two of the three while it reads
    assert border.delayed == 2
    assert border.retry() == 2 and border.delayed == 0 and pages.free == PAGES


def test_a_border_without_room_for_a_batch_or_a_user_is_refused_with_the_figures() -> None:
    cache, border, meta, pages, *_ = make()
    with pytest.raises(ConfigError, match="5 of 12 pages of 1 KB for rows; a batch needs 6, and one user 2"):
        Border(cache, meta, pages, "more", PAGES, 5, 6, 2)
    with pytest.raises(
        ConfigError, match=r"^cache.device_mb: 12 pages of 1 KB; a batch needs 11 for rows, and one user 2$"
    ):
        Border(cache, meta, pages, "more", PAGES, 11, 11, 2)
    with pytest.raises(ValueError, match="13 pages of 12 for rows: 0 to 12 can be"):
        border.set_limit(13)
    with pytest.raises(ValueError, match="rows of 2048 bytes in pages of 1024"):
        EmbeddingCache(POOL, {"x": Table(4, 512, np.dtype(np.float32))}, Source())


def test_a_pool_with_more_places_for_rows_than_can_be_numbered_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before its arrays are made, which no memory holds here."""
    says = r"^cache\.device_mb: a pool of 1073741824 MB has more than 2147483647 places for rows of 4 bytes \(x\)"
    with pytest.raises(ConfigError, match=says):
        RowPages(2**40, PAGE_BYTES, {"x": TableShape(9, 4)})
    monkeypatch.setattr(row_pages, "MOST_CELLS", 10)
    RowPages(5, PAGE_BYTES, {"x": TableShape(9, PAGE_BYTES // 2)})
    with pytest.raises(ConfigError, match="more than 10 places for rows of 512 bytes"):
        RowPages(6, PAGE_BYTES, {"x": TableShape(9, PAGE_BYTES // 2)})


def test_a_shard_that_fails_again_and_again_takes_nothing_from_the_device() -> None:
    cache, _, _, _, source, _ = make(embeddings=3)
    right(cache, "wide", list(range(12)))
    source.during = fail
    for first in range(20, 60):
        with pytest.raises(ShardError):
            cache.rows("wide", batch(list(range(first, first + BATCH))))
    right(cache, "wide", list(range(12)))
    assert source.asked.count(("wide", list(range(12)))) == 1 and cache.counts("wide")["evicted"] == 0
    source.during = lambda: None
    right(cache, "wide", [20, 21, 22, 23])
    assert cache.pages.resident("wide") == 12 and cache.counts("wide")["past"] == 0


def test_rows_that_another_batch_brought_while_one_read_them_are_taken_from_there() -> None:
    cache, _, _, _, source, _ = make(embeddings=3)

    def during() -> None:
        source.during = lambda: None
        assert resident(cache, "wide") == []  # nothing is found before it is there
        right(cache, "wide", [1, 2])

    source.during = during
    right(cache, "wide", [1, 2, 3])
    assert resident(cache, "wide") == [1, 2, 3] and cache.pages._filled.sum() == 3
    counts = cache.counts("wide")
    assert (counts["duplicates"], counts["past"]) == (0, 0) and not cache.pages._pins.any()


def test_a_pool_that_is_lost_while_a_batch_reads_has_the_rows_all_the_same() -> None:
    cache, _, _, _, source, pool = make(embeddings=3)
    right(cache, "wide", [8, 9])

    def during() -> None:
        source.during = lambda: None
        pool.lose(pool.epoch, RuntimeError("lost on purpose"))

    source.during = during
    right(cache, "wide", [1, 9])
    assert resident(cache, "wide") == [1, 9] and cache.pages._filled.sum() == 2
