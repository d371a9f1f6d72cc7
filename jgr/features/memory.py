# SPDX-License-Identifier: Apache-2.0
"""The cache's memory: records in one array, and each item's state (FLAME-2, 4). Pure: time and jitter are arguments.

The one idea: items are rows of a catalog, a cached row has a slot, and everything about slots is an array, so that a
request's items take their steps of `states.TABLE` together, in a few array operations, and their records are copied
once, to where they are needed. (In Python an object for each item behind a lock for each bucket took seven times as
long, and slots in a dict of item ids twice as long.)

Slots belong to buckets, as rows do, and a full bucket drops its least recently used slot. All records have the same
length, so a capacity in bytes is a number of slots. Slot 0 belongs to no item: rows without a slot point to it.

A get may need more rows than its buckets have slots. In the modes in which gets wait for fetches, such a row is fetched
for the waiting request and not kept: it passes through. Until its fetch ends, -1 - row stands in the place of a slot.

Invariants (`check`): a row has at most one slot, in its bucket; a slot without a found record holds the default one; a
pending item keeps its slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jgr.features.states import ACTION, AGED, BACK_OFF_NS, FETCH, NEXT, Event, State

FRESH, STALE, MISSING = 0, 1, 2
SLOT_BYTES = 64
"""Bytes of a slot besides its record: seven numbers about it, and three for the sorting of its bucket."""
_NEVER = np.iinfo(np.int64).max
_SEEN = np.array([MISSING, FRESH], np.uint8)  # by whether a record is there
_SEEN_OLD = np.array([MISSING, STALE], np.uint8)
_VALUE, _NOT_FOUND, _FAILURE = int(Event.VALUE), int(Event.NOT_FOUND), int(Event.FAILURE)
_PENDING = State.PENDING, State.STALE_PENDING

UInt8 = npt.NDArray[np.uint8]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


class Failed:
    """The end of a fetch that gave neither a value nor the answer that there is none."""


FAILED = Failed()
End = bytes | Failed | None
"""The result of a fetch: a record, FAILED, or None if the store has none."""


class Got(NamedTuple):
    """The result of a get.

    seen: [n] FRESH, STALE or MISSING. old: [o] positions in the request of the items that are not fresh; slots, states:
    their slots and states after the get. fetch: slots to be fetched and committed. joined, held: numbers of items, see
    `states`. A row that passes through is -1 - row among the slots, and PENDING.
    """

    seen: UInt8
    old: Int64
    slots: Int32
    states: UInt8
    fetch: list[int]
    joined: int
    held: int


class _Bucket:
    """The slots first .. end - 1, of which those from `unused` on were never used.

    victims: slots that could go when they were looked for, least recently used first; ticks: when each was last used.
    Those before `tried` are dealt with; a slot whose last use is later than its tick is no victim any more. full_at:
    the last tick in which no slot could go."""

    def __init__(self, first: int, end: int) -> None:
        self.first, self.end, self.unused, self.tried, self.full_at = first, end, first, 0, 0
        self.victims: Int64 = np.zeros(0, np.int64)
        self.ticks: Int64 = np.zeros(0, np.int64)


class Memory:
    """The records and states of a catalog's items.

    default: the record of an item without features. items: their number. capacity: in bytes. ttl_ns: how long a record
    is fresh; absent_ttl_ns: how long it is trusted that the store has none. passes: rows without a slot pass through,
    see above; otherwise they are MISSING, and nothing is fetched for them."""

    def __init__(
        self,
        default: bytes,
        *,
        items: int,
        buckets: int,
        capacity: int,
        ttl_ns: int,
        absent_ttl_ns: int,
        passes: bool = False,
    ) -> None:
        self._default = np.frombuffer(default, np.uint8)
        self.slot_bytes = len(default) + SLOT_BYTES
        each = min(capacity // buckets // self.slot_bytes, -(-items // buckets))
        n = 1 + each * buckets
        self._ttl_ns, self._absent_ttl_ns = ttl_ns, absent_ttl_ns
        self._slots = np.zeros(items, np.int32)  # by row
        self._rows = np.full(n, -1, np.int64)  # by slot, as all below
        self._records = np.zeros((n, len(default)), np.uint8)  # pages that were never written take no memory
        self._records[0] = self._default
        self._state, self._found = np.zeros(n, np.uint8), np.zeros(n, np.bool_)
        self._expires_ns, self._used = np.zeros(n, np.int64), np.zeros(n, np.int64)
        self._failures, self._retry_ns = np.zeros(n, np.int64), np.zeros(n, np.int64)
        self._retry_ns[0] = _NEVER
        self._buckets = [_Bucket(1 + each * k, 1 + each * (k + 1)) for k in range(buckets)]
        self._passes, self._passing = passes, set[int]()  # -1 - row of what is being fetched and has no slot
        self._pass_failures, self._pass_retry_ns = 0, -_NEVER
        self._tick = 0  # of gets and commits
        self._last_retry_ns = -_NEVER  # the last time at which something that failed may be tried again
        self.entries = self.evicted = 0

    @property
    def slots(self) -> int:
        """Records that there is room for."""
        return len(self._rows) - 1

    def rows(self, slots: Sequence[int]) -> list[int]:
        """The rows of slots, and of what passes through."""
        at = np.array(slots, np.int64)
        found: list[int] = np.where(at > 0, self._rows[np.maximum(at, 0)], -1 - at).tolist()
        return found

    def get(self, rows: Int32, now_ns: int, may_fetch: bool, out: UInt8) -> Got:
        """Copy the records of rows [n], repeats allowed, to out, [n, record bytes], and step the items' states.

        may_fetch: whether fetches may start.
        """
        slots = self._slots[rows]
        self._tick += 1
        self._used[slots] = self._tick
        if may_fetch and self.slots and not slots.all():
            self._admit(list(dict.fromkeys(rows[slots == 0].tolist())))
            slots = self._slots[rows]
        np.take(self._records, slots, axis=0, out=out, mode="clip")  # the other modes copy out first
        found = self._found[slots].view(np.uint8)
        seen = _SEEN[found]
        old = np.flatnonzero(self._expires_ns[slots] <= now_ns)
        if not len(old):
            return Got(seen, old, slots[:0], seen[:0], [], 0, 0)
        slots, found = slots[old], found[old]
        seen[old] = _SEEN_OLD[found]
        state = AGED[self._state[slots], found]
        # GET is 0, HELD 1; a single value for all if all have slots and no fetch failed lately.
        held: int | UInt8 = int(not may_fetch)
        if may_fetch and (now_ns < self._last_retry_ns or not slots.all()):
            held = (self._retry_ns[slots] > now_ns).view(np.uint8)
        self._state[slots] = after = NEXT[state, held]
        action = ACTION[state, held]
        _, starts, joined, kept_back = np.bincount(action, minlength=4).tolist()
        fetch = list(dict.fromkeys(slots[action == FETCH].tolist())) if starts else []
        got = Got(seen, old, slots, after, fetch, joined + starts - len(fetch), kept_back)
        passes = self._passes and may_fetch and now_ns >= self._pass_retry_ns
        return got if not passes or slots.all() else self._pass_through(got, rows)

    def _pass_through(self, got: Got, rows: Int32) -> Got:
        """With what has no slot: each row is fetched once, however many gets wait for it."""
        places = np.flatnonzero(got.slots == 0)
        slots, states = got.slots.copy(), got.states.copy()
        slots[places] = named = -1 - rows[got.old[places]]
        states[places] = State.PENDING
        new = [name for name in dict.fromkeys(named.tolist()) if name not in self._passing]
        self._passing.update(new)
        joined, held = got.joined + len(places) - len(new), got.held - len(places)
        return got._replace(slots=slots, states=states, fetch=got.fetch + new, joined=joined, held=held)

    def _passed(self, names: Sequence[int], ends: Sequence[End], now_ns: int) -> None:
        """Fetches of what passes through ended. After a failure all of it is left alone for a while."""
        self._passing.difference_update(names)
        failed = any(isinstance(end, Failed) for end in ends)
        if failed:
            wait_ns = int(BACK_OFF_NS[min(self._pass_failures, len(BACK_OFF_NS) - 1)])
            self._pass_retry_ns = now_ns + wait_ns
        self._pass_failures = self._pass_failures + 1 if failed else 0

    def commit(
        self, slots: Sequence[int], ends: Sequence[End], now_ns: int, jitter: npt.NDArray[np.float64]
    ) -> None:
        """Store the ends of fetches, each slot once. jitter: [n], the share of the time to live that is added."""
        if passed := [place for place, slot in enumerate(slots) if slot < 0]:
            self._passed([slots[place] for place in passed], [ends[place] for place in passed], now_ns)
            kept = [place for place, slot in enumerate(slots) if slot > 0]
            slots, ends, jitter = (
                [slots[place] for place in kept],
                [ends[place] for place in kept],
                jitter[kept],
            )
        at = np.array(slots, np.int64)
        self._tick += 1
        self._used[at] = self._tick
        event = np.array([_event(end) for end in ends], np.int64)
        self._state[at] = NEXT[self._state[at], event]
        if _FAILURE in event:
            failed = at[event == _FAILURE]
            failures = self._failures[failed]
            self._retry_ns[failed] = now_ns + BACK_OFF_NS[np.minimum(failures, len(BACK_OFF_NS) - 1)]
            self._last_retry_ns = max(self._last_retry_ns, int(self._retry_ns[failed].max()))
            self._failures[failed] = failures + 1
            ended = event != _FAILURE
            at, event, jitter = at[ended], event[ended], jitter[ended]
        self._failures[at] = self._retry_ns[at] = 0
        self._found[at] = there = event == _VALUE
        ttl_ns = (self._ttl_ns * (1 + jitter)).astype(np.int64)
        self._expires_ns[at] = now_ns + np.where(there, ttl_ns, self._absent_ttl_ns)
        self._records[at[~there]] = self._default
        values = b"".join([end for end in ends if isinstance(end, bytes)])
        self._records[at[there]] = np.frombuffer(values, np.uint8).reshape(
            np.count_nonzero(there), len(self._default)
        )

    def forget(self, rows: Int32) -> None:
        """The records of rows [n] are lost, where there were some. A fetch under way goes on."""
        slots = self._slots[rows]
        slots = slots[self._found[slots]]
        pending = self._state[slots] == State.STALE_PENDING
        self._state[slots] = np.where(pending, State.PENDING, State.ABSENT)
        self._found[slots] = False
        self._expires_ns[slots] = 0

    def state(self, row: int, now_ns: int) -> State:
        """The state of a row's item; this does not count as a use."""
        slot = self._slots[row]
        aged = self._expires_ns[slot] <= now_ns
        return State(int(AGED[self._state[slot], int(self._found[slot])] if aged else self._state[slot]))

    def bucket(self, row: int) -> int:
        """The number of a row's bucket."""
        return row % len(self._buckets)

    def kept(self) -> list[list[int]]:
        """The rows of each bucket, least recently used first."""
        rows: list[list[int]] = [[] for _ in self._buckets]
        for slot in np.argsort(self._used, kind="stable").tolist():
            if self._rows[slot] >= 0:
                rows[self.bucket(int(self._rows[slot]))].append(int(self._rows[slot]))
        return rows

    def check(self) -> None:
        """Check the invariants. Raises AssertionError if one is broken."""
        slots = np.flatnonzero(self._rows >= 0)
        assert (self._slots[self._rows[slots]] == slots).all(), "a row and its slot disagree"
        assert np.count_nonzero(self._slots) == len(slots) == self.entries, "slots are lost"
        for slot, row in zip(slots.tolist(), self._rows[slots].tolist(), strict=True):
            bucket = self._buckets[self.bucket(row)]
            assert bucket.first <= slot < bucket.unused, "a slot is not its bucket's"
        empty = np.append(0, slots[~self._found[slots]])
        assert (self._records[empty] == self._default).all(), "an item without features has some"
        pending = np.flatnonzero(np.isin(self._state, _PENDING))
        assert (self._rows[pending] >= 0).all(), "a pending item lost its slot"

    def _admit(self, rows: list[int]) -> None:
        """Give rows without a slot one, as far as there are slots that this get does not use itself."""
        pairs = [(slot, row) for row in rows if (slot := self._room(self._buckets[self.bucket(row)]))]
        if not pairs:
            return
        slots, admitted = np.array(pairs, np.int64).T
        dropped = self._rows[slots]
        self._slots[admitted], self._rows[slots] = slots, admitted
        self._records[slots] = self._default
        self.entries += len(slots)
        if (dropped >= 0).any():
            self._drop(slots[dropped >= 0], dropped[dropped >= 0])

    def _drop(self, slots: Int64, rows: Int64) -> None:
        """Reset the state of `slots`, which were taken from `rows`."""
        self._slots[rows] = 0
        self._found[slots] = False
        self._state[slots] = State.ABSENT
        self._expires_ns[slots] = self._failures[slots] = self._retry_ns[slots] = 0
        self.entries -= len(rows)
        self.evicted += len(rows)

    def _room(self, bucket: _Bucket) -> int:
        """Take a slot for a row of the bucket, another one in each call; 0: there is none."""
        slot = bucket.unused
        if slot == bucket.end:
            slot = self._victim(bucket)
        else:
            bucket.unused += 1
        self._used[slot] = self._tick  # it is taken
        return slot

    def _victim(self, bucket: _Bucket) -> int:
        """The least recently used slot that was not used in this tick and is not pending; 0: none.

        The order is sorted once and then read on: slots that were used meanwhile come after all others. Within a tick
        no slot can go that could not before, so a bucket in which none can is searched once.
        """
        if bucket.full_at == self._tick:
            return 0
        for anew in (False, True):
            if anew:
                self._look_for_victims(bucket)
            while bucket.tried < len(bucket.victims):
                slot, tick = int(bucket.victims[bucket.tried]), bucket.ticks[bucket.tried]
                bucket.tried += 1
                if self._used[slot] == tick and self._state[slot] not in _PENDING:
                    return slot
        bucket.full_at = self._tick
        return 0

    def _look_for_victims(self, bucket: _Bucket) -> None:
        own = slice(bucket.first, bucket.end)
        used, states = self._used[own], self._state[own]
        order = np.argsort(used, kind="stable")
        order = order[(used[order] < self._tick) & ~np.isin(states[order], _PENDING)]
        bucket.victims, bucket.ticks, bucket.tried = order + bucket.first, used[order], 0


def _event(end: End) -> int:
    if end is None:
        return _NOT_FOUND
    return _FAILURE if isinstance(end, Failed) else _VALUE
