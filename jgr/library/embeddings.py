# SPDX-License-Identifier: Apache-2.0
"""Position-aware embeddings of tokens (RCLLM-2): what it means that two tokens of reviews are alike.

e(t, p) is the model's own embedding of token t, rotated as rope would rotate it at position p, of length 1. Positions
count from the begin of the review, and are taken at the begin of their bucket of 32; so all that e depends on is a key:
the token and the number of the bucket. The rotation is that of SemShareKV, which the paper leaves open.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]

BUCKET = 32
"""Positions that count as one."""
_BUCKET_BITS = 20


def keys_of(tokens: Int32) -> Int64:
    """The keys of a review's tokens, [t] int32 -> [t] int64."""
    return tokens.astype(np.int64) << _BUCKET_BITS | np.arange(len(tokens)) // BUCKET


class TokenEmbeddings:
    """table: [vocabulary, D] with D even, the model's embeddings, of any float dtype. theta: of its rope."""

    def __init__(self, table: npt.NDArray[np.generic], theta: float) -> None:
        half = table.shape[1] // 2
        self._table, self._frequencies = table, theta ** (-np.arange(half) / half)

    def of(self, keys: Int64) -> Float32:
        """The embeddings of keys [n], each of length 1: [n, D] float32; 0 for a token whose embedding is 0."""
        rows: Float32 = np.asarray(self._table[keys >> _BUCKET_BITS]).astype(np.float32)
        angles = ((keys & (1 << _BUCKET_BITS) - 1) * BUCKET)[:, None] * self._frequencies
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        a, b = np.split(rows, 2, axis=1)
        found = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=1)
        length = np.linalg.norm(found, axis=1, keepdims=True)
        unit: Float32 = (found / np.where(length > 0, length, 1)).astype(np.float32)
        return unit
