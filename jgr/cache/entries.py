# SPDX-License-Identifier: Apache-2.0
"""What a cached segment is: whose, of which tokens, and in which cells its keys and values stand (BAT-6, BAT-8).

An entry is the KV of one user's or one item's segment in one layout. Its first `tokens` tokens are valid, and their
hash says which they were: a segment that begins with just these tokens reuses them, so that a history that grew is
extended and one that changed is a miss. Nobody overwrites a valid token: who extends an entry writes behind them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from jgr.prompt.segments import Content as Content

Int32 = npt.NDArray[np.int32]
EntryKind = Literal["user", "item"]


class Name(NamedTuple):
    """Of whom an entry is. layout: the segment's place and what it sees, as far as its KV depends on them."""

    kind: EntryKind
    id: str | int
    layout: str


@dataclass(eq=False, slots=True)
class Entry:
    """tokens: valid ones; digest: their hash. cells: int32, in order of the tokens, with room for `growing` as well.

    pins: requests that read or write it. growing: what a writer makes of it, or None. named: whether it can be found;
    one that cannot is freed with its last pin. note: its owner's.
    """

    name: Name
    tokens: int
    digest: bytes
    cells: Int32
    pins: int = 0
    growing: Content | None = None
    named: bool = True
    note: Any = None


@dataclass(frozen=True, eq=False)
class Stored:
    """Where a user's state is in the pool, or where a new one is to be put. pages: [pages_per_user] int32."""

    pages: Int32
    generation: int
    new: bool


class Valid(Protocol):
    """Some tokens that are there, and their hash."""

    tokens: int
    digest: bytes


def serves(valid: Valid, content: Content) -> bool:
    """Whether the valid tokens are the first of the content's; where there are none they serve nobody."""
    if not 0 < valid.tokens <= len(content):
        return False
    return valid.digest == (content.digest if valid.tokens == len(content) else content.prefix(valid.tokens))
