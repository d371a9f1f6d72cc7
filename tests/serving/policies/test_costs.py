# SPDX-License-Identifier: Apache-2.0
"""The prefill cost: exact points give their polynomial back, noisy ones the best that is not negative."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jgr.config import UserError
from jgr.serving.policies.costs import PrefillCost, fit

GRID = list(itertools.product((1, 64, 256, 1024, 4096), (0, 128, 1500)))


def _time(new: float, cached: float) -> float:
    return 2e-3 + 1e-5 * new + 3e-9 * new**2 + 2e-9 * new * cached


def test_exact_points_give_their_polynomial_back() -> None:
    cost = fit([(n, c, _time(n, c)) for n, c in GRID])
    assert cost.coefficients == pytest.approx((2e-3, 1e-5, 3e-9, 2e-9), rel=1e-6)
    assert cost.points == 15 and 0 <= cost.mean_relative_error <= cost.max_relative_error < 1e-9
    assert cost.seconds(1586, 1500) == pytest.approx(_time(1586, 1500))


def test_the_errors_are_those_of_the_points() -> None:
    points = [(n, c, _time(n, c) * (1.1 if i % 2 else 0.9)) for i, (n, c) in enumerate(GRID)]
    cost = fit(points)
    errors = [abs(cost.seconds(n, c) - t) / t for n, c, t in points]
    assert cost.max_relative_error == pytest.approx(max(errors))
    assert cost.mean_relative_error == pytest.approx(sum(errors) / len(errors))


@given(st.lists(st.floats(1e-4, 10.0), min_size=len(GRID), max_size=len(GRID)))
def test_no_small_step_to_other_coefficients_is_better(times: list[float]) -> None:
    cost = fit([(n, c, t) for (n, c), t in zip(GRID, times, strict=True)])
    new, cached = np.array(GRID, np.float64).T
    columns = np.stack([np.ones_like(new), new, new**2, new * cached], 1) / np.array(times)[:, None]
    columns /= (scale := columns.max(axis=0))
    x = np.array(cost.coefficients) * scale
    assert (x >= 0).all()
    # The optimum of a convex problem over x >= 0: the slope is 0 where x > 0 and uphill where x = 0.
    slope = columns.T @ (columns @ x - 1)
    assert (slope > -1e-6).all() and np.abs(slope[x > 0]).max() < 1e-6
    assert cost.seconds(10_000, 10_000) >= cost.seconds(10_000, 0) >= cost.seconds(100, 0) >= 0


def test_json_round_trip() -> None:
    cost = fit([(n, c, _time(n, c)) for n, c in GRID])
    assert PrefillCost.from_json(cost.to_json()) == cost
    for text in (b"{}", b"[", cost.to_json().replace(b"[", b"[-"), cost.to_json().replace(b"[", b"[1.0,")):
        with pytest.raises(UserError, match="prefill cost"):
            PrefillCost.from_json(text)
    with pytest.raises(UserError, match="finite"):
        replace(cost, mean_relative_error=math.nan)


@pytest.mark.parametrize("bad", [(math.nan, 0, 1), (1, -1, 1), (1, 0, 0), (1, 0, math.inf)])
def test_a_bad_point_is_named(bad: tuple[float, float, float]) -> None:
    with pytest.raises(UserError, match=r"points\[15\]"):
        fit([*((n, c, _time(n, c)) for n, c in GRID), bad])


def test_points_that_cannot_tell_are_refused() -> None:
    with pytest.raises(UserError, match="at least 4"):
        fit([])
    with pytest.raises(UserError, match="at least 4"):
        fit([(1, 1, 1.0)] * 3)
    for points in (
        [(n, 0, 1.0) for n, _ in GRID],
        [(n, n, 1.0) for n, _ in GRID],
        [(5, c, 1.0) for _, c in GRID],
    ):
        with pytest.raises(UserError, match="three values of new tokens"):
            fit(points)
