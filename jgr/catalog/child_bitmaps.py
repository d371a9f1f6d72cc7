# SPDX-License-Identifier: Apache-2.0
"""Bitmaps of the children of a prefix tree's widest nodes, so that a beam step costs the same however many they have.

The one idea: if a node's children are at least 1/32 of its level's vocabulary, a bitmap of their codes takes no more
memory than a list. So these nodes, and only these, are stored a second time, which at most doubles the tree. A beam
step reads one bitmap row for such a node; the other nodes have few children, whose codes it lists.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Uint32 = npt.NDArray[np.uint32]

WORD = 32
MIN_WIDE = 32
_CHUNK = 1 << 26  # words of 8 bytes that are worked on at a time


def bitmap_words(vocabulary: int) -> int:
    return -(-vocabulary // WORD)


def wide_children(offsets: Int32, codes: Int32, vocabulary: int) -> tuple[Int32, Uint32]:
    """The nodes of one level with at least max(32, vocabulary / 32) children, and their children's codes.

    offsets: [N + 1]; codes: [C], below `vocabulary`. Returns nodes [n], ascending, and bitmaps [n, vocabulary / 32,
    rounded up], where code c is bit c % 32 of word c // 32. If there is no wide node: one entry that is no node.
    """
    nodes = np.flatnonzero(np.diff(offsets) >= max(MIN_WIDE, vocabulary // WORD)).astype(np.int32)
    words = bitmap_words(vocabulary)
    if not len(nodes):
        return np.array([np.iinfo(np.int32).max], np.int32), np.zeros((1, words), np.uint32)
    bitmaps = np.empty((len(nodes), words), np.uint32)
    step = max(1, _CHUNK // words)
    for at in range(0, len(nodes), step):
        first, last = offsets[nodes[at : at + step]], offsets[nodes[at : at + step] + 1]
        degrees = last - first
        row = np.repeat(np.arange(len(first)), degrees)
        child = np.arange(degrees.sum()) - np.repeat(np.cumsum(degrees) - degrees, degrees)
        code = codes[child + np.repeat(first, degrees)].astype(np.int64)
        # A node's codes are distinct: the sum of their bits is their union, and exact in float64.
        bits = np.bincount(
            row * words + code // WORD,
            weights=(1 << code % WORD).astype(np.float64),
            minlength=len(first) * words,
        )
        bitmaps[at : at + step] = bits.astype(np.uint32).reshape(len(first), words)
    return nodes, bitmaps
