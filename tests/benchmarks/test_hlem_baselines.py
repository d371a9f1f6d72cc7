# SPDX-License-Identifier: Apache-2.0
"""The baselines of the memory controller: each finds what it is told of."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest

from benchmarks import hlem_controller
from benchmarks.hlem_baselines import PROFILED, SEEN, Bo, Exact, Lstm, Network
from jgr.serving.policies.memory_signals import STATE, Limits, Signals
from jgr.simulation.controller import episodes, workload
from jgr.simulation.controller.epochs import Traffic


def signals(p99_ms: float, hot: float = 0.2) -> Signals:
    return Signals(hot, 0.3, 0.6, 8000.0, 0.0, p99_ms, 300)


def test_the_gaussian_process_finds_the_least_of_a_parabola() -> None:
    of = Bo(Limits())
    splits = [of.split]
    for _ in range(18):
        splits.append(of.decide(signals(20 + 100 * (splits[-1] - 0.64) ** 2)))
    assert np.abs(np.array(splits[-5:]) - 0.64).max() < 0.1


def test_the_exact_search_takes_the_least_of_the_nearest_profiled_curve() -> None:
    world = workload.sized(
        workload.world(workload.zipf_users(3000, 0.6), workload.zipf_rows(10**8, 0.8)), 0.6, 0.9
    )
    of = Exact(Limits(), world)
    for hot in (0.1, 0.33, 0.6):
        nearest = PROFILED[np.abs(PROFILED - hot).argmin()]
        alone = Traffic(*(np.full(1, value, np.float32) for value in (nearest, 1.0, 8000.0)))
        wanted = episodes.GRID[np.asarray(episodes.table(world, alone))[0].argmin()]
        assert of.decide(signals(20.0, hot)) == pytest.approx(wanted)


def test_the_lstm_waits_for_its_states_and_then_gives_the_networks_split() -> None:
    weights = jax.jit(Network().init)(jax.random.key(0), np.zeros((1, SEEN, STATE), np.float32))
    of = Lstm(Limits(), weights)
    found = [of.decide(signals(20.0 + at)) for at in range(SEEN + 1)]
    assert found[: SEEN - 1] == [0.5] * (SEEN - 1) and found[SEEN] != 0.5
    assert all(0.1 <= split <= 0.9 for split in found)


def test_foresight_is_the_best_of_all_courses_that_the_step_allows() -> None:
    costs = np.random.default_rng(0).random((4, 6))
    courses = (
        course
        for course in itertools.product(range(6), repeat=4)
        if all(abs(before - after) <= 2 for before, after in itertools.pairwise(course))
    )
    least = min(sum(costs[at, place] for at, place in enumerate(course)) for course in courses)
    assert hlem_controller._least_course(costs, 2) == pytest.approx(least / 4)
    bowl = 30.0 * (1 + (episodes.GRID - 0.5) ** 2)
    found = hlem_controller.foresight(np.tile(bowl, (20, 1)))
    assert found["gap"] == found["regret"] == found["best_static_regret"] == 0.0
    assert found["flat"] == pytest.approx(0.2), "a hundredth above the least is a tenth to each side"
