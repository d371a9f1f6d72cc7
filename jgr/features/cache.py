# SPDX-License-Identifier: Apache-2.0
"""The feature cache of the serving path: `get_many`, from any thread or from an event loop (FLAME-2..4).

The one idea: the pure `memory` decides, under one lock for tens of microseconds; this file owns the clock, the threads
that ask the store, and the requests that wait. All items of a request that must be fetched go to the store in one round
trip, together with those of other requests that wait for a free thread.

Invariants: an item has at most one fetch at a time (single flight); every fetch that starts ends in a commit, even if
the store fails; a get never waits beyond its deadline, and then serves the records that are there. Values that are not
records of the schema are counted and never served. In the modes that wait, the cache's memory decides how often the
store is asked, never what a request is given; without memory the store is asked for every item of every request.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jgr.cache.embeddings import EmbeddingCache
from jgr.config import ConfigError, FeaturesConfig
from jgr.features import numa
from jgr.features.memory import FAILED, FRESH, MISSING, End, Failed, Got, Memory
from jgr.features.paged import PagedMemory
from jgr.features.schema import Schema
from jgr.features.states import WAITS
from jgr.features.stores import FeatureStore, StoreError

MAX_BATCH = 4096
"""The most items in a round trip, unless one request alone has more."""
MAX_QUEUED = 1 << 16
"""The most items that wait for the store; beyond it no further item is fetched."""
COMMITTED = 512
"""The most items that are committed under one hold of the lock; more would delay gets."""
JITTER = 0.1
QUIET_NS = 5_000_000_000
"""Between two lines of the log on values that are wrong."""

UInt8 = npt.NDArray[np.uint8]
Int32 = npt.NDArray[np.int32]

_log = logging.getLogger(__name__)


class Features(NamedTuple):
    """The features of n items. records: [n] of the schema's dtype. states: [n] uint8, FRESH, STALE or MISSING.

    stale: how many records are older than their time to live. missing: how many are the default record (EMPTY), since
    they are not fetched yet or the store has none; FLAME's `feature_missing`. Where records are kept in pages,
    one of zeros stands in the pool alone, see `jgr.features.paged`.
    """

    records: npt.NDArray[np.void]
    states: UInt8
    stale: int
    missing: int


@dataclass
class Counts:
    """Counters since the start; the last two are current values. They count items unless they say otherwise."""

    fresh: int = 0
    stale: int = 0
    missing: int = 0
    waits: int = 0  # gets that waited for a fetch
    late: int = 0  # gets whose fetch had not ended by the deadline
    fetched: int = 0  # items that the store was asked for
    joined: int = 0  # items that shared a fetch under way: the savings of single flight
    not_found: int = 0
    invalid: int = 0  # values that were truncated, foreign or of a wrong type
    round_trips: int = 0
    failures: int = 0  # round trips without an answer
    held: int = 0  # items that were not fetched: after a failure, or since too many waited
    bytes: int = 0  # bytes of the values that the store sent
    evicted: int = 0
    entries: int = 0  # items in the cache now
    used_bytes: int = 0  # bytes in use now


class _Wait:
    """A get that waits for fetches, which write into its records and states.

    Its methods are called under the cache's lock. default: the record of what the store has not. done: set once all
    awaited fetches have ended.
    """

    def __init__(self, records: UInt8, seen: UInt8, default: bytes) -> None:
        self.records, self.seen, self.default, self.awaited = records, seen, default, 0
        self.done: futures.Future[None] = futures.Future()
        self.done.set_running_or_notify_cancel()  # an event loop that stops waiting must not cancel it

    def deliver(self, place: int, end: End) -> None:
        if not isinstance(end, Failed):
            self.records[place] = np.frombuffer(self.default if end is None else end, np.uint8)
            self.seen[place] = MISSING if end is None else FRESH
        self.awaited -= 1

    def given_up(self) -> int:
        """Detach the served arrays, so that late fetches do not write to them; returns how many are still awaited."""
        if self.awaited:
            self.records, self.seen = self.records.copy(), self.seen.copy()
        return self.awaited


class FeatureCache:
    """Serves the records of `schema` from `store` by the mode of `config`; `close` it in the end.

    item_ids: the catalog's ids, which are the store's keys; gets name items by row. config.store and config.schema are
    not read here. clock: nanoseconds that never go back. seed: seed of the jitter of the times to live. pages: where
    records are kept, which has their table; None: in an array of this process, of config.cache_mb. Raises ConfigError
    if the mode never waits (asynchronous) and there is no room for a record in every bucket.
    """

    def __init__(
        self,
        store: FeatureStore,
        schema: Schema,
        item_ids: Sequence[str],
        config: FeaturesConfig,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
        seed: int = 0,
        pages: EmbeddingCache | None = None,
    ) -> None:
        self.schema, self._store, self._clock, self._item_ids = schema, store, clock, item_ids
        self._max_wait_ns = round(config.max_wait_ms * 1e6)
        self._waits = WAITS[config.mode]
        items, ttl_ns, absent_ttl_ns = (
            len(item_ids),
            *(round(s * 1e9) for s in (config.ttl_s, config.absent_ttl_s)),
        )
        self._memory: Memory | PagedMemory
        self._keep: Callable[[Sequence[int], Sequence[End]], None] | None = None
        self.host_bytes = round(config.cache_mb * 2**20)
        """Bytes of this process that it may take."""
        if pages is None:
            self._memory = Memory(
                schema.default,
                items=items,
                buckets=config.buckets,
                capacity=round(config.cache_mb * 2**20),
                ttl_ns=ttl_ns,
                absent_ttl_ns=absent_ttl_ns,
                passes=bool(self._waits),
            )
        else:
            self._memory = PagedMemory(pages, schema.default, items, ttl_ns, absent_ttl_ns)
            self._keep, self.host_bytes = self._memory.keep, self._memory.state_bytes
        if not (self._waits or self._memory.slots):
            raise ConfigError(
                f"features.cache_mb: {config.cache_mb} MB have no room for a record of {schema.record_bytes} bytes in "
                f"each of {config.buckets} buckets, and features.mode=asynchronous serves only what is cached"
            )
        self._waiting: dict[int, list[tuple[_Wait, int]]] = {}  # by slot: who, and for which place
        # Where nobody waits, requests that follow one another share a round trip.
        self._linger_s = 0.0 if self._waits else config.linger_ms / 1e3
        self._bind = config.bind_threads
        self._random = np.random.default_rng(seed)
        self._counts = Counts()
        self._untold, self._told_ns = 0, -QUIET_NS  # wrong values that no line of the log has told of
        self._lock = threading.Lock()  # of all of the above
        self._queue: queue.SimpleQueue[list[int] | None] = queue.SimpleQueue()
        self._gathering = threading.Lock()
        self._queued = 0
        self._answering = True
        self._closed = threading.Event()
        self._connections = config.connections
        self._threads: list[threading.Thread] = []

    def get_many(
        self, rows: Int32, deadline_ns: int | None = None, out: npt.NDArray[Any] | None = None
    ) -> Features:
        """The records of the items of rows [n], in order, repeats allowed. Blocks if the mode says so.

        Waits until `deadline_ns` of the clock, and never longer than config.max_wait_ms. It raises nothing: records
        that the store does not give in time are stale or missing. out: where to write the records, [n, record bytes]
        with contiguous rows, such as a view of a `Staging`; the returned records are then a view of it.
        """
        return self._got(*self._begin(rows, out), deadline_ns)

    async def get_many_async(
        self, rows: Int32, deadline_ns: int | None = None, out: npt.NDArray[Any] | None = None
    ) -> Features:
        """The same as `get_many`, without blocking the event loop."""
        records, seen, wait = self._begin(rows, out)
        if wait is not None:
            await asyncio.wait([asyncio.wrap_future(wait.done)], timeout=self._patience_s(deadline_ns))
            self._waited(wait)
        return self._finish(records, seen)

    def get_again(self, rows: Int32) -> Features:
        """The same as `get_many`, of rows whose records went from the pages in which a get found them. None is looked
        for there, so that those which the store gives in time are in the answer."""
        return self._got(*self._begin(rows, None, gone=True), None)

    def counts(self) -> Counts:
        """The counters, as a copy."""
        memory = self._memory
        with self._lock:
            used = memory.entries * memory.slot_bytes
            return replace(self._counts, evicted=memory.evicted, entries=memory.entries, used_bytes=used)

    def close(self, timeout_s: float = 5.0) -> bool:
        """Stop fetching, and close the store. False if a thread still waits for the store; it ends with its answer."""
        with self._lock:  # no thread is started from now on
            self._closed.set()
        for _ in self._threads:
            self._queue.put(None)
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        self._store.close()
        return not any(thread.is_alive() for thread in self._threads)

    def _got(self, records: UInt8, seen: UInt8, wait: _Wait | None, deadline_ns: int | None) -> Features:
        if wait is not None:
            futures.wait([wait.done], timeout=self._patience_s(deadline_ns))
            self._waited(wait)
        return self._finish(records, seen)

    def _begin(
        self, rows: Int32, out: npt.NDArray[Any] | None, gone: bool = False
    ) -> tuple[UInt8, UInt8, _Wait | None]:
        """Read records and states from the cache, start the needed fetches, and say what to wait for."""
        shape = (len(rows), self.schema.record_bytes)
        records = np.empty(shape, np.uint8) if out is None else out.view(np.uint8)
        wait: _Wait | None = None
        now_ns = self._clock()
        with self._lock:
            may_fetch = self._queued < MAX_QUEUED and not self._closed.is_set()
            if gone:
                self._memory.forget(rows)
            got = self._memory.get(rows, now_ns, may_fetch, records)
            if self._waits and len(got.old):
                wait = self._wait(got, records)
            self._queued += len(got.fetch)
            self._counts.joined += got.joined
            self._counts.held += got.held
            if got.fetch and not self._threads:
                self._start()
        if got.fetch:
            self._queue.put(got.fetch)
        return records, got.seen, wait

    def _start(self) -> None:
        """Start the threads, at the first fetch: an engine that is dropped before it serves then leaves no thread."""
        self._threads = [
            threading.Thread(target=self._work, name=f"features-{number}", daemon=True)
            for number in range(self._connections)
        ]
        for thread in self._threads:
            thread.start()

    def _wait(self, got: Got, records: UInt8) -> _Wait | None:
        wait = _Wait(records, got.seen, self.schema.default)
        for place, slot, state in zip(got.old.tolist(), got.slots.tolist(), got.states.tolist(), strict=True):
            if state in self._waits:
                self._waiting.setdefault(slot, []).append((wait, place))
                wait.awaited += 1
        return wait if wait.awaited else None

    def _waited(self, wait: _Wait) -> None:
        with self._lock:
            self._counts.waits += 1
            self._counts.late += wait.given_up() > 0

    def _finish(self, records: UInt8, seen: UInt8) -> Features:
        fresh, stale, missing = np.bincount(seen, minlength=3).tolist()
        with self._lock:
            self._counts.fresh += fresh
            self._counts.stale += stale
            self._counts.missing += missing
        return Features(records.view(self.schema.dtype)[:, 0], seen, stale, missing)

    def _patience_s(self, deadline_ns: int | None) -> float:
        left_ns = self._max_wait_ns
        if deadline_ns is not None:
            left_ns = min(left_ns, deadline_ns - self._clock())
        return max(0, left_ns) / 1e9

    def _work(self) -> None:
        """The loop of a thread: ask the store and commit its answers, until the cache is closed."""
        if self._bind:
            numa.bind_thread()
        while slots := self._gather():
            # A pending item keeps its slot.
            rows = self._memory.rows(slots)
            items = [self._item_ids[row] for row in rows]
            ends: Sequence[End] = [FAILED] * len(slots)
            try:
                ends = self._fetch(items)
                if self._keep is not None:
                    self._keep(rows, ends)
            except Exception:
                _log.exception("a fetch of %d items' features failed", len(items))
            for start in range(0, len(slots), COMMITTED):
                self._commit(slots[start : start + COMMITTED], ends[start : start + COMMITTED])

    def _gather(self) -> list[int]:
        """Take slots that wait for the store, up to MAX_BATCH or one request's; none: the cache is closed."""
        with self._gathering:
            first = self._queue.get()
            if first is None:
                return []
            self._closed.wait(self._linger_s)
            slots = list(first)
            while len(slots) < MAX_BATCH:
                try:
                    more = self._queue.get_nowait()
                except queue.Empty:
                    break
                if more is None:
                    self._queue.put(None)  # somebody's end
                    break
                slots += more
        return slots

    def _fetch(self, items: Sequence[str]) -> list[End]:
        with self._lock:
            self._counts.round_trips += 1
            self._counts.fetched += len(items)
        try:
            values = self._store.get_many(items)
        except StoreError as cause:
            self._answers(False, cause)
            with self._lock:
                self._counts.failures += 1
            return [FAILED] * len(items)
        self._answers(True)
        ends: list[End] = list(values)
        faults = self.schema.faults(values)
        for place, _ in faults:
            ends[place] = FAILED
        self._tell(items, faults)
        with self._lock:
            self._counts.invalid += len(faults)
            self._counts.not_found += values.count(None)
            self._counts.bytes += sum(len(value) for value in values if value is not None)
        if len(ends) != len(items):
            raise ValueError(f"the store gave {len(ends)} values for {len(items)} items")
        return ends

    def _tell(self, items: Sequence[str], faults: Sequence[tuple[int, str]]) -> None:
        """Log values that are wrong: one line in QUIET_NS, however many fetches find some."""
        now_ns = self._clock()
        with self._lock:
            self._untold += len(faults)
            if not faults or now_ns - self._told_ns < QUIET_NS:
                return
            count, self._untold, self._told_ns = self._untold, 0, now_ns
        place, fault = faults[0]
        _log.warning("%d feature values are wrong; that of item %r %s", count, items[place], fault)

    def _commit(self, slots: Sequence[int], ends: Sequence[End]) -> None:
        now_ns, done = self._clock(), list[_Wait]()
        with self._lock:
            self._queued -= len(slots)
            jitter = self._random.uniform(-JITTER, JITTER, len(slots))
            self._memory.commit(slots, ends, now_ns, jitter)
            for slot, end in zip(slots, ends, strict=True) if self._waiting else ():
                for wait, place in self._waiting.pop(slot, ()):
                    wait.deliver(place, end)
                    if not wait.awaited:
                        done.append(wait)
        for wait in done:
            wait.done.set_result(None)

    def _answers(self, well: bool, cause: StoreError | None = None) -> None:
        """Log once that the store fails, and once that it is back."""
        if well != self._answering:
            self._answering = well
            if well:
                _log.info("the feature store answers again")
            else:
                _log.warning("the feature store fails; cached features are served: %s", cause)
