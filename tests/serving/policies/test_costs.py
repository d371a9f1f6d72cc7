# SPDX-License-Identifier: Apache-2.0
"""The fit of costs: exact points give their coefficients back, noisy ones the best that are not negative, and what is
held out is predicted by the others."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jgr.config import UserError
from jgr.serving.policies.costs import CostModel, Errors, FittedCost, Point, errors, fit, telling

TERMS = ("new", "among_new", "to_cached")
GRID = list(itertools.product((1, 64, 256, 1024, 4096), (0, 128, 1500)))


def counts(new: float, cached: float) -> dict[str, float]:
    return {"new": new, "among_new": new**2, "to_cached": new * cached, "unread": 7}


def seconds(new: float, cached: float) -> float:
    return 2e-3 + 1e-5 * new + 3e-9 * new**2 + 2e-9 * new * cached


EXACT = [Point(counts(*at), seconds(*at)) for at in GRID]


def test_exact_points_give_their_coefficients_back() -> None:
    cost = fit(EXACT, TERMS, folds=5)
    assert cost.constant == pytest.approx(2e-3, rel=1e-6)
    assert cost.coefficients == pytest.approx(dict(zip(TERMS, (1e-5, 3e-9, 2e-9), strict=True)), rel=1e-6)
    assert cost.points == 15 and cost.held_out is not None and cost.held_out.largest < 1e-6
    assert cost.seconds(counts(1586, 1500)) == pytest.approx(seconds(1586, 1500))
    with pytest.raises(KeyError, match="to_cached"):
        cost.seconds({"new": 1, "among_new": 1})


def test_the_errors_are_those_of_the_points() -> None:
    noisy = [Point(p.counts, p.seconds * (1.1 if i % 2 else 0.9)) for i, p in enumerate(EXACT)]
    cost = fit(noisy, TERMS)
    found = [abs(cost.seconds(p.counts) - p.seconds) / p.seconds for p in noisy]
    assert cost.errors.mean == pytest.approx(sum(found) / len(found))
    assert cost.errors.largest == pytest.approx(max(found))
    assert cost.held_out is None
    assert errors([1.0, 3.0], [2.0, 2.0]) == Errors(0.5, 0.5)


def test_a_held_out_point_has_no_part_in_its_prediction() -> None:
    wrong = [*EXACT[:-1], Point(EXACT[-1].counts, 10 * EXACT[-1].seconds)]
    cost = fit(wrong, TERMS, folds=len(wrong))
    alone = [
        fit([*wrong[:at], *wrong[at + 1 :]], TERMS).seconds(point.counts) for at, point in enumerate(wrong)
    ]
    assert alone[-1] == pytest.approx(EXACT[-1].seconds)
    expected = errors(alone, [point.seconds for point in wrong])
    assert cost.held_out is not None
    assert cost.held_out.mean == pytest.approx(expected.mean)
    assert cost.held_out.largest == pytest.approx(expected.largest) and expected.largest >= 0.9 - 1e-9


def test_the_same_seed_divides_the_points_alike() -> None:
    noisy = [Point(p.counts, p.seconds * (1 + 0.03 * (i % 4))) for i, p in enumerate(EXACT)]
    first = fit(noisy, TERMS, folds=3, seed=1)
    assert fit(noisy, TERMS, folds=3, seed=1) == first
    assert fit(noisy, TERMS, folds=3, seed=2).held_out != first.held_out


@given(st.lists(st.floats(1e-4, 10.0), min_size=len(GRID), max_size=len(GRID)))
def test_no_small_step_to_other_coefficients_is_better(times: list[float]) -> None:
    cost = fit([Point(counts(*at), t) for at, t in zip(GRID, times, strict=True)], TERMS)
    columns = np.array([[1.0, *(counts(*at)[term] for term in TERMS)] for at in GRID])
    columns /= np.array(times)[:, None]
    columns /= (scale := columns.max(axis=0))
    x = np.array([cost.constant, *cost.coefficients.values()]) * scale
    assert (x >= 0).all()
    # The optimum of a convex problem over x >= 0: the slope is 0 where x > 0 and uphill where x = 0.
    slope = columns.T @ (columns @ x - 1)
    assert (slope > -1e-6).all() and np.abs(slope[x > 0]).max() < 1e-6
    assert cost.seconds(counts(9999, 9999)) >= cost.seconds(counts(9999, 0)) >= cost.seconds(counts(9, 0))


def test_terms_are_told_apart_in_order() -> None:
    points = [Point({"a": n, "twice": 2 * n + 3, "same": 5, "none": 0, "b": n % 3}, 1.0) for n in range(1, 9)]
    assert telling(points, ("a", "twice", "same", "none", "b")) == ("a", "b")
    assert telling(points, ("same", "twice", "a")) == ("twice",)
    assert telling(points[:1], ("a", "b")) == telling([], ("a",)) == ()
    with pytest.raises(UserError, match="do not tell apart what twice, same costs"):
        fit(points, ("a", "twice", "same"))
    constant = fit(points, ())
    assert (constant.constant, constant.coefficients) == (pytest.approx(1.0), {})


@pytest.mark.parametrize(
    "bad",
    [
        Point(counts(math.nan, 0), 1),
        Point(counts(1, -1), 1),
        Point(counts(1, 0), 0),
        Point(counts(1, 0), math.inf),
        Point({"new": 1, "among_new": 1}, 1),
    ],
)
def test_a_bad_point_is_named(bad: Point) -> None:
    with pytest.raises(UserError, match=r"points\[15\]"):
        fit([*EXACT, bad], TERMS)


@pytest.mark.parametrize("points", [[], EXACT[:3]])
def test_too_few_points_are_refused(points: list[Point]) -> None:
    with pytest.raises(UserError, match="3 terms need at least 4 points"):
        fit(points, TERMS)


def model() -> CostModel:
    cost = fit(EXACT, TERMS, folds=3)
    host = FittedCost(1e-4, {"requests": 1e-5}, 3, Errors(0.1, 0.2))
    return CostModel("qwen3", "cpu: cpu", {"recommend": cost}, {"recommend": host})


def test_json_round_trip() -> None:
    found = CostModel.from_json(model().to_json())
    assert found == model()
    assert found.seconds("recommend", counts(64, 128)) == pytest.approx(seconds(64, 128))
    with pytest.raises(KeyError, match="rank"):
        found.seconds("rank", counts(1, 1))


@dataclass
class Change:
    path: tuple[str, ...]
    value: object


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (Change(("version",), 2), "version"),
        (Change(("kinds", "recommend", "constant"), -1.0), "not negative"),
        (Change(("kinds", "recommend", "points"), 0), "needs points"),
        (Change(("kinds", "recommend", "coefficients"), {"new": -1e-9}), "not negative"),
        (Change(("kinds", "recommend", "coefficients"), {"new": "1"}), "Expected `float`"),
        (Change(("kinds", "recommend", "errors", "mean"), 0.9), "not above the largest"),
        (Change(("kinds", "recommend", "more"), 1), "more"),
        (Change(("hosts",), {}), "same kinds of work"),
        (Change(("family",), None), "family"),
    ],
)
def test_what_is_no_cost_model_is_refused(change: Change, words: str) -> None:
    content = msgspec.json.decode(model().to_json())
    inner: dict[str, object] = content
    for name in change.path[:-1]:
        nested = inner[name]
        assert isinstance(nested, Mapping)
        inner = nested  # type: ignore[assignment]
    inner[change.path[-1]] = change.value
    with pytest.raises(UserError, match=f"cost model: .*{words}"):
        CostModel.from_json(msgspec.json.encode(content))


@pytest.mark.parametrize(
    "text", [b"", b"{}", b"[1]", b"\xff", b'{"family": "x"', b'{"family": "\xff"}', "\ud800"]
)
def test_what_is_no_json_is_refused(text: bytes | str) -> None:
    with pytest.raises(UserError, match="cost model"):
        CostModel.from_json(text)
