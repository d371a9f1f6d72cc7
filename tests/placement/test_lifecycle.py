# SPDX-License-Identifier: Apache-2.0
"""The life cycle against sets of rows: any order of refreshes, bursts, new items, steps and failures."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jgr.placement.items import (
    NOWHERE,
    REPLICATED,
    SHARDED,
    ItemPlacement,
    Items,
    Workers,
    burst,
    hash_items,
    hrcs,
    replicate,
)
from jgr.placement.lifecycle import IllegalStep, Lifecycle, Step

FREQUENCIES = st.sampled_from([0.0, 1.0, 2.0, 5.0, 30.0])


def _make(policy: str, items: Items, workers: Workers) -> ItemPlacement:
    if policy == "replicate":
        return replicate(items, workers)
    if policy == "hash":
        return hash_items(items, workers)
    return hrcs(items, workers, prefill_s=1.0, item_tokens=100.0, link_bytes_per_s=200.0, alpha=float(policy))


class Swaps(RuleBasedStateMachine):
    """readable[w]: published rows; arrived: what a copy brought that nobody reads yet."""

    @initialize(
        n_workers=st.integers(1, 3),
        rows=st.lists(st.tuples(FREQUENCIES, st.integers(1, 6)), min_size=1, max_size=10),
        capacity=st.integers(0, 30),
        step_bytes=st.integers(1, 12),
    )
    def start(self, n_workers: int, rows: list[tuple[float, int]], capacity: int, step_bytes: int) -> None:
        self.workers = Workers(n_workers, capacity)
        self.readable: list[set[int]] = [set() for _ in range(n_workers)]
        self.arrived: tuple[int, set[int]] = (0, set())
        self.cycle = Lifecycle(self.workers, step_bytes)
        self.lost: set[int] = set()
        items = Items(np.array([f for f, _ in rows]), np.array([t for _, t in rows]), 1)
        self.go_to(hash_items(items, self.workers))

    def go_to(self, target: ItemPlacement) -> None:
        self.target = target
        self.kept = set(range(len(target.items))) - set(target.dropped.tolist())
        self.alive = set[int]().union(*self.readable) & self.kept
        steps = self.cycle.plan(target)
        assert steps == self.cycle.steps
        sizes = target.items.room_bytes
        for step in steps:
            assert len(step.rows)
            assert (
                step.kind != "copy" or len(step.rows) == 1 or sizes[step.rows].sum() <= self.cycle._step_bytes
            )

    @rule(policy=st.sampled_from(["replicate", "hash", "0.0", "0.05", "0.2"]), data=st.data())
    def refresh(self, policy: str, data: st.DataObject) -> None:
        old = self.target.items
        frequency = data.draw(st.lists(FREQUENCIES, min_size=len(old), max_size=len(old)))
        self.go_to(_make(policy, Items(np.array(frequency), old.tokens, 1), self.workers))

    @rule(data=st.data())
    def burst(self, data: st.DataObject) -> None:
        row = st.integers(0, len(self.target.items) - 1)
        target = burst(self.target, data.draw(st.lists(row, min_size=1, max_size=3)))
        target.check()
        self.go_to(target)

    @precondition(lambda self: self.cycle.steps)
    @rule(count=st.integers(1, 8))
    def advance(self, count: int) -> None:
        for step in self.cycle.steps[:count]:
            self.apply(step)
            self.cycle.commit(step)
            self.audit()

    @precondition(lambda self: self.cycle.steps)
    @rule()
    def finish(self) -> None:
        self.advance(len(self.cycle.steps))
        self.lost.clear()
        assert [sorted(rows) for rows in self.readable] == [
            np.flatnonzero(self.target.held()[worker]).tolist() for worker in range(self.workers.count)
        ]

    @precondition(lambda self: self.cycle.steps)
    @rule()
    def fail(self) -> None:
        step = self.cycle.steps[0]
        if step.kind != "copy":
            with pytest.raises(IllegalStep, match="cannot fail"):
                self.cycle.fail(step)
            return
        self.cycle.fail(step)
        assert self.cycle.steps == ()

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        worker = data.draw(st.integers(0, self.workers.count - 1))
        self.cycle.lose(worker)
        assert self.cycle.steps == () and not self.cycle.published(worker).any()
        self.lost.add(worker)
        self.readable[worker] = set()
        if self.arrived[0] == worker:
            self.arrived = (0, set())
        self.alive &= set[int]().union(*self.readable)
        if data.draw(st.booleans()):
            self.go_to(self.target)

    def apply(self, step: Step) -> None:
        rows = set(step.rows.tolist())
        assert len(rows) == len(step.rows)
        if step.kind == "copy":
            assert not self.arrived[1] and not rows & self.readable[step.worker]
            assert step.source is None or rows <= self.readable[step.source]
            assert step.source is not None or not any(rows & there for there in self.readable)
            self.arrived = (step.worker, rows)
        elif step.kind == "publish":
            assert self.arrived == (step.worker, rows)
            self.readable[step.worker] |= rows
            self.arrived = (0, set())
        else:
            assert rows <= self.readable[step.worker]
            self.readable[step.worker] -= rows
        self.alive |= set[int]().union(*self.readable) & self.kept

    @invariant()
    def audit(self) -> None:
        self.cycle.check()
        sizes = self.target.items.room_bytes
        for worker, rows in enumerate(self.readable):
            extra = self.arrived[1] if self.arrived[0] == worker else set()
            assert not rows & extra
            assert sum(int(sizes[row]) for row in rows | extra) <= self.workers.capacity_bytes
        # What the target keeps has a copy to read from its first one on.
        assert self.alive <= set[int]().union(*self.readable)
        every = np.arange(len(sizes), dtype=np.int32)
        for worker, rows in enumerate(self.readable):
            for row, source in zip(every, self.cycle.where(worker, every), strict=True):
                if source == -1:
                    assert not any(row in there for there in self.readable) or (
                        row % self.workers.count in self.lost
                    )
                else:
                    assert row in self.readable[source] and (source == worker or row not in rows)


TestSwaps = Swaps.TestCase
TestSwaps.settings = settings(max_examples=100, stateful_step_count=20, deadline=None)


def _shown(steps: tuple[Step, ...]) -> list[tuple[str, int, list[int], int | None]]:
    return [(step.kind, step.worker, step.rows.tolist(), step.source) for step in steps]


def _run(cycle: Lifecycle) -> None:
    for step in cycle.steps:
        cycle.commit(step)


def test_a_burst_by_hand() -> None:
    workers = Workers(2, 20)
    items = Items(np.array([4.0, 3.0, 2.0, 1.0]), np.full(4, 10), 1)
    cycle = Lifecycle(workers)
    cycle.plan(hash_items(items, workers))
    _run(cycle)
    # Row 3, at home on worker 1, goes to worker 0 too, which has room after row 2, its coldest, is gone.
    # Worker 1 is full already with its own two.
    target = burst(hash_items(items, workers), [3])
    assert _shown(cycle.plan(target)) == [
        ("drop", 0, [2], None),
        ("copy", 0, [3], 1),
        ("publish", 0, [3], None),
    ]
    drop, copy, publish = cycle.steps
    with pytest.raises(IllegalStep, match="copy on worker 0 is not the next step"):
        cycle.commit(copy)
    cycle.commit(drop)
    assert cycle.where(0, np.array([0, 1, 2, 3])).tolist() == [0, 1, -1, 1]
    cycle.commit(copy)
    assert cycle.where(0, np.array([3])).tolist() == [1]
    cycle.commit(publish)
    assert cycle.where(0, np.array([3])).tolist() == [0] and cycle.steps == ()
    cycle.check()


def test_a_copy_with_room_comes_before_any_drop() -> None:
    workers = Workers(2, 100)
    hot, cold = np.array([9.0, 0.1, 0.1, 9.0]), np.array([0.1, 9.0, 0.1, 9.0])
    cycle = Lifecycle(workers)
    placements = [_make("0.05", Items(f, np.full(4, 10), 1), workers) for f in (hot, cold)]
    assert [p.replicated.tolist() for p in placements] == [
        [True, False, False, True],
        [False, True, False, True],
    ]
    cycle.plan(placements[0])
    _run(cycle)
    assert _shown(cycle.plan(placements[1])) == [
        ("copy", 0, [1], 1),
        ("publish", 0, [1], None),
        ("drop", 1, [0], None),
    ]


def test_copies_beside_the_home_go_before_last_ones() -> None:
    workers, items = Workers(2, 20), Items(np.ones(4), np.full(4, 10), 1)
    first, then = (
        ItemPlacement(items, workers, np.array(holding, np.uint8), np.array([1, 2, 3, 0], np.int32))
        for holding in ([SHARDED, REPLICATED, NOWHERE, SHARDED], [NOWHERE, SHARDED, SHARDED, SHARDED])
    )
    cycle = Lifecycle(workers)
    cycle.plan(first)
    _run(cycle)
    # Row 0, the coldest, leaves for good; row 1 is still on worker 1. Row 2 is new: worker 0 computes it.
    assert _shown(cycle.plan(then)) == [
        ("drop", 0, [1], None),
        ("copy", 0, [2], None),
        ("publish", 0, [2], None),
        ("drop", 0, [0], None),
    ]


def test_what_a_lost_worker_held_is_copied_from_those_that_have_it() -> None:
    workers, items = Workers(2, 100), Items(np.ones(4), np.full(4, 10), 1)
    holding = np.array([REPLICATED, REPLICATED, SHARDED, SHARDED], np.uint8)
    target = ItemPlacement(items, workers, holding, np.arange(4, dtype=np.int32))
    cycle = Lifecycle(workers)
    cycle.plan(target)
    _run(cycle)
    cycle.lose(0)
    cycle.check()
    assert cycle.plan(target, absent=[0]) == (), "there is nobody to copy to"
    assert cycle.where(1, np.arange(4)).tolist() == [1, 1, -1, 1]
    # Row 0, at home on worker 0, is on worker 1 too; row 2 is nowhere, and row 1 is at home on worker 1.
    assert _shown(cycle.plan(target)) == [
        ("copy", 0, [0], 1),
        ("publish", 0, [0], None),
        ("copy", 0, [1], 1),
        ("publish", 0, [1], None),
        ("copy", 0, [2], None),
        ("publish", 0, [2], None),
    ]
    _run(cycle)
    cycle.check()
    assert cycle.where(0, np.arange(4)).tolist() == [0, 0, 0, 1]


def test_who_is_there_gets_what_is_to_be_everywhere_without_waiting_for_its_home() -> None:
    workers, items = Workers(2, 100), Items(np.ones(2), np.full(2, 10), 1)
    target = replicate(items, workers)
    cycle = Lifecycle(workers)
    cycle.lose(0)
    assert _shown(cycle.plan(target, absent=[0])) == [
        ("copy", 1, [1], None),
        ("publish", 1, [1], None),
        ("copy", 1, [0], None),
        ("publish", 1, [0], None),
    ]
    _run(cycle)
    cycle.check()


def test_a_plan_for_other_workers_or_items_is_refused() -> None:
    workers, items = Workers(2, 100), Items(np.ones(3), np.full(3, 10), 1)
    cycle = Lifecycle(workers)
    steps = cycle.plan(hash_items(items, workers))
    with pytest.raises(ValueError, match="is for Workers"):
        cycle.plan(hash_items(items, Workers(3, 100)))
    for other in (Items(np.ones(2), np.full(2, 10), 1), Items(np.ones(3), np.full(3, 11), 1)):
        with pytest.raises(ValueError, match="first 3 items must be as large"):
            cycle.plan(hash_items(other, workers))
    assert cycle.steps == steps
