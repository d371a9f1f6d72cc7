# SPDX-License-Identifier: Apache-2.0
"""Candidates of a request: c distinct items, drawn one after another by popularity.

The one idea: drawing without repeats is a race. If item i arrives after an exponential time of rate p_i, the first c
arrivals are such a draw, and an item is among them with probability 1 - exp(-L p_i), where L is the time by which c
are expected. So the share of all *accesses* that the most popular items get is known without drawing, and the exponent
of a Zipf law can be solved for it. Refusing repeats flattens a law: items that 90 % of the draws hit get fewer than
90 % of the accesses, and no item can be in a request more than once.

Letters: n items, c candidates, r requests. p_i adds up to 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from jgr.data.interactions import DataError

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]

TOP = 0.1  # the share of all items that are called the top items
_EXACT_RANKS = 2048
_MAX_EXPONENT = 8.0
# Racing all items costs about as much as sorting this many times fewer draws.
_DRAW_COST = 12
_BLOCK = 1 << 20


def top_count(n_items: int) -> int:
    """The number of items in the top 10 %, at least one."""
    return max(1, math.ceil(TOP * n_items))


def zipf(n_items: int, exponent: float) -> Float64:
    """The popularity of n items under a Zipf law, [n], most popular first; it adds up to 1."""
    weights: Float64 = np.arange(1, n_items + 1, dtype=np.float64) ** -exponent
    weights /= weights.sum()
    return weights


def solve_exponent(n_items: int, candidates: int, share: float) -> float:
    """The Zipf exponent at which the top 10 % of n items get `share` of the accesses, with c distinct ones per request.

    Raises DataError if no exponent does, since a request can access each top item only once.
    """
    most, least = min(1.0, top_count(n_items) / candidates), top_count(n_items) / n_items
    if n_items < candidates or not least < share < most:
        raise DataError(
            f"{n_items} items: {candidates} distinct candidates cannot put {share:.0%} of the accesses on the top "
            f"10 % of the items (possible: {least:.0%} to {most:.0%}); take more items or another share"
        )
    ranks, counts = _grid(n_items)

    def excess(exponent: float) -> float:
        return zipf_share(ranks, counts, exponent, candidates) - share

    if excess(_MAX_EXPONENT) < 0:
        raise DataError(
            f"{n_items} items: no Zipf law puts {share:.0%} of the accesses on the top 10 % of the items"
        )
    return _root(excess, 0.0, _MAX_EXPONENT)


def _grid(n_items: int) -> tuple[Float64, Float64]:
    """A grid of ranks, and how many ranks each point stands for: single ones first, then ever longer blocks."""
    top = top_count(n_items)
    bounds = np.arange(1, min(_EXACT_RANKS, n_items) + 2, dtype=np.float64)
    if n_items > _EXACT_RANKS:
        blocks = np.unique(np.geomspace(_EXACT_RANKS + 1, n_items + 1, _EXACT_RANKS).round())
        bounds = np.union1d(np.append(bounds, float(top + 1)), blocks)
    return np.sqrt(bounds[:-1] * (bounds[1:] - 1)), np.diff(bounds)


def zipf_share(ranks: Float64, counts: Float64, exponent: float, candidates: int) -> float:
    """The share of accesses on the top 10 % of the items, under a Zipf law on a grid of ranks."""
    weights = ranks**-exponent
    weights /= (weights * counts).sum()
    rate = race_length(weights, counts, candidates)
    accesses = -np.expm1(-rate * weights) * counts
    top = ranks < top_count(round(counts.sum())) + 1
    return float(accesses[top].sum() / accesses.sum())


def race_length(weights: Float64, counts: Float64 | float, candidates: int) -> float:
    """L of the file's docstring: the number of draws with repeats that gives `candidates` distinct items on average."""
    total = float((np.ones_like(weights) * counts)[weights > 0].sum())
    if candidates >= total:
        return math.inf

    def excess(log_rate: float) -> float:
        return float((-np.expm1(-math.exp(log_rate) * weights) * counts).sum()) - candidates

    return math.exp(_root(excess, math.log(candidates) - 1, 600.0))


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    """Find by bisection where a rising function crosses 0."""
    while high - low > 1e-9 * max(1.0, abs(high)):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < 0 else (low, middle)
    return (low + high) / 2


