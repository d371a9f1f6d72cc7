# SPDX-License-Identifier: Apache-2.0
"""The nearest prototype of a token: locality-sensitive hashing by faiss (RCLLM-3), and brute force to compare with.

A vector's signature is the signs of random projections. A table has a bucket for each value of some of its bits; a
query looks into its own bucket of every table and those that differ in up to `flips` bits, and what is nearest there by
its whole signature is compared by the cosine itself.

The spec's four tables of 18 bits find less than half of the neighbours at a cosine of .95. So the settings are chosen:
`tuned` takes the first of LADDER whose recall on held-out tokens that need a search is high enough, and a library
remembers them.
"""

from __future__ import annotations

import faiss
import numpy as np
import numpy.typing as npt

from jgr.library.prototypes import Settings

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]

COMPARED = 16
"""What a search compares by the cosine: the nearest by signature."""
LEAST_RECALL = 0.95
_CHUNK = 1024
_SAME = 1e-5
"""Cosines that differ by less are equal."""


LADDER = tuple(
    Settings(*each) for each in ((4, 18, 0), (4, 18, 1), (8, 16, 1), (12, 16, 1), (8, 16, 2), (16, 16, 2))
)
"""From the cheapest to the dearest search; the first are the spec's."""


def search_alone() -> None:
    """Have the searches of this thread take no other threads, which the model computes on."""
    faiss.omp_set_num_threads(1)


class LshIndex:
    """vectors: [n, D] float32 of length 1. Searches from several threads at once are fine."""

    def __init__(self, vectors: Float32, settings: Settings) -> None:
        self._vectors = vectors
        width = -(-settings.tables * settings.bits // 8) * 8
        drawn = np.random.default_rng(0).normal(size=(width, vectors.shape[1]))
        self._projections: Float32 = drawn.astype(np.float32).T
        self._index = faiss.IndexBinaryMultiHash(width, settings.tables, settings.bits)
        self._index.nflip = settings.flips
        for at in range(0, len(vectors), _CHUNK):
            self._index.add(self._signatures(vectors[at : at + _CHUNK]))

    def neighbours(self, queries: Float32, most: int) -> tuple[Int64, Float32]:
        """The nearest `most` vectors by signature for queries [m, D]: their numbers [m, most], and their cosines; -1
        and -1 where there are fewer."""
        numbers = np.full((len(queries), most), -1, np.int64)
        cosines = np.full((len(queries), most), -1, np.float32)
        for at in range(0, len(queries), _CHUNK) if len(self._vectors) else ():
            some = queries[at : at + _CHUNK]
            _, found = self._index.search(self._signatures(some), most)
            numbers[at : at + _CHUNK] = found
            near = np.einsum("md,mkd->mk", some, self._vectors[found], optimize=False)
            cosines[at : at + _CHUNK] = np.where(found >= 0, near, -1)
        return numbers, cosines

    def nearest(self, queries: Float32) -> tuple[Int64, Float32]:
        """The number of the nearest vector for each query, [m], and its cosine; -1 and -1 where none is found."""
        numbers, cosines = self.neighbours(queries, COMPARED)
        best = cosines.argmax(axis=1)[:, None]
        return np.take_along_axis(numbers, best, 1)[:, 0], np.take_along_axis(cosines, best, 1)[:, 0]

    def _signatures(self, vectors: Float32) -> npt.NDArray[np.uint8]:
        return np.packbits(vectors @ self._projections > 0, axis=1, bitorder="little")


def nearest_of_all(vectors: Float32, queries: Float32) -> tuple[Int64, Float32]:
    """The same as `LshIndex.nearest` by comparing with every vector."""
    numbers = np.full(len(queries), -1, np.int64)
    cosines = np.full(len(queries), -1, np.float32)
    for at in range(0, len(queries), _CHUNK) if len(vectors) else ():
        near = queries[at : at + _CHUNK] @ vectors.T
        numbers[at : at + _CHUNK] = near.argmax(axis=1)
        cosines[at : at + _CHUNK] = near.max(axis=1)
    return numbers, cosines


def recall(
    found: Float32, wanted: Float32, least: float, weights: npt.NDArray[np.int64] | None = None
) -> float:
    """The share of the queries with a vector of at least this cosine for which a search found one as near.

    found, wanted: cosines [m] by the search and by brute force. weights: [m], how often a query counts; None: once.
    1 where there is no such query.
    """
    counts = np.ones(len(wanted), np.int64) if weights is None else weights
    asked = wanted >= least
    total = int(counts[asked].sum())
    return float(counts[asked & (found >= wanted - _SAME)].sum() / total) if total else 1.0


def tuned(
    vectors: Float32, queries: Float32, least: float, weights: npt.NDArray[np.int64] | None = None
) -> tuple[Settings, float]:
    """The cheapest settings with which a search finds enough of what brute force finds, and their recall; where none
    do, those that find the most. Where brute force finds nothing that could be measured: the dearest, and 1."""
    wanted = nearest_of_all(vectors, queries)[1]
    if not (wanted >= least).any():
        return LADDER[-1], 1.0
    best = LADDER[0], -1.0
    for settings in LADDER:
        share = recall(LshIndex(vectors, settings).nearest(queries)[1], wanted, least, weights)
        if share > best[1]:
            best = settings, share
        if share >= LEAST_RECALL:
            break
    return best
