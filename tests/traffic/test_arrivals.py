# SPDX-License-Identifier: Apache-2.0
"""Arrival processes against the formulas of their laws, with fixed seeds, and logs that are replayed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from jgr.traffic import arrivals
from jgr.traffic.arrivals import parse_process, replayed
from jgr.traffic.schedule import LoadError

TEXTS = ("constant", "poisson", "gamma:3", "gamma:0.3", "diurnal:5:0.9", "flash:4:0.5:6")


def _rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_constant_arrivals_are_evenly_spaced() -> None:
    assert arrivals.constant(_rng(), 4.0, 1.0).tolist() == [0.0, 0.25, 0.5, 0.75]
    assert arrivals.constant(_rng(), 4.0, 1.1).tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert arrivals.constant(_rng(), 0.1, 1.0).tolist() == [0.0]


@given(st.sampled_from(TEXTS), st.floats(1e-3, 50.0), st.floats(1e-3, 20.0), st.integers(0, 2**32))
def test_times_are_ordered_within_the_duration_and_repeat_with_the_seed(
    text: str, rate: float, duration_s: float, seed: int
) -> None:
    process = parse_process(text)
    times = process.times(_rng(seed), rate, duration_s)
    assert times.dtype == np.float64
    assert (np.diff(times) >= 0).all()
    assert ((times >= 0) & (times < duration_s)).all()
    np.testing.assert_array_equal(times, process.times(_rng(seed), rate, duration_s))


@pytest.mark.parametrize(
    ("text", "cv"), [("poisson", 1.0), ("gamma:1", 1.0), ("gamma:3", 3.0), ("gamma:0.3", 0.3)]
)
def test_gaps_have_their_law(text: str, cv: float) -> None:
    # Kolmogorov and Smirnov's test against the Gamma law, which is exponential for cv = 1. A sum of times cannot hold
    # the shortest gaps of a bursty law: what is compared is longer than a nanosecond.
    gaps = np.diff(parse_process(text).times(_rng(1), 100.0, 200.0))
    law, least = stats.gamma(cv**-2, scale=cv**2 / 100.0), 1e-9
    assert (gaps > least).mean() == pytest.approx(law.sf(least), abs=0.01)
    longer = gaps[gaps > least]
    assert stats.kstest(longer, lambda x: (law.cdf(x) - law.cdf(least)) / law.sf(least)).pvalue > 0.01
    assert gaps.mean() == pytest.approx(0.01, rel=0.08)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.08)


@pytest.mark.parametrize("text", ["poisson", "gamma:3", "gamma:0.3"])
@pytest.mark.parametrize("duration_s", [0.05, 1.0])
def test_a_stationary_process_has_its_rate_from_the_first_moment(text: str, duration_s: float) -> None:
    # A renewal process that began at 0 would have (cv^2 - 1) / 2 more: 4 at cv = 3.
    process, rng = parse_process(text), _rng(2)
    counts = np.array([len(process.times(rng, 20.0, duration_s)) for _ in range(4000)])
    error = counts.std() / math.sqrt(len(counts))
    assert abs(counts.mean() - 20.0 * duration_s) < 4 * error


def test_the_counts_of_a_renewal_process_spread_with_its_cv() -> None:
    # In a long time the variance of the count over its mean is cv^2; of Gamma's shape 1/9 after 100 gaps, nearly.
    process, rng = parse_process("gamma:3"), _rng(3)
    counts = np.array([len(process.times(rng, 100.0, 20.0)) for _ in range(400)])
    assert counts.var() / counts.mean() == pytest.approx(9.0, rel=0.25)


def _chi_square(times: np.ndarray, expected: np.ndarray, edges: np.ndarray) -> float:
    """The p value of Poisson counts between edges against their expectations."""
    counts = np.histogram(times, edges)[0]
    return float(stats.chi2.sf(((counts - expected) ** 2 / expected).sum(), len(expected)))


def test_the_diurnal_rate_is_the_integral_of_its_sine() -> None:
    rate, swing, period_s = 200.0, 0.8, 50.0
    times = arrivals.diurnal(_rng(4), rate, 100.0, period_s, swing)
    edges = np.linspace(0.0, 100.0, 41)
    wave = 2 * math.pi / period_s
    integral = rate * (edges - swing / wave * (np.cos(wave * edges) - 1))
    assert _chi_square(times, np.diff(integral), edges) > 0.01
    # Without a swing the same times would not pass.
    assert _chi_square(times, np.full(40, rate * 2.5), edges) < 1e-9


def test_a_flash_crowd_comes_in_the_middle_of_every_period() -> None:
    rate, every_s, length_s, factor = 100.0, 10.0, 2.0, 5.0
    times = arrivals.flash(_rng(5), rate, 60.0, every_s, length_s, factor)
    edges = np.arange(0.0, 60.5, 0.5)
    middles = (edges[:-1] + edges[1:]) / 2 % every_s
    crowd = (middles > 4.0) & (middles < 6.0)
    assert _chi_square(times, 0.5 * rate * np.where(crowd, factor, 1.0), edges) > 0.01
    assert crowd.sum() == 6 * 4
    assert parse_process("flash:10:2:5").mean_factor == pytest.approx(1 + 4 * 0.2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("uniform", r"no arrivals 'uniform'; there are: constant, poisson, gamma:CV"),
        ("gamma", "must look like gamma:CV"),
        ("gamma:1:2", "must look like gamma:CV"),
        ("gamma:nan", "must look like gamma:CV"),
        ("gamma:x", "must look like gamma:CV"),
        ("gamma:0", "'gamma:0': CV is from 0.01 to 100$"),
        ("poisson:1", "must look like poisson"),
        ("diurnal:0:0.5", "PERIOD_S is above 0"),
        ("diurnal:5:1.5", "SWING from 0 to 1"),
        ("flash:5:5:2", "'flash:5:5:2': LENGTH_S is above 0 and below EVERY_S"),
        ("flash:5:1:0", "FACTOR"),
    ],
)
def test_other_processes_are_refused(text: str, words: str) -> None:
    with pytest.raises(LoadError, match=words):
        parse_process(text)


LOG = np.array([0.0, 1.0, 3.0, 6.0, 10.0])


def test_a_log_keeps_its_pace_without_a_rate() -> None:
    times, length_s = replayed(LOG, None, None, 5)
    assert times.tolist() == LOG.tolist()
    assert length_s == 12.5  # five mean gaps
    times, length_s = replayed(LOG, None, 6.0, 5)
    assert (times.tolist(), length_s) == ([0.0, 1.0, 3.0], 6.0)


def test_a_rate_stretches_a_log_and_keeps_its_shape() -> None:
    times, length_s = replayed(LOG, 4.0, None, 5)
    np.testing.assert_allclose(times, LOG / 10)  # 0.4 a second by its mean gap of 2.5 s, so ten times faster
    assert length_s == 1.25
    times, length_s = replayed(LOG, 2.0, 1.5, 5)
    np.testing.assert_allclose(times, np.array([0.0, 1.0, 3.0]) / 3)
    assert len(times) / length_s == 2.0
    assert replayed(LOG, 2.0, 0.1, 5)[0].tolist() == [0.0]


def test_a_log_that_is_too_long_or_has_one_time_is_refused() -> None:
    with pytest.raises(LoadError, match="more than 4 requests"):
        replayed(LOG, None, None, 4)
    with pytest.raises(LoadError, match="come at one time"):
        replayed(np.zeros(3), 2.0, None, 5)
    assert replayed(np.zeros(3), None, None, 5)[1] == 0.0
