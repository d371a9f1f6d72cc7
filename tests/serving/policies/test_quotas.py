# SPDX-License-Identifier: Apache-2.0
"""Quotas against a bucket of exact fractions, and shares against a count."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jgr.serving.policies.quotas import NS_PER_S, Bucket, Places, Share


@given(
    st.sampled_from(
        [Fraction(1, 1000), Fraction(1, 2), Fraction(1), Fraction(8), Fraction(1000), Fraction(10**6)]
    ),
    st.integers(1, 20),
    st.lists(st.integers(0, 3 * NS_PER_S), max_size=60),
)
def test_a_bucket_gives_what_an_exact_one_gives(rate: Fraction, burst: int, gaps: list[int]) -> None:
    bucket, tokens, now = Bucket(float(rate), burst), Fraction(burst), 10**12
    for gap in gaps:
        now += gap
        tokens = min(Fraction(burst), tokens + rate * gap / NS_PER_S)
        wait_ns = bucket.take(now)
        if tokens >= 1:
            assert wait_ns == 0
            tokens -= 1
        else:
            assert wait_ns == (1 - tokens) / rate * NS_PER_S


def test_after_the_wait_that_it_names_there_is_a_token_and_not_before() -> None:
    bucket = Bucket(3.0, 2)
    assert [bucket.take(5) for _ in range(2)] == [0, 0]
    wait_ns = bucket.take(5)
    assert wait_ns == 333_333_333
    assert bucket.take(5 + wait_ns - 1) == 1
    assert bucket.take(5 + wait_ns) == 0
    assert bucket.take(5 + wait_ns) == 333_333_333


@pytest.mark.parametrize(("share", "size", "most"), [(0.5, 5, 2), (1.0, 3, 3), (0.001, 10, 1)])
def test_a_share_is_of_each_queue(share: float, size: int, most: int) -> None:
    held = Share(share)
    assert [held.enter("a", size) for _ in range(most + 1)] == [True] * most + [False]
    assert held.enter("b", size)
    held.leave("a")
    assert held.enter("a", size) and not held.enter("a", size)
    for _ in range(most):
        held.leave("a")
    with pytest.raises(AssertionError, match="nothing is held"):
        held.leave("a")


def test_places_are_held_and_given_back() -> None:
    places = Places(2)
    assert [places.enter() for _ in range(3)] == [True, True, False]
    places.leave()
    assert [places.enter() for _ in range(2)] == [True, False]
