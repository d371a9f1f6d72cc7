# SPDX-License-Identifier: Apache-2.0
"""Nearest training sequences: what those who went the same way took next to it, a baseline that knows order.

Sequence-aware nearest neighbours as in STAN (Garg et al., "Sequence and Time Aware Neighborhood for Session-based
Recommendations", 2019) without its times, which most datasets lack. VMIS-kNN (Kersbergen et al., "Serenade", 2022) is
its like: both weigh a shared item by how recent it is in the history.

    w(i)     = exp(-places of i before the history's end / recency); an item that occurs twice counts where it is last
    sim(s)   = sum of w over the distinct items that training sequence s shares with the history / sqrt(items of s)
    score(j) = sum over the `neighbours` most similar s, over the places of s where j stands, of
               sim(s) * exp(-distance in s to the history's most recent item that s has / spread)

The place of that shared item itself counts nothing. Equal similarities: the earlier sequence; equal scores go by
popularity, then by row.

Letters: n items, b histories, t training sequences.
"""

from __future__ import annotations

import numpy as np
from scipy import sparse

from jgr.data.interactions import Ragged
from jgr.evaluation.baselines import Float64, Int32, Int64, Popularity, top_k_of

NEIGHBOURS = 100
RECENCY = 2.0
SPREAD = 2.0

_SHARED_PER_BATCH = 1 << 22
"""About how many pairs of a history's item and a training sequence are held at once."""


class SequenceKNN:
    """neighbours: >= 1 sequences. recency, spread: > 0 places; see the module."""

    def __init__(
        self,
        sequences: Ragged,
        n_items: int,
        neighbours: int = NEIGHBOURS,
        recency: float = RECENCY,
        spread: float = SPREAD,
    ) -> None:
        self._sequences, self._n = sequences, n_items
        self._neighbours, self._recency, self._spread = neighbours, recency, spread
        rows, owner = sequences.flatten()
        had = sparse.csr_array((np.ones(len(rows)), (rows, owner)), shape=(n_items, len(sequences)))
        had.data[:] = 1  # scipy has added up an item that occurs twice
        sizes = had.sum(axis=0)
        self._had = had @ sparse.diags_array(1 / np.sqrt(np.maximum(sizes, 1)))
        self._by_popularity = np.argsort(-Popularity(sequences, n_items).counts, kind="stable")

    def top_k(self, histories: Ragged, k: int, *, exclude_seen: bool) -> Int32:
        """[b, k] int32 rows, best first; -1 where the catalog has no further item."""
        return top_k_of(histories, k, self._by_popularity, exclude_seen, self._scores)

    def _scores(self, histories: Ragged) -> Float64:
        scores = np.zeros((len(histories), self._n))
        rows, owner = histories.flatten()
        shared = np.bincount(owner, np.diff(self._had.indptr)[rows], minlength=len(histories))
        part = (np.cumsum(shared) // _SHARED_PER_BATCH).astype(np.int64)
        for number in np.unique(part):
            chosen = np.flatnonzero(part == number)
            scores[chosen] = self._scores_of(histories.select(chosen))
        return scores

    def _scores_of(self, histories: Ragged) -> Float64:
        weights = self._weights(histories)
        query, sequence, similarity = self._nearest(sparse.csr_array(weights) @ self._had)
        found = np.zeros(weights.size)
        if len(query):
            places, pair = self._sequences.select(sequence).positions()
            rows = self._sequences.rows[places]
            cells = query[pair] * self._n + rows
            distance = _distances(weights.ravel()[cells], pair)
            near = np.where(distance > 0, similarity[pair] * np.exp(-distance / self._spread), 0.0)
            found += np.bincount(cells, near, minlength=len(found))
        return found.reshape(weights.shape)

    def _weights(self, histories: Ragged) -> Float64:
        """w of every item, [b, n]; 0 for those that a history lacks."""
        rows, owner = histories.flatten()
        ago = np.cumsum(histories.lengths)[owner] - np.arange(len(owner)) - 1
        weights = np.zeros((len(histories), self._n))
        weights[owner, rows] = np.exp(-ago / self._recency)  # the last assignment of a cell stays
        return weights

    def _nearest(self, similar: sparse.csr_array) -> tuple[Int64, Int64, Float64]:
        """(history, sequence, similarity) of each history's most similar sequences."""
        query = np.repeat(np.arange(similar.shape[0]), np.diff(similar.indptr))
        order = np.lexsort((similar.indices, -similar.data, query))
        rank = np.arange(len(order)) - similar.indptr[query]
        kept = order[rank < self._neighbours]
        return query[kept], similar.indices[kept].astype(np.int64), similar.data[kept]


def _distances(weights: Float64, pair: Int64) -> Float64:
    """The distance of each element to its sequence's element of the largest weight, the last of equals.

    weights, pair: [elements], those of a pair side by side; every pair is there.
    """
    begins = np.flatnonzero(np.diff(pair, prepend=-1))
    place = np.arange(len(pair))
    best = np.maximum.reduceat(weights, begins)
    is_best = weights == best[pair]
    anchor = np.maximum.reduceat(np.where(is_best, place, -1), begins)
    distances: Float64 = np.abs(place - anchor[pair]).astype(np.float64)
    return distances
