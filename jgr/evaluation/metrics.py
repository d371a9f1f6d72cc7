# SPDX-License-Identifier: Apache-2.0
"""Ranking metrics: recall, hit rate, NDCG and MRR at k.

The one idea: every metric is a function of *hits*, the [n, m] table that says whether place j of query i's
ranking is a relevant item, and of the number of relevant items per query. Whatever produced the ranking, it
is turned into that table once; a metric then is one vectorised line that gives a value per query, so that
paired comparisons stay possible.

Conventions, the same as ranx, pytrec_eval and RecBole:
- Recall divides by the number of relevant items, not by min(k, that number); with one it is the hit rate.
- NDCG has gain 1 / log2(place + 1), places from 1; the ideal ranking has min(k, relevant) ones on top.
- A ranking shorter than k misses in its empty places; divisors stay.
- A query without any relevant item scores 0: it counts in `mean_all` and is left out of `mean_with_truth`.
- Equal scores keep the candidates' order (stable, as `jax.lax.top_k`).

Letters: n queries, m places, k cut-off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Hits:
    """What a metric needs to know of n rankings.

    table: [n, m] bool, places best first. n_relevant: [n] int64, relevant items per query, ranked or not.
    """

    table: npt.NDArray[np.bool_]
    n_relevant: npt.NDArray[np.int64]

    @classmethod
    def of_targets(cls, ranked: npt.NDArray[np.int32], targets: npt.NDArray[np.int32]) -> Hits:
        """One relevant item a query: targets, [n] rows. ranked: [n, m] rows, best first, then -1."""
        if ranked.ndim != 2 or targets.shape != ranked.shape[:1]:
            raise ValueError(f"ranked must be [n, m] and targets [n], got {ranked.shape} and {targets.shape}")
        if (targets < 0).any():
            raise ValueError(f"query {int(np.argmax(targets < 0))}: the target is a negative row")
        table = ranked == targets[:, None]
        if (table.sum(axis=1) > 1).any():
            raise ValueError(f"query {int(np.argmax(table.sum(axis=1) > 1))}: an item is ranked twice")
        return cls(table, np.ones(len(targets), np.int64))


def rank_candidates(scores: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Candidate indices by falling score, [..., c]; equal scores keep their order. ValueError on NaN."""
    values = np.asarray(scores, np.float64)
    if np.isnan(values).any():
        raise ValueError("scores hold NaN")
    order: npt.NDArray[np.int64] = np.argsort(-values, axis=-1, kind="stable")
    return order


def recall(hits: Hits, k: int) -> Float64:
    """The share of the relevant items that stand in the first k places, [n]."""
    found: Float64 = hits.table[:, :k].sum(axis=1) / np.maximum(hits.n_relevant, 1)
    return found


def hr(hits: Hits, k: int) -> Float64:
    """The hit rate, [n]: 1 if a relevant item stands in the first k places, else 0."""
    hit: Float64 = hits.table[:, :k].max(axis=1, initial=False).astype(np.float64)
    return hit


def mrr(hits: Hits, k: int) -> Float64:
    """The reciprocal rank, [n]: 1 / place of the first hit if it is within k, else 0."""
    top = hits.table[:, :k]
    best: Float64 = np.where(top, 1.0 / np.arange(1, top.shape[1] + 1), 0.0).max(axis=1, initial=0.0)
    return best


def ndcg(hits: Hits, k: int) -> Float64:
    """The discounted gain of the first k places over that of the ideal ranking, [n]."""
    top = hits.table[:, :k]
    places = min(k, max(top.shape[1], int(hits.n_relevant.max(initial=0))))
    gain = 1.0 / np.log2(np.arange(2, places + 2))
    ideal = np.append(0.0, np.cumsum(gain))[np.minimum(hits.n_relevant, places)]
    found: Float64 = (top * gain[: top.shape[1]]).sum(axis=1) / np.where(ideal > 0, ideal, 1.0)
    return found


METRICS: dict[str, Callable[[Hits, int], Float64]] = {"recall": recall, "hr": hr, "ndcg": ndcg, "mrr": mrr}


def per_query(hits: Hits, names: Iterable[str]) -> dict[str, Float64]:
    """Values by name ("hr@10", "ndcg@5", ...), each [n]. ValueError names a metric that does not exist."""
    values: dict[str, Float64] = {}
    for name in names:
        metric, _, k = name.partition("@")
        if metric not in METRICS or not k.isdecimal() or int(k) < 1:
            raise ValueError(
                f"unknown metric {name!r}: expected one of {', '.join(METRICS)}, then @ and k >= 1"
            )
        values[name] = METRICS[metric](hits, int(k))
    return values


def mean_all(hits: Hits, names: Iterable[str]) -> dict[str, float]:
    """Means over all n >= 1 queries."""
    return {name: float(values.mean()) for name, values in per_query(hits, names).items()}


def mean_with_truth(hits: Hits, names: Iterable[str]) -> dict[str, float]:
    """Means over the queries that have a relevant item; at least one must."""
    known = hits.n_relevant > 0
    return {name: float(values[known].mean()) for name, values in per_query(hits, names).items()}
