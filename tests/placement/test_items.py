# SPDX-License-Identifier: Apache-2.0
"""Placements against hand tables and plain loops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jgr.config import UserError
from jgr.placement.items import (
    Bound,
    ItemPlacement,
    Items,
    LinkBudget,
    Workers,
    burst,
    bursting,
    expected_bytes,
    hash_items,
    hrcs,
    replicate,
)

PLENTY = 1 << 40


def _items(frequency: list[float], tokens: list[int] | None = None, cell_tokens: int = 1) -> Items:
    sizes = tokens or [10] * len(frequency)
    return Items(np.array(frequency), np.array(sizes), bytes_per_token=4, cell_tokens=cell_tokens)


def _hrcs(
    items: Items, workers: Workers, r_max: float, bound: Bound = "paper", alpha: float = 0.2
) -> ItemPlacement:
    """HRCS with a link that makes R_max what is asked for."""
    n = workers.count
    factor = {"paper": (n - 1) / n, "physical": n / (n - 1)}[bound] if n > 1 else 1.0
    link = r_max / factor / alpha * 1000 * items.bytes_per_token
    return hrcs(
        items,
        workers,
        prefill_s=1.0,
        item_tokens=1000.0,
        link_bytes_per_s=link,
        alpha=alpha,
        bound=bound,
    )


@pytest.mark.parametrize("bound", ["paper", "physical"])
def test_the_hand_table_of_bat_19(bound: Bound) -> None:
    placement = _hrcs(_items([0.1, 0.5, 0.1, 0.2, 0.1]), Workers(2, PLENTY), 0.25, bound)
    assert placement.budget is not None and placement.budget.max_remote == pytest.approx(0.25)
    assert placement.replicated_fraction == 0.6
    assert placement.order.tolist() == [1, 3, 0, 2, 4]
    assert placement.replicated.tolist() == [True, True, False, True, False]
    assert placement.owner.tolist() == [-1, -1, 0, -1, 0]
    assert placement.sharded_share == pytest.approx(0.2)
    assert placement.alpha == pytest.approx(0.2 * 0.2 / 0.25) and not placement.alpha_exceeded


def test_a_sum_that_rounds_below_its_goal_reaches_it() -> None:
    assert _hrcs(_items([0.5, 0.2, 0.1, 0.1, 0.1]), Workers(4, PLENTY), 0.2).replicated_fraction == 0.6


@pytest.mark.parametrize(("gigabits", "r_max"), [(10, 0.14), (100, 1.0)])
def test_the_figures_of_bat_11_note_3(gigabits: int, r_max: float) -> None:
    items = Items(np.ones(8), np.full(8, 15), bytes_per_token=28672)
    placement = hrcs(
        items,
        Workers(4, PLENTY),
        prefill_s=0.033,
        item_tokens=1500,
        link_bytes_per_s=gigabits * 1e9 / 8,
        alpha=0.2,
    )
    assert placement.budget is not None and placement.budget.max_remote == pytest.approx(r_max, abs=0.01)
    assert placement.replicated_fraction == (0.0 if r_max == 1 else 7 / 8)


def test_the_bounds_differ_by_the_square_of_the_factor() -> None:
    arguments: dict[str, Any] = {"prefill_s": 0.5, "item_tokens": 100.0, "link_bytes_per_s": 400.0}
    budgets = [
        hrcs(_items([1.0] * 9), Workers(4, PLENTY), bound=bound, **arguments).budget
        for bound in ("paper", "physical")
    ]
    # t B = .5 s * 100 tokens/s of 100 tokens: alpha .2 allows .1, times 3/4 or 4/3.
    assert [b.max_remote for b in budgets if b] == pytest.approx([0.075, 0.1 * 4 / 3])


@pytest.mark.parametrize("bound", ["paper", "physical"])
def test_one_worker_holds_everything_itself(bound: Bound) -> None:
    placement = _hrcs(_items([3.0, 0.0, 1.0]), Workers(1, PLENTY), 0.5, bound)
    assert placement.replicated_fraction == 1.0 and placement.alpha == 0.0
    assert placement.budget == LinkBudget(0.2, math.inf) and placement.budget.max_remote == 0.0
    short = _hrcs(_items([3.0, 2.0, 1.0]), Workers(1, 80), 0.5, bound)
    assert np.flatnonzero(short.held()[0]).tolist() == [0, 1] and short.dropped.tolist() == [2]
    assert short.alpha == 0.0


def test_no_remote_reads_allowed_and_all_allowed() -> None:
    items, workers = _items([4.0, 3.0, 2.0, 0.0]), Workers(2, PLENTY)
    none = _hrcs(items, workers, 1e-15)
    assert none.replicated.tolist() == [True, True, True, False] and none.alpha == 0.0
    assert not _hrcs(items, workers, 7.0).replicated.any()


def test_short_memory_lowers_r_and_says_which_alpha_that_needs() -> None:
    items = _items([0.5, 0.2, 0.1, 0.1, 0.1])
    # 40 bytes an item, homes 0 1 0 1 0: with the shard of worker 0, two or three replicas take 160 bytes, one 120.
    placement = _hrcs(items, Workers(2, 159), 0.25)
    assert placement.replicated.tolist() == [True, False, False, False, False]
    assert placement.owner.tolist() == [-1, 1, 0, 1, 0] and placement.used_bytes().tolist() == [120, 120]
    assert placement.sharded_share == pytest.approx(0.5)
    assert placement.alpha == pytest.approx(0.2 * 0.5 / 0.25) and placement.alpha_exceeded
    assert _hrcs(items, Workers(2, 160), 0.25).replicated.sum() == 3
    assert placement.dropped.tolist() == []
    # Not even all shards fit: nothing is replicated, and the coldest go.
    tight = _hrcs(items, Workers(2, 80), 0.25)
    assert tight.owner.tolist() == [0, 1, 0, 1, -1] and tight.dropped.tolist() == [4]


def test_items_without_access_yield_to_replication() -> None:
    placement = _hrcs(_items([4.0, 4.0, 0.0, 0.0, 0.0, 0.0]), Workers(2, 120), 0.25)
    assert placement.replicated.tolist() == [True, True] + [False] * 4
    assert placement.dropped.tolist() == [4, 5] and not placement.alpha_exceeded


def test_replicate_and_hash_drop_the_coldest() -> None:
    items = _items([1.0, 5.0, 3.0, 4.0, 2.0], [10, 10, 10, 20, 10])
    everywhere = replicate(items, Workers(3, 160))
    assert everywhere.replicated.tolist() == [False, True, True, True, False]
    assert everywhere.dropped.tolist() == [0, 4] and everywhere.used_bytes().tolist() == [160] * 3
    shards = hash_items(items, Workers(2, 80))  # homes 0 1 0 1 0
    assert shards.owner.tolist() == [-1, 1, 0, -1, 0] and shards.dropped.tolist() == [0, 3]
    assert shards.alpha is None and not shards.alpha_exceeded


def test_whole_cells_are_what_fills_memory() -> None:
    items = _items([3.0, 2.0, 1.0], [5, 4, 1], cell_tokens=4)
    assert items.room_bytes.tolist() == [32, 16, 16] and items.transfer_bytes.tolist() == [20, 16, 4]
    assert replicate(items, Workers(2, 63)).dropped.tolist() == [2]
    assert replicate(items, Workers(2, 64)).dropped.tolist() == []


def test_what_is_in_a_burst() -> None:
    placement = _hrcs(_items([0.5, 0.2, 0.1, 0.1, 0.1]), Workers(2, 160), 0.25)
    assert placement.replicated.tolist() == [True, True, True, False, False]

    def found(times: dict[int, int], asked: int) -> list[int]:
        rows, counts = np.array([*times], np.int32), np.array([*times.values()], np.int64)
        return bursting(placement, rows, counts, asked).tolist()

    assert found({3: 41, 4: 59}, 100) == [4, 3], "the hottest first"
    assert found({3: 39, 4: 61}, 100) == [4], "the other has less than four times its share"
    assert found({3: 15, 4: 16}, 31) == [4], "the other was asked for too seldom"
    assert found({0: 90, 3: 10}, 100) == [], "it is everywhere already"
    assert found({}, 0) == []


def test_a_burst_is_hotter_than_what_is_everywhere_and_nobody_needs_it_where_nothing_is() -> None:
    placement = _hrcs(_items([0.6, 0.38, 0.01, 0.01]), Workers(2, 128), 0.25)
    assert placement.replicated.tolist() == [True, True, False, False]
    row = np.array([3], np.int32)
    assert bursting(placement, row, np.array([39]), 100).tolist() == [3]
    assert bursting(placement, row, np.array([37]), 100).tolist() == []
    shards = hash_items(_items([0.6, 0.38, 0.01, 0.01]), Workers(2, 128))
    assert bursting(shards, row, np.array([100]), 100).tolist() == []


def test_a_burst_replaces_the_coldest_replica() -> None:
    before = _hrcs(_items([0.5, 0.2, 0.1, 0.1, 0.1]), Workers(2, 160), 0.25)
    after = burst(before, [4])
    assert after.replicated.tolist() == [True, True, False, False, True]
    assert after.owner.tolist() == [-1, -1, 0, 1, -1] and after.order.tolist() == [4, 0, 1, 2, 3]
    assert after.budget == before.budget and after.alpha == before.alpha and not after.alpha_exceeded
    again = burst(after, [3])  # the earlier burst keeps its place, however cold it was
    assert again.replicated.tolist() == [True, False, False, True, True]
    assert again.alpha == pytest.approx(0.2 * 0.3 / 0.25) and again.alpha_exceeded


def test_a_burst_is_replicated_even_if_others_are_dropped_for_it() -> None:
    before = hash_items(_items([5.0, 4.0, 3.0, 2.0, 1.0]), Workers(2, 80))
    after = burst(before, [4, 4])
    assert after.replicated.tolist() == [False] * 4 + [True]
    assert after.owner.tolist() == [0, 1, -1, -1, -1] and after.dropped.tolist() == [2, 3]
    # Three at once do not fit on a worker: two do.
    most = burst(before, [4, 3, 2])
    assert most.replicated.tolist() == [False, False, False, True, True]
    with pytest.raises(ValueError, match=r"rows: must be in 0\.\.4"):
        burst(before, [5])


WORLDS = st.tuples(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.5, 1.0, 2.0, 7.0]), st.integers(1, 9)), min_size=1, max_size=12
    ),
    st.integers(1, 4),
    st.integers(0, 200),
    st.floats(1e-3, 1.5),
    st.integers(1, 4),
)


@given(WORLDS)
def test_hrcs_equals_a_search_by_loops(
    world: tuple[list[tuple[float, int]], int, int, float, int],
) -> None:
    rows, n_workers, capacity, r_max, cell = world
    items = _items([f for f, _ in rows], [t for _, t in rows], cell)
    placement = _hrcs(items, Workers(n_workers, capacity), r_max)
    placement.check()

    total = sum(f for f, _ in rows)
    share = [f / total if total else 1 / len(rows) for f, _ in rows]
    room = [math.ceil(t / cell) * cell * 4 for _, t in rows]
    order = sorted(range(len(rows)), key=lambda row: -share[row])
    limit = min(r_max, 1.0) if n_workers > 1 else -1.0
    wanted = next(
        (k for k in range(len(rows)) if sum(share[i] for i in order[k:]) <= limit + 1e-9), len(rows)
    )

    def used(k: int, worker: int) -> int:
        shard = [room[i] for i in order[k:] if i % n_workers == worker and share[i] > 0]
        return sum(room[i] for i in order[:k]) + sum(shard)

    fitting = [k for k in range(wanted + 1) if all(used(k, w) <= capacity for w in range(n_workers))]
    count = max(fitting, default=0)
    free = [capacity - sum(room[i] for i in order[:count])] * n_workers
    held: list[set[int]] = [set(order[:count]) for _ in range(n_workers)]
    full: set[int] = set()
    for row in order[count:]:
        worker = row % n_workers
        if worker in full or room[row] > free[worker]:
            full.add(worker)
        else:
            free[worker] -= room[row]
            held[worker].add(row)

    assert np.flatnonzero(placement.replicated).tolist() == sorted(order[:count])
    for worker in range(n_workers):
        assert np.flatnonzero(placement.held()[worker]).tolist() == sorted(held[worker])
        assert placement.used_bytes()[worker] == sum(room[i] for i in held[worker])
    assert placement.dropped.tolist() == sorted(set(range(len(rows))).difference(*held))


@given(WORLDS, st.data())
def test_traffic_equals_a_hand_loop(
    world: tuple[list[tuple[float, int]], int, int, float, int], data: st.DataObject
) -> None:
    rows, n_workers, capacity, r_max, cell = world
    placement = _hrcs(
        _items([f for f, _ in rows], [t for _, t in rows], cell), Workers(n_workers, capacity), r_max
    )
    row = st.integers(0, len(rows) - 1)
    requests = data.draw(
        st.lists(st.tuples(st.integers(0, n_workers - 1), st.lists(row, max_size=6)), max_size=6)
    )
    tokens = np.zeros((n_workers, n_workers), np.int64)
    cells = np.zeros_like(tokens)
    held = [set(np.flatnonzero(placement.held()[w]).tolist()) for w in range(n_workers)]
    for worker, wanted in requests:
        for item in wanted:
            sources = [w for w in range(n_workers) if item in held[w]]
            if sources and worker not in sources:
                (source,) = sources
                tokens[source, worker] += rows[item][1]
                cells[source, worker] += math.ceil(rows[item][1] / cell)
    stream = [(worker, np.array(wanted, np.int32)) for worker, wanted in requests]
    assert expected_bytes(placement, stream).tolist() == (tokens * 4).tolist()
    assert expected_bytes(placement, stream, whole_cells=True).tolist() == (cells * cell * 4).tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prefill_s": 0.0}, "prefill_s: must be above 0"),
        ({"item_tokens": math.nan}, "item_tokens: must be above 0"),
        ({"link_bytes_per_s": math.inf}, "link_bytes_per_s: must be above 0"),
        ({"alpha": 1.5}, "alpha: must be a share"),
        ({"alpha": math.nan}, "alpha: must be a share"),
        ({"bound": "exact"}, 'bound: must be "paper" or "physical"'),
    ],
)
def test_hrcs_refuses(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"prefill_s": 1.0, "item_tokens": 1.0, "link_bytes_per_s": 1.0} | change
    with pytest.raises(UserError, match=message):
        hrcs(_items([1.0]), Workers(2, 100), **arguments)


def test_items_and_workers_refuse() -> None:
    with pytest.raises(UserError, match="cache workers"):
        Workers(0, 1)
    with pytest.raises(UserError, match="capacity_bytes"):
        Workers(1, -1)
    for frequency, tokens, message in (
        ([1.0], [1, 2], "both must be"),
        ([], [], "both must be"),
        ([math.nan], [1], "frequency: must be finite"),
        ([-1.0], [1], "frequency: must be finite"),
        ([1.0], [0], "tokens: must be integers"),
        ([1.0], [1.5], "tokens: must be integers"),
    ):
        with pytest.raises(ValueError, match=message):
            Items(np.array(frequency), np.array(tokens), 1)
    with pytest.raises(ValueError, match="bytes_per_token"):
        Items(np.ones(1), np.ones(1, np.int64), 0)
