# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a corpus of reviews are kept as prototypes (RCLLM-3), and how much of other reviews they cover."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jgr.library.embeddings import TokenEmbeddings, keys_of
from jgr.library.index import LADDER, LshIndex
from jgr.library.prototypes import Prototypes

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]

_NEIGHBOURS = 32
_CHUNK = 512


def cluster(reviews: Sequence[Int32], embeddings: TokenEmbeddings, least: float, most: int) -> Prototypes:
    """The prototypes of the at most `most` largest clusters of a corpus.

    Greedy leaders, the most frequent keys first: a leader takes those of its neighbours that have none yet and are
    within the cosine `least`. A cluster's representative is the key nearest to its centroid, where it first occurs.
    """
    keys = np.concatenate([keys_of(review) for review in reviews]) if len(reviews) else np.zeros(0, np.int64)
    unique, first, counts = np.unique(keys, return_index=True, return_counts=True)
    if not len(unique):
        return Prototypes(*(np.zeros(0, np.int64) for _ in Prototypes._fields))
    vectors = embeddings.of(unique)
    leader = _leaders(vectors, counts, least)
    chosen = _representatives(vectors, counts, leader)
    members = np.bincount(leader, counts, minlength=len(unique)).astype(np.int64)[leader[chosen]]
    chosen, members = (x[np.lexsort((first[chosen], -members))[:most]] for x in (chosen, members))
    order = np.argsort(first[chosen], kind="stable")
    at = first[chosen][order]
    ends = np.cumsum([len(review) for review in reviews])
    review = np.searchsorted(ends, at, side="right")
    starts = np.concatenate([[0], ends[:-1]])
    return Prototypes(unique[chosen][order], members[order], review.astype(np.int64), at - starts[review])


def _leaders(vectors: Float32, counts: Int64, least: float) -> Int64:
    """The number of each vector's leader, [n]."""
    numbers, cosines = LshIndex(vectors, LADDER[2]).neighbours(vectors, min(_NEIGHBOURS, len(vectors)))
    leader = np.full(len(vectors), -1, np.int64)
    for at in np.argsort(-counts, kind="stable").tolist():
        if leader[at] < 0:
            leader[at] = at
            near = numbers[at][cosines[at] >= least]
            leader[near[leader[near] < 0]] = at
    return leader


def _representatives(vectors: Float32, counts: Int64, leader: Int64) -> Int64:
    """The number of the vector nearest to the centroid, of each cluster."""
    centroids = np.zeros_like(vectors)
    np.add.at(centroids, leader, vectors * counts[:, None].astype(np.float32))
    near = np.einsum(
        "nd,nd->n", vectors, centroids[leader]
    )  # a centroid's length is the same for all of its members
    order = np.lexsort((np.arange(len(near)), -near, leader))
    chosen: Int64 = order[np.concatenate([[True], leader[order][1:] != leader[order][:-1]])]
    return chosen


class Cover(NamedTuple):
    """What the first `size` prototypes cover: the shares of tokens with one at a cosine of at least .99 and .9."""

    size: int
    at_99: float
    at_90: float


def coverage(
    prototypes: Prototypes, embeddings: TokenEmbeddings, reviews: Sequence[Int32], sizes: Sequence[int]
) -> list[Cover]:
    """What pools of these sizes, each of the largest clusters, cover of the tokens of other reviews; empty
    where these have none. By brute force."""
    keys = np.concatenate([keys_of(review) for review in reviews]) if len(reviews) else np.zeros(0, np.int64)
    if not len(keys):
        return []
    unique, counts = np.unique(keys, return_counts=True)
    queries, vectors = embeddings.of(unique), embeddings.of(prototypes.keys[prototypes.largest()])
    best = np.full(len(unique), -1, np.float32)
    total, done, told = int(counts.sum()), 0, []
    for size in sorted(sizes):
        for at in range(done, min(size, len(vectors)), _CHUNK):
            some = vectors[at : min(at + _CHUNK, size)]
            best = np.maximum(best, (queries @ some.T).max(axis=1, initial=-1))
        done = min(size, len(vectors))
        shares = (float(counts[best >= least - 1e-5].sum()) / total for least in (0.99, 0.9))
        told.append(Cover(size, *shares))
    return told
