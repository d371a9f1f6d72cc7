# SPDX-License-Identifier: Apache-2.0
"""How many replicas are wanted for which waits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jgr.serving.policies.scaling import wanted


@pytest.mark.parametrize(
    ("replicas", "waits_ms", "expected"),
    [
        (2, [100, 100], 2),  # as long as it may be
        (2, [150, 120], 3),
        (2, [250, 150], 4),  # twice the target: two more
        (2, [900, 100], 7),
        (4, [250, 150], 4),  # two of the four start, and will take their part
        (2, [0, 0], 1),
        (2, [30, 20], 1),  # one would wait 50 ms
        (2, [30, 30], 2),  # one would wait 60 ms, which is near what it may
        (3, [50, 40], 3),  # nobody goes while another one starts
        (1, [0], 1),
        (0, [], 1),
        (3, [], 3),  # nobody has told anything yet
    ],
)
def test_how_many_are_wanted(replicas: int, waits_ms: list[float], expected: int) -> None:
    assert wanted(replicas, waits_ms, target_ms=100) == expected


@given(st.integers(1, 50), st.floats(0, 1e5), st.floats(1, 1e4))
def test_one_that_goes_is_not_asked_for_again(replicas: int, total_ms: float, target_ms: float) -> None:
    after = wanted(replicas, [total_ms / replicas] * replicas, target_ms)
    assert after >= 1
    if after < replicas:
        assert after == replicas - 1
        assert wanted(after, [total_ms / after] * after, target_ms) <= after


@given(st.integers(1, 50), st.floats(0, 1e5), st.floats(0, 1e5))
def test_more_waiting_never_wants_fewer(replicas: int, less: float, more: float) -> None:
    low, high = (wanted(replicas, [each] * replicas, 100.0) for each in sorted((less, more)))
    assert low <= high
