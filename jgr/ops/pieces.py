# SPDX-License-Identifier: Apache-2.0
"""A row of a kernel in pieces: the sizes of its blocks must be powers of two, so a head of 96 is 64 + 32."""

from __future__ import annotations

Pieces = tuple[tuple[int, int], ...]


def pieces_of(width: int, most: int = 1 << 20) -> Pieces:
    """Cut `width` numbers into (start, size) pieces, the largest first, each of a power of two up to `most`."""
    pieces, start = [], 0
    while start < width:
        size = min(most, 1 << (width - start).bit_length() - 1)
        pieces.append((start, size))
        start += size
    return tuple(pieces)
