# SPDX-License-Identifier: Apache-2.0
"""The estimate against sums over all accesses that ever were."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jgr.cache.entries import Name
from jgr.cache.hotness import ExponentialWindow, Hotness, ItemFrequencies, Tier

WINDOW = 100
TIERS: tuple[Tier, ...] = ("device", "host")
STEPS = st.lists(
    st.tuples(
        st.integers(0, 90),
        st.sampled_from("abcde"),
        st.sampled_from(["touch", "device", "host", "let_go", "forget"]),
    ),
    max_size=40,
)


def user(name: str) -> Name:
    return Name("user", name, "user_prefix")


def exponential(past: list[tuple[int, str]], name: str, now: int) -> float:
    return sum(math.exp(-(now - t) / WINDOW) for t, who in past if who == name)


@given(steps=STEPS)
def test_estimates_are_sums_over_the_past(steps: list[tuple[int, str, str]]) -> None:
    hotness: Hotness = ExponentialWindow(WINDOW, remembered=9)
    now, past, cached = 0, list[tuple[int, str]](), dict[str, str]()
    for wait, name, verb in steps:
        now += wait
        past.append((now, name))
        hotness.touch(user(name), now)
        if verb in ("device", "host"):
            cached[name] = verb
            hotness.hold(user(name), verb)
        elif name in cached and verb in ("let_go", "forget"):
            del cached[name]
            hotness.let_go(user(name))
        if verb == "forget":
            past = [came for came in past if came[1] != name]
            hotness.forget(user(name))
        hotness.check()
        for other in "abcde":
            assert hotness.frequency(user(other), now) == pytest.approx(exponential(past, other, now))
        for tier in TIERS:
            order = [str(found.id) for found in hotness.coldest(tier)]
            assert sorted(order) == sorted(who for who, where in cached.items() if where == tier)
            assert order == [found.id for found in hotness.coldest(tier)]
            frequencies = [exponential(past, who, now) for who in order]
            assert frequencies == pytest.approx(sorted(frequencies))


def test_only_so_many_strangers_are_remembered() -> None:
    hotness = ExponentialWindow(WINDOW, remembered=2)
    for at, name in enumerate("abcb"):
        hotness.touch(user(name), at)
    assert hotness.frequency(user("a"), 3) == 0
    assert hotness.frequency(user("b"), 3) > hotness.frequency(user("c"), 3) > 0
    hotness.hold(user("b"))
    for at, name in enumerate("def"):
        hotness.touch(user(name), 4 + at)
    assert hotness.frequency(user("b"), 6) > 0, "a cached user is not forgotten"
    assert [hotness.frequency(user(name), 6) > 0 for name in "cdef"] == [False, False, True, True]


def test_what_is_kept_of_cached_users_goes_with_them() -> None:
    hotness = ExponentialWindow(WINDOW, remembered=2)
    for number in range(100):
        hotness.hold(user(str(number)))
    for number in range(100):
        hotness.let_go(user(str(number)))
        hotness.check()


@given(
    steps=st.lists(st.tuples(st.integers(0, 90), st.lists(st.integers(0, 5), unique=True)), max_size=30),
    most=st.integers(1, 6),
)
def test_items_frequencies_are_sums_over_the_past(steps: list[tuple[int, list[int]]], most: int) -> None:
    seen, now = ItemFrequencies(6, WINDOW), 0
    past: list[tuple[int, str]] = []
    requests: list[tuple[int, str]] = []
    for wait, rows in steps:
        now += wait
        seen.touch(rows, 10, now)
        past += [(now, str(row)) for row in rows]
        requests += [(now, "request")] if rows else []
    assert seen.requests(now) == pytest.approx(exponential(requests, "request", now))
    expected = np.array([exponential(past, str(row), now) for row in range(6)])
    rows, frequency = seen.hottest(most, now)
    assert len(rows) == min(most, np.count_nonzero(expected))
    np.testing.assert_allclose(frequency, expected[rows], rtol=1e-5)
    left = np.delete(expected, rows)
    assert not len(left) or not len(rows) or left.max() <= frequency.min() * (1 + 1e-5)


@given(
    steps=st.lists(st.tuples(st.integers(0, 90), st.sets(st.integers(0, 5))), max_size=20),
    at=st.integers(0, 20),
    order=st.permutations(range(6)),
)
def test_counts_go_on_in_another_catalog_by_the_items_there(
    steps: list[tuple[int, set[int]]], at: int, order: list[int]
) -> None:
    """As if all had been counted there; the last item of the old catalog is not in the new one, which has two more."""
    old, new, whole, now = (
        ItemFrequencies(6, WINDOW),
        ItemFrequencies(7, WINDOW),
        ItemFrequencies(7, WINDOW),
        0,
    )
    for step, (wait, items) in enumerate(steps):
        now += wait
        new_rows = [order.index(item) if item < 5 else 6 for item in items]
        (old.touch(sorted(items), 9, now) if step < at else new.touch(new_rows, 9, now))
        whole.touch(new_rows, 9, now)
    rows = old.hottest(6, now)[0]
    rows = rows[rows < 5]
    new.count_on(old, rows, np.array([order.index(row) for row in rows.tolist()], np.int32))
    found, expected = (dict(zip(*each.hottest(7, now), strict=True)) for each in (new, whole))
    if at:  # what was asked for of the item that is gone is gone too
        expected.pop(6, None), found.pop(6, None)
    assert found == pytest.approx(expected, rel=1e-5)
    assert new.requests(now) == pytest.approx(whole.requests(now))
    assert new.user_tokens == pytest.approx(whole.user_tokens)


def test_requests_that_nobody_sent_and_rows_that_are_not_there_do_not_count() -> None:
    seen = ItemFrequencies(3, WINDOW)
    seen.own.add((0, 1))
    seen.touch([0, 1], 10, 0)
    assert seen.requests(0) == 0
    seen.touch([2, 7], 20, 0)
    assert [x.tolist() for x in seen.hottest(5, 0)] == [[2], [1.0]]
    assert seen.user_tokens == 20
