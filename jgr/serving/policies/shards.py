# SPDX-License-Identifier: Apache-2.0
"""Shards of embedding rows, as a fleet's router knows them (HLEM-13, HLEM-14).

A shard is the items whose ids have one hash: every process finds it without the catalog. A user's profile is the shards
that the history reads most; a node holds a shard where half of its rows in use are on the device. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from zlib import crc32

import msgspec
import numpy as np
import numpy.typing as npt

SHARDS = 4096
PROFILE = 16
"""So many shards are a user's profile."""
HELD = 0.5
"""The share of a shard's rows in use that are on the device where the node holds it."""


def shard_of(item_id: str) -> int:
    """The shard of an item's row."""
    return crc32(item_id.encode()) % SHARDS


def name(shard: int) -> str:
    """The name of a shard in digests."""
    return f"shard {shard}"


def profile(history: Iterable[bytes]) -> tuple[str, ...]:
    """The names of at most PROFILE shards that a history reads most. history: events as JSON, as a request has them;
    one that is no text and no whole number is left out."""
    counts = Counter(shard_of(found) for each in history if (found := _id(bytes(each))) is not None)
    return tuple(name(shard) for shard, _ in counts.most_common(PROFILE))


def held(
    shards: npt.NDArray[np.int16], in_use: npt.NDArray[np.bool_], there: npt.NDArray[np.bool_]
) -> Sequence[str]:
    """The names of the shards that a node holds. shards: of each row; in_use, there: whether it is used of late, and on
    the device; [rows] each."""
    wanted = np.bincount(shards[in_use], minlength=SHARDS)
    found = np.bincount(shards[in_use & there], minlength=SHARDS)
    return [name(shard) for shard in np.flatnonzero((wanted > 0) & (found >= HELD * wanted)).tolist()]


def _id(item: bytes) -> str | None:
    if item[:1] in b"{[":  # not an id; it need not be read
        return None
    try:
        found = msgspec.json.decode(item)  # escapes too: many clients send all but ASCII in them
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return str(found) if isinstance(found, str) or type(found) is int else None
