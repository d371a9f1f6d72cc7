# SPDX-License-Identifier: Apache-2.0
"""BAT-10 by its table, and the acceptance check of BAT-19 (5)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jgr.serving.policies.prefix_choice import Policy, Situation, choose

LONG = Situation(user_tokens=100, item_tokens=60, cached=False, room=False, frequency=3.0, coldest=3.0)
SHORT = replace(LONG, user_tokens=59)


@pytest.mark.parametrize(
    ("policy", "long", "short"),
    [
        ("none", "user_prefix", "user_prefix"),
        ("user", "user_prefix", "user_prefix"),
        ("item", "item_prefix", "item_prefix"),
        ("cache_agnostic", "user_prefix", "item_prefix"),
        ("hotness", "item_prefix", "item_prefix"),
    ],
)
def test_each_policy(policy: Policy, long: str, short: str) -> None:
    assert (choose(policy, LONG), choose(policy, SHORT)) == (long, short)
    assert choose(policy, replace(LONG, user_tokens=60)) == long, "as long is long enough"


@pytest.mark.parametrize(
    ("change", "hysteresis", "layout"),
    [
        ({"frequency": 3.0}, 0.0, "item_prefix"),
        ({"frequency": 3.1}, 0.0, "user_prefix"),
        ({"frequency": 3.1}, 0.1, "item_prefix"),
        ({"frequency": 3.4}, 0.1, "user_prefix"),
        ({"cached": True, "frequency": 0.0}, 0.1, "user_prefix"),
        ({"room": True, "frequency": 0.0}, 0.1, "user_prefix"),
        ({"coldest": None, "frequency": 9.0}, 0.1, "item_prefix"),
        ({"user_tokens": 59, "cached": True, "room": True, "frequency": 9.0}, 0.0, "item_prefix"),
    ],
)
def test_hotness_admits_who_is_hotter_than_the_coldest(change: dict, hysteresis: float, layout: str) -> None:
    """The cache is full of users with frequencies of 5 and 3."""
    assert choose("hotness", replace(LONG, **change), hysteresis) == layout
