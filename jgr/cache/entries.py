# SPDX-License-Identifier: Apache-2.0
"""What a cached entry is: its name, the content that it was computed from, and the cells that hold it (BAT-6, BAT-8).

An entry is what was computed from a content: the KV of one user's or one item's segment in one layout, a user's state,
an embedding row. Its first `tokens` are valid, and their hash says which they were: a segment that begins with just
these tokens reuses them, so that a history that grew is extended and one that changed is a miss. Nobody overwrites a
valid token: who extends an entry writes after them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from jgr.prompt.segments import Content as Content

Int32 = npt.NDArray[np.int32]


class Name(NamedTuple):
    """The name under which an entry is found.

    kind: "user", "item", or any other class that the meta service was given. id: of the user or the item within its
    kind. layout: the segment's place and what it sees, as far as its KV depends on them.
    """

    kind: str
    id: str | int
    layout: str


class Valued(Protocol):
    """The content that an entry is computed from, described by its length and its hashes."""

    def __len__(self) -> int: ...

    @property
    def digest(self) -> bytes:
        """The hash of all of it, 16 bytes."""

    def prefix(self, count: int) -> bytes:
        """The hash of its first `count` tokens, 16 bytes."""


@dataclass(eq=False, slots=True)
class Entry:
    """One cached entry: its valid tokens and the cells that hold them.

    tokens: number of valid tokens; digest: their hash. cells: numbers of its class's cells, in order of the tokens,
    with room for `growing` as well. pins: requests that read or write it. growing: the longer content that a writer is
    making of it, or None. named: whether it can be found; an entry that cannot is freed with its last pin. made_from:
    its owner's record of what it was computed from. ahead: the lane whose planned programs write the last of its
    tokens, so that only the programs that it runs after these may read it; None: all are there. writers: their number.
    """

    name: Name
    tokens: int
    digest: bytes
    cells: tuple[int, ...]
    pins: int = 0
    growing: Valued | None = None
    named: bool = True
    made_from: Any = None
    ahead: object = None
    writers: int = 0


class Stored(msgspec.Struct, frozen=True):
    """Where a user's state is in the pool, or where a new one is to be put.

    cells: their numbers in the pool. epoch: the pool's epoch when they were given out; they mean nothing in another.
    new: whether the state is still to be written. tokens: how many of the state are valid, or will be. first: how many
    of a new one are there already.
    """

    cells: tuple[int, ...]
    epoch: int
    new: bool
    tokens: int = 1
    first: int = 0


class Move(msgspec.Struct, frozen=True):
    """A copy between device and host: the n-th cell of `device` and the n-th of `host` hold the same bytes after it.

    of: the class of the cells, which says their size.
    """

    direction: Literal["to_host", "to_device"]
    of: str
    device: tuple[int, ...]
    host: tuple[int, ...]


class Fetch(msgspec.Struct, frozen=True):
    """A copy between two devices of a process, by their numbers: the n-th of the cells `into`, on device `to`, holds
    after it what the n-th of `cells` holds, on device `source`."""

    source: int
    to: int
    cells: tuple[int, ...]
    into: tuple[int, ...]


class Valid(Protocol):
    """Tokens that are computed already: how many, and their hash."""

    tokens: int
    digest: bytes


class Below(Protocol):
    """Entries on the host that do not go when others come to the device."""

    def find(self, name: Name, content: Valued) -> tuple[int, tuple[int, ...]] | None:
        """How many tokens of the content are there, and the cells of the host that hold them."""

    def valid_tokens(self, name: Name, content: Valued) -> int:
        """The number of these tokens, 0 for none. Changes nothing."""

    def holds(self, name: Name, digest: bytes) -> bool:
        """Whether the whole of this content is there. Changes nothing."""

    def names(self, kind: str) -> Iterator[Name]:
        """The names of the entries of a kind that hold anything."""


def serves(valid: Valid, content: Valued) -> bool:
    """Whether the valid tokens are the first ones of the content. No valid token at all serves nothing."""
    if not 0 < valid.tokens <= len(content):
        return False
    return valid.digest == (content.digest if valid.tokens == len(content) else content.prefix(valid.tokens))
