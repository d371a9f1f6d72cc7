# SPDX-License-Identifier: Apache-2.0
"""The cache with threads: single flight, what is served while the store hangs, deadlines, and what is counted."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from jgr.config import ConfigError, FeaturesConfig
from jgr.features.cache import FeatureCache, Features
from jgr.features.memory import FRESH, MISSING, STALE
from jgr.features.schema import Schema
from jgr.features.stores import StoreError

SCHEMA = Schema.parse("x:int32")
PATIENCE_S = 30.0
S = 10**9
ITEMS = [*"abcdefgh", *map(str, range(1000))]
ROWS = {item: row for row, item in enumerate(ITEMS)}


def rows(*items: str) -> npt.NDArray[np.int32]:
    return np.array([ROWS[item] for item in items], np.int32)


def record(x: int) -> bytes:
    return SCHEMA.pack({"x": np.array([[x]])})[0]


class FakeStore:
    """Holds records of x; every answer waits until `open` is set. entered: somebody waits for an answer."""

    def __init__(self, values: dict[str, bytes]) -> None:
        self.values, self.asked, self.error = dict(values), list[list[str]](), None
        self.open, self.entered = threading.Event(), threading.Event()
        self.open.set()
        self.error: Exception | None = None

    def get_many(self, item_ids: Sequence[str]) -> list[bytes | None]:
        self.asked.append(list(item_ids))
        self.entered.set()
        assert self.open.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        return [self.values.get(item) for item in item_ids]

    def put_many(self, item_ids: Sequence[str], values: Sequence[bytes]) -> None:
        raise NotImplementedError

    def schema(self) -> str | None:
        return str(SCHEMA)

    def set_schema(self, text: str) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.closed = True


class Clock:
    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


@contextmanager
def cached(
    store: FakeStore, mode: str, clock: Callable[[], int] = lambda: 0, **settings: Any
) -> Iterator[FeatureCache]:
    given: dict[str, Any] = {"mode": mode, "max_wait_ms": PATIENCE_S * 1e3, "linger_ms": 0.0, **settings}
    cache = FeatureCache(store, SCHEMA, ITEMS, FeaturesConfig(**given), clock=clock)
    try:
        yield cache
    finally:
        store.open.set()
        assert cache.close(PATIENCE_S)


def served(features: Features) -> list[tuple[int, int]]:
    return list(zip(features.records["x"][:, 0].tolist(), features.states.tolist(), strict=True))


def test_a_cache_that_was_never_asked_has_no_thread_and_goes_without_a_close() -> None:
    """As that of an engine which a reload makes, and drops for one over the catalog that was activated."""
    threads = set(threading.enumerate())
    cache = FeatureCache(FakeStore({}), SCHEMA, ITEMS, FeaturesConfig())
    assert set(threading.enumerate()) == threads
    gone = weakref.ref(cache)
    del cache
    assert gone() is None


def test_single_flight_under_32_threads() -> None:
    items = [str(n) for n in range(20)]
    store = FakeStore({item: record(int(item)) for item in items})
    store.open.clear()
    begun = threading.Semaphore(0)

    def clock() -> int:
        begun.release()
        return 0

    with cached(store, "synchronous", clock) as cache, ThreadPoolExecutor(32) as threads:
        # Each asks for some of the items, in an order of its own, one of them twice.
        asked = [[items[(7 * t + n) % 20] for n in range(12)] * 2 for t in range(32)]
        gets = [threads.submit(cache.get_many, rows(*one)) for one in asked]
        for _ in gets:
            assert begun.acquire(timeout=PATIENCE_S)
        store.open.set()
        for one, get in zip(asked, gets, strict=True):
            assert served(get.result(PATIENCE_S)) == [(int(item), FRESH) for item in one]
        counts = cache.counts()
    assert Counter(item for batch in store.asked for item in batch) == dict.fromkeys(items, 1)
    assert counts.fetched == 20 and counts.entries == 20
    assert (counts.fresh, counts.stale, counts.missing, counts.late) == (32 * 24, 0, 0, 0)


@pytest.mark.parametrize("mode", ["asynchronous", "sync_missing"])
def test_stale_is_served_while_the_refresh_hangs(mode: str) -> None:
    store, clock = FakeStore({"a": record(1)}), Clock()
    with cached(store, "synchronous", clock) as cache:
        assert served(cache.get_many(rows("a"))) == [(1, FRESH)]
    store.asked.clear()
    with cached(store, mode, clock) as cache:
        cache.get_many(rows("a"))
        if mode == "asynchronous":  # it was missing, and is there once its fetch has ended
            cache.close(PATIENCE_S)
        assert served(cache.get_many(rows("a"))) == [(1, FRESH)]
    with cached(store, "sync_missing", clock) as cache:
        cache.get_many(rows("a"))
        clock.now = 67 * S  # beyond the time to live of 60 s with its jitter
        store.values["a"] = record(2)
        store.open.clear()
        store.entered.clear()
        for _ in range(3):
            assert served(cache.get_many(rows("a"))) == [(1, STALE)]
        assert store.entered.wait(PATIENCE_S)
        store.open.set()
        cache.close(PATIENCE_S)  # once the refresh has ended
        assert served(cache.get_many(rows("a"))) == [(2, FRESH)]
        counts = cache.counts()
    assert (counts.stale, counts.fetched, counts.joined, counts.waits) == (3, 2, 2, 1)


def test_the_modes_wait_for_what_they_say() -> None:
    store, clock = FakeStore({"a": record(1), "b": record(2)}), Clock()
    with cached(store, "asynchronous", clock) as cache:
        store.open.clear()
        assert served(cache.get_many(rows("a", "b"))) == [(0, MISSING)] * 2
        assert cache.get_many(rows("a", "b")).missing == 2
        store.open.set()
        cache.close(PATIENCE_S)
        assert served(cache.get_many(rows("b", "a"))) == [(2, FRESH), (1, FRESH)]
        assert cache.counts().waits == 0
    assert store.asked == [["a", "b"]]  # one round trip
    with cached(store, "synchronous", clock) as cache:
        cache.get_many(rows("a"))
        clock.now = 67 * S
        store.values["a"] = record(3)
        features = cache.get_many(rows("a", "b"))
        assert served(features) == [(3, FRESH), (2, FRESH)]
        assert store.asked[1:] == [["a"], ["a", "b"]]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_get_ends_at_its_deadline_with_what_there_is(asynchronous: bool) -> None:
    store, clock = FakeStore({"a": record(1), "b": record(2)}), Clock()

    def get(cache: FeatureCache, asked: npt.NDArray[np.int32], deadline_ns: int | None) -> Features:
        if asynchronous:
            return asyncio.run(cache.get_many_async(asked, deadline_ns))
        return cache.get_many(asked, deadline_ns)

    with cached(store, "synchronous", clock) as cache:
        assert served(get(cache, rows("a"), None)) == [(1, FRESH)]
        clock.now = 67 * S
        store.open.clear()
        # The store hangs until all of these have ended.
        for deadline_ns in (clock.now + 10**7, clock.now, 0):
            features = get(cache, rows("a", "b"), deadline_ns)
            assert served(features) == [(1, STALE), (0, MISSING)]
            assert (features.stale, features.missing) == (1, 1)
        assert cache.counts().late == 3
        store.open.set()
        assert get(cache, rows("b", "a"), None).missing == 0
    with cached(store, "synchronous", clock, max_wait_ms=1.0) as cache:
        store.open.clear()
        assert get(cache, rows("a"), clock.now + 3600 * S).missing == 1


def test_not_found_is_remembered_for_a_short_time() -> None:
    store, clock = FakeStore({}), Clock()
    with cached(store, "sync_missing", clock) as cache:
        for _ in range(3):
            assert served(cache.get_many(rows("a"))) == [(0, MISSING)]
        assert store.asked == [["a"]]
        store.values["a"] = record(1)
        clock.now = 5 * S
        assert served(cache.get_many(rows("a"))) == [(1, FRESH)]
        assert (cache.counts().not_found, cache.counts().missing) == (1, 3)


def test_who_waited_and_heard_that_there_is_none_is_not_given_the_stale_record() -> None:
    store, clock = FakeStore({"a": record(1)}), Clock()
    with cached(store, "synchronous", clock) as cache:
        assert served(cache.get_many(rows("a"))) == [(1, FRESH)]
        clock.now = 67 * S
        del store.values["a"]
        assert served(cache.get_many(rows("a"))) == [(0, MISSING)]


@pytest.mark.parametrize("error", [StoreError("down"), RuntimeError("a defect of the store")])
def test_failures_keep_what_is_stale_and_are_tried_again(error: Exception) -> None:
    store, clock = FakeStore({"a": record(1)}), Clock()
    with cached(store, "synchronous", clock) as cache:
        cache.get_many(rows("a"))
        clock.now, store.error = 67 * S, error
        assert served(cache.get_many(rows("a", "b"))) == [(1, STALE), (0, MISSING)]
        assert served(cache.get_many(rows("a", "b"))) == [(1, STALE), (0, MISSING)]  # held: not asked again
        assert len(store.asked) == 2 and cache.counts().held == 2
        clock.now += S
        store.error, store.values["b"] = None, record(2)
        assert served(cache.get_many(rows("a", "b"))) == [(1, FRESH), (2, FRESH)]
        assert cache.counts().failures == isinstance(error, StoreError)


def test_wrong_values_are_counted_and_never_served() -> None:
    other = Schema.parse("y:int32").default
    store, clock = FakeStore({"c": record(1)[:-1], "f": other, "g": record(3)}), Clock()
    with cached(store, "synchronous", clock) as cache:
        items = ["c", "g", "f"]
        assert served(cache.get_many(rows(*items))) == [(0, MISSING), (3, FRESH), (0, MISSING)]
        assert cache.counts().invalid == 2 and cache.counts().bytes == 19 + 20 + 20
        clock.now = S
        store.values["c"] = record(1)
        assert served(cache.get_many(rows(*items))) == [(1, FRESH), (3, FRESH), (0, MISSING)]


def test_wrong_values_are_told_of_in_one_line_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    store, clock = FakeStore({"c": record(1)[:-1], "f": b""}), Clock()
    with cached(store, "synchronous", clock, absent_ttl_s=0.1) as cache:
        for second in (0, 1, 2, 4, 5, 6):
            clock.now = second * S
            cache.get_many(rows("c", "f"))
        assert cache.counts().invalid == 12
    told = [each.getMessage() for each in caplog.records if "are wrong" in each.getMessage()]
    assert [line.partition(" feature values are wrong; that of item 'c' ")[0] for line in told] == ["2", "8"]


def test_requests_that_follow_one_another_share_a_round_trip() -> None:
    store = FakeStore({"a": record(1), "b": record(2)})
    with cached(store, "asynchronous", linger_ms=PATIENCE_S * 1e3, connections=2) as cache:
        cache.get_many(rows("a"))
        cache.get_many(rows("b", "a"))
        cache.close(PATIENCE_S)  # ends the lingering
        assert store.asked == [["a", "b"]]


def test_a_full_cache_forgets_and_an_empty_request_is_answered() -> None:
    items = [str(n) for n in range(1000)]
    store = FakeStore({item: record(int(item)) for item in items})
    with cached(store, "synchronous", cache_mb=0.1, buckets=4) as cache:
        for start in range(0, 1000, 50):
            asked = items[start : start + 50]
            assert served(cache.get_many(rows(*asked))) == [(int(item), FRESH) for item in asked]
        counts = cache.counts()
        assert 0 < counts.used_bytes <= 0.1 * 2**20 and counts.entries + counts.evicted == 1000
        assert cache.get_many(rows()).records.shape == (0,)
        assert cache.close(PATIENCE_S)
        assert store.closed and cache.get_many(rows(*items)).missing == counts.evicted  # no fetch any more


def test_records_are_written_where_the_caller_says() -> None:
    store, clock = FakeStore({"a": record(1), "b": record(2)}), Clock()
    with cached(store, "synchronous", clock) as cache:
        words = np.full((3, SCHEMA.record_bytes // 4), 9, np.uint32)
        features = cache.get_many(rows("b", "h", "a"), out=words)
        assert served(features) == [(2, FRESH), (0, MISSING), (1, FRESH)]
        assert words.tobytes() == record(2) + SCHEMA.default + record(1)
        assert np.shares_memory(features.records, words)
        # What comes after the deadline is not written there any more.
        clock.now = 67 * S
        store.values["a"] = record(5)
        store.open.clear()
        assert served(cache.get_many(rows("a"), 0, words[:1])) == [(1, STALE)]
        store.open.set()
        assert served(cache.get_many(rows("a"))) == [(5, FRESH)]
        assert words[:1].tobytes() == record(1)


def test_what_passes_through_is_fetched_once_at_a_time_and_left_alone_after_a_failure() -> None:
    store, clock = FakeStore({item: record(row) for item, row in ROWS.items()}), Clock()
    begun = threading.Semaphore(0)
    with cached(store, "sync_missing", clock, cache_mb=0) as cache, ThreadPoolExecutor(8) as threads:
        waits = cache._wait

        def waiting(*given: Any) -> Any:  # under the cache's lock
            found = waits(*given)
            begun.release()
            return found

        cache._wait = waiting  # type: ignore[method-assign]
        store.open.clear()
        gets = [threads.submit(cache.get_many, rows("a", "b", "a")) for _ in range(8)]
        for _ in gets:
            assert begun.acquire(timeout=PATIENCE_S)
        store.open.set()
        assert all(served(get.result(PATIENCE_S)) == [(0, FRESH), (1, FRESH), (0, FRESH)] for get in gets)
        assert store.asked == [["a", "b"]] and cache.counts().joined == 8 * 3 - 2
        store.error = StoreError("down")
        assert cache.get_many(rows("a")).missing == 1
        assert cache.get_many(rows("b")).missing == 1  # held
        assert (len(store.asked), cache.counts().held) == (2, 1)
        clock.now, store.error = S, None
        assert served(cache.get_many(rows("b"))) == [(1, FRESH)]


def test_a_mode_that_never_waits_counts_what_has_no_room_and_needs_some() -> None:
    items = [str(n) for n in range(100)]
    store = FakeStore({item: record(int(item)) for item in items})
    with cached(store, "asynchronous", cache_mb=0.001, buckets=4) as cache:
        assert cache.get_many(rows(*items)).missing == 100
        cache.close(PATIENCE_S)
        features = cache.get_many(rows(*items))
        assert all(one in ((row, FRESH), (0, MISSING)) for row, one in enumerate(served(features)))
        assert (features.missing, cache.counts().entries, cache.counts().fetched) == (88, 12, 12)
    with pytest.raises(
        ConfigError, match=r"features\.cache_mb: 0 MB have no room.*features\.mode=asynchronous"
    ):
        FeatureCache(store, SCHEMA, ITEMS, FeaturesConfig(mode="asynchronous", cache_mb=0))
