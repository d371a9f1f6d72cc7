# SPDX-License-Identifier: Apache-2.0
"""What a library says of its prototypes and of how the nearest is found, without what finds it, which needs faiss."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct

Int64 = npt.NDArray[np.int64]


class Prototypes(NamedTuple):
    """Tokens of a corpus that stand for their clusters, [n] each, in the order of the corpus.

    keys: see embeddings. members: how many tokens of the corpus each one's cluster has. reviews, places: where it
    stands: the number of the review, and of the token in it.
    """

    keys: Int64
    members: Int64
    reviews: Int64
    places: Int64

    def largest(self) -> Int64:
        """Their numbers, the largest clusters first, [n]."""
        return np.lexsort((np.arange(len(self.keys)), -self.members))


class Settings(Struct, frozen=True):
    """tables: how often a vector is hashed. bits: of each hash. flips: bits in which a bucket that is looked into may
    differ."""

    tables: int
    bits: int
    flips: int
