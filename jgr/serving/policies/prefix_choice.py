# SPDX-License-Identifier: Apache-2.0
"""Which of user and items comes first in a prompt (BAT-10): what comes first can be reused.

The choice decides what is admitted to the cache too: a user who comes too rarely to be kept is not admitted and then
thrown out, but read behind the items, which are there for everybody.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Policy = Literal["none", "user", "item", "cache_agnostic", "hotness"]
LayoutName = Literal["user_prefix", "item_prefix"]


@dataclass(frozen=True)
class Situation:
    """Of a request. frequency: accesses of its user in the last window; coldest: the least one of a cached user.

    cached: some of the user's tokens are. room: all of them fit without another user going.
    """

    user_tokens: int
    item_tokens: int
    cached: bool = False
    room: bool = False
    frequency: float = 0.0
    coldest: float | None = None


def choose(policy: Policy, at: Situation, hysteresis: float = 0.1) -> LayoutName:
    """The layout of a request. hysteresis: how much more often than the coldest user another must come."""
    if policy in ("none", "user"):
        return "user_prefix"
    if policy == "item" or at.user_tokens < at.item_tokens:
        return "item_prefix"
    if policy == "cache_agnostic" or at.cached or at.room:
        return "user_prefix"
    hot = at.coldest is not None and at.frequency > (1 + hysteresis) * at.coldest
    return "user_prefix" if hot else "item_prefix"
