# SPDX-License-Identifier: Apache-2.0
"""Items placed by who asks for them together: the hottest everywhere, the others in parts of few cut edges (RCLLM-7).

The graph has an edge between items that stand in the same requests, by how often they do over the root of how often
each is asked for, since an item that everybody asks for is near to all and tells nothing. The hottest are not in it:
every worker has them. A partition of the graph gives each other item its home, so most of a request's have the same.

Requests are rows of the catalog, [c] int32 each. All functions are pure; `partition` says how METIS comes in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_matrix

from jgr.placement.items import Bool, Float64, Int32, ItemPlacement, Items, Workers, place_at
from jgr.placement.partition import By, partition

HOT = 0.001
"""The share of the items that every worker holds."""
NEIGHBOURS = 20
"""An item has edges to so many others at least, where it has them: the heaviest."""
MOST_PAIRS = 20_000_000
"""Pairs of items that are counted; of more, those of the last requests, without any that has more than that alone."""
FALLEN = 0.05
"""Items are parted anew where the share that requests find on one worker has fallen by so much."""


def hottest(items: Items, share: float = HOT) -> Int32:
    """The rows that every worker is to hold, the hottest first: that share of all, rounded up, of those asked for."""
    count = min(math.ceil(share * len(items)), int(np.count_nonzero(items.frequency)))
    return items.by_share[:count]


def graph(n: int, requests: Sequence[Int32], leave_out: Int32 | None = None) -> Any:
    """The similarity of items that stand in the same requests, [n, n] scipy CSR, symmetric, float64: their number of
    common requests over the root of the product of both's numbers. leave_out: rows that get no edge."""
    known, pairs = list[Int32](), 0
    for rows in reversed(requests):
        unique = np.unique(rows)
        if len(unique) ** 2 > MOST_PAIRS:
            continue
        pairs += len(unique) ** 2
        if pairs > MOST_PAIRS:
            break
        known.append(unique)
    if not known:
        return csr_matrix((n, n))
    columns = np.concatenate(known)
    ends = np.cumsum([0, *map(len, known)])
    asked = csr_matrix((np.ones(len(columns)), columns, ends), shape=(len(known), n))
    if leave_out is not None and len(leave_out):
        kept = np.ones(n)
        kept[leave_out] = 0
        asked = asked.multiply(kept).tocsr()
        asked.eliminate_zeros()
    common = (asked.T @ asked).tocsr()
    often = np.asarray(asked.sum(0)).ravel()
    common.setdiag(0)
    common.eliminate_zeros()
    rows = np.repeat(np.arange(n), np.diff(common.indptr))
    common.data /= np.sqrt(often[rows] * often[common.indices])
    return _heaviest(common, rows)


def homes(
    items: Items,
    workers: Workers,
    requests: Sequence[Int32],
    before: Int32 | None = None,
    *,
    hot: float = HOT,
    by: By = "auto",
) -> Int32:
    """The home of each row, [n] int32: parts of the similarity graph, balanced in accesses and in tokens.

    before: homes of the first rows as they were; parts get the numbers by which the most tokens stay where they are.
    """
    n, k = len(items), workers.count
    everywhere = hottest(items, hot)
    edges = graph(n, requests, everywhere)
    found = np.zeros(n, np.int32)
    cold = np.ones(n, bool)
    cold[everywhere] = False
    linked = cold & (np.diff(edges.indptr) > 0)
    for rows in (np.flatnonzero(linked), np.flatnonzero(cold & ~linked)):
        loads = np.stack([items.share[rows], items.room_bytes[rows].astype(np.float64)], axis=1)
        found[rows] = partition(edges[rows][:, rows], loads, k, by if linked[rows[:1]].any() else "numpy")
    # A hot row is everywhere; its home only says who has it first.
    found[everywhere] = everywhere % k
    return found if before is None else _renamed(found, before, items, k)


def similarity(
    items: Items, workers: Workers, of: Int32, *, hot: float = HOT, order: Int32 | None = None
) -> ItemPlacement:
    """The hottest rows on every worker, the others at home. of: homes, [n]. Where memory is short, the coldest rows of
    a home are dropped."""
    return place_at(items, workers, items.by_share if order is None else order, len(hottest(items, hot)), of)


def best_share(held: Bool, requests: Sequence[Int32]) -> float:
    """The share of its candidates that a request finds on the worker which has the most of them, in the mean over the
    requests; 0 where there are none. held: [N, n], which worker holds which row."""
    shares = [float(held[:, rows].sum(1).max()) / len(rows) for rows in requests if len(rows)]
    return float(np.mean(shares)) if shares else 0.0


class Drift:
    """Says when items are to be parted anew: where the share that requests find on one worker has fallen by `FALLEN`
    since the first requests after the last partition, twice as many requests are known as then, or new items came."""

    def __init__(self) -> None:
        self._level: float | None = None
        self._rows = self._requests = 0

    def parted(self, rows: int, requests: int) -> None:
        """So many items were parted, by so many requests."""
        self._level, self._rows, self._requests = None, rows, requests

    def due(self, rows: int, requests: int, share: float | None) -> bool:
        """Whether to part anew. rows, requests: that are known now. share: `best_share` of the requests since the last
        call; None: there was none."""
        if not requests:
            return False
        if rows != self._rows or requests >= 2 * self._requests:
            return True
        if share is None:
            return False
        if self._level is None:  # those that the partition was made of would flatter it
            self._level = share
        return share < self._level - FALLEN


def _heaviest(edges: Any, rows: Any) -> Any:
    """The heaviest edges of each vertex; an edge stays where either end keeps it."""
    order = np.lexsort((-edges.data, rows))
    rank = np.arange(len(rows)) - np.repeat(edges.indptr[:-1], np.diff(edges.indptr))
    kept = order[rank < NEIGHBOURS]
    some = csr_matrix((edges.data[kept], (rows[kept], edges.indices[kept])), shape=edges.shape)
    return some.maximum(some.T).tocsr()


def _renamed(found: Int32, before: Int32, items: Items, k: int) -> Int32:
    """The same parts under the numbers by which the most bytes stay."""
    known = len(before)
    stays: Float64 = np.zeros((k, k))
    np.add.at(stays, (found[:known], before), items.room_bytes[:known].astype(np.float64))
    _, name = linear_sum_assignment(-stays)
    renamed: Int32 = name.astype(np.int32)[found]
    return renamed
