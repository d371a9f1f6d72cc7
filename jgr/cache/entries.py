# SPDX-License-Identifier: Apache-2.0
"""What a cached entry is: whose, of which content, and in which cells it stands (BAT-6, BAT-8).

An entry is what was computed from a content: the KV of one user's or one item's segment in one layout, a user's state,
an embedding row. Its first `tokens` are valid, and their hash says which they were: a segment that begins with just
these tokens reuses them, so that a history that grew is extended and one that changed is a miss. Nobody overwrites a
valid token: who extends an entry writes after them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from jgr.prompt.segments import Content as Content

Int32 = npt.NDArray[np.int32]


class Name(NamedTuple):
    """Whose an entry is. kind: any name that the meta service was given. layout: the segment's place and what it sees,
    as far as its KV depends on them."""

    kind: str
    id: str | int
    layout: str


class Valued(Protocol):
    """What an entry is computed from, by its length and its hashes."""

    def __len__(self) -> int: ...

    @property
    def digest(self) -> bytes:
        """16 bytes: the hash of all of it."""

    def prefix(self, count: int) -> bytes:
        """16 bytes: the hash of its first `count`."""


@dataclass(eq=False, slots=True)
class Entry:
    """tokens: the number of valid ones; digest: their hash. cells: numbers of its class's cells, in order of the
    tokens, with room for `growing` as well.

    pins: requests that read or write it. growing: what a writer makes of it, or None. named: whether it can be found;
    one that cannot is freed with its last pin. made_from: its owner's record of what it was computed from.
    """

    name: Name
    tokens: int
    digest: bytes
    cells: tuple[int, ...]
    pins: int = 0
    growing: Valued | None = None
    named: bool = True
    made_from: Any = None


class Stored(msgspec.Struct, frozen=True):
    """Where a user's state is in the pool, or where a new one is to be put. cells: their numbers; epoch: of the pool
    that they are cells of."""

    cells: tuple[int, ...]
    epoch: int
    new: bool


class Move(msgspec.Struct, frozen=True):
    """Cells of one class, on the device and on the host, that are copied from the one to the other, in order."""

    direction: Literal["to_host", "to_device"]
    of: str
    device: tuple[int, ...]
    host: tuple[int, ...]


class Valid(Protocol):
    """Some tokens that are there, and their hash."""

    tokens: int
    digest: bytes


def serves(valid: Valid, content: Valued) -> bool:
    """Whether the valid tokens are the first of the content's; where there are none they serve nobody."""
    if not 0 < valid.tokens <= len(content):
        return False
    return valid.digest == (content.digest if valid.tokens == len(content) else content.prefix(valid.tokens))
