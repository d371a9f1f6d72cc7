# SPDX-License-Identifier: Apache-2.0
"""Which of user and items comes first in a prompt (BAT-10): what comes first can be reused.

The choice decides what is admitted to the cache too: a user who comes too rarely to be kept is not admitted and then
thrown out, but stands after the items, which are cached for everybody.

The rule `published` is the paper's: a user that is not shorter than the items goes first where it is cached, where
there is room for it, or where it comes more often than the coldest cached user. The rule `priced` goes beyond: putting
a new user first computes items that are cached, now, so as to save the user's tokens later. A user is admitted where
that pays, and one whose cached tokens are fewer than those of the items is read behind them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Policy = Literal["none", "user", "item", "cache_agnostic", "hotness", "blocks"]
Rule = Literal["priced", "published"]
CacheLayout = Literal["user_prefix", "item_prefix", "causal"]
KEEP_USERS: tuple[Policy, ...] = ("user", "cache_agnostic", "hotness", "blocks")
KEEP_ITEMS: tuple[Policy, ...] = ("item", "cache_agnostic", "hotness", "blocks")
ITEMS_FIRST: CacheLayout = "item_prefix"
"""The layout whose items can be reused as they are. In the others the user stands first, and the user's part can be."""


RETURNS = 0.5
"""How often a user who is admitted will come while it is cached, for each time that it came in the last window."""


@dataclass(frozen=True)
class Situation:
    """What the choice for a request depends on.

    user_tokens, item_tokens: tokens of the history, and of all candidates. cached_user, cached_items: how many of them
    need not be computed where the user, or the items, come first. room: there is so much for users that none has to go
    for this one; where users are priced, nor for the next. frequency: how often the user came in the last window;
    coldest: the lowest frequency of a cached user, 0 where no user is cached.
    """

    user_tokens: int
    item_tokens: int
    cached_user: int = 0
    cached_items: int = 0
    room: bool = False
    frequency: float = 0.0
    coldest: float = 0.0


def choose(policy: Policy, at: Situation, hysteresis: float = 0.1, rule: Rule = "priced") -> CacheLayout:
    """The layout for a request. rule: of hotness. hysteresis: by which share another user must come more often than the
    coldest one, where users are priced."""
    if policy == "blocks":
        return "causal"
    if policy in ("none", "user"):
        return "user_prefix"
    if policy == "item" or at.user_tokens < at.item_tokens:
        return "item_prefix"
    if policy == "cache_agnostic":
        return "user_prefix"
    if rule == "published":
        admitted = at.cached_user or at.room or at.frequency > at.coldest
        return "user_prefix" if admitted else "item_prefix"
    if at.cached_user:
        return "user_prefix" if at.cached_user >= at.cached_items else "item_prefix"
    hot = at.frequency > (1 + hysteresis) * at.coldest
    pays = RETURNS * at.frequency * (at.user_tokens - at.cached_items) >= at.cached_items
    return "user_prefix" if at.room or (hot and pays) else "item_prefix"
