# SPDX-License-Identifier: Apache-2.0
"""The state machine of one item in the cache (FLAME-2): five states, seven events, one table.

The one idea: everything that can happen is a row of TABLE. `memory` keeps the records of many items and steps all of
them at once by NEXT, which is TABLE as an array.

An item without features is remembered too, for a short time: it is FRESH, and is dropped when the time has passed. A
PENDING item has one fetch however many requests ask (single flight), and keeps its slot.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Literal, NamedTuple

import numpy as np

Mode = Literal["asynchronous", "synchronous", "sync_missing"]


class State(IntEnum):
    """The state of one item."""

    ABSENT = 0
    PENDING = 1
    FRESH = 2
    STALE = 3
    STALE_PENDING = 4


class Event(IntEnum):
    """What happens to an item. GET: a request asks for it. HELD: the same while it may not be fetched, after a failure
    or under overload. VALUE, NOT_FOUND, FAILURE: how its fetch ended. EXPIRY: its time to live has passed. EVICTION: it
    is dropped.
    """

    GET = 0
    HELD = 1
    VALUE = 2
    NOT_FOUND = 3
    FAILURE = 4
    EXPIRY = 5
    EVICTION = 6


class Step(NamedTuple):
    """A transition. state: the next state. fetch: a fetch starts. joined: a fetch that is under way is shared."""

    state: State
    fetch: bool = False
    joined: bool = False


_ABSENT, _PENDING, _FRESH = Step(State.ABSENT), Step(State.PENDING), Step(State.FRESH)
_STALE, _STALE_PENDING = Step(State.STALE), Step(State.STALE_PENDING)
_FETCH, _REFRESH = Step(State.PENDING, fetch=True), Step(State.STALE_PENDING, fetch=True)
_JOIN, _JOIN_STALE = Step(State.PENDING, joined=True), Step(State.STALE_PENDING, joined=True)

# State:        GET          HELD         VALUE   NOT_FOUND  FAILURE  EXPIRY          EVICTION
TABLE: dict[State, tuple[Step, ...]] = {
    State.ABSENT: (_FETCH, _ABSENT, _FRESH, _FRESH, _ABSENT, _ABSENT, _ABSENT),
    State.PENDING: (_JOIN, _JOIN, _FRESH, _FRESH, _ABSENT, _PENDING, _PENDING),
    State.FRESH: (_FRESH, _FRESH, _FRESH, _FRESH, _FRESH, _STALE, _ABSENT),
    State.STALE: (_REFRESH, _STALE, _FRESH, _FRESH, _STALE, _STALE, _ABSENT),
    State.STALE_PENDING: (_JOIN_STALE, _JOIN_STALE, _FRESH, _FRESH, _STALE, _STALE_PENDING, _STALE_PENDING),
}
NEXT = np.array([[step.state for step in TABLE[state]] for state in State], np.uint8)
AGED = NEXT[:, [Event.EVICTION, Event.EXPIRY]]
"""The state after the time to live, by [state, found]; found: whether the store has a record of the item."""

NOTHING, FETCH, JOIN, HOLD = range(4)
"""What a GET does: nothing, start a fetch, share one, or neither although the item is not fresh."""


def _action(step: Step) -> int:
    if step.fetch or step.joined:
        return FETCH if step.fetch else JOIN
    return NOTHING if step.state == State.FRESH else HOLD


ACTION = np.array([[_action(TABLE[state][event]) for event in (Event.GET, Event.HELD)] for state in State])
"""What a GET does, by [state, held]."""

WAITS: dict[Mode, tuple[State, ...]] = {
    "asynchronous": (),
    "sync_missing": (State.PENDING,),
    "synchronous": (State.PENDING, State.STALE_PENDING),
}
"""For each mode, the states after a GET in which the request waits for the fetch (FLAME-3)."""

BACK_OFF_NS = np.minimum(10_000_000 << np.arange(8), 1_000_000_000)
"""How long an item is not fetched after 1, 2, ... failures in a row, in ns; the last value is for all further ones."""
