# SPDX-License-Identifier: Apache-2.0
"""How long a prefill takes: t(new, cached) as a polynomial of the tokens, fitted to profiled points (BAT-11).

    t = a + b * new + c * new ** 2 + d * new * cached

The terms are the dispatch, the matmuls, attention among new tokens and attention to cached ones. None can take less
than no time, so the coefficients are the best ones that are not negative: t never decreases, also outside the points.
The fit is of relative errors, because profiled times span decades.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from jgr.config import UserError

Float64 = npt.NDArray[np.float64]

_TERMS = 4


@dataclass(frozen=True)
class PrefillCost:
    """A fitted cost of prefills.

    coefficients: a, b, c, d in seconds and tokens. max_relative_error, mean_relative_error: of |predicted - measured| /
    measured over the profiled points. points: their number.
    """

    coefficients: tuple[float, float, float, float]
    max_relative_error: float
    mean_relative_error: float
    points: int

    def __post_init__(self) -> None:
        values = [*self.coefficients, self.max_relative_error, self.mean_relative_error]
        if len(self.coefficients) != _TERMS or not np.isfinite(values).all() or min(values) < 0:
            raise UserError("prefill cost: needs four coefficients and two errors, finite and not negative")

    def seconds(self, new: float, cached: float) -> float:
        """Predicted seconds of a prefill of `new` tokens after `cached` ones. 0 new tokens cost the dispatch."""
        a, b, c, d = self.coefficients
        return a + new * (b + c * new + d * cached)

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, text: bytes | str) -> PrefillCost:
        """Read what `to_json` wrote. Raises UserError where it is something else."""
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise UserError(f"prefill cost: {error}") from None


def fit(points: Sequence[tuple[float, float, float]]) -> PrefillCost:
    """The cost that fits profiled (new tokens, cached tokens, seconds) best.

    UserError where a point is not finite, negative or took no time, or where the points do not tell the terms apart.
    """
    if len(points) < _TERMS or any(len(point) != 3 for point in points):
        raise UserError(
            f"profiled points: needs at least {_TERMS} of (new, cached, seconds), got {len(points)}"
        )
    table = np.array(points, np.float64)
    for index, (new, cached, seconds) in enumerate(table):
        if not np.isfinite(table[index]).all() or new < 0 or cached < 0 or seconds <= 0:
            raise UserError(
                f"profiled points[{index}]: new {new}, cached {cached}, seconds {seconds} must be finite, tokens"
                " not negative and seconds above 0"
            )
    new, cached, seconds = table.T
    terms = np.stack([np.ones_like(new), new, new**2, new * cached], axis=1)
    scale = terms.max(axis=0)
    if not scale.all() or np.linalg.matrix_rank(terms / scale) < _TERMS:
        raise UserError(
            "profiled points: they must hold at least three values of new tokens, some of them with two of cached ones"
        )
    weighted = terms / seconds[:, None]
    coefficients = _least_squares(weighted)
    error = np.abs(weighted @ coefficients - 1)
    a, b, c, d = coefficients.tolist()
    return PrefillCost((a, b, c, d), float(error.max()), float(error.mean()), len(points))


def _least_squares(columns: Float64) -> Float64:
    """The x >= 0 that makes columns @ x closest to 1: the best fit of its own support, of which there are 15."""
    scale = np.abs(columns).max(axis=0)
    scaled = columns / scale
    best, least = np.zeros(_TERMS), np.inf
    for size in range(1, _TERMS + 1):
        for support in map(list, itertools.combinations(range(_TERMS), size)):
            some = np.linalg.lstsq(scaled[:, support], np.ones(len(columns)), rcond=None)[0]
            distance = float(((scaled[:, support] @ some - 1) ** 2).sum())
            if some.min() >= 0 and distance < least:
                best, least = np.zeros(_TERMS), distance
                best[support] = some
    best /= scale
    return best
