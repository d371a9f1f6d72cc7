# SPDX-License-Identifier: Apache-2.0
"""Items' records in pages of the device's pool, beside the rows of embeddings (FLAME-1 with HLEM-2).

The one idea: a record is a row of one more table, which the feature store's answers bring. What an item's state is, who
asks the store, who waits and for how long stays as it is (`states`, `memory`, `cache`): the host keeps the states
without the records. A record that went with its page is as one that was never fetched.

A record comes twice to whoever waited for it: the store's answer is written to the pool, where later requests find it,
and is kept with the request. So a request is given what it waited for even where no page could be had. What a request
found in the pool, and is gone when its part is dispatched, is asked for again.

On the host the record of a row that only the pool has is all zeros, which no store can give: a record has a header.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np
import numpy.typing as npt

from jgr.cache.embeddings import EmbeddingCache, Table
from jgr.features.memory import MISSING, SLOT_BYTES, End, Got, Memory
from jgr.features.schema import Schema

NAME = "features"
"""The table of records."""

UInt8 = npt.NDArray[np.uint8]
Int32 = npt.NDArray[np.int32]


def table_of(schema: Schema, items: int) -> Table:
    """The table of the records of so many items."""
    return Table(items, schema.record_bytes // 4, np.dtype(np.uint32), brought=str(schema))


class PagedMemory:
    """States on the host, records in the pages of `rows`: what `Memory` is to a feature cache.

    Every item has a state, of SLOT_BYTES. The cache's lock is held for all but `keep`.
    """

    def __init__(
        self, rows: EmbeddingCache, default: bytes, items: int, ttl_ns: int, absent_ttl_ns: int
    ) -> None:
        self._pages, self._default = rows, np.frombuffer(default, np.uint8)
        self._states = Memory(
            b"",
            items=items,
            buckets=1,
            capacity=items * SLOT_BYTES,
            ttl_ns=ttl_ns,
            absent_ttl_ns=absent_ttl_ns,
        )
        self.slot_bytes = len(default)
        self.slots = items
        self.state_bytes = items * SLOT_BYTES
        self.rows: Callable[[Sequence[int]], list[int]] = self._states.rows

    @property
    def entries(self) -> int:
        """Records in the pool."""
        return self._pages.pages.resident(NAME)

    @property
    def evicted(self) -> int:
        return self._pages.counts(NAME)["evicted"]

    def forget(self, rows: Int32) -> None:
        """See `Memory.forget`."""
        self._states.forget(rows)

    def get(self, rows: Int32, now_ns: int, may_fetch: bool, out: UInt8) -> Got:
        """The same as `Memory.get`; out, [n, record bytes], gets the default record, or zeros for what is in the pool
        alone."""
        here = self._pages.here(NAME, rows)
        self._states.forget(rows[~here])
        got = self._states.get(rows, now_ns, may_fetch, np.empty((len(rows), 0), np.uint8))
        out[:] = self._default
        out[got.seen != MISSING] = 0
        return got

    def keep(self, rows: Sequence[int], ends: Sequence[End]) -> None:
        """Write the records that the store gave to the pool: before `commit`, so that nobody counts on one sooner."""
        found = [(row, end) for row, end in zip(rows, ends, strict=True) if isinstance(end, bytes)]
        if found:
            values = np.frombuffer(b"".join(end for _, end in found), np.uint32).reshape(len(found), -1)
            self._pages.put(NAME, np.array([row for row, _ in found], np.int64), values)

    def commit(
        self, slots: Sequence[int], ends: Sequence[End], now_ns: int, jitter: npt.NDArray[np.float64]
    ) -> None:
        """See `Memory.commit`."""
        states: list[End] = [b"" if isinstance(end, bytes) else end for end in ends]
        self._states.commit(slots, states, now_ns, jitter)


class Again(Protocol):
    """The feature cache, for records that have gone meanwhile."""

    def get_again(self, rows: Int32) -> Any:
        """The `Features` of rows [n], none of which is taken from the pool."""


class PagedRecords:
    """Gives executors the records of candidates, from the pool and from the host. Any thread may call it."""

    def __init__(self, rows: EmbeddingCache, features: Again) -> None:
        self._pages, self._features = rows, features

    def compile(self, count: int) -> None:
        """Make the programs for batches of `count` candidates."""
        self._pages.compile(NAME, count)

    def given(self, rows: Int32, records: npt.NDArray[np.void], states: UInt8, count: int) -> jax.Array:
        """The records [count, words] uint32 of candidates, on the device; zeros beyond them and where they are missing.

        rows [c <= count], each once; records, states [c]: as `Features` has them. Where one that the pool had is gone,
        the store is asked again, and both are written to.
        """
        while True:
            words = np.zeros((count, records.dtype.itemsize // 4), np.uint32)
            words[: len(rows)] = records.view(np.uint32).reshape(len(rows), -1)
            padded, there = np.full(count, -1, np.int32), np.zeros(count, np.bool_)
            padded[: len(rows)], there[: len(rows)] = rows, states != MISSING
            sent = there & (words[:, 0] != 0)
            found = self._pages.records(NAME, padded, words, there & ~sent, sent)
            if found.words is not None:
                return found.words
            again = self._features.get_again(rows[found.gone])
            # Whole records, whose headers say that they are sent: so once is enough. By fields a header is not copied.
            in_words, new = (x.view(np.uint32).reshape(len(x), -1) for x in (records, again.records))
            in_words[found.gone], states[found.gone] = new, again.states
