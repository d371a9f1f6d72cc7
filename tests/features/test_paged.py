# SPDX-License-Identifier: Apache-2.0
"""Records in pages of a real pool: gets give what a cache on the host gives, whatever goes from the pages meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from jgr.cache.embeddings import EmbeddingCache
from jgr.cache.pool import DevicePool
from jgr.config import FeaturesConfig
from jgr.features.cache import FeatureCache, Features
from jgr.features.memory import FRESH, MISSING, STALE
from jgr.features.paged import NAME, PagedRecords, table_of
from jgr.features.stores import StoreError
from tests.features.test_cache import ITEMS, PATIENCE_S, SCHEMA, Clock, FakeStore, S, cached, record, rows

PAGES, PAGE_BYTES, BATCH = 6, 256, 8  # 12 records in a page
NUMBERS = [*map(str, range(40))]
Asked = npt.NDArray[np.int32]


class NoRows:
    def read(self, table: str, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        raise AssertionError("records are brought, not read")


@contextmanager
def paged(
    store: FakeStore, clock: Clock, mode: str = "sync_missing", pages: int = PAGES
) -> Iterator[tuple[FeatureCache, PagedRecords, EmbeddingCache]]:
    pool = EmbeddingCache(DevicePool(PAGES, PAGE_BYTES), {NAME: table_of(SCHEMA, len(ITEMS))}, NoRows())
    pool.grow(list(range(pages)))
    given: dict[str, Any] = {"mode": mode, "max_wait_ms": PATIENCE_S * 1e3, "linger_ms": 0.0}
    features = FeatureCache(store, SCHEMA, ITEMS, FeaturesConfig(**given), clock=clock, pages=pool)
    records = PagedRecords(pool, features)
    records.compile(BATCH)
    try:
        yield features, records, pool
    finally:
        store.open.set()
        assert features.close(PATIENCE_S)
        pool.check()


def seen(records: PagedRecords, asked: Asked, got: Features) -> list[tuple[int, int]]:
    """What a part is given: x of each record as the device has it, and the states."""
    words = np.asarray(records.given(asked, got.records, got.states, BATCH))
    assert not words[len(asked) :].any()
    place = SCHEMA.dtype.fields["x"][1] // 4  # type: ignore[index]
    return list(zip(words[: len(asked), place].view(np.int32).tolist(), got.states.tolist(), strict=True))


@pytest.mark.parametrize("mode", ["synchronous", "sync_missing"])
@pytest.mark.parametrize("pages", [PAGES, 1, 0])
def test_gets_give_what_a_cache_on_the_host_gives(mode: str, pages: int) -> None:
    """Its own code has neither pages nor a device. The store changes, forgets and fails between the gets. A refresh
    that nobody waits for may have come by the dispatch. Where pages are too few, what went is fetched at other times,
    so all that is known of a record is that the store had it once."""
    rng = np.random.default_rng(pages)
    values = {item: record(int(item)) for item in NUMBERS[::2]}
    store, other, clock = FakeStore(values), FakeStore(values), Clock()
    with cached(other, mode, clock) as host, paged(store, clock, mode, pages) as (features, records, pool):
        ever = {item: {value} for item, value in values.items()}
        for step in range(150):
            clock.now += int(rng.choice([0, S, 30 * S, 67 * S]))
            item, value = str(rng.choice(NUMBERS)), record(1000 + step)
            ever.setdefault(item, set()).add(value)
            for each in (store, other):
                if step % 3:
                    each.values[item] = value
                else:
                    each.values.pop(item, None)
                each.error = StoreError("down") if pages == PAGES and step % 10 == 9 else None
            asked = rows(*rng.permutation(NUMBERS)[: rng.integers(1, BATCH)])
            got = seen(records, asked, features.get_many(asked))
            hosts = host.get_many(asked)
            wanted = list(zip(hosts.records["x"][:, 0].tolist(), hosts.states.tolist(), strict=True))
            for place, (x, state) in enumerate(got):
                name = ITEMS[asked[place]]
                if pages == PAGES and (x, state) != wanted[place]:
                    assert state == STALE == wanted[place][1] and record(x) == store.values[name]
                elif state == MISSING:
                    assert x == 0
                else:
                    assert record(x) in ever[name]
            for cache in (features, host):  # no refresh goes on into the next step
                while cache._queued:
                    pass
        if pages:
            assert pool.counts(NAME)["hits"] > 0
        counts = pool.counts(NAME)
        assert (counts["evicted"] > 0) == (pages == 1) and (counts["past"] > 0) == (pages < PAGES)


def test_what_goes_between_look_up_and_dispatch_is_asked_for_again() -> None:
    store, clock = FakeStore({item: record(int(item)) for item in NUMBERS}), Clock()
    with paged(store, clock) as (features, records, pool):
        asked = rows("3", "1", "2")
        assert seen(records, asked, features.get_many(asked)) == [(3, FRESH), (1, FRESH), (2, FRESH)]
        got = features.get_many(asked)
        assert not got.records.view(np.uint8).any() and store.asked == [["3", "1", "2"]]  # in the pool alone
        pool.grow(pool.shrink(PAGES))
        assert seen(records, asked, got) == [(3, FRESH), (1, FRESH), (2, FRESH)]
        assert store.asked == [["3", "1", "2"]] * 2 and got.states.tolist() == [FRESH] * 3
        assert pool.counts(NAME)["evicted"] == 3
        # The same with a store that is down: counted as missing, for the answer too.
        got = features.get_many(asked)
        pool.grow(pool.shrink(PAGES))
        store.error = StoreError("down")
        before = features.counts().missing
        assert seen(records, asked, got) == [(0, MISSING)] * 3
        assert got.states.tolist() == [MISSING] * 3 and features.counts().missing == before + 3


def test_where_no_page_is_to_be_had_the_store_is_asked_once() -> None:
    """What it gives travels with the batch, since there is no page for it to stand in."""
    store, clock = FakeStore({item: record(int(item)) for item in NUMBERS}), Clock()
    with paged(store, clock) as (features, records, pool):
        asked = rows("3", "1", "2")
        features.get_many(asked)
        got = features.get_many(asked)  # in the pool alone
        lent = pool.shrink(PAGES)
        assert seen(records, asked, got) == [(3, FRESH), (1, FRESH), (2, FRESH)]
        assert store.asked == [["3", "1", "2"]] * 2
        pool.grow(lent)


def test_a_lost_pool_is_as_one_without_records() -> None:
    store, clock = FakeStore({item: record(int(item)) for item in NUMBERS}), Clock()
    with paged(store, clock) as (features, records, pool):
        asked = rows("3", "1")
        features.get_many(asked)
        got = features.get_many(asked)
        pool.pool.lose(pool.pool.epoch, RuntimeError("a test loses the pool"))
        assert seen(records, asked, got) == [(3, FRESH), (1, FRESH)]
        assert len(store.asked) == 2 and features.counts().entries == 2


def test_a_refresh_is_written_over_what_stands_there_and_is_seen_whole() -> None:
    store, clock = FakeStore({"1": record(1), "2": record(2)}), Clock()
    with paged(store, clock) as (features, records, pool):
        asked = rows("1", "2")
        features.get_many(asked)
        clock.now = 67 * S
        store.values["1"] = record(5)
        store.open.clear()
        stale = features.get_many(asked)  # its refresh waits for the store
        assert seen(records, asked, stale) == [(1, STALE), (2, STALE)]
        before = records.given(asked, stale.records, stale.states, BATCH)
        store.open.set()
        features.close(PATIENCE_S)
        place = SCHEMA.dtype.fields["x"][1] // 4  # type: ignore[index]
        assert np.asarray(before)[:2, place].tolist() == [1, 2]  # dispatched before
        assert seen(records, asked, features.get_many(asked)) == [(5, FRESH), (2, FRESH)]
        counts = pool.counts(NAME)
        assert pool.pages.resident(NAME) == 2 and counts["duplicates"] == 0
        assert counts["bytes"] == 4 * SCHEMA.record_bytes and counts["transfers"] == 2


def test_the_asynchronous_mode_never_waits_and_finds_later_what_came() -> None:
    store, clock = FakeStore({"1": record(1)}), Clock()
    with paged(store, clock, "asynchronous") as (features, records, pool):
        asked = rows("1", "a")
        assert seen(records, asked, features.get_many(asked)) == [(0, MISSING), (0, MISSING)]
        features.close(PATIENCE_S)
        got = features.get_many(asked)
        assert seen(records, asked, got) == [(1, FRESH), (0, MISSING)]
        pool.grow(pool.shrink(PAGES))
        assert seen(records, asked, got) == [(0, MISSING), (0, MISSING)]


def test_nothing_is_pinned_for_good_and_records_are_not_fetched_ahead() -> None:
    store, clock = FakeStore({item: record(int(item)) for item in NUMBERS}), Clock()
    with paged(store, clock) as (features, records, pool):
        for _ in range(4):
            asked = rows(*NUMBERS[:BATCH])
            seen(records, asked, features.get_many(asked))
        assert len(pool.shrink(PAGES)) == PAGES
        pool.grow(list(range(PAGES)))
        assert pool.refill().copied == 0 and len(store.asked) == 1
