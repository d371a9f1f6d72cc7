# SPDX-License-Identifier: Apache-2.0
"""Requests of the past: what users were shown together, what they had done before, and what they did then.

The one idea: a user's impressions of one day in one scenario are the candidates of one request, asked at the first of
them. So its history ends before that one, and no candidate knows what was done with another.

A day is one of UTC. An impression with nothing before it, or whose feedback nobody recorded, is in no request; recorded
ones of the same day but another scenario are in its history where they came before.

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
    """histories: r, with the arrays of all events. users: [r] int32. offsets: [r + 1] int64.

    shown: [k] int64, places of the impressions among all events; those of request i are
    shown[offsets[i]:offsets[i + 1]], in order of time.
    """

    histories: Ragged
    users: Int32
    offsets: Int64
    shown: Int64

    def __len__(self) -> int:
        return len(self.users)

    def select(self, indices: slice | Int64) -> Requests:
        """The requests at `indices`."""
        parts = Ragged(np.zeros(0, np.int32), self.offsets[:-1], self.offsets[1:]).select(indices)
        offsets = np.append(0, np.cumsum(parts.lengths))
        return Requests(
            self.histories.select(indices), self.users[indices], offsets, self.shown[parts.positions()[0]]
        )

    def places(self, i: int) -> Int64:
        """Of the impressions of request i, a view."""
        return self.shown[self.offsets[i] : self.offsets[i + 1]]

    @property
    def owners(self) -> Int64:
        """[k]: the request of each impression."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    @property
    def rows(self) -> Int32:
        """[k]: what was shown."""
        return self.histories.rows[self.shown]

    @property
    def actions(self) -> Int32:
        """[k] bits: what was done with it."""
        return feedback_of(self.histories)[0][self.shown]

    @property
    def scenarios(self) -> Int32:
        """[r]."""
        return feedback_of(self.histories)[1][self.shown[self.offsets[:-1]]]

    @property
    def times(self) -> Int64:
        """[r] seconds: when it was asked."""
        return feedback_of(self.histories)[2][self.shown[self.offsets[:-1]]]


def feedback_of(events: Ragged) -> tuple[Int32, Int32, Int64]:
    """Actions, scenarios and times of all events. DataError where the dataset has none."""
    if events.actions is None or events.scenarios is None or events.times is None:
        raise DataError("the dataset has no feedback: needs actions, scenarios and times (jgr prepare)")
    return events.actions, events.scenarios, events.times


def requests(interactions: Interactions, examples: Examples, most: int | None = None) -> Requests:
    """The requests of a split's impressions. most: one with more impressions becomes several, each asked at its first.

    DataError where the dataset has no feedback, or nothing of the split was recorded.
    """
    actions, scenarios, times = feedback_of(examples.histories)
    keep = recorded(interactions, actions[examples.histories.stops])
    if not keep.any():
        raise DataError("nothing that the split's users did was recorded")
    kept = examples.select(np.flatnonzero(keep))
    place = kept.histories.stops  # a target stands right behind its history
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
    """Whether somebody wrote down what the user did, by an event's actions."""
    if UNRECORDED not in interactions.actions:
        return np.ones(len(actions), bool)
    known: npt.NDArray[np.bool_] = actions >> interactions.actions.index(UNRECORDED) & 1 == 0
    return known


def action_bits(interactions: Interactions, names: tuple[str, ...], field: str) -> tuple[int, ...]:
    """The bit of each name. DataError names `field` and what the dataset has."""
    missing = [name for name in names if name not in interactions.actions]
    if missing:
        known = ", ".join(interactions.actions) or "none"
        raise DataError(f"{field}: the dataset has no action {missing[0]!r}; it has {known}")
    return tuple(map(interactions.actions.index, names))
