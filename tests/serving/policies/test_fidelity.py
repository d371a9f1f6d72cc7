# SPDX-License-Identifier: Apache-2.0
"""Agreement of scores against scipy, and the fall back with its hysteresis against a plain reading of its rule."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import softmax
from scipy.stats import entropy, kendalltau

from jgr.serving.policies.fidelity import FEWEST, FIRST, SAMPLES, Watch, agreement

SCORES = st.lists(
    st.tuples(*[st.sampled_from([-3.0, -1.5, 0.0, 0.25, 2.0, 2.5, 7.0])] * 2), min_size=2, max_size=30
)


@given(SCORES)
def test_agreement_is_scipys(pairs: list[tuple[float, float]]) -> None:
    exact, approximate = np.array(pairs).T
    found = agreement(exact, approximate)
    if len(set(exact)) == 1:
        assert found is None
        return
    assert found is not None
    expected = kendalltau(exact, approximate).statistic if len(set(approximate)) > 1 else 0.0
    assert found.tau == pytest.approx(expected, abs=1e-12)
    assert found.kl == pytest.approx(entropy(softmax(exact), softmax(approximate)), abs=1e-12)
    count = min(FIRST, len(exact))
    first = [
        {at for _, at in sorted((-s, at) for at, s in enumerate(x))[:count]} for x in (exact, approximate)
    ]
    assert found.overlap == len(first[0] & first[1]) / count


def test_there_is_no_agreement_without_an_order() -> None:
    one, equal, broken = np.array([1.0]), np.array([2.0, 2.0]), np.array([1.0, np.nan])
    assert agreement(one, one) is agreement(equal, np.array([1.0, 2.0])) is None
    assert agreement(broken, np.array([1.0, 2.0])) is agreement(np.array([1.0, 2.0]), broken) is None
    whole = agreement(np.array([1.0, 3.0, 2.0], np.float32), np.array([1.0, 3.0, 2.0], np.float32))
    assert whole == (1.0, 1.0, 0.0)


@settings(max_examples=60)
@given(
    st.floats(0.01, 2),
    st.lists(st.tuples(st.integers(1, 90), st.sampled_from([1.0, 0.9, 0.6, 0.0, -1.0])), max_size=12),
)
def test_it_falls_back_above_the_limit_and_comes_back_below_half(
    most: float, runs: list[tuple[int, float]]
) -> None:
    watch, seen, fell_back = Watch(most), list[float](), False
    for count, tau in runs:
        for _ in range(count):
            seen.append(1 - tau)
            changed = watch.observe(tau)
            mean = float(np.mean(seen[-SAMPLES:]))
            assert watch.mean == pytest.approx(mean)
            if abs(mean - most) < 1e-9 or abs(mean - most / 2) < 1e-9:
                fell_back = watch.fell_back  # either is right, but for rounding
                continue
            before = fell_back
            if len(seen) >= FEWEST:
                fell_back = mean > most if not fell_back else mean >= most / 2
            assert (watch.fell_back, changed) == (fell_back, fell_back != before)


def test_without_a_limit_nothing_is_decided() -> None:
    watch = Watch(None)
    assert watch.mean == 0
    assert not any(watch.observe(-1.0) for _ in range(2 * FEWEST)) and not watch.fell_back
    assert watch.mean == 2
