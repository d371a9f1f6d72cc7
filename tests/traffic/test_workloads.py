# SPDX-License-Identifier: Apache-2.0
"""Synthetic ranking traffic: the laws against independent draws, and each workload against the paper's figures."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jgr.data.interactions import DataError
from jgr.traffic.candidates import CandidateDraw, solve_exponent, zipf
from jgr.traffic.workloads import (
    BEAUTY,
    BOOKS,
    GAMES,
    INDUSTRY,
    WORKLOADS,
    Access,
    Traffic,
    Workload,
    books,
    industry,
)
from tests.traffic.trace_report import report

FACTORS = {"games": 4, "beauty": 6, "books": 100, "industry": 500}
SMALL = Workload("small", 50, 300, 200, 5, hourly=2.0, visit=1.5, candidates=10, top10_share=0.6)


def _plain(accesses: list[Access]) -> list[tuple[int, int, int, list[int]]]:
    return [(a.time_ns, a.user, a.user_tokens, a.items.tolist()) for a in accesses]


def _first(workload: Workload, n: int, seed: int = 0, speed: float = 1.0) -> list[Access]:
    return list(islice(Traffic(workload, seed).accesses(speed), n))


def _naive_draw(weights: np.ndarray, candidates: int, rng: np.random.Generator) -> list[int]:
    drawn: list[int] = []
    while len(drawn) < candidates:
        item = int(rng.choice(len(weights), p=weights))
        if item not in drawn:
            drawn.append(item)
    return drawn


@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.6])  # with repeats, and as a race of all items
def test_candidates_are_drawn_as_one_by_one_without_repeats(exponent: float) -> None:
    weights, rng = zipf(200, exponent), np.random.default_rng(1)
    found = CandidateDraw(weights, 8).draw(20_000, rng)
    naive = np.array([_naive_draw(weights, 8, rng) for _ in range(1500)])
    assert (np.diff(np.sort(found, axis=1), axis=1) > 0).all()
    # Three standard errors of the naive frequencies, at the first place and overall.
    for mine, theirs, per in [(found[:, 0], naive[:, 0], 1), (found, naive, 8)]:
        mean = np.bincount(mine.ravel(), minlength=200)[:10] / 20_000
        expected = np.bincount(theirs.ravel(), minlength=200)[:10] / 1500
        assert np.abs(mean - expected).max() < 4 * np.sqrt(per * 0.25 / 1500)


@given(st.integers(1, 40), st.integers(1, 40), st.floats(0, 6), st.integers(0, 9))
@settings(max_examples=60)
def test_candidates_are_distinct_and_have_weight(n: int, candidates: int, exponent: float, seed: int) -> None:
    weights = zipf(n, exponent)
    weights[1::3] = 0
    rng = np.random.default_rng(seed)
    if candidates > (weights > 0).sum():
        with pytest.raises(DataError, match="distinct"):
            CandidateDraw(weights, candidates)
        return
    found = CandidateDraw(weights, candidates).draw(5, rng)
    assert found.shape == (5, candidates) and found.dtype == np.int32
    assert all(len(set(line)) == candidates for line in found.tolist())
    assert (weights[found] > 0).all()


@pytest.mark.parametrize(("items", "share"), [(1_500, 0.9), (12_000, 0.9), (280_000, 0.9), (8_000, 0.45)])
def test_the_solved_exponent_gives_the_share_of_accesses(items: int, share: float) -> None:
    law = CandidateDraw(zipf(items, solve_exponent(items, 100, share)), 100)
    assert law.share() == pytest.approx(share, abs=1e-3)  # over all items, not the solver's grid
    found = law.draw(1000, np.random.default_rng(0))
    assert (found < items / 10).mean() == pytest.approx(share, abs=0.01)


def test_the_exponent_of_a_million_items_is_near_the_published_one() -> None:
    # 1.07 to 1.1 puts 90 % of draws with repeats there; refusing repeats asks for a little more.
    draws = zipf(1_000_000, 1.08)[:100_000].sum()
    assert draws == pytest.approx(0.9, abs=0.01)
    assert solve_exponent(1_000_000, 100, 0.9) == pytest.approx(1.13, abs=0.01)


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_have_the_papers_figures(name: str) -> None:
    full = WORKLOADS[name]
    workload = full.scaled(FACTORS[name])
    traffic = Traffic(workload, seed=3)
    assert (workload.users, workload.items) == (
        round(full.users / FACTORS[name]),
        round(full.items / FACTORS[name]),
    )
    assert traffic.user_tokens.mean() == pytest.approx(full.user_tokens, rel=0.01)
    assert traffic.item_tokens.mean() == pytest.approx(full.item_tokens, rel=0.01)
    assert 1 <= traffic.item_tokens.min() and traffic.item_tokens.max() <= workload.max_item_tokens
    assert traffic.user_tokens.max() <= 8192 - 100 * full.item_tokens
    measured = report(traffic, 8000)
    assert measured["top10_share"] == pytest.approx(0.9, abs=0.01)
    assert measured["mean_item_tokens"] == pytest.approx(full.item_tokens, rel=0.06)
    assert measured["once_an_hour"] > 0.55
    assert measured["hours"] == pytest.approx(8000 / workload.rate / 3600, rel=0.1)
    assert measured["parameters"]["requests_per_second"] == workload.rate


def test_what_the_paper_says_of_single_workloads() -> None:
    sizes = {name: (w.users, w.items, w.user_tokens, w.item_tokens) for name, w in WORKLOADS.items()}
    assert sizes == {
        "games": (15_000, 8_000, 1245, 11),
        "beauty": (22_000, 12_000, 2043, 18),
        "books": (510_000, 280_000, 1586, 15),
        "industry": (10_000_000, 1_000_000, 1500, 10),
    }
    users = Traffic(INDUSTRY.scaled(200)).user_tokens  # 50,000 users
    assert (users < 1000).mean() == pytest.approx(0.36, abs=0.01)
    assert users.max() > 0.9 * INDUSTRY.max_user_tokens
    assert report(Traffic(BOOKS.scaled(50)), 8000)["user_longer"] == pytest.approx(0.7, abs=0.03)
    assert (books(10**6).name, books(10**6).items) == ("books-1000000", 10**6)
    assert industry(items=10**8).items == 10**8


def test_a_small_user_cache_reuses_as_little_of_industry_as_in_the_paper() -> None:
    traffic = Traffic(INDUSTRY.scaled(500))
    room = 0.0019 * traffic.user_tokens.sum()
    cached: OrderedDict[int, int] = OrderedDict()
    reused = total = held = 0
    for access in islice(traffic.accesses(), 8000):
        total += access.user_tokens + int(traffic.item_tokens[access.items].sum())
        known = cached.pop(access.user, 0)
        reused, held = reused + known, held - known + access.user_tokens
        cached[access.user] = access.user_tokens
        while held > room:
            held -= cached.popitem(last=False)[1]
    assert reused / total == pytest.approx(0.18, abs=0.05)


def test_time_and_order() -> None:
    accesses = _first(SMALL, 3000)
    times = np.array([access.time_ns for access in accesses])
    assert (np.diff(times) >= 0).all() and times[0] >= 0
    assert times[-1] / 1e9 == pytest.approx(3000 / SMALL.rate, rel=0.1)
    faster = _first(SMALL, 3000, speed=1000)
    assert np.abs(np.array([access.time_ns for access in faster]) - times / 1000).max() <= 1
    assert [a[1:] for a in _plain(faster)] == [a[1:] for a in _plain(accesses)]


def test_users_come_by_their_activity_and_visits_have_their_size() -> None:
    single = replace(SMALL, visit=1.0, activity_spread=0.0)
    users = [access.user for access in _first(single, 5000)]
    counts = np.bincount(users, minlength=50)
    assert np.abs(counts - 100).max() < 5 * 10  # Poisson, equal rates
    visits = replace(INDUSTRY, users=200_000, items=2000, candidates=5, visit=2.5)
    returns = report(Traffic(visits), 10_000)["returns"]
    assert returns["600s"] == pytest.approx(1 - 1 / 2.5, abs=0.03)  # of a visit's requests, all but the first


def test_equal_seeds_give_equal_streams() -> None:
    traffic = Traffic(SMALL, 7)
    once = _plain(list(islice(traffic.accesses(), 700)))
    assert _plain(list(islice(traffic.accesses(), 700))) == once == _plain(_first(SMALL, 700, 7))
    assert _plain(_first(SMALL, 700, 8)) != once


def test_histories_grow_on_returns_only_and_stop_when_full() -> None:
    growing = replace(SMALL, growth=0.5, growth_tokens=400)
    traffic = Traffic(growing)
    last: dict[int, int] = {}
    grew = 0
    for access in islice(traffic.accesses(), 3000):
        before = last.get(access.user, int(traffic.user_tokens[access.user]))
        more = access.user_tokens - before
        assert more in (0, 400) or access.user_tokens == growing.max_user_tokens
        assert access.user in last or more == 0
        grew += more > 0
        last[access.user] = access.user_tokens
    assert max(last.values()) == growing.max_user_tokens
    assert grew > 500
    assert _plain(list(islice(traffic.accesses(), 50))) == _plain(_first(growing, 50))


def test_scaling_keeps_all_but_the_sizes() -> None:
    half = GAMES.scaled(2)
    assert half == replace(GAMES, name="games/2", users=7500, items=4000)
    assert half.rate == GAMES.rate / 2
    with pytest.raises(DataError, match=r"800 items.*distinct candidates"):
        GAMES.scaled(10)
    with pytest.raises(DataError, match=r"scaled by 0\.5"):
        GAMES.scaled(0.5)
    assert BEAUTY.scaled(1) == replace(BEAUTY, name="beauty/1")


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("items", lambda: replace(GAMES, items=99)),
        ("user_tokens", lambda: replace(GAMES, user_tokens=8000)),
        ("visit", lambda: replace(GAMES, visit=0.5)),
        ("top10_share", lambda: replace(GAMES, top10_share=1.0)),
        ("hourly", lambda: replace(GAMES, hourly=0.0)),
        ("growth", lambda: replace(GAMES, growth=2.0)),
    ],
)
def test_a_field_out_of_range_is_named(field: str, change: Callable[[], Workload]) -> None:
    with pytest.raises(DataError, match=f"games: {field}="):
        change()


def test_the_report_counts_what_is_there() -> None:
    class Given:
        name, parameters = "given", {"a": 1}
        item_tokens = np.array([1, 2, 3, 4] * 5, np.int32)

        def accesses(self, speed: float = 1.0) -> Iterator[Access]:
            hour = 3600 * 10**9
            events = [(0, 0, 2), (30, 0, 9), (600, 1, 9), (3600, 2, 9), (3631, 0, 9), (7200, 1, 9)]
            rows = np.array([0, 1], np.int32)
            return (Access(t * hour // 3600, user, tokens, rows) for t, user, tokens in events)

    found = report(Given(), 100)
    assert found == {
        "name": "given",
        "requests": 6,
        "users": 3,
        "hours": 2.0,
        "top10_share": 1.0,
        "mean_user_tokens": 47 / 6,
        "mean_item_tokens": 1.5,
        "repeats": 0.5,
        "returns": {"60s": 1 / 6, "600s": 1 / 6, "3600s": 1 / 6},
        "once_an_hour": 3 / 4,
        "user_longer": 5 / 6,
        "parameters": {"a": 1},
    }
    assert report(Given(), 1)["once_an_hour"] is None
    with pytest.raises(DataError, match="no requests"):
        report(Given(), 0)
