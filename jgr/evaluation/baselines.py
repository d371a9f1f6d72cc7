# SPDX-License-Identifier: Apache-2.0
"""Popularity, item-kNN and sequential rules: what a model has to beat, with jgr.evaluation.sequence_knn.

All are fitted on training sequences only and rank the whole catalog for a batch of histories. `exclude_seen`
leaves out the items of the history; which setting is right depends on whether people of this dataset buy
things twice, so it has no default and belongs beside the number.

Letters: n items, b histories, k places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
from scipy import sparse

from jgr.data.interactions import Ragged

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]

RULES_WINDOW = 5
RULES_DECAY = 1.0

_SCORES_PER_BATCH = 1 << 22
_PAIRS_PER_BATCH = 1 << 22


class Popularity:
    """Every user gets the items with the most training interactions; equal counts in row order.

    counts: [n] int64.
    """

    def __init__(self, sequences: Ragged, n_items: int) -> None:
        self.counts = np.bincount(sequences.flatten()[0], minlength=n_items)

    def top_k(self, histories: Ragged, k: int, *, exclude_seen: bool) -> Int32:
        """[b, k] int32 rows, best first; -1 where the catalog has no further item."""
        scores = self.counts.astype(np.float64)
        everyone = np.arange(len(self.counts))
        return top_k_of(histories, k, everyone, exclude_seen, lambda batch: np.tile(scores, (len(batch), 1)))


class ItemKNN:
    """Items that the same users took, whatever the order (cosine of co-occurrence).

    similarity(i, j) = users of both / sqrt(users of i * users of j), 0 for i = j; an item's score is the sum
    of its similarities to the distinct items of the history. Equal scores, zero among them, go by popularity,
    then by row.
    """

    def __init__(self, sequences: Ragged, n_items: int) -> None:
        users_of, self._offsets, self._neighbours, both = _co_occurrence(sequences, n_items)
        owner = np.repeat(np.arange(n_items), np.diff(self._offsets))
        self._similarity = both / np.sqrt(users_of[owner] * users_of[self._neighbours])
        self._by_popularity = np.argsort(-Popularity(sequences, n_items).counts, kind="stable")

    def similarity(self, row: int) -> tuple[Int64, Float64]:
        """The neighbours of an item, ascending, and their similarities; those left out have similarity 0."""
        window = slice(self._offsets[row], self._offsets[row + 1])
        return self._neighbours[window], self._similarity[window]

    def top_k(self, histories: Ragged, k: int, *, exclude_seen: bool) -> Int32:
        """[b, k] int32 rows, best first; -1 where the catalog has no further item."""
        return top_k_of(histories, k, self._by_popularity, exclude_seen, self._scores)

    def _scores(self, histories: Ragged) -> Float64:
        n = len(self._by_popularity)
        query, item = _distinct(histories, n)
        begin, end = self._offsets[item], self._offsets[item + 1]
        found = np.zeros(len(histories) * n)
        for entries in _bounded(end - begin):
            place, owner = Ragged(np.zeros(0, np.int32), begin[entries], end[entries]).positions()
            cells = query[entries][owner] * n + self._neighbours[place]
            found += np.bincount(cells, self._similarity[place], minlength=len(found))
        return found.reshape(len(histories), n).astype(np.float64, copy=False)


class SequentialRules:
    """Items that came soon after the history's last ones, the nearer the more.

    rule(i, j) = sum of distance ** -decay over all places of training sequences where j stands up to `window` places
    after i; an item's score = sum of distance ** -decay * rule(i, item) over the last `window` items i of the history,
    the last at distance 1. An item may follow itself: people buy things twice. Equal scores go by popularity, then by
    row.

    The rules are those of Kamehkhosh, Jannach and Ludewig, "A Comparison of Frequent Pattern Techniques and a Deep
    Learning Method for Session-Based Recommendation" (2017), which look at the last item alone.
    """

    def __init__(
        self, sequences: Ragged, n_items: int, window: int = RULES_WINDOW, decay: float = RULES_DECAY
    ) -> None:
        """window: >= 1 items. decay: >= 0; 0 counts all within the window alike."""
        self._weights = np.arange(1, window + 1) ** -float(decay)
        rows, owner = sequences.flatten()
        rules = sparse.csr_array((n_items, n_items))
        for distance, weight in enumerate(self._weights, 1):
            same = owner[distance:] == owner[:-distance]
            pairs = rows[:-distance][same], rows[distance:][same]
            rules += sparse.csr_array((np.full(len(pairs[0]), weight), pairs), rules.shape)
        self._rules = rules
        self._by_popularity = np.argsort(-Popularity(sequences, n_items).counts, kind="stable")

    def top_k(self, histories: Ragged, k: int, *, exclude_seen: bool) -> Int32:
        """[b, k] int32 rows, best first; -1 where the catalog has no further item."""
        return top_k_of(histories, k, self._by_popularity, exclude_seen, self._scores)

    def _scores(self, histories: Ragged) -> Float64:
        rows, owner = histories.flatten()
        place = np.cumsum(histories.lengths)[owner] - np.arange(len(owner)) - 1  # 0 for the last
        last = place < len(self._weights)
        cells = owner[last], rows[last]
        shape = len(histories), self._rules.shape[0]
        found: Float64 = (
            sparse.csr_array((self._weights[place[last]], cells), shape) @ self._rules
        ).toarray()
        return found


def _distinct(sequences: Ragged, n_items: int) -> tuple[Int64, Int64]:
    """(sequence, item) of each distinct pair, ascending."""
    rows, owner = sequences.flatten()
    sequence, item = np.divmod(np.unique(owner * n_items + rows), n_items)
    return sequence, item


def _co_occurrence(sequences: Ragged, n_items: int) -> tuple[Int64, Int64, Int64, Int64]:
    """Users of each item [n]; then a sparse matrix by rows: offsets [n + 1], columns, users of both items."""
    user, item = _distinct(sequences, n_items)
    had = sparse.csr_array((np.ones(len(user), np.int64), (user, item)), shape=(len(sequences), n_items))
    both = (had.T @ had).tocsr()
    users_of = both.diagonal()
    both.setdiag(0)
    both.eliminate_zeros()
    both.sort_indices()
    return users_of, both.indptr.astype(np.int64), both.indices.astype(np.int64), both.data


def _bounded(pairs: Int64) -> Iterator[slice]:
    """Slices over entries that cost so many pairs each: at most _PAIRS_PER_BATCH together, or a single entry."""
    ends = np.cumsum(pairs)
    at = 0
    while at < len(pairs):
        done = ends[at - 1] if at else 0
        upto = max(at + 1, int(np.searchsorted(ends, done + _PAIRS_PER_BATCH, side="right")))
        yield slice(at, upto)
        at = upto


def top_k_of(
    histories: Ragged,
    k: int,
    tie_order: Int64,
    exclude_seen: bool,
    scores_of: Callable[[Ragged], Float64],
) -> Int32:
    """The k best rows of each history; equal scores in `tie_order`, [n] rows."""
    n = len(tie_order)
    result = np.full((len(histories), k), -1, np.int32)
    step = max(1, _SCORES_PER_BATCH // n)
    for at in range(0, len(histories), step):
        batch = histories.select(slice(at, at + step))
        scores = scores_of(batch)
        if exclude_seen:
            rows, owner = batch.flatten()
            scores[owner, rows] = -np.inf
        scores = scores[:, tie_order]
        best = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        found = np.where(np.isfinite(np.take_along_axis(scores, best, axis=1)), tie_order[best], -1)
        result[at : at + step, : best.shape[1]] = found
    return result
