# SPDX-License-Identifier: Apache-2.0
"""Items placed by who asks for them together, and how they get there (RCLLM-7, RCLLM-16)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jgr.placement.items import Items, Workers, burst, hash_items
from jgr.placement.lifecycle import Lifecycle, Step
from jgr.placement.partition import imbalance_of
from jgr.placement.similarity import FALLEN, NEIGHBOURS, Drift, best_share, graph, homes, hottest, similarity

Int32 = npt.NDArray[np.int32]


def requests_of(communities: Sequence[Int32], count: int, size: int, seed: int = 0) -> list[Int32]:
    """Requests that each ask for items of one community."""
    rng = np.random.default_rng(seed)
    chosen = [communities[at] for at in rng.integers(0, len(communities), count)]
    return [rng.choice(rows, size, replace=False).astype(np.int32) for rows in chosen]


def items_of(n: int, requests: Sequence[Int32], tokens: Int32 | None = None) -> Items:
    frequency = np.bincount(np.concatenate([*requests, np.zeros(0, np.int32)]), minlength=n).astype(float)
    return Items(frequency, np.full(n, 8) if tokens is None else tokens, 1)


def test_the_graph_is_co_occurrence_over_popularity() -> None:
    requests = [np.array(rows, np.int32) for rows in ([0, 1, 2], [0, 1], [0, 3, 3], [4])]
    found = graph(6, requests).toarray()
    expected = np.zeros((6, 6))
    often = [3, 2, 1, 1, 1, 0]
    for one, other, together in ((0, 1, 2), (0, 2, 1), (1, 2, 1), (0, 3, 1)):
        expected[one, other] = expected[other, one] = together / math.sqrt(often[one] * often[other])
    np.testing.assert_allclose(found, expected)
    without = graph(6, requests, np.array([0], np.int32)).toarray()
    assert np.flatnonzero(without).tolist() == [8, 13], "1 and 2 alone"
    assert graph(3, []).nnz == 0


def test_a_request_of_too_many_items_is_left_out_and_those_before_it_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jgr.placement.similarity.MOST_PAIRS", 12)
    few = [np.array(rows, np.int32) for rows in ([4, 5], [0, 1], [2, 3, 3, 3])]
    found = graph(6, [*few, np.arange(6, dtype=np.int32)])
    assert np.argwhere(found.toarray()).tolist() == [[0, 1], [1, 0], [2, 3], [3, 2], [4, 5], [5, 4]]
    later = graph(6, [*few, np.array([0, 1, 2], np.int32)])
    assert np.argwhere(later.toarray()).tolist() == [[0, 1], [0, 2], [1, 0], [1, 2], [2, 0], [2, 1]]


def test_an_item_keeps_its_heaviest_neighbours_and_those_that_keep_it() -> None:
    hub = [np.array([0, other], np.int32) for other in range(1, 60) for _ in range(60 - other)]
    found = graph(60, hub)
    assert found[0].nnz == 59, "each of the others keeps it"
    rng = np.random.default_rng(0)
    dense = graph(80, [rng.choice(80, 40, replace=False).astype(np.int32) for _ in range(50)])
    assert (abs(dense - dense.T) > 1e-12).nnz == 0
    assert NEIGHBOURS <= np.diff(dense.indptr).min() and dense.nnz < 80 * 79


@settings(max_examples=25, deadline=None)
@given(
    k=st.integers(1, 5), seed=st.integers(0, 99), hot=st.sampled_from([0.0, 0.01, 0.05]), seen=st.booleans()
)
def test_every_item_is_somewhere_hot_ones_everywhere_and_both_balances_hold(
    k: int, seed: int, hot: float, seen: bool
) -> None:
    rng = np.random.default_rng(seed)
    n = 100 * k
    communities = np.array_split(rng.permutation(n).astype(np.int32), 2 * k)
    requests = requests_of(communities, 40 * k, 10, seed) if seen else []
    items = items_of(n, requests, rng.integers(5, 12, n))
    workers = Workers(k, int(items.room_bytes.sum()))
    at = homes(items, workers, requests, hot=hot, by="numpy")
    placement = similarity(items, workers, at, hot=hot)
    placement.check()
    held = placement.held()
    assert held.any(0).all(), "no item is lost"
    top = hottest(items, hot)
    assert len(top) == (math.ceil(hot * n) if seen else 0) and held[:, top].all()
    assert placement.replicated.sum() == len(top)
    cold = np.setdiff1d(np.arange(n), top)
    loads = np.stack([items.share, items.tokens], axis=1)[cold]
    assert imbalance_of(loads, at[cold], k)[1] <= 0.06
    assert imbalance_of(loads, at[cold], k)[0] <= 0.1, (
        "two sets, those asked for and those not, have a bound each"
    )


def test_communities_stay_together_and_parts_keep_their_numbers() -> None:
    rng = np.random.default_rng(3)
    communities = np.array_split(rng.permutation(320).astype(np.int32), 16)
    requests = requests_of(communities, 400, 8)
    items, workers = items_of(320, requests), Workers(4, 10_000)
    at = homes(items, workers, requests, hot=0, by="numpy")
    new = requests_of(communities, 100, 8, seed=9)
    assert best_share(similarity(items, workers, at, hot=0).held(), new) > 0.95
    assert best_share(hash_items(items, workers).held(), new) < 0.6
    before = ((at + 1) % 4).astype(np.int32)
    again = homes(items, workers, requests, before, hot=0, by="numpy")
    assert (again == before).mean() > 0.95, "the parts are the same, and have the numbers that they had"


def test_the_best_share_is_counted_by_request() -> None:
    held = np.array([[1, 1, 0, 0], [0, 1, 1, 1]], bool)
    rows = [np.array(some, np.int32) for some in ([0, 1, 2], [2, 3], [])]
    assert best_share(held, rows) == pytest.approx((2 / 3 + 1) / 2)
    assert best_share(held, []) == 0


def test_items_are_parted_anew_when_requests_find_less_of_them_together() -> None:
    drift = Drift()
    assert not drift.due(10, 0, None), "nobody asked for anything"
    assert drift.due(10, 5, None)
    drift.parted(10, 5)
    assert not drift.due(10, 5, None) and not drift.due(10, 6, 0.8)
    assert not drift.due(10, 6, 0.8 - FALLEN + 1e-9) and drift.due(10, 6, 0.8 - FALLEN - 1e-9)
    assert drift.due(10, 10, 0.8), "twice as many requests are known"
    assert drift.due(11, 6, 0.8), "a new item"
    drift.parted(11, 6)
    assert not drift.due(11, 6, 0.5), "the level is that after the last partition"


def test_homes_stay_with_bursts() -> None:
    items, workers = Items(np.array([3.0, 2, 1, 1]), np.full(4, 10), 1), Workers(2, 100)
    placement = similarity(items, workers, np.array([1, 1, 0, 0], np.int32), hot=0)
    assert placement.owner.tolist() == [1, 1, 0, 0]
    assert burst(placement, [2]).owner.tolist() == [1, 1, -1, 0]
    assert similarity(items, Workers(2, 15), np.array([1, 1, 0, 0], np.int32), hot=0).dropped.tolist() == [
        1,
        3,
    ]


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10_000), workers=st.integers(1, 4), turns=st.integers(1, 4),
    spare=st.sampled_from([0, 1, 6, 60]), step_bytes=st.integers(1, 12), faults=st.booleans(),
)  # fmt: skip
@example(
    seed=86, workers=2, turns=3, spare=0, step_bytes=2, faults=True
)  # a last copy goes, and its new home changes
def test_items_move_from_home_to_home_while_they_are_read(
    seed: int, workers: int, turns: int, spare: int, step_bytes: int, faults: bool
) -> None:
    """Any homes after any others, which may be half reached. With room to spare what is held stays readable; what is
    planned is always reached."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 14))
    tokens = rng.integers(1, 6, n)
    at = [rng.integers(0, workers, n).astype(np.int32) for _ in range(turns + 1)]
    fullest = max(int(np.bincount(of, tokens, workers).max()) for of in at)
    every = Workers(workers, fullest + spare)
    cycle, readable = Lifecycle(every, step_bytes), [set[int]() for _ in range(workers)]
    roomy, arrived = spare == 60, set[int]()

    def do(step: Step) -> None:
        rows = set(step.rows.tolist())
        if step.kind == "copy":
            assert step.source is None or rows <= readable[step.source]
            assert step.source is not None or not any(rows & there for there in readable)
            arrived.update(rows)
        elif step.kind == "publish":
            assert rows == arrived
            readable[step.worker] |= rows
            arrived.clear()
        else:
            assert rows <= readable[step.worker]
            readable[step.worker] -= rows
        cycle.commit(step)
        cycle.check()

    for of in at:
        frequency = rng.choice([0.0, 1.0, 5.0], n)
        items = Items(frequency, tokens, 1)
        target = similarity(items, every, of, hot=float(rng.choice([0, 0.2])) if roomy else 0.0)
        alive = set[int]().union(*readable)
        cycle.plan(target)
        if faults and cycle.steps:
            for step in cycle.steps[: int(rng.integers(0, len(cycle.steps)))]:
                do(step)
            if rng.random() < 0.5 and cycle.steps and cycle.steps[0].kind == "copy":
                cycle.fail(cycle.steps[0])
            if rng.random() < 0.5 and of is not at[-1]:
                continue  # other homes are wanted before these are reached
            cycle.plan(target)
        for step in cycle.steps:
            do(step)
            there = set[int]().union(*readable)
            assert not roomy or alive <= there, "who is held is read, before and after"
            sources = cycle.where(0, np.arange(n, dtype=np.int32))
            assert {row for row in range(n) if sources[row] >= 0} == there
            assert all(row in readable[source] for row, source in enumerate(sources) if source >= 0)
        assert [sorted(rows) for rows in readable] == [
            np.flatnonzero(target.held()[worker]).tolist() for worker in range(workers)
        ]
        assert (cycle.homes == of).all()


def test_a_home_that_is_not_there_leaves_items_where_they_are() -> None:
    items, workers = Items(np.ones(2), np.full(2, 10), 1), Workers(2, 40)
    there, elsewhere = (similarity(items, workers, np.array(of, np.int32), hot=0) for of in ([0, 0], [1, 0]))
    cycle = Lifecycle(workers)
    for step in cycle.plan(there):
        cycle.commit(step)
    cycle.lose(1)
    assert cycle.plan(elsewhere, absent=[1]) == () and cycle.where(1, np.arange(2)).tolist() == [0, 0]
    steps = cycle.plan(elsewhere)
    assert [(s.kind, s.worker, s.rows.tolist(), s.source) for s in steps] == [
        ("copy", 1, [0], 0),
        ("publish", 1, [0], None),
        ("drop", 0, [0], None),
    ]
    for step in steps:
        cycle.commit(step)
    cycle.check()
    assert cycle.where(0, np.arange(2)).tolist() == [1, 0]
