# SPDX-License-Identifier: Apache-2.0
"""How the items on the cache workers become those of another placement, while they are read (BAT-12).

There are three steps: copy, publish, drop. A copy takes its memory before it can be read. A published copy is read
until it is dropped. A copy is dropped if the item has others, or if the new placement holds the item nowhere. One
invariant makes this safe: an item that is published anywhere is published at its home. So making room on one worker
never takes another worker's last source, and no exchange of items can deadlock. Before a copy, a worker drops only as
much as that copy needs. Hot items come first.

Where the new placement has other homes (jgr/placement/similarity.py), an item's home is the old one until the new one
has published it; then the old copy goes. Items move in turns of step_bytes, so that room which one worker gives back
serves the next turn. Only where there is no room at all is an item dropped before it has moved, and computed anew.

A worker may be lost, with all that it holds (`lose`). What others hold of its items is still read there, and is what
the worker that takes its place copies from. Until all of that is done the invariant does not hold for its items.

Everything here is pure: the steps are data for whoever moves the bytes, and a step has happened when `commit` says so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jgr.placement.items import Bool, Int32, Int64, ItemPlacement, Workers


class IllegalStep(RuntimeError):
    """Somebody reported a step that is not the next one. Nothing has changed."""


@dataclass(frozen=True, eq=False)
class Step:
    """One thing to do to `rows`, int32, on `worker`.

    copy: fetch the items from the worker `source`, or compute them where that is None; nobody can read them yet.
    publish: from now on readers find the copied items. drop: readers do not find the items any more; their memory may
    be used again when those who read them already have finished.
    """

    kind: Literal["copy", "publish", "drop"]
    worker: int
    rows: Int32
    source: int | None = None


class Lifecycle:
    """Which items are on the workers, at first none, and the steps to another placement.

    step_bytes: a copy step moves at most this many bytes, but at least one item.
    """

    def __init__(self, workers: Workers, step_bytes: int = 64 << 20) -> None:
        self._workers, self._step_bytes = workers, step_bytes
        self._published: Bool = np.zeros((workers.count, 0), bool)
        self._room: Int64 = np.zeros(0, np.int64)
        self._used: Int64 = np.zeros(workers.count, np.int64)  # published and copied bytes
        self._copied: Step | None = None
        self._steps: deque[Step] = deque()
        self._lost: set[int] = set()  # workers that were, until a plan that has them is done
        self._absent: Collection[int] = ()  # of the plan
        self._home: Int32 = np.zeros(0, np.int32)  # [n], where each row is read by those who have no copy
        self._next_home: Int32 = self._home  # of the plan

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps that are left to do, in order."""
        return tuple(self._steps)

    def plan(self, target: ItemPlacement, absent: Collection[int] = ()) -> tuple[Step, ...]:
        """Plan the steps from what is held now to `target`; they replace those that were left. absent: workers that are
        not there, and get nothing.

        Call it between two steps. New frequencies and a burst (`items.burst`) all
        come as a target. ValueError where the target is for other workers, or its rows are missing or take other room
        than before; AssertionError where it does not fit into memory.
        """
        known, room = len(self._room), target.items.room_bytes
        if target.workers != self._workers:
            raise ValueError(f"target: is for {target.workers}, not {self._workers}")
        if not np.array_equal(room[:known], self._room):
            raise ValueError(f"target: its first {known} items must be as large as those placed before")
        target.check()
        grown = ((0, 0), (0, len(room) - known))
        self._published, self._room = np.pad(self._published, grown), room
        self._absent, self._next_home = frozenset(absent), target.home
        self._home = np.concatenate([self._home, self._next_home[known:]])
        at_next = self._published[self._next_home, np.arange(len(room))]
        # What nobody has, or the next home has already, has nothing to wait for.
        had: Bool = np.asarray(self._published.any(axis=0))
        if self._copied is not None:
            copied = self._copied.rows
            # What nobody else has is read there as soon as it is published, wherever it was at home.
            self._home[copied[~had[copied]]] = self._copied.worker
            had[copied] = True
        free = at_next | ~had
        self._home = np.where(free, self._next_home, self._home).astype(np.int32)
        draft = _Draft(
            self._published.copy(),
            self._used.copy(),
            self._home.copy(),
            target,
            self._step_bytes,
            self._absent,
        )
        if self._copied is not None:
            draft.publish(self._copied.worker, self._copied.rows)
        self._steps = deque(draft.to_target())
        return self.steps

    def commit(self, step: Step) -> None:
        """Report that the next step was done. IllegalStep where `step` is another one."""
        self._must_be_next(step)
        self._steps.popleft()
        if not self._steps:
            self._lost &= set(self._absent)
        if step.kind == "publish":
            self._published[step.worker, step.rows] = True
            moved_home = step.rows[self._next_home[step.rows] == step.worker]
            self._home[moved_home] = step.worker
            self._copied = None
            return
        moved = int(self._room[step.rows].sum())
        if step.kind == "copy":
            self._used[step.worker] += moved
            self._copied = step
        else:
            self._used[step.worker] -= moved
            self._published[step.worker, step.rows] = False

    def fail(self, step: Step) -> None:
        """Report that the next step, a copy, failed. What is held stays, and the rest of the plan is forgotten."""
        self._must_be_next(step)
        if step.kind != "copy":
            raise IllegalStep(f"a {step.kind} cannot fail")
        self._steps.clear()

    def lose(self, worker: int) -> None:
        """A worker is gone, with all that it held, or has begun anew. The rest of the plan is forgotten."""
        self._published[worker] = False
        if self._copied is not None and self._copied.worker == worker:
            self._copied = None
        self._used[worker] = 0
        self._steps.clear()
        self._lost.add(worker)

    def published(self, worker: int) -> Bool:
        """Which rows the worker's readers find there, [n]."""
        found: Bool = self._published[worker].copy()
        return found

    def where(self, worker: int, rows: Int32) -> Int32:
        """The worker whose copy of each row `worker` reads, its own or the home's, int32; -1 where there is no copy."""
        homes = self._home[rows]
        elsewhere = np.where(self._published[homes, rows], homes, -1)
        return np.where(self._published[worker, rows], worker, elsewhere).astype(np.int32)

    @property
    def homes(self) -> Int32:
        """The home of each row now, [n]."""
        return self._home.copy()

    def check(self) -> None:
        """Audit the invariants. AssertionError names what is broken."""
        used = self._published.astype(np.int64) @ self._room
        if self._copied is not None:
            used[self._copied.worker] += self._room[self._copied.rows].sum()
        assert np.array_equal(used, self._used), f"bytes used: {used} found, {self._used} counted"
        if self._steps and self._steps[0].kind == "copy":
            used[self._steps[0].worker] += self._room[self._steps[0].rows].sum()
        assert (used <= self._workers.capacity_bytes).all(), f"{used} of {self._workers.capacity_bytes} bytes"
        rows = np.arange(len(self._room))
        at_home = self._published[self._home, rows]
        whole = ~np.isin(self._home, list(self._lost))
        lost = np.flatnonzero(self._published.any(axis=0) & ~at_home & whole)
        assert not len(lost), f"rows {lost} are not published at home"
        assert self._copied is None or not self._steps or self._steps[0].kind == "publish"

    def _must_be_next(self, step: Step) -> None:
        if not self._steps or self._steps[0] is not step:
            raise IllegalStep(f"{step.kind} on worker {step.worker} is not the next step")