class CandidateDraw:
    """Draws c distinct items by weight, in the order of the draws. Raises DataError if fewer have a weight above 0.

    weights: [n], 0 or more. inclusion: [n], the probability that a request accesses each item.
    """

    def __init__(self, weights: npt.ArrayLike, candidates: int) -> None:
        popularity = np.asarray(weights, np.float64)
        positive = int((popularity > 0).sum())
        if not 1 <= candidates <= positive:
            raise DataError(f"{positive} items have a popularity: cannot draw {candidates} distinct ones")
        self.candidates = candidates
        self._popularity = popularity / popularity.sum()
        self._length = race_length(self._popularity, 1.0, candidates)
        self._races = len(popularity) < _DRAW_COST * self._length
        self._bounds = np.cumsum(self._popularity)

    def share(self) -> float:
        """The expected share of accesses on the 10 % of the items with the largest weights."""
        inclusion = -np.expm1(-self._length * self._popularity)
        if math.isinf(self._length):
            inclusion = (self._popularity > 0).astype(np.float64)
        top = np.partition(inclusion, -top_count(len(inclusion)))[-top_count(len(inclusion)) :]
        return float(top.sum() / inclusion.sum())

    def draw(self, requests: int, rng: np.random.Generator) -> Int32:
        """Draw the candidates of r requests, [r, c] int32 rows, distinct within a request."""
        width = len(self._popularity) if self._races else math.ceil(1.25 * self._length) + 8
        block = max(1, _BLOCK // width)
        parts = []
        for at in range(0, requests, block):
            size = min(block, requests - at)
            parts.append(self._race(size, rng) if self._races else self._draw(size, width, rng))
        return np.concatenate(parts) if parts else np.zeros((0, self.candidates), np.int32)

    def _race(self, requests: int, rng: np.random.Generator) -> Int32:
        with np.errstate(divide="ignore"):
            arrivals = rng.standard_exponential((requests, len(self._popularity))) / self._popularity
        first = np.argpartition(arrivals, self.candidates - 1, axis=1)[:, : self.candidates]
        order = np.argsort(np.take_along_axis(arrivals, first, 1), axis=1)
        return np.take_along_axis(first, order, 1).astype(np.int32)

    def _draw(self, requests: int, width: int, rng: np.random.Generator) -> Int32:
        found = np.empty((requests, self.candidates), np.int32)
        waiting, drawn = np.arange(requests), np.empty((requests, 0), np.int64)
        while len(waiting):
            drawn = np.concatenate([drawn, self._with_repeats((len(waiting), width), rng)], axis=1)
            items, enough = _first_distinct(drawn, self.candidates)
            found[waiting[enough]] = items[enough]
            waiting, drawn = waiting[~enough], drawn[~enough]
        return found

    def _with_repeats(self, shape: tuple[int, int], rng: np.random.Generator) -> Int64:
        places: Int64 = np.searchsorted(self._bounds, rng.random(shape) * self._bounds[-1], side="right")
        return places


def _first_distinct(drawn: Int64, candidates: int) -> tuple[Int32, npt.NDArray[np.bool_]]:
    """The first `candidates` distinct values of each line, in order, and which lines hold that many."""
    width = drawn.shape[1]
    keys = np.sort(drawn * width + np.arange(width), axis=1)
    values, places = keys // width, keys % width
    repeated = np.zeros(drawn.shape, bool)
    repeated[:, 1:] = values[:, 1:] == values[:, :-1]
    places[repeated] = width
    enough = (~repeated).sum(axis=1) >= candidates
    first = np.sort(np.partition(places, candidates - 1, axis=1)[:, :candidates], axis=1)
    return np.take_along_axis(drawn, np.minimum(first, width - 1), 1).astype(np.int32), enough
