# SPDX-License-Identifier: Apache-2.0
"""The epoch model against an LRU that is run, a queue that is run, and formulas (SIM-12)."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from statistics import NormalDist

import jax
import numpy as np
import pytest

from jgr.simulation.controller import epochs, workload
from jgr.simulation.controller.epochs import Hits, Traffic, World


@pytest.fixture(scope="module")
def world() -> World:
    return workload.world(workload.zipf_users(4000, 0.6), workload.zipf_rows(300_000_000, 0.88))


characteristic_time, latency, service_s, steady_hits = map(
    jax.jit, (epochs.characteristic_time, epochs.latency, epochs.service_s, epochs.steady_hits)
)
"""Each a program, where its operations one by one would be dozens."""


def traffic(hot: float = 0.2, load: float = 1.0, events: float = 8000.0) -> Traffic:
    return Traffic(np.float32(hot), np.float32(load), np.float32(events))


def test_hit_rates_are_those_of_an_lru_that_is_run() -> None:
    random = np.random.default_rng(0)
    mass = np.arange(1, 2001) ** -0.8
    mass /= mass.sum()
    time = characteristic_time(np.ones(2000, np.float32), mass.astype(np.float32), np.float32(300.0))
    predicted = float((mass * -np.expm1(-mass * float(time))).sum())
    kept: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for at, thing in enumerate(random.choice(2000, 60_000, p=mass).tolist()):
        if thing in kept:
            kept.move_to_end(thing)
            hits += at >= 10_000
        else:
            kept[thing] = None
            if len(kept) > 300:
                kept.popitem(last=False)
    assert hits / 50_000 == pytest.approx(predicted, abs=0.01)


def test_bins_change_hit_rates_little() -> None:
    mass = np.arange(1, 4001) ** -0.7
    shares = (mass / mass.sum()).astype(np.float32)
    whole = characteristic_time(np.ones(4000, np.float32), shares, np.float32(500))
    count, binned = workload.zipf(4000, 0.7, 24)
    few = characteristic_time(count.astype(np.float32), binned.astype(np.float32), np.float32(500))
    rate = [
        float((m * -np.expm1(-m / c * float(t))).sum())
        for m, c, t in ((mass / mass.sum(), 1.0, whole), (binned, count, few))
    ]
    assert rate[0] == pytest.approx(rate[1], abs=0.01)


def test_the_tail_is_that_of_a_queue_that_is_run(world: World) -> None:
    now, hits = traffic(), Hits(np.float32(0.5), np.float32(0.1), np.float32(0.5))
    found = latency(world, now, hits)
    random = np.random.default_rng(1)
    number = 200_000
    lengths = random.choice(np.array(epochs.LENGTHS), number) * 8000.0
    kept = (random.random(number) < 0.2 * 0.5 + 0.8 * 0.1).astype(float)
    service = np.asarray(service_s(world, lengths, kept, hits.rows))
    arrival = np.cumsum(random.exponential(1.0 / float(world.rate), number))
    done = 0.0
    times = np.empty(number)
    for at in range(number):
        done = max(done, arrival[at]) + service[at]
        times[at] = done - arrival[at]
    assert float(found.busy) == pytest.approx(service.sum() / arrival[-1], rel=0.02)
    assert float(found.p99_s) == pytest.approx(np.quantile(times, 0.99), rel=0.1)
    assert float(found.late) == pytest.approx((times > 0.03).mean(), abs=0.02)


def test_a_request_costs_what_the_formula_says(world: World) -> None:
    new = 20 + 100 + 1000
    expected = (
        1e-3 + 6 * 3e-8 * new + 6 * 1.4e-11 * (new * 1020 - 0.5 * 1000**2) + new * 14 * 1024 * 0.5 / 32e9
    )
    found = service_s(world, np.float32(1000), 0.0, np.float32(0.5))
    assert float(found) == pytest.approx(expected, rel=1e-5)
    kept = service_s(world, np.float32(1000), 1.0, np.float32(1.0))
    assert float(kept) == pytest.approx(1e-3 + 6 * 3e-8 * 120 + 6 * 1.4e-11 * 120 * 1020, rel=1e-5)


def test_what_is_lost_is_lost_at_once_and_the_rest_comes_with_the_turnover(world: World) -> None:
    low, high = (steady_hits(world, traffic(), np.float32(split)) for split in (0.3, 0.7))
    step = jax.jit(epochs.step)
    end, mean, _ = step(world, traffic(), high, np.float32(0.3))
    assert float(end.rows) == pytest.approx(float(low.rows), rel=1e-5)
    assert float(high.cold) < float(mean.cold) < float(end.cold) < float(low.cold)
    for _ in range(60):
        end, mean, _ = step(world, traffic(), end, np.float32(0.3))
    np.testing.assert_allclose([float(x) for x in end], [float(x) for x in low], rtol=1e-3)


def test_the_best_split_is_inside_and_falls_with_hot_users(world: World) -> None:
    grid = np.linspace(0.1, 0.9, 41, dtype=np.float32)
    of = jax.jit(jax.vmap(epochs.steady, (None, None, 0)))
    best = [
        float(grid[int(np.asarray(of(world, traffic(hot), grid).p99_s).argmin())]) for hot in (0.2, 0.4, 0.6)
    ]
    assert best == sorted(best, reverse=True)
    assert 0.1 < best[2] < best[0] < 0.9


def test_regimes_are_those_of_the_paper() -> None:
    random = np.random.default_rng(0)
    steady, trend, burst = (workload.traffic(each, random) for each in workload.REGIMES)
    assert set(np.asarray(steady.hot_share).tolist()) == {np.float32(0.2)}
    assert np.asarray(trend.hot_share)[[0, -1]] == pytest.approx([0.15, 0.6])
    hot, load = np.asarray(burst.hot_share), np.asarray(burst.load)
    np.testing.assert_array_equal(hot > 0.5, load > 1.2)
    edges = np.flatnonzero(np.diff(np.r_[0, hot > 0.5, 0]))
    lasts = edges[1::2] - edges[::2]
    assert 5 < len(lasts) < 25 and lasts[:-1].min() >= 3  # the last may be cut by the end


def test_bursts_begin_once_in_twelve_epochs() -> None:
    """As Poisson has it, so the share of epochs without one, of four epochs in the mean, is exp(-4 / 12)."""
    found = workload.traffic("burst", np.random.default_rng(1), 1_000_000)
    assert np.mean(np.asarray(found.hot_share) < 0.5) == pytest.approx(np.exp(-4 / 12), abs=0.004)


def test_measured_popularity_keeps_its_skew() -> None:
    requests = np.array([50, 20, 10] + [1] * 57)
    hot, cold = workload.user_popularity(requests, 6000)
    assert float(hot.things.sum()) == pytest.approx(300)
    assert float(cold.things.sum()) == pytest.approx(5700)
    assert float(hot.mass.sum()) == pytest.approx(1) and float(cold.mass.sum()) == pytest.approx(1)
    rows = workload.row_popularity([(0.9, 0.3), (0.1, 0.7), (0.0, 0.0)], 1000)
    assert float(rows.things.sum()) == pytest.approx(1000)
    each = np.asarray(rows.mass / rows.things)
    assert set(np.round(each, 7)) == {np.float32(0.0003333), np.float32(0.007)}


def test_a_lognormal_law_has_the_shares_of_its_formula() -> None:
    found = workload.lognormal_rows(10**6, 1.8)
    assert found.things.sum() == pytest.approx(1e6, rel=1e-3) and found.mass.sum() == pytest.approx(
        1, rel=1e-5
    )
    normal = NormalDist()
    for top in (1e-3, 1e-2, 0.1, 0.5):  # the share of the reads that the most read rows have
        wanted = normal.cdf(normal.inv_cdf(top) + 1.8)
        ranks, reads = np.cumsum(found.things) / 1e6, np.cumsum(found.mass)
        assert np.interp(top, ranks, reads) == pytest.approx(wanted, abs=0.04)


def test_small_tables_take_their_share_and_no_row_is_lost() -> None:
    rows = workload.lognormal_rows(10**6, 1.8)
    found = workload.with_small_tables(rows, 0.25)
    assert len(found.things) == len(rows.things)
    assert found.things.sum() == pytest.approx(1e6 + workload.SMALL, rel=1e-3)
    assert found.mass.sum() == pytest.approx(1.0, rel=1e-5) and found.mass[0] == pytest.approx(0.25)


@pytest.mark.data("dlrm-embedding-stats")
def test_the_hottest_rows_of_the_statistics_are_there(dataset: Path) -> None:
    for year, least in ((2022, 0.2), (2021, 0.15)):
        found = np.array(workload.dlrm_rows(dataset.parent, year))
        np.testing.assert_allclose(found.sum(0), 1.0, atol=0.003)
        hottest = found[found[:, 0] < 0.0005]
        assert hottest[:, 1].sum() > least, "few rows, and many of the reads"
        assert (found > 0).all()
