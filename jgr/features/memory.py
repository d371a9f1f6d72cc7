# SPDX-License-Identifier: Apache-2.0
"""The cache's memory: records in one array, and what is known of each item (FLAME-2, 4). Pure: time and chance come in.

The one idea: an item has a slot, and everything about slots is an array, so that a request's items take their steps of
`states.TABLE` together, in a few array operations, and their records are copied once, to where they are needed. (One
object for each item, behind a lock for each bucket, took five times as long in Python.)

Slots belong to buckets, items to buckets by their hash, and each bucket drops what was used longest ago. All records
have the same length, so that a capacity in bytes is one in slots. Slot 0 is nobody's: it stands for what gets no slot.

Invariants (`check`): an item has one slot, in its bucket; a slot without a found record holds the default one; what is
pending keeps its slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jgr.features.states import ACTION, AGED, BACK_OFF_NS, FETCH, NEXT, Event, State

FRESH, STALE, MISSING = 0, 1, 2
SLOT_BYTES = 300
"""What a slot takes besides its record, measured on CPython 3.11 with ids of ten characters."""
_NEVER = np.iinfo(np.int64).max
_SEEN = np.array([MISSING, FRESH], np.uint8)  # by whether a record is there
_SEEN_OLD = np.array([MISSING, STALE], np.uint8)
_VALUE, _NOT_FOUND, _FAILURE = int(Event.VALUE), int(Event.NOT_FOUND), int(Event.FAILURE)

UInt8 = npt.NDArray[np.uint8]
Int64 = npt.NDArray[np.int64]


class Failed:
    """How a fetch ended that gave neither a value nor the answer that there is none."""


FAILED = Failed()
End = bytes | Failed | None
"""Of a fetch; None: the store has none."""


class Got(NamedTuple):
    """What a get found, and what it started.

    seen: [n] FRESH, STALE or MISSING. old: [o] places in the request of what is not fresh, with their slots and their
    states now. fetch: slots that must be fetched and committed. joined, held: items; see `states`.
    """

    seen: UInt8
    old: Int64
    slots: Int64
    states: UInt8
    fetch: list[int]
    joined: int
    held: int


class _Bucket:
    """Slots `first` to `end`, those from `unused` on never used. victims: slots, used longest ago first, and the
    ticks at which they were; those before `tried` are dealt with, and those that were used since are no victims."""

    def __init__(self, first: int, end: int) -> None:
        self.first, self.end, self.unused, self.tried = first, end, first, 0
        self.victims: Int64 = np.zeros(0, np.int64)
        self.ticks: Int64 = np.zeros(0, np.int64)


class Memory:
    """default: the record of an item without features. capacity: bytes. ttl_ns: of records, absent_ttl_ns: of the
    knowledge that there is none."""

    def __init__(
        self, default: bytes, *, buckets: int, capacity: int, ttl_ns: int, absent_ttl_ns: int
    ) -> None:
        self._default = np.frombuffer(default, np.uint8)
        self.slot_bytes = len(default) + SLOT_BYTES
        each = capacity // buckets // self.slot_bytes
        n = 1 + each * buckets
        self._ttl_ns, self._absent_ttl_ns = ttl_ns, absent_ttl_ns
        self._records = np.zeros((n, len(default)), np.uint8)  # pages that were never written take no memory
        self._records[0] = self._default
        self._state, self._found = np.zeros(n, np.uint8), np.zeros(n, np.bool_)
        self._expires_ns, self._used = np.zeros(n, np.int64), np.zeros(n, np.int64)
        self._failures, self._retry_ns = np.zeros(n, np.int64), np.zeros(n, np.int64)
        self._retry_ns[0] = _NEVER
        self._items: list[str] = [""] * n
        self._slots: dict[str, int] = {}
        self._buckets = [_Bucket(1 + each * k, 1 + each * (k + 1)) for k in range(buckets)]
        self._tick = 0
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def used_bytes(self) -> int:
        return len(self._slots) * self.slot_bytes

    def item(self, slot: int) -> str:
        return self._items[slot]

    def get(self, items: Sequence[str], now_ns: int, may_fetch: bool, out: UInt8) -> Got:
        """Copy the items' records to out, [n, record bytes], and do what asking for them does.

        may_fetch: whether anything may be fetched. An item may come twice.
        """
        n = len(items)
        slots = np.fromiter(map(self._slots.get, items, repeat(0)), np.int64, n)
        begin = self._tick
        self._use(slots)
        if may_fetch:
            for place in np.flatnonzero(slots == 0).tolist():
                slots[place] = self._slots.get(items[place]) or self._admit(items[place], begin)
        np.take(self._records, slots, axis=0, out=out, mode="clip")  # the other modes copy out first
        found = self._found[slots].view(np.uint8)
        seen = _SEEN[found]
        old = np.flatnonzero(self._expires_ns[slots] <= now_ns)
        if not len(old):
            return Got(seen, old, old, seen[:0], [], 0, 0)
        slots, found = slots[old], found[old]
        seen[old] = _SEEN_OLD[found]
        state = AGED[self._state[slots], found]
        # GET is 0, HELD 1.
        held = (self._retry_ns[slots] > now_ns).view(np.uint8) if may_fetch else np.ones(len(old), np.uint8)
        self._state[slots] = after = NEXT[state, held]
        action = ACTION[state, held]
        _, starts, joined, kept_back = np.bincount(action, minlength=4).tolist()
        fetch = list(dict.fromkeys(slots[action == FETCH].tolist())) if starts else []
        return Got(seen, old, slots, after, fetch, joined + starts - len(fetch), kept_back)

    def commit(
        self, slots: Sequence[int], ends: Sequence[End], now_ns: int, jitter: npt.NDArray[np.float64]
    ) -> None:
        """Fetches ended, each slot once. jitter: [n], so much of the time to live is added."""
        at = np.array(slots, np.int64)
        self._use(at)
        event = np.array([_event(end) for end in ends], np.int64)
        self._state[at] = NEXT[self._state[at], event]
        if _FAILURE in event:
            failed = at[event == _FAILURE]
            failures = self._failures[failed]
            self._retry_ns[failed] = now_ns + BACK_OFF_NS[np.minimum(failures, len(BACK_OFF_NS) - 1)]
            self._failures[failed] = failures + 1
            ended = event != _FAILURE
            at, event, jitter = at[ended], event[ended], jitter[ended]
        self._failures[at] = self._retry_ns[at] = 0
        self._found[at] = there = event == _VALUE
        ttl_ns = (self._ttl_ns * (1 + jitter)).astype(np.int64)
        self._expires_ns[at] = now_ns + np.where(there, ttl_ns, self._absent_ttl_ns)
        self._records[at[~there]] = self._default
        values = b"".join([end for end in ends if isinstance(end, bytes)])
        self._records[at[there]] = np.frombuffer(values, np.uint8).reshape(-1, len(self._default))

    def state(self, item: str, now_ns: int) -> State:
        """Of an item; it does not count as used."""
        slot = self._slots.get(item, 0)
        state = self._state[slot]
        aged = self._expires_ns[slot] <= now_ns
        return State(int(AGED[state, int(self._found[slot])] if aged else state))

    def bucket(self, item: str) -> int:
        """The number of an item's bucket."""
        return hash(item) % len(self._buckets)

    def kept(self) -> list[list[str]]:
        """The items of each bucket, used longest ago first."""
        order = sorted(self._slots.values(), key=lambda slot: int(self._used[slot]))
        items: list[list[str]] = [[] for _ in self._buckets]
        for slot in order:
            items[self.bucket(self._items[slot])].append(self._items[slot])
        return items

    def check(self) -> None:
        """Audit; AssertionError."""
        for item, slot in self._slots.items():
            bucket = self._buckets[self.bucket(item)]
            assert self._items[slot] == item, "an item and its slot disagree"
            assert bucket.first <= slot < bucket.unused, "a slot is not its bucket's"
        empty = [slot for slot in self._slots.values() if not self._found[slot]]
        assert (self._records[[0, *empty]] == self._default).all(), "an item without features has some"
        in_use = {0, *self._slots.values()}
        pending = np.flatnonzero(np.isin(self._state, (State.PENDING, State.STALE_PENDING)))
        assert in_use.issuperset(pending.tolist()), "a pending item lost its slot"

    def _use(self, slots: Int64) -> None:
        self._used[slots] = np.arange(self._tick, self._tick + len(slots))
        self._tick += len(slots)

    def _admit(self, item: str, begin: int) -> int:
        """A slot for an item that has none; 0 where all of its bucket are pending, or used from tick `begin` on."""
        bucket = self._buckets[self.bucket(item)]
        if bucket.unused < bucket.end:
            slot = bucket.unused
            bucket.unused += 1
        else:
            slot = self._victim(bucket, begin)
            if not slot:
                return 0
            del self._slots[self._items[slot]]
            self.evicted += 1
            self._found[slot] = False
            self._state[slot] = State.ABSENT
            self._expires_ns[slot] = self._failures[slot] = self._retry_ns[slot] = 0
        self._records[slot] = self._default
        self._items[slot] = item
        self._slots[item] = slot
        self._used[slot] = self._tick
        self._tick += 1
        return slot

    def _victim(self, bucket: _Bucket, begin: int) -> int:
        """The slot that was used longest ago, before `begin`, and is not pending; 0: none.

        The order is sorted once and then read on: a slot that was used meanwhile comes after all that were not.
        """
        for _ in range(2):
            while bucket.tried < len(bucket.victims):
                slot, tick = int(bucket.victims[bucket.tried]), bucket.ticks[bucket.tried]
                bucket.tried += 1
                pending = self._state[slot] in (State.PENDING, State.STALE_PENDING)
                if self._used[slot] == tick and tick < begin and not pending:
                    return slot
            own = slice(bucket.first, bucket.end)
            order = np.argsort(self._used[own], kind="stable")
            bucket.victims, bucket.ticks, bucket.tried = order + bucket.first, self._used[own][order], 0
        return 0


def _event(end: End) -> int:
    if end is None:
        return _NOT_FOUND
    return _FAILURE if isinstance(end, Failed) else _VALUE
