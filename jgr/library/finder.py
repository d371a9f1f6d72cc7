# SPDX-License-Identifier: Apache-2.0
"""The nearest prototypes of a library for the tokens of reviews."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from jgr.library.embeddings import TokenEmbeddings, keys_of
from jgr.library.index import LshIndex, search_alone
from jgr.library.prototypes import Prototypes, Settings

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]


class Finder:
    """Called by several threads at once."""

    def __init__(self, prototypes: Prototypes, embeddings: TokenEmbeddings, settings: Settings) -> None:
        self._embeddings = embeddings
        self._order = np.argsort(prototypes.keys, kind="stable")
        self._sorted = prototypes.keys[self._order]
        self._index = LshIndex(embeddings.of(prototypes.keys), settings)

    def find(self, review: Int32) -> tuple[Int64, Float32]:
        """For each token of a review [t] int32 the number of its nearest prototype, and their cosine; -1 and -1 where
        the search finds none.

        A prototype of the same key is nearest without a search.
        """
        keys = keys_of(review)
        at = np.minimum(np.searchsorted(self._sorted, keys), len(self._sorted) - 1)
        same = self._sorted[at] == keys
        numbers, cosines = self._order[at], np.ones(len(keys), np.float32)
        others = np.flatnonzero(~same)
        if len(others):
            search_alone()
            unique, back = np.unique(keys[others], return_inverse=True)
            found, near = self._index.nearest(self._embeddings.of(unique))
            numbers[others], cosines[others] = found[back], near[back]
        return numbers, cosines
