# SPDX-License-Identifier: Apache-2.0
"""The cache's decisions: every state with every event, back-off, and buckets against a plain list each."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jgr.features.memory import FAILED, FRESH, MISSING, SLOT_BYTES, STALE, End, Got, Memory
from jgr.features.states import TABLE, WAITS, Event, State

MS = 1_000_000
TTL, ABSENT_TTL = 1000 * MS, 100 * MS
ITEM, OTHER = 5, 7
ITEMS = 12
DEFAULT, VALUE, NEW = b"none", b"old!", b"new!"
SLOT = SLOT_BYTES + 4
A, P, F, S, SP = State

# What FLAME-2 says, once more: the next state, and whether a fetch starts (+) or one under way is shared (=).
EXPECTED = """
            A     P     F     S     SP
GET         P+    P=    F     SP+   SP=
HELD        A     P=    F     S     SP=
VALUE       F     F     F     F     F
NOT_FOUND   F     F     F     F     F
FAILURE     A     A     F     S     S
EXPIRY      A     P     S     S     SP
EVICTION    A     P     A     A     SP
"""
NAMES = {"A": A, "P": P, "F": F, "S": S, "SP": SP}
ROWS = [line.split() for line in EXPECTED.strip().splitlines()]
CASES = [
    (NAMES[before], Event[row[0]], NAMES[after.rstrip("+=")], after[-1] == "+", after[-1] == "=")
    for row in ROWS[1:]
    for before, after in zip(ROWS[0], row[1:], strict=True)
]


class Kept:
    """A memory of records of four bytes, asked item by item."""

    def __init__(self, slots: int, buckets: int = 1) -> None:
        self.memory = Memory(
            DEFAULT, items=ITEMS, buckets=buckets, capacity=slots * SLOT, ttl_ns=TTL, absent_ttl_ns=ABSENT_TTL
        )
        self.slots: dict[int, int] = {}

    def get(self, *rows: int, now: int = 0, may_fetch: bool = True) -> tuple[list[bytes], Got]:
        out = np.zeros((len(rows), len(DEFAULT)), np.uint8)
        got = self.memory.get(np.array(rows, np.int32), now, may_fetch, out)
        self.slots |= dict(zip(self.memory.rows(got.fetch), got.fetch, strict=True))
        self.memory.check()
        return [row.tobytes() for row in out], got

    def commit(self, item: int, end: End, now: int = 0, jitter: float = 0.0) -> None:
        """Of an item that a get has said is to be fetched."""
        self.memory.commit([self.slots[item]], [end], now, np.array([jitter]))
        self.memory.check()

    def fetches(self, item: int, now: int) -> bool:
        return bool(self.get(item, now=now)[1].fetch)


def brought_to(state: State) -> tuple[Kept, int]:
    """A memory of one slot whose item is in a state, and the time."""
    kept, now = Kept(1), 0
    assert kept.get(ITEM)[0] == [DEFAULT]
    if state == A:
        kept.commit(ITEM, FAILED, -1000 * MS)
    if state in (F, S, SP):
        kept.commit(ITEM, VALUE)
    if state in (S, SP):
        now = TTL
    if state == SP:
        kept.get(ITEM, now=now)
    assert kept.memory.state(ITEM, now) == state
    return kept, now


@pytest.mark.parametrize(("before", "event", "after", "fetch", "joined"), CASES)
def test_every_state_with_every_event(
    before: State, event: Event, after: State, fetch: bool, joined: bool
) -> None:
    assert TABLE[before][event] == (after, fetch, joined)
    kept, now = brought_to(before)
    if event in (Event.GET, Event.HELD):
        records, got = kept.get(ITEM, now=now, may_fetch=event == Event.GET)
        assert (len(got.fetch), got.joined, got.held) == (fetch, joined, after in (A, S))
        assert records == [DEFAULT if before in (A, P) else VALUE]
        assert got.seen.tolist() == [{A: MISSING, P: MISSING, F: FRESH, S: STALE, SP: STALE}[before]]
    elif event == Event.EXPIRY:
        now = max(now, TTL)
    elif event == Event.EVICTION:
        kept.get(OTHER, now=now)  # there is one slot
    else:
        ends: dict[Event, End] = {Event.VALUE: NEW, Event.NOT_FOUND: None, Event.FAILURE: FAILED}
        kept.commit(ITEM, ends[event], now)
    assert kept.memory.state(ITEM, now) == after


def test_the_cases_are_all_cases() -> None:
    assert {(case[0], case[1]) for case in CASES} == {(s, e) for s in State for e in Event}
    assert WAITS == {"asynchronous": (), "sync_missing": (P,), "synchronous": (P, SP)}


@pytest.mark.parametrize("pending", [True, False])
def test_a_bucket_in_which_no_slot_can_go_is_searched_once(
    pending: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All slots wait for the store, or the get uses them all itself."""
    kept, searches, argsort = Kept(4, buckets=2), [], np.argsort
    if pending:
        kept.get(*range(4))
    monkeypatch.setattr(np, "argsort", lambda *given, **how: searches.append(given) or argsort(*given, **how))
    _, got = kept.get(*range(4, ITEMS))
    assert (len(got.fetch), len(searches)) == (0 if pending else 4, 2)
    monkeypatch.undo()
    if pending:  # what came may go again
        for item in range(4):
            kept.commit(item, VALUE)
        assert len(kept.get(*range(4, 8))[1].fetch) == 4


