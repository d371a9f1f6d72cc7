# SPDX-License-Identifier: Apache-2.0
"""The catalog's prefix tree as flat arrays (XGR-8), for any depth.

The one idea: semantic ids are sorted, so the children of a node are *consecutive* nodes of the next level. A node is
its index in its level; child `j` of node `i` is node `offsets[i] + j`. No keys are searched and no child pointer is
stored; a beam that carries its node index knows the legal continuations by two loads.

Letters: n items, N_l nodes at depth l (N_0 = 1, the root; N_depth = leaves).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """A sorted prefix tree over semantic ids.

    offsets: per level l, [N_l + 1] int32; node i of depth l has children offsets[l][i] .. offsets[l][i + 1] - 1.
    codes: per level l, [N_{l+1}] int32; the code that leads to each node of depth l + 1.
    paths: [leaves, depth] int32; the node at depth 1..depth on the way to each leaf (the last column is the leaf).
    leaf_of_row: [n] int32; the leaf of each catalog row's semantic id.
    leaf_offsets, leaf_rows: CSR; leaf i names rows leaf_rows[leaf_offsets[i]:leaf_offsets[i + 1]], in catalog order.
    """

    offsets: tuple[Int32, ...]
    codes: tuple[Int32, ...]
    paths: Int32
    leaf_of_row: Int32
    leaf_offsets: Int32
    leaf_rows: Int32

    @property
    def depth(self) -> int:
        return len(self.codes)

    @property
    def n_leaves(self) -> int:
        return len(self.leaf_offsets) - 1

    @property
    def max_degrees(self) -> tuple[int, ...]:
        """For each level, the largest number of children of a node: the static size of gathers on the device."""
        return tuple(int(np.diff(o).max()) for o in self.offsets)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        arrays = (*self.offsets, *self.codes, self.paths, self.leaf_of_row, self.leaf_offsets, self.leaf_rows)
        return sum(array.nbytes for array in arrays)

    def rows_of(self, leaf: int) -> Int32:
        """The catalog rows that share semantic id `leaf`, in catalog order."""
        return self.leaf_rows[self.leaf_offsets[leaf] : self.leaf_offsets[leaf + 1]]

    def rows_of_each(self, leaves: Int32) -> list[list[int]]:
        """`rows_of` each of leaves, [m] int32."""
        starts, ends = self.leaf_offsets[leaves].tolist(), self.leaf_offsets[leaves + 1].tolist()
        rows = self.leaf_rows
        return [rows[start:end].tolist() for start, end in zip(starts, ends, strict=True)]

    @classmethod
    def build(cls, codes: Int32) -> PrefixTree:
        """Build from [n, depth] non-negative codes, n >= 1. O(n log n) time, O(n depth) memory."""
        if codes.ndim != 2 or codes.shape[0] == 0 or codes.shape[1] == 0:
            raise ValueError(f"codes must be [n >= 1, depth >= 1], got {codes.shape}")
        n, depth = codes.shape
        order = np.lexsort(_sort_keys(codes)[::-1])  # stable: rows of one leaf keep catalog order
        # whether a sorted row opens a node: it differs from the row before in levels 0..l
        new = np.zeros(n, bool)
        new[0] = True
        opens = np.zeros(1, np.int64)  # the sorted row that opens each node of the level above
        offsets, level_codes, nodes = [], [], []
        for level in range(depth):
            ranked = codes[order, level]
            new[1:] |= ranked[1:] != ranked[:-1]
            node = np.cumsum(new, dtype=np.int32) - np.int32(1)
            # A node's first child is the node that its first row opens.
            offsets.append(np.append(node[opens], node[-1] + 1).astype(np.int32))
            opens = np.flatnonzero(new)
            level_codes.append(ranked[opens].astype(np.int32, copy=False))
            nodes.append(node)
        leaf_of_row = np.empty(n, np.int32)
        leaf_of_row[order] = nodes[-1]
        return cls(
            offsets=tuple(offsets),
            codes=tuple(level_codes),
            paths=np.stack([node[opens] for node in nodes], axis=1),
            leaf_of_row=leaf_of_row,
            leaf_offsets=np.append(opens, n).astype(np.int32),
            leaf_rows=order.astype(np.int32),
        )


def _sort_keys(codes: Int32) -> list[npt.NDArray[np.int64]]:
    """Pack each row of codes into as few 63-bit keys as possible, in the same order: a sort has a pass for each key."""
    keys: list[npt.NDArray[np.int64]] = []
    room = 0
    for level in range(codes.shape[1]):
        span = int(codes[:, level].max()) + 1
        if room < span:
            keys.append(codes[:, level].astype(np.int64))
            room = (2**63 - 1) // span
        else:
            keys[-1] *= span
            keys[-1] += codes[:, level]
            room //= span
    return keys
