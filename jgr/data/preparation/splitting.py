# SPDX-License-Identifier: Apache-2.0
"""Turns the events of a raw dataset into the arrays of a prepared one: filter, order, cut, renumber.

The one idea: a split is a *rank* of each event (0 train, 1 valid, 2 test) that never falls along a user's events.
However the ranks came about, examples are cut from them in the same way, and checked once more as arrays.

Splits. Leave-one-out: a user's last event is the test target, the one before it the valid target; users with
fewer than three events are only trained on. Time: events from the 80 % quantile of all times on are valid targets,
from the 90 % quantile on test targets. Given: as the source says. For the last two, a user's events must come in
the order train, valid, test; every event but a user's first is a target, and its history is everything before it
(if the source has no order: everything of the earlier splits).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from jgr.data.interactions import DataError
from jgr.data.prepared import SPLITS, Arrays
from jgr.data.sources.records import Counts, Source

Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

VALID_FROM, TEST_FROM = 0.8, 0.9


@dataclass(frozen=True, eq=False)
class Events:
    """All events that were read, in file order: arrays of [total] int64.

    user, item: indices into user_ids and item_ids, which are in the order first seen. item_lines: each item's line for
    items.jsonl. actions, scenario: None if the source has no feedback.
    """

    user: Int64
    item: Int64
    time: Int64 | None
    split: Int64
    user_ids: tuple[str, ...]
    item_ids: tuple[str, ...]
    item_lines: list[bytes]
    actions: Int64 | None = None
    scenario: Int64 | None = None


@dataclass(frozen=True, eq=False)
class Split:
    """The result of `split_events`. user_ids: [u]. item_lines: [n], the lines of items.jsonl in row order."""

    arrays: Arrays
    user_ids: list[str]
    item_lines: list[bytes]

    def counts(self) -> Counts:
        return Counts(len(self.user_ids), len(self.item_lines), len(self.arrays.rows))


def split_events(events: Events, source: Source, parameters: dict[str, Any]) -> Split:
    """Filter, order, cut and renumber the events, and check the arrays. Raises DataError if nothing is left."""
    given = parameters["split"] == "given"
    keep = _frequent(events, _distinct(events, source), parameters["min_user"], parameters["min_item"])
    if not keep.any():
        raise DataError("no event is left: lower --min_user or --min_item")
    selected = np.flatnonzero(keep)
    # A stable sort by user, then by time if known; equal keys stay in the order of the files.
    keys = [events.user] if events.time is None else [events.time, events.user]
    keys = [events.split, *keys] if given and len(keys) == 2 else keys
    order = selected[np.lexsort([key[selected] for key in keys])]
    kept_users, user = np.unique(events.user[order], return_inverse=True)
    kept_items, item = np.unique(events.item[order], return_inverse=True)
    time = None if events.time is None else events.time[order]
    offsets = np.append(0, np.cumsum(np.bincount(user)))
    user_ids = [events.user_ids[i] for i in kept_users]
    ranks = {"leave_one_out": _last_two, "time": _by_time}.get(parameters["split"])
    rank = events.split[order] if ranks is None else ranks(offsets, time)
    _refuse_leaks(rank, user, user_ids)
    learnt = np.bincount(item[rank == 0], minlength=len(kept_items))
    by_popularity = np.argsort(-learnt, kind="stable")
    row = np.empty(len(kept_items), np.int32)
    row[by_popularity] = np.arange(len(kept_items), dtype=np.int32)
    arrays = _cut(row[item], offsets, user, rank, time, source.unordered)
    if events.actions is not None and events.scenario is not None:
        columns = [column[order].astype(np.int32) for column in (events.actions, events.scenario)]
        arrays = replace(arrays, actions=columns[0], scenarios=columns[1])
    arrays.check(len(kept_items), tuple(user_ids))
    return Split(arrays, user_ids, [events.item_lines[i] for i in kept_items[by_popularity]])


def _distinct(events: Events, source: Source) -> Bool:
    """Which events to keep, [total], if repeats are to be dropped. Raises DataError for a set with an item twice."""
    keep = np.ones(len(events.user), bool)
    repeats = source.drop_repeats and events.time is not None  # without times it may be a purchase again
    if not (source.unordered or repeats):
        return keep
    columns = [events.user, events.item]
    if repeats and events.time is not None:
        columns.append(events.time)
    if repeats and not source.actions:  # at one time somebody may have seen an item and taken it
        columns += [column for column in (events.actions, events.scenario) if column is not None]
    order = np.lexsort(columns)
    same = np.all([np.diff(column[order]) == 0 for column in columns], axis=0)
    keep[order[1:][same]] = False
    if source.unordered and not keep.all():
        repeated = int(np.argmin(keep))
        raise DataError(
            f"user {events.user_ids[events.user[repeated]]!r} has item "
            f"{events.item_ids[events.item[repeated]]!r} twice: the split leaks, or the list is not a set"
        )
    return keep


def _frequent(events: Events, keep: Bool, min_user: int, min_item: int) -> Bool:
    """Which events to keep of those that `keep` has, [total], so that every user and item that is left has at least the
    asked number."""
    while True:
        of_user, of_item = np.bincount(events.user[keep]), np.bincount(events.item[keep])
        fits = keep.copy()
        fits[keep] = (of_user[events.user[keep]] >= min_user) & (of_item[events.item[keep]] >= min_item)
        if fits.sum() in (0, keep.sum()):
            return fits
        keep = fits


def _last_two(offsets: Int64, time: Int64 | None) -> Int64:
    """The rank of each event by leave-one-out: 0 train, 1 valid, 2 test."""
    rank = np.zeros(offsets[-1], np.int64)
    stops = offsets[1:][np.diff(offsets) >= 3]
    rank[stops - 2], rank[stops - 1] = 1, 2
    return rank


def _by_time(offsets: Int64, time: Int64 | None) -> Int64:
    """The rank of each event by the quantile of its time among all events; equal times get equal ranks."""
    if time is None:
        raise DataError("--split=time: the raw files give no times")
    ordered = np.sort(time)
    valid_from, test_from = (ordered[int(share * len(ordered))] for share in (VALID_FROM, TEST_FROM))
    rank: Int64 = (time >= valid_from).astype(np.int64) + (time >= test_from)
    return rank


def _refuse_leaks(rank: Int64, user: Int64, user_ids: list[str]) -> None:
    back = (np.diff(rank) < 0) & (np.diff(user) == 0)
    if back.any():
        at = int(np.argmax(back))
        raise DataError(
            f"user {user_ids[user[at]]!r}: the split leaks: an event of {SPLITS[rank[at + 1]]} comes after one of "
            f"{SPLITS[rank[at]]}"
        )


def _cut(
    rows: npt.NDArray[np.int32], offsets: Int64, user: Int64, rank: Int64, time: Int64 | None, unordered: bool
) -> Arrays:
    """Cut the examples: every event that has a history is a target."""
    n_users = len(offsets) - 1
    before = [offsets[:-1] + np.bincount(user[rank < r], minlength=n_users) for r in range(3)]
    windows = []
    for r, split in enumerate(SPLITS):
        target = np.flatnonzero(rank == r)
        owner = user[target]
        # Without order, other items of the same split may have come later.
        stop = before[r][owner] if unordered and r else target
        has_history = stop > offsets[owner]
        if not has_history.any():
            raise DataError(f"the split leaves no {split} example; choose another or loosen the filters")
        columns = [owner, offsets[owner], stop, target]
        windows.append(np.stack([column[has_history] for column in columns]))
    train, valid, test = windows
    return Arrays(rows, offsets, before[1], train, valid, test, time)
