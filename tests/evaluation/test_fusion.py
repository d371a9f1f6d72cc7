# SPDX-License-Identifier: Apache-2.0
"""Reciprocal-rank fusion against a loop over dictionaries."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jgr.evaluation.fusion import reciprocal_rank_fusion

N = 9
RANKING = st.lists(st.integers(0, N - 1), unique=True, max_size=5)
LINES = st.lists(st.tuples(RANKING, RANKING), min_size=1, max_size=6)


@given(LINES, st.integers(1, 12))
def test_fusion_adds_reciprocal_ranks(lines: list[tuple[list[int], list[int]]], k: int) -> None:
    rankings = [np.array([(of + [-1] * 5)[:5] for of in side], np.int32) for side in zip(*lines, strict=True)]
    found = reciprocal_rank_fusion(rankings, k)
    assert found.dtype == np.int32
    for (first, second), top in zip(lines, found.tolist(), strict=True):
        score = dict.fromkeys([*first, *second], Fraction())
        for ranking in (first, second):
            for place, item in enumerate(ranking, 1):
                score[item] += Fraction(1, 60 + place)
        expected = sorted(
            score, key=lambda item: -score[item]
        )  # a stable sort: the first ranking's items first
        assert top == (expected + [-1] * k)[:k]
