# SPDX-License-Identifier: Apache-2.0
"""The events of DLRMv3's generator have the statistics of its description."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import dlrm_v3
from benchmarks.dlrm_v3 import ACTIVE, CATEGORIES, CHOSEN, Events


@pytest.fixture(scope="module")
def events() -> Events:
    return dlrm_v3.generate(200, 50 * CATEGORIES, scale=0.25)


def test_users_are_active_and_as_busy_as_described(events: Events) -> None:
    counts = np.zeros((200, 100))
    np.add.at(counts, (events.user, events.step), 1)
    active = counts > 0
    assert active.mean() == pytest.approx(ACTIVE, abs=0.01)
    assert counts[active].mean() == pytest.approx(25.0, abs=0.2)
    assert counts[active].std() == pytest.approx(6.2, abs=0.3) and counts[active].min() == 8


def test_the_step_before_the_base_has_everybody() -> None:
    found = dlrm_v3.generate(50, CATEGORIES, steps=4, scale=0.1, base=3)
    assert len(np.unique(found.user[found.step == 2])) == 50


def test_a_user_has_four_categories_and_items_of_them_that_exist(events: Events) -> None:
    size = 50
    assert (events.item // size == events.category).all()
    place = events.item % size
    assert (place < np.maximum(1, size * (events.step + 1) // 100)).all()
    assert np.bincount(place[events.step == 99], minlength=size).min() > 0
    assert max(len(np.unique(events.category[events.user == user])) for user in range(20)) == CHOSEN


def test_interests_narrow_as_an_urn_has_it_and_ratings_are_means(events: Events) -> None:
    shares = []
    for user in range(50):
        counts = np.unique(events.category[events.user == user], return_counts=True)[1]
        shares.append(counts.max() / counts.sum())
    # Even draws of 1,750 events would have .25 + 1.03 * sqrt(.1875 / 1750) = .261 in the mean.
    assert 0.275 < np.mean(shares) < 0.4
    assert events.rating.min() >= (1 + 2 - 0.5) / 2 and events.rating.max() <= (5 + 4.5 + 0.5) / 2
    assert events.rating.mean() == pytest.approx((3.25 + 3.375) / 2, abs=0.25)


def test_old_items_are_read_more_and_all_reads_are_counted(events: Events) -> None:
    found = dlrm_v3.row_popularity(events, 50 * CATEGORIES, rows=10**6)
    assert found.mass.sum() == pytest.approx(1.0, abs=1e-5) and found.mass[0] == pytest.approx(0.5, abs=1e-5)
    assert found.things.sum() == pytest.approx(10**6 + CATEGORIES, rel=1e-5)
    assert found.mass[1] > 3 * found.mass[-4] > 0
