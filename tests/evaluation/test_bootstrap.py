# SPDX-License-Identifier: Apache-2.0
"""Bootstrap intervals against scipy, which draws the same resamples from the same seed."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats

from jgr.evaluation import bootstrap

RESAMPLES, SEED = 400, 7


def values(n: int, series: int = 3) -> np.ndarray:
    """Per-query values of hit-rate and reciprocal-rank kind: few distinct ones, series that depend on each other."""
    place = np.random.default_rng(n).integers(1, 15, (n, 1)) + np.arange(series)
    return np.where(place <= 10, 1.0 / place, 0.0)


@pytest.mark.parametrize("n", [2, 57, 1000])
def test_intervals_are_those_of_scipy(n: int) -> None:
    data = values(n)
    means = bootstrap.resampled_means(data, RESAMPLES, SEED)
    low, high = bootstrap.interval(means)
    for i in range(3):
        want = scipy.stats.bootstrap(
            (data[:, i],),
            np.mean,
            n_resamples=RESAMPLES,
            method="percentile",
            rng=np.random.default_rng(SEED),
        )
        np.testing.assert_allclose(np.sort(means[:, i]), np.sort(want.bootstrap_distribution), atol=1e-12)
        np.testing.assert_allclose((low[i], high[i]), want.confidence_interval, atol=1e-12)


def test_a_difference_is_resampled_in_pairs() -> None:
    data = values(200)
    means = bootstrap.resampled_means(data, RESAMPLES, SEED)
    low, high = bootstrap.interval(means[:, 0] - means[:, 2])
    want = scipy.stats.bootstrap(
        (data[:, 0], data[:, 2]),
        lambda a, b, axis: np.mean(a, axis) - np.mean(b, axis),
        paired=True,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(SEED),
    )
    np.testing.assert_allclose((low, high), want.confidence_interval, atol=1e-12)
    unpaired = bootstrap.resampled_means(data[:, 2:], RESAMPLES, SEED + 1)[:, 0]
    wide = np.subtract(*bootstrap.interval(means[:, 0] - unpaired)[::-1])
    assert high - low < wide  # what the two share cancels


def test_blocks_do_not_change_the_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    data = values(100)
    whole = bootstrap.resampled_means(data, RESAMPLES, SEED)
    monkeypatch.setattr(bootstrap, "_COUNTS_PER_BLOCK", 1)
    np.testing.assert_allclose(bootstrap.resampled_means(data, RESAMPLES, SEED), whole, atol=1e-12)


def test_what_does_not_vary_has_no_width() -> None:
    for data in (np.full((50, 2), 0.25), np.array([[0.5, 1.0]])):
        low, high = bootstrap.interval(bootstrap.resampled_means(data, RESAMPLES, SEED))
        np.testing.assert_allclose(low, data[0], atol=1e-15)
        np.testing.assert_allclose(high, data[0], atol=1e-15)
