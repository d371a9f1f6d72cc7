# SPDX-License-Identifier: Apache-2.0
"""What a memory controller is told of one epoch, and how that becomes its state and its reward (HLEM-3 .. HLEM-6).

The split is the share of the pool that embedding rows may take; kept users have the rest. Pure: no clock, and what was
not measured is NaN or None.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jgr.fields import UserError

Float32 = npt.NDArray[np.float32]

FEATURES = ("hot_share", "user_hits", "row_hits", "mean_events", "late", "split", "p99")
"""The state, in its order (HLEM-4)."""
STATE = len(FEATURES)
ACTIONS = (-0.04, -0.02, 0.0, 0.02, 0.04)
"""By how much the split may be moved in an epoch (HLEM-5)."""
LONGEST = 20_480
"""Events that the mean length is divided by."""
TAIL = 4.0
"""Limits of latency that the 99th percentile is divided by."""
HOT_USERS = 0.05
"""The share of the users, by their requests in the last hour, that are called hot."""


@dataclass(frozen=True, slots=True)
class Signals:
    """One epoch of one pool.

    hot_share: share of the requests that came from hot users. user_hits, row_hits: hit rates of kept users and of
    embedding rows. mean_events: mean length of the histories, in events. late: share of the requests above the
    latency limit. p99_ms: 99th percentile of the latency, in ms. requests: how many there were; where there were
    none, nothing else counts.
    """

    hot_share: float
    user_hits: float
    row_hits: float
    mean_events: float
    late: float
    p99_ms: float
    requests: int

    @property
    def whole(self) -> bool:
        """Whether all was measured: every number is finite, and the shares are shares."""
        shares = (self.hot_share, self.user_hits, self.row_hits, self.late)
        return (
            all(0.0 <= share <= 1.0 for share in shares)
            and 0.0 <= self.mean_events < math.inf
            and 0.0 <= self.p99_ms < math.inf
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """Between which splits the border moves, and the latency it is moved for.

    least, most: the ends of the split. safe: the split to go to where signals are missing: the best static one that is
    known. limit_ms: the latency that 99 of 100 requests should stay below (the SLO). Raises UserError where the ends do
    not hold the safe split, or leave one side nothing.
    """

    least: float = 0.1
    most: float = 0.9
    safe: float = 0.5
    limit_ms: float = 30.0

    def __post_init__(self) -> None:
        if not 0.0 < self.least <= self.safe <= self.most < 1.0:
            raise UserError(
                f"memory: the splits must be 0 < least <= safe <= most < 1, not least {self.least}, safe {self.safe}, "
                f"most {self.most}"
            )
        if not 0.0 < self.limit_ms < math.inf:
            raise UserError(f"memory: the latency limit must be above 0 ms, not {self.limit_ms}")

    def clip(self, split: float) -> float:
        """The nearest split that is allowed."""
        return min(max(split, self.least), self.most)


def require_room(limits: Limits, pool_bytes: int, user_bytes: int, batch_bytes: int) -> None:
    """Raise UserError, with the figures, where an end of the border leaves no room for one user or one batch's rows."""
    users = int((1.0 - limits.most) * pool_bytes)
    rows = int(limits.least * pool_bytes)
    if users < user_bytes:
        raise UserError(
            f"memory.most ({limits.most}): it leaves kept users {users} bytes of {pool_bytes}, and one user takes "
            f"{user_bytes}"
        )
    if rows < batch_bytes:
        raise UserError(
            f"memory.least ({limits.least}): it leaves embedding rows {rows} bytes of {pool_bytes}, and one batch "
            f"reads {batch_bytes}"
        )


def state(signals: Signals, split: float, limits: Limits) -> Float32:
    """The state of an epoch, f32 [STATE], each number in [0, 1]: HLEM-4. split: the one that was in force."""
    return np.array(
        (
            signals.hot_share,
            signals.user_hits,
            signals.row_hits,
            min(1.0, signals.mean_events / LONGEST),
            signals.late,
            split,
            min(1.0, signals.p99_ms / (TAIL * limits.limit_ms)),
        ),
        np.float32,
    )


def reward(signals: Signals, limits: Limits) -> float:
    """HLEM-6: the share of the requests in time, less how far the 99th percentile is above the limit, as a share of it.

    An epoch without a request is worth 1, as one in which all are in time.
    """
    if signals.requests == 0:
        return 1.0
    return (1.0 - signals.late) - max(0.0, min(signals.p99_ms / limits.limit_ms, TAIL) - 1.0)
