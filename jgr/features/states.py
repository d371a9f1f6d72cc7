# SPDX-License-Identifier: Apache-2.0
"""What the cache knows of one item, and what that becomes (FLAME-2): five states, seven events, one table.

The one idea: everything that can happen is a row of TABLE; `memory` keeps the records of many items and takes all their
steps at once from NEXT, which is TABLE as an array.

That an item has no features is known for a short time too: it is FRESH, and is dropped when that has passed, since
there is nothing to serve meanwhile. What is PENDING is fetched once however many ask (single flight), and is kept.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Literal, NamedTuple

import numpy as np

Mode = Literal["asynchronous", "synchronous", "sync_missing"]


class State(IntEnum):
    """Of one item."""

    ABSENT = 0
    PENDING = 1
    FRESH = 2
    STALE = 3
    STALE_PENDING = 4


class Event(IntEnum):
    """GET: somebody asks. HELD: somebody asks while nothing may be fetched, after a failure or under overload.

    VALUE, NOT_FOUND, FAILURE: how a fetch ended. EXPIRY: the time to live has passed. EVICTION: it is dropped.
    """

    GET = 0
    HELD = 1
    VALUE = 2
    NOT_FOUND = 3
    FAILURE = 4
    EXPIRY = 5
    EVICTION = 6


class Step(NamedTuple):
    """state: the next one. fetch: a fetch starts. joined: it would have, were none under way."""

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
"""[state, found]: the state once the time to live has passed, of what the store has none of and of what it has."""

NOTHING, FETCH, JOIN, HOLD = range(4)
"""What a GET does besides: start a fetch, share one, or neither though there is nothing fresh."""


def _action(step: Step) -> int:
    if step.fetch or step.joined:
        return FETCH if step.fetch else JOIN
    return NOTHING if step.state == State.FRESH else HOLD


ACTION = np.array([[_action(TABLE[state][event]) for event in (Event.GET, Event.HELD)] for state in State])
"""[state, held]"""

WAITS: dict[Mode, tuple[State, ...]] = {
    "asynchronous": (),
    "sync_missing": (State.PENDING,),
    "synchronous": (State.PENDING, State.STALE_PENDING),
}
"""The states, after a GET, in which whoever asks waits for the fetch (FLAME-3)."""

BACK_OFF_NS = np.minimum(10_000_000 << np.arange(8), 1_000_000_000)
"""How long nothing is fetched after so many failures in a row, less one; from the last on it stays."""
