# SPDX-License-Identifier: Apache-2.0
"""The drawn loss: a running mean that stands where it is measured, in short runs and in long ones."""

from __future__ import annotations

import numpy as np
import pytest

from jgr.training.curves import smoothed


@pytest.mark.parametrize(("steps", "window"), [(0, 1), (1, 1), (30, 1), (150, 7), (5000, 50)])
def test_the_mean_of_a_straight_line_lies_on_it(steps: int, window: int) -> None:
    at = np.arange(1.0, steps + 1)
    found = smoothed(np.stack([at, 8 - 0.001 * at], axis=1))
    assert found.shape == (max(0, steps - window + 1), 2)
    np.testing.assert_allclose(found[:, 1], 8 - 0.001 * found[:, 0])
    if steps:
        assert found[0, 0] == pytest.approx((1 + window) / 2)


def test_what_goes_up_and_down_is_smoothed_away() -> None:
    at = np.arange(1.0, 1001)
    found = smoothed(np.stack([at, 3 + (-1) ** at], axis=1))
    np.testing.assert_allclose(found[:, 1], 3)