def test_stale_values_are_served_and_deleted_items_are_not() -> None:
    kept, now = brought_to(SP)
    kept.commit(ITEM, FAILED, now)
    assert kept.get(ITEM, now=now)[0] == [VALUE]
    kept.commit(ITEM, None, now)
    records, got = kept.get(ITEM, now=now)
    assert (records, got.seen.tolist(), got.fetch) == ([DEFAULT], [MISSING], [])
    # "Not found" has the short time to live, and nothing to serve afterwards.
    assert kept.memory.state(ITEM, now + ABSENT_TTL - 1) == F
    assert kept.memory.state(ITEM, now + ABSENT_TTL) == A
    assert kept.fetches(ITEM, now + ABSENT_TTL)
    kept.commit(ITEM, NEW, now)
    assert kept.get(ITEM, now=now)[0] == [NEW]


@pytest.mark.parametrize(("jitter", "ttl"), [(-0.1, 900 * MS), (0.0, 1000 * MS), (0.1, 1100 * MS)])
def test_jitter_is_of_the_time_to_live(jitter: float, ttl: int) -> None:
    kept = Kept(1)
    kept.get(ITEM)
    kept.commit(ITEM, VALUE, 5, jitter)
    assert kept.memory.state(ITEM, 5 + ttl - 1) == F
    assert kept.memory.state(ITEM, 5 + ttl) == S


def test_failures_back_off_up_to_a_second_and_a_success_ends_that() -> None:
    kept, now = Kept(1), 0
    for wait_ms in (10, 20, 40, 80, 160, 320, 640, 1000, 1000, 1000):
        assert kept.fetches(ITEM, now)
        kept.commit(ITEM, FAILED, now)
        assert not kept.fetches(ITEM, now + wait_ms * MS - 1)
        now += wait_ms * MS
    assert kept.fetches(ITEM, now)
    kept.commit(ITEM, VALUE, now)
    now += TTL
    assert kept.fetches(ITEM, now)
    kept.commit(ITEM, FAILED, now)
    assert not kept.fetches(ITEM, now) and kept.fetches(ITEM, now + 10 * MS)


def test_a_request_is_served_whole_or_not_at_all_by_its_own_items() -> None:
    kept = Kept(2)
    records, got = kept.get(1, 2, 1, 3)
    assert (len(got.fetch), got.joined, got.held) == (2, 1, 1)  # no slot for 3, which drops neither 1 nor 2
    kept.commit(1, b"aaaa")
    kept.commit(2, b"bbbb")
    records, got = kept.get(3, 1, 2)
    assert (records, got.held) == ([DEFAULT, b"aaaa", b"bbbb"], 1)
    assert kept.get(3)[0] == [DEFAULT] and kept.memory.kept() == [[2, 3]]


class PlainLru:
    """One bucket by the book: a list, the item used last at its end."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.kept = capacity, dict[int, bytes]()

    def get(self, item: int) -> bytes | None:
        value = self.kept.pop(item, None)
        if value is not None:
            self.kept[item] = value
        return value

    def put(self, item: int, value: bytes) -> None:
        self.kept.pop(item, None)
        self.kept[item] = value
        while len(self.kept) * SLOT > self.capacity:
            del self.kept[next(iter(self.kept))]


@given(
    st.lists(st.integers(0, 11), max_size=80),
    st.sampled_from([1, 2, 4]),
    st.integers(0, 13),
)
def test_buckets_equal_a_plain_lru_each(accesses: list[int], buckets: int, slots: int) -> None:
    kept = Kept(slots, buckets)
    memory, capacity = kept.memory, slots * SLOT
    plain = [PlainLru(capacity // buckets) for _ in range(buckets)]
    for number, item in enumerate(accesses):
        value = b"%04d" % number
        model = plain[memory.bucket(item)]
        records, got = kept.get(item)
        assert records == [model.get(item) or DEFAULT]
        if got.fetch:
            kept.commit(item, value)
        if records == [DEFAULT]:
            model.put(item, value)
        assert memory.kept() == [list(p.kept) for p in plain]
        assert memory.entries * memory.slot_bytes == sum(len(p.kept) * SLOT for p in plain) <= capacity


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=6), st.booleans()), max_size=30),
    st.integers(0, 8),
)
def test_whole_requests_never_get_another_items_record(
    requests: list[tuple[list[int], bool]], slots: int
) -> None:
    """Fetches end later, in any order; whatever is served is the item's own record or the default one."""
    kept = Kept(slots, 2)
    under_way: set[int] = set()
    for rows, commit in requests:
        records, got = kept.get(*rows)
        for row, record, seen in zip(rows, records, got.seen.tolist(), strict=True):
            assert record == (DEFAULT if seen == MISSING else b"%04d" % row)
        fetched = kept.memory.rows(got.fetch)
        assert under_way.isdisjoint(fetched) and len(set(fetched)) == len(fetched)
        under_way |= set(fetched)
        if commit:
            for row in under_way:
                kept.commit(row, b"%04d" % row)
            under_way = set()
