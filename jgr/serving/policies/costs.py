# SPDX-License-Identifier: Apache-2.0
"""How long work takes that was not measured: seconds as a sum over counted terms, fitted to profiled points (SIM-10).

    t = constant + sum over terms of coefficient * count

What is counted is up to the caller: `jgr.models.costs` counts FLOPs and bytes. No term can take less than no time, so
the coefficients are the best ones that are not negative: t never falls when a count grows, also outside the points. The
fit is of relative errors, because profiled times span decades.

A fit says how well it predicts what it has not seen (`held_out`): every point is predicted by a fit without it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Self

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from jgr.config import UserError

Float64 = npt.NDArray[np.float64]

FOLDS = 5
_CLOSE = 1e-3
"""How much of a term may lie outside the others' span for it to be told apart from them."""


class Point(Struct, frozen=True):
    """A measurement: the count of each term, by its name, and the seconds."""

    counts: Mapping[str, float]
    seconds: float


class Errors(Struct, frozen=True, forbid_unknown_fields=True):
    """The mean and the largest of |predicted - measured| / measured over some points."""

    mean: float
    largest: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.largest) and 0 <= self.mean <= self.largest):
            raise UserError(
                "a cost's errors must be finite, not negative, and the mean not above the largest"
            )


class FittedCost(Struct, frozen=True, forbid_unknown_fields=True):
    """A fitted cost of one kind of work.

    constant: seconds. coefficients: seconds for one of each term. points: how many were fitted, with `errors`.
    held_out: the errors of points that were not; None where that was not asked for. Raises UserError for numbers that
    are not finite, or negative.
    """

    constant: float
    coefficients: dict[str, float]
    points: int
    errors: Errors
    held_out: Errors | None = None

    def __post_init__(self) -> None:
        values = [self.constant, *self.coefficients.values()]
        if not (np.isfinite(values).all() and min(values) >= 0 and self.points > 0):
            raise UserError("a cost needs points, and seconds that are finite and not negative")

    def seconds(self, counts: Mapping[str, float]) -> float:
        """Predicted seconds of work with these counts. KeyError where a term is missing; others are not read."""
        return self.constant + sum(factor * counts[term] for term, factor in self.coefficients.items())


class CostModel(Struct, frozen=True, forbid_unknown_fields=True):
    """The fitted costs of a model on a device, by the kind of work.

    kinds: of a run, from its launch to what its collect gives. hosts: of the host's part of it, with the term requests.
    Raises UserError where the kinds of both differ.
    """

    family: str
    device: str
    kinds: dict[str, FittedCost]
    hosts: dict[str, FittedCost]
    version: Literal[1] = 1

    def __post_init__(self) -> None:
        if self.kinds.keys() != self.hosts.keys():
            raise UserError("kinds and hosts must be of the same kinds of work")

    def seconds(self, kind: str, counts: Mapping[str, float]) -> float:
        """Predicted seconds of a run. KeyError for a kind that was not profiled, or a term that is missing."""
        return self.kinds[kind].seconds(counts)

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, text: bytes | str) -> Self:
        """Read what `to_json` wrote. Raises UserError where it is something else."""
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.MsgspecError, UserError, UnicodeError, RecursionError) as error:
            raise UserError(f"cost model: {error}") from None


def telling(points: Sequence[Point], terms: Sequence[str]) -> tuple[str, ...]:
    """The terms, in this order, that the points tell apart from the constant and from the terms before them."""
    found: list[str] = []
    basis = np.ones((len(points), 1)) / math.sqrt(max(1, len(points)))
    for term in terms:
        column = np.array([point.counts[term] for point in points], np.float64)
        size = float(np.linalg.norm(column))
        rest = column - basis @ (basis.T @ column)
        rest -= basis @ (basis.T @ rest)  # once more, for rounding
        if size > 0 and float(np.linalg.norm(rest)) > _CLOSE * size:
            found.append(term)
            basis = np.column_stack([basis, rest / np.linalg.norm(rest)])
    return tuple(found)


def fit(points: Sequence[Point], terms: Sequence[str], folds: int = 0, seed: int = 0) -> FittedCost:
    """The cost of these terms that fits the points best.

    folds: the points are divided into so many parts by chance, and each part is predicted by a fit of the others, which
    gives `held_out`; 0: it is left out. UserError where a point has no count of a term, or one that is not finite or is
    negative, or took no time; or where there are too few points, or they do not tell a term from those before it.
    """
    columns, seconds = _table(points, terms)
    least = len(terms) + 1
    if len(points) < least:
        raise UserError(
            f"profiled points: {len(terms)} terms need at least {least} points, there are {len(points)}"
        )
    unclear = [term for term in terms if term not in telling(points, terms)]
    if unclear:
        raise UserError(f"profiled points: they do not tell apart what {', '.join(unclear)} costs")
    found = _least_squares(columns, seconds)
    held_out = None
    if folds:
        predicted = np.empty_like(seconds)
        order = np.random.default_rng(seed).permutation(len(seconds))
        for part in np.array_split(order, min(folds, len(order))):
            others = np.setdiff1d(order, part)
            predicted[part] = columns[part] @ _least_squares(columns[others], seconds[others])
        held_out = errors(predicted, seconds)
    constant, *factors = found.tolist()
    return FittedCost(
        constant,
        dict(zip(terms, factors, strict=True)),
        len(points),
        errors(columns @ found, seconds),
        held_out,
    )


def errors(predicted: Iterable[float], measured: Iterable[float]) -> Errors:
    """The relative errors of predictions; at least one."""
    found = [
        abs(float(mine) - float(its)) / float(its) for mine, its in zip(predicted, measured, strict=True)
    ]
    largest = max(found)
    return Errors(min(math.fsum(found) / len(found), largest), largest)


def _table(points: Sequence[Point], terms: Sequence[str]) -> tuple[Float64, Float64]:
    """The counts [n, 1 + terms], the first column of which is 1, and the seconds [n]."""
    rows: list[list[float]] = []
    for index, point in enumerate(points):
        missing = [term for term in terms if term not in point.counts]
        if missing:
            raise UserError(f"profiled points[{index}]: has no {', '.join(missing)}")
        row = [1.0, *(float(point.counts[term]) for term in terms)]
        if not (
            np.isfinite(row).all() and min(row) >= 0 and math.isfinite(point.seconds) and point.seconds > 0
        ):
            raise UserError(
                f"profiled points[{index}]: counts {dict(point.counts)} must be finite and not negative, and seconds"
                f" {point.seconds} finite and above 0"
            )
        rows.append(row)
    return np.array(rows, np.float64).reshape(len(rows), 1 + len(terms)), np.array(
        [point.seconds for point in points], np.float64
    )


def _least_squares(columns: Float64, seconds: Float64) -> Float64:
    """The x >= 0 with the smallest squares of columns @ x / seconds - 1."""
    from scipy.optimize import nnls  # slow to import, and only fits need it

    weighted = columns / seconds[:, None]
    scale = weighted.max(axis=0)
    scale[scale == 0] = 1.0
    found: Any = nnls(weighted / scale, np.ones(len(seconds)))[0]
    result: Float64 = found / scale
    return result
