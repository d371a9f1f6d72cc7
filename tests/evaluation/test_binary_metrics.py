# SPDX-License-Identifier: Apache-2.0
"""AUC, GAUC, log loss and normalised entropy against their definitions, pair by pair."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jgr.evaluation.binary_metrics import Areas, auc, gauc, log_loss, normalised_entropy

IMPRESSION = st.tuples(st.integers(0, 4), st.integers(0, 1), st.integers(7, 10), st.integers(0, 3))


def by_pairs(scores: list[int], labels: list[int]) -> float:
    pairs = [
        1.0 if yes > no else 0.5 if yes == no else 0.0
        for yes, a in zip(scores, labels, strict=True)
        for no, b in zip(scores, labels, strict=True)
        if a > b
    ]
    return sum(pairs) / len(pairs) if pairs else math.nan


@given(st.lists(IMPRESSION, min_size=1, max_size=30))
def test_areas_are_shares_of_pairs(impressions: list[tuple[int, int, int, int]]) -> None:
    scores, labels, users, times = (list(column) for column in zip(*impressions, strict=True))
    a, b, c = (np.array(column) for column in (scores, labels, users))
    assert auc(a / 4, b) == pytest.approx(by_pairs(scores, labels), nan_ok=True)

    repeated = [np.repeat(x, times) for x in (a, b)]
    weighted = by_pairs(repeated[0].tolist(), repeated[1].tolist())
    assert Areas(a / 4, b).weighted(np.array(times)) == pytest.approx(weighted, nan_ok=True)

    of_users = [
        (by_pairs(a[c == user].tolist(), b[c == user].tolist()), int((c == user).sum()))
        for user in set(users)
    ]
    defined = [(area, size) for area, size in of_users if not math.isnan(area)]
    expected = (
        sum(area * size for area, size in defined) / sum(size for _, size in defined) if defined else math.nan
    )
    assert gauc(a / 4, b, c) == pytest.approx(expected, nan_ok=True)


def test_losses_by_hand() -> None:
    scores, labels = np.array([0.9, 0.2, 0.5]), np.array([1, 0, 0])
    nats = -(math.log(0.9) + math.log(0.8) + math.log(0.5)) / 3
    assert log_loss(scores, labels) == pytest.approx(nats)
    entropy = -(math.log(1 / 3) + 2 * math.log(2 / 3)) / 3
    assert normalised_entropy(scores, labels) == pytest.approx(nats / entropy)
    assert normalised_entropy(np.full(3, 1 / 3), labels) == pytest.approx(1)
    assert log_loss(np.array([0.0]), np.array([1])) == pytest.approx(-math.log(1e-7))
    assert math.isnan(normalised_entropy(scores, np.ones(3, int)))
