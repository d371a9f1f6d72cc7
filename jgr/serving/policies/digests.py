# SPDX-License-Identifier: Apache-2.0
"""What each node of a fleet holds, in few bytes: a Bloom filter for each, and those of all nodes side by side.

A node reports its filter every so often, so a router knows what was held some seconds ago, and of some entries it is
told wrongly that they are held: the answer to a request never depends on it, only where it is computed. The filters
stand side by side, a row of bits for each position, so that a hundred keys are looked up at a hundred nodes by a few
operations on arrays.

An entry has two positions. All nodes of a fleet must use filters of the same size.
"""

from __future__ import annotations

from collections.abc import Iterable
from zlib import crc32

import numpy as np
import numpy.typing as npt

MIN_BITS, MAX_BITS = 10, 20
"""Bounds of the size of a filter, as powers of two: 128 bytes to 128 KiB."""
_ODD = np.uint64(0x9E3779B97F4A7C15)

Bool = npt.NDArray[np.bool_]
Keys = npt.NDArray[np.uint64]


def keys(names: Iterable[str]) -> Keys:
    """A number for each name, [n] uint64, the same in every process."""
    return np.fromiter((crc32(name.encode()) for name in names), np.uint64) * _ODD


def positions(of: Keys, bits: int) -> npt.NDArray[np.intp]:
    """The two positions of each key in a filter of 2^bits, [2, n]."""
    first = of >> np.uint64(64 - bits)
    second = (of >> np.uint64(64 - 2 * bits)) & np.uint64((1 << bits) - 1)
    return np.stack([first, second]).astype(np.intp)


def digest(names: Iterable[str], bits: int) -> bytes:
    """The filter that holds these names, of 2^bits bits."""
    held = np.zeros(1 << bits, np.uint8)
    held[positions(keys(names), bits)] = 1
    return np.packbits(held).tobytes()


class Digests:
    """The filters of the nodes in slots 0, 1, ..., each of 2^bits bits. A slot without a filter holds nothing."""

    def __init__(self, bits: int) -> None:
        if not MIN_BITS <= bits <= MAX_BITS:
            raise ValueError(f"bits: must be from {MIN_BITS} to {MAX_BITS}, got {bits}")
        self._bits = bits
        self._table = np.zeros((1 << bits, 1), np.uint8)  # [position, slot / 8]

    def replace(self, slot: int, filter: bytes) -> None:
        """The node in `slot` holds this now. ValueError for a filter of another size."""
        if len(filter) != len(self._table) // 8:
            raise ValueError(f"a digest must have {len(self._table) // 8} bytes, got {len(filter)}")
        byte, bit = divmod(slot, 8)
        if byte >= self._table.shape[1]:
            self._table = np.pad(self._table, ((0, 0), (0, byte + 1 - self._table.shape[1])))
        held = np.unpackbits(np.frombuffer(filter, np.uint8))
        mask = np.uint8(0x80 >> bit)
        self._table[:, byte] = (self._table[:, byte] & ~mask) | held * mask

    def clear(self, slot: int) -> None:
        """Nobody is in `slot` any more."""
        if slot < 8 * self._table.shape[1]:
            self.replace(slot, bytes(len(self._table) // 8))

    def held(self, of: Keys, slots: int) -> Bool:
        """Which of the first `slots` nodes hold which of the n keys, as far as is known, [n, slots]."""
        first, second = positions(of, self._bits)
        packed = self._table[first] & self._table[second]
        found = np.unpackbits(packed, axis=1)
        if found.shape[1] < slots:
            found = np.pad(found, ((0, 0), (0, slots - found.shape[1])))
        return found[:, :slots].view(np.bool_)
