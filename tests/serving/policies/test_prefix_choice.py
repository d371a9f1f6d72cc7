# SPDX-License-Identifier: Apache-2.0
"""BAT-10 by its table, and the acceptance check of BAT-19 (5)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jgr.serving.policies.prefix_choice import Policy, Situation, choose

LONG = Situation(user_tokens=100, item_tokens=60, room=False, frequency=3.0, coldest=3.0)
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
        ({"room": True, "frequency": 0.0}, 0.1, "user_prefix"),
        ({"coldest": 0.0, "frequency": 0.1}, 0.1, "user_prefix"),  # nobody is cached
        ({"coldest": 0.0, "frequency": 0.0}, 0.1, "item_prefix"),
        ({"user_tokens": 59, "cached_user": 59, "room": True, "frequency": 9.0}, 0.0, "item_prefix"),
        # Cached, whoever is computed less goes first, however rarely the user comes.
        ({"cached_user": 40, "cached_items": 40, "frequency": 0.0}, 0.1, "user_prefix"),
        ({"cached_user": 40, "cached_items": 41, "room": True, "frequency": 9.0}, 0.1, "item_prefix"),
        # Admitted, a user must be expected to give back the cached items that are computed now for its sake:
        # 4 times in a window are 2 to come, which save 100 - 60 or 100 - 70 tokens each.
        ({"cached_items": 60, "frequency": 4.0, "coldest": 1.0}, 0.1, "user_prefix"),
        ({"cached_items": 70, "frequency": 4.0, "coldest": 1.0}, 0.1, "item_prefix"),
        ({"cached_items": 70, "frequency": 4.0, "room": True}, 0.1, "user_prefix"),
    ],
)
def test_hotness_admits_who_is_hotter_than_the_coldest(change: dict, hysteresis: float, layout: str) -> None:
    """The cache is full of users with frequencies of 5 and 3."""
    assert choose("hotness", replace(LONG, **change), hysteresis) == layout


@pytest.mark.parametrize(
    ("change", "layout"),
    [
        ({"frequency": 3.0}, "item_prefix"),
        ({"frequency": 3.1}, "user_prefix"),  # without a margin
        ({"frequency": 3.1, "cached_items": 60}, "user_prefix"),  # and without a price
        ({"frequency": 0.0, "room": True, "cached_items": 60}, "user_prefix"),
        ({"frequency": 0.0, "cached_user": 1, "cached_items": 60}, "user_prefix"),
        ({"user_tokens": 59, "cached_user": 59, "room": True, "frequency": 9.0}, "item_prefix"),
    ],
)
def test_the_published_rule_compares_frequencies_alone(change: dict, layout: str) -> None:
    assert choose("hotness", replace(LONG, **change), 0.5, "published") == layout
