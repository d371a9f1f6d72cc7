# SPDX-License-Identifier: Apache-2.0
"""Fusing rankings by reciprocal ranks (Cormack, Clarke and Buettcher, "Reciprocal Rank Fusion outperforms Condorcet and
individual Rank Learning Methods", 2009): an item's score is the sum of 1 / (CONSTANT + its place) over the rankings
that have it. It needs places alone, so a model's scores and counts can be fused as they are.

Letters: n examples, m places of a ranking, k places of the result.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]

CONSTANT = 60


def reciprocal_rank_fusion(rankings: Sequence[Int32], k: int) -> Int32:
    """[n, k] int32 rows, best first, -1 where no ranking has a further one.

    rankings: [n, m] each, m may differ; -1 for none, and no row twice in a line. Equal scores: the item that an earlier
    ranking has, and there the better place.
    """
    rows = np.concatenate(rankings, axis=1).astype(np.int64)
    places = np.concatenate([np.arange(ranking.shape[1]) for ranking in rankings])
    line, column = np.nonzero(rows >= 0)
    found = rows[line, column]
    base = int(found.max(initial=0)) + 1
    cells, first, of = np.unique(line * base + found, return_index=True, return_inverse=True)
    scores = np.bincount(of, 1 / (CONSTANT + 1 + places[column]), minlength=len(cells))
    lines, items = np.divmod(cells, base)
    order = np.lexsort((first, -scores, lines))
    lines, items = lines[order], items[order]
    rank = np.arange(len(lines)) - np.searchsorted(lines, lines)
    fused = np.full((len(rows), k), -1, np.int32)
    kept = rank < k
    fused[lines[kept], rank[kept]] = items[kept]
    return fused