class _Draft:
    """What the workers would hold after the steps drafted so far. It changes `published` and `used` in place."""

    def __init__(
        self,
        published: Bool,
        used: Int64,
        homes: Int32,
        target: ItemPlacement,
        step_bytes: int,
        absent: Collection[int] = (),
    ) -> None:
        self._absent = absent
        self._published, self._used, self._step_bytes = published, used, step_bytes
        self._target, self._wanted = target, target.held()
        self._home, self._next_home = homes, target.home
        self._room = target.items.room_bytes
        self._steps: list[Step] = []
        self._surplus: list[deque[int]] = [deque() for _ in range(target.workers.count)]
        # What other workers have still to get from here, the coldest first; it goes where nothing else can.
        self._unmoved = [deque[int]() for _ in range(target.workers.count)]

    def publish(self, worker: int, rows: Int32) -> None:
        self._steps.append(Step("publish", worker, rows))
        self._published[worker, rows] = True
        moved = rows[(self._next_home[rows] == worker) & (self._home[rows] != worker)]
        for row, old in zip(moved.tolist(), self._home[moved].tolist(), strict=True):
            if self._published[old, row] and not self._wanted[old, row]:
                self._surplus[old].append(row)
        self._home[moved] = worker

    def to_target(self) -> list[Step]:
        workers = range(self._target.workers.count)
        present = [worker for worker in workers if worker not in self._absent]
        self._surplus = [self._to_drop(worker) for worker in workers]
        self._unmoved = [self._to_move(worker) for worker in workers]
        order, homes = self._target.order, self._next_home
        for worker in present:  # before anybody drops the last copy of what a lost worker had
            for other in present:
                lost = order[(homes[order] == worker) & ~self._published[self._home[order], order]]
                self._add(worker, self._held_by(other, lost), other)
        moving = order[(homes[order] != self._home[order]) & self._wanted[homes[order], order]]
        for some in self._parts(moving):
            for worker in present:
                for other in present:
                    there = some[(homes[some] == worker) & (self._home[some] == other)]
                    self._add(worker, self._held_by(other, there), other)
        replicated = self._target.replicated[order]
        for rows in (order[replicated], order[~replicated]):
            by_home = [rows[homes[rows] == worker] for worker in workers]
            for worker in present:  # homes first: the others copy from them
                self._add(worker, by_home[worker], None)
            for worker in present:
                for source in workers:
                    if source not in self._absent:
                        self._add(worker, by_home[source], source)
                        continue
                    for other in present:  # where they still are until their next home is there
                        there = by_home[source][self._home[by_home[source]] == other]
                        self._add(worker, self._held_by(other, there), other)
                    self._add(worker, by_home[source], None)
        for worker in workers:
            self._make_room(worker, None)
        return self._steps

    def _to_drop(self, worker: int) -> deque[int]:
        """The rows to drop, in order: copies away from home, the coldest first, then copies at home."""
        rows = self._unwanted(worker)
        at_home = self._home[rows] == worker
        gone = at_home & ~self._wanted[:, rows].any(axis=0)
        return deque([*rows[~at_home].tolist(), *rows[gone].tolist()])

    def _to_move(self, worker: int) -> deque[int]:
        rows = self._unwanted(worker)
        return deque(rows[(self._home[rows] == worker) & self._wanted[:, rows].any(axis=0)].tolist())

    def _unwanted(self, worker: int) -> Int32:
        coldest = self._target.order[::-1]
        found: Int32 = coldest[self._published[worker, coldest] & ~self._wanted[worker, coldest]]
        return found

    def _held_by(self, worker: int, rows: Int32) -> Int32:
        held: Int32 = rows[self._published[worker, rows]]
        return held

    def _add(self, worker: int, rows: Int32, source: int | None) -> None:
        missing = rows[self._wanted[worker, rows] & ~self._published[worker, rows]]
        for some in self._parts(missing):
            needed = int(self._room[some].sum())
            self._make_room(worker, needed)
            self._steps.append(Step("copy", worker, some, source))
            self._used[worker] += needed
            self.publish(worker, some)

    def _parts(self, rows: Int32) -> Iterator[Int32]:
        ends = np.cumsum(self._room[rows])
        start = 0
        while start < len(rows):
            before = int(ends[start - 1]) if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, before + self._step_bytes, side="right")))
            yield rows[start:stop]
            start = stop

    def _make_room(self, worker: int, needed: int | None) -> None:
        """Drop what the target does not want on the worker until `needed` bytes are free; None: drop all of it
        that others need not get from here first."""
        free = self._target.workers.capacity_bytes - int(self._used[worker])
        surplus, unmoved, rows = self._surplus[worker], self._unmoved[worker], list[int]()
        while surplus and (needed is None or free < needed):
            row = surplus.popleft()
            if self._published[worker, row]:
                rows.append(row)
                free += int(self._room[row])
        while unmoved and needed is not None and free < needed:
            row = unmoved.popleft()
            if self._published[worker, row] and self._home[row] == worker:
                rows.append(row)
                free += int(self._room[row])
        self._drop(worker, np.array(rows, np.int32))

    def _drop(self, worker: int, rows: Int32) -> None:
        """Drop the rows on the worker; where it is their home, first drop their copies on other workers."""
        leaving = rows[self._home[rows] == worker]
        for other in range(self._target.workers.count):
            there = leaving[self._published[other, leaving]]
            if other != worker and len(there):
                self._emit_drop(other, there)
        if len(rows):
            self._emit_drop(worker, rows)

    def _emit_drop(self, worker: int, rows: Int32) -> None:
        self._steps.append(Step("drop", worker, rows))
        self._published[worker, rows] = False
        self._used[worker] -= int(self._room[rows].sum())
