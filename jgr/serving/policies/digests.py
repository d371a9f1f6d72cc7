# SPDX-License-Identifier: Apache-2.0
"""What each node of a fleet holds, in few bytes: a Bloom filter for each, and those of all nodes side by side.

A node reports its filter every so often, so a router knows what was held some seconds ago, and of some entries it is
told wrongly that they are held: the answer to a request never depends on it, only where it is computed. The filters
stand side by side, a row of bits for each position, so that a hundred keys are looked up at a hundred nodes by a few
operations on arrays; a report costs what changed since the last one.

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

UInt8 = npt.NDArray[np.uint8]
Keys = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]


def keys(names: Iterable[str]) -> Keys:
    """A number for each name, [n] uint64, the same in every process."""
    return np.fromiter(map(crc32, map(str.encode, names)), np.uint64) * _ODD


def positions(of: Keys, bits: int) -> tuple[Places, Places]:
    """The two positions of each key in a filter of 2^bits, [n] each."""
    first = of >> (64 - bits)
    second = (of >> (64 - 2 * bits)) & ((1 << bits) - 1)
    return first.view(np.int64), second.view(np.int64)


def digest(names: Iterable[str], bits: int) -> bytes:
    """The filter that holds these names, of 2^bits bits."""
    held = np.zeros(1 << bits, np.uint8)
    for places in positions(keys(names), bits):
        held[places] = 1
    return np.packbits(held).tobytes()


class Digests:
    """The filters of the nodes in slots 0, 1, ..., each of 2^bits bits. ValueError for `bits` out of bounds."""

    def __init__(self, bits: int) -> None:
        if not MIN_BITS <= bits <= MAX_BITS:
            raise ValueError(f"bits: must be from {MIN_BITS} to {MAX_BITS}, got {bits}")
        self._bits = bits
        self._empty: UInt8 = np.zeros((1 << bits) // 8, np.uint8)
        self._filters: list[UInt8] = []  # by slot
        self._table = np.zeros((1 << bits, 0), np.uint8)  # [position, slot / 8]

    def __len__(self) -> int:
        return len(self._filters)

    def parse(self, filter: bytes) -> UInt8:
        """The filter of a report; `b""` holds nothing. ValueError for one of another size."""
        if not filter:
            return self._empty
        if len(filter) != len(self._empty):
            raise ValueError(f"a digest must have {len(self._empty)} bytes, got {len(filter)}")
        return np.frombuffer(filter, np.uint8)

    def add(self) -> None:
        """There is one more slot; its node holds nothing."""
        if len(self) == 8 * self._table.shape[1]:
            self._table = np.pad(self._table, ((0, 0), (0, 1)))
        self._filters.append(self._empty)

    def replace(self, slot: int, filter: UInt8) -> None:
        """The node in `slot` holds this now."""
        byte, bit = divmod(slot, 8)
        flipped = np.flatnonzero(np.unpackbits(self._filters[slot] ^ filter))
        self._table[flipped, byte] ^= np.uint8(0x80 >> bit)
        self._filters[slot] = filter

    def remove(self, slot: int) -> None:
        """The node in `slot` has left; that of the last slot stands there from now on."""
        self.replace(slot, self._filters[-1])
        self.replace(len(self) - 1, self._empty)
        del self._filters[-1]

    def count(self, of: Keys) -> Float64:
        """How many of the n keys each node holds, as far as is known, [slots] float64."""
        return self.count_at(*positions(of, self._bits))

    def count_at(self, first: Places, second: Places) -> Float64:
        """See count: of the keys with these `positions`, [n] each."""
        packed = self._table.take(first, axis=0)
        packed &= self._table.take(second, axis=0)
        found = np.unpackbits(packed).reshape(len(packed), 8 * packed.shape[1])
        # Bytes are added faster than larger integers.
        held: Float64 = np.add.reduce(found, axis=0, dtype=np.uint8 if len(packed) < 256 else np.uint32)
        return held[: len(self._filters)].astype(np.float64)

    def holds_at(self, first: Places, second: Places) -> Float64:
        """Which nodes hold one key, the first one of those with these positions, [slots] float64, 0 or 1."""
        packed = self._table[first.item(0)] & self._table[second.item(0)]
        return np.unpackbits(packed, count=len(self._filters)).astype(np.float64)

    def check(self) -> None:
        """Audit: the table has the bits of the filters, and no other. AssertionError where it has not."""
        held = np.zeros((8 * self._table.shape[1], len(self._table)), np.uint8)
        for slot, filter in enumerate(self._filters):
            held[slot] = np.unpackbits(filter)
        assert np.array_equal(np.packbits(held.T, axis=1), self._table), (
            "the table is not that of the filters"
        )
