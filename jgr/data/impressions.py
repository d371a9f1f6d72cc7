# SPDX-License-Identifier: Apache-2.0
"""Rank requests rebuilt from logged impressions: what users were shown, what they had done before, and their feedback.

The one idea: all impressions of a user on one day in one scenario are the candidates of one request, asked at the time
of the first. So the history ends before the first, and no candidate knows the feedback on another.

Days are those of UTC. An impression without any event before it, or without recorded feedback, is in no request.
Recorded impressions in other scenarios of the same day are part of the history if they came earlier.

Letters: r requests, k impressions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jgr.data.interactions import UNRECORDED, DataError, Examples, Int32, Int64, Interactions, Ragged

DAY_S = 86_400


@dataclass(frozen=True, eq=False)
class Requests:
    """r past requests.

    histories: r sequences, windows of the arrays of all events. users: [r] int32. offsets: [r + 1] int64. shown: [k]
    int64, the impressions' positions among all events; request i has shown[offsets[i]:offsets[i + 1]], in time order.
    """

    histories: Ragged
    users: Int32
    offsets: Int64
    shown: Int64

    def __len__(self) -> int:
        return len(self.users)

    def select(self, indices: slice | Int64) -> Requests:
        """Keep only the requests at `indices`."""
        parts = Ragged(np.zeros(0, np.int32), self.offsets[:-1], self.offsets[1:]).select(indices)
        offsets = np.append(0, np.cumsum(parts.lengths))
        return Requests(
            self.histories.select(indices), self.users[indices], offsets, self.shown[parts.positions()[0]]
        )

    def places(self, i: int) -> Int64:
        """Positions of request i's impressions among all events, a view."""
        return self.shown[self.offsets[i] : self.offsets[i + 1]]

    @property
    def owners(self) -> Int64:
        """The index of each impression's request, [k]."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    @property
    def rows(self) -> Int32:
        """The catalog row of each impression, [k]."""
        return self.histories.rows[self.shown]

    @property
    def actions(self) -> Int32:
        """What the user did with each impression, [k] bits."""
        return feedback_of(self.histories)[0][self.shown]

    @property
    def scenarios(self) -> Int32:
        """The scenario of each request, [r]."""
        return feedback_of(self.histories)[1][self.shown[self.offsets[:-1]]]

    @property
    def times(self) -> Int64:
        """When each request was asked, [r], in seconds."""
        return feedback_of(self.histories)[2][self.shown[self.offsets[:-1]]]


def feedback_of(events: Ragged) -> tuple[Int32, Int32, Int64]:
    """The actions, scenarios and times of all events. Raises DataError if the dataset has no feedback."""
    if events.actions is None or events.scenarios is None:
        raise DataError("the dataset has no feedback: no column says what users did (jgr prepare)")
    if events.times is None:
        raise DataError("the dataset has no times, which requests with feedback need (jgr prepare)")
    return events.actions, events.scenarios, events.times


def requests(interactions: Interactions, examples: Examples, most: int | None = None) -> Requests:
    """Group a split's impressions into requests. most: most impressions in a request; larger ones become several.

    Raises DataError if the dataset has no feedback, or the split has no recorded impression.
    """
    actions, scenarios, times = feedback_of(examples.histories)
    keep = recorded(interactions, actions[examples.histories.stops])
    if not keep.any():
        raise DataError("nothing that the split's users did was recorded")
    kept = examples.select(np.flatnonzero(keep))
    place = kept.histories.stops  # a target is the event right after its history
    keys = np.stack([place, scenarios[place], times[place] // DAY_S, kept.users])
    order = np.lexsort(keys)
    place, user = place[order], kept.users[order]
    first = np.append(True, (np.diff(keys[1:, order]) != 0).any(axis=0))
    if most is not None:
        number = np.arange(len(place))
        first |= (number - np.maximum.accumulate(np.where(first, number, 0))) % most == 0
    starts = np.flatnonzero(first)
    histories = kept.histories.select(order[starts])
    return Requests(histories, user[starts], np.append(starts, len(place)), place)


def recorded(interactions: Interactions, actions: Int32) -> npt.NDArray[np.bool_]:
    """Whether the user's feedback was recorded, for each event, by its `actions`."""
    if UNRECORDED not in interactions.actions:
        return np.ones(len(actions), bool)
    known: npt.NDArray[np.bool_] = actions >> interactions.actions.index(UNRECORDED) & 1 == 0
    return known


def action_bits(interactions: Interactions, names: tuple[str, ...], field: str) -> tuple[int, ...]:
    """The bit of each action in `names`. Raises DataError for an unknown one, naming `field` and the known ones."""
    missing = [name for name in names if name not in interactions.actions]
    if missing:
        known = ", ".join(interactions.actions) or "none"
        raise DataError(f"{field}: the dataset has no action {missing[0]!r}; it has {known}")
    return tuple(map(interactions.actions.index, names))
