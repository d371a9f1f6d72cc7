# SPDX-License-Identifier: Apache-2.0
"""How runs are timed and fitted: on a clock that the runs move themselves."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from jgr.models.costs import Cost
from jgr.serving.engine import cost_profile
from jgr.serving.engine.cost_profile import Trial, choose, spaced


class Machine:
    """Its clock moves while a trial runs: by launch_s, by device_s while its output is waited for, by collect_s."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ran: list[str] = []

    def trial(
        self,
        kind: str,
        cost: Cost,
        launch_s: float,
        device_s: list[float],
        collect_s: float,
        requests: int = 1,
    ) -> Trial:
        durations = itertools.cycle(device_s)

        def launch() -> Any:
            self.ran.append(f"{kind} {cost.products}")
            self.now += launch_s
            return "pending"

        def outputs(pending: Any) -> Any:
            assert pending == "pending"
            self.now += next(durations)
            return ()

        def collect(pending: Any) -> None:
            assert pending == "pending"
            self.now += collect_s

        return Trial(kind, f"{cost.products}", cost, requests, launch, collect, outputs)

    def measure(self, trials: list[Trial], rounds: int = 5) -> list[cost_profile.Timed]:
        return cost_profile.measure(trials, rounds=rounds, clock=lambda: self.now)


def test_a_runs_time_is_the_median_of_its_rounds_and_the_hosts_part_is_what_is_not_waited_for() -> None:
    machine = Machine()
    # The two calls of the first round do not count; one that was disturbed hardly does.
    trial = machine.trial("part", Cost(5), 0.25, [9.0, 9.0, 1.0, 3.0, 2.0, 50.0, 2.0], 0.125)
    (found,) = machine.measure([trial])
    assert (found.seconds, found.host_s) == (2.375, 0.375)
    assert found.spread == pytest.approx((3.375 - 2.375) / 2.375)
    assert (found.kind, found.label, found.cost, found.requests) == ("part", "5", Cost(5), 1)


def test_trials_take_turns_in_another_order_each_round() -> None:
    machine = Machine()
    trials = [machine.trial("part", Cost(n), 0, [1.0], 0) for n in range(6)]
    found = machine.measure(trials, rounds=4)
    assert [one.cost.products for one in found] == list(range(6))
    rounds = [machine.ran[12 + 6 * at : 18 + 6 * at] for at in range(4)]  # after the first, of two calls each
    assert all(sorted(one) == sorted(rounds[0]) for one in rounds)
    assert len(set(map(tuple, rounds))) == 4


def test_short_runs_are_repeated_in_their_turn() -> None:
    machine = Machine()
    short = machine.trial("part", Cost(1), 0, [0.5e-3], 0)
    machine.measure([short, machine.trial("part", Cost(2), 0, [0.5], 0)], rounds=3)
    assert machine.ran.count("part 1") == 2 + 3 * 4 and machine.ran.count("part 2") == 2 + 3


def test_the_fit_is_of_each_kind_and_of_its_host() -> None:
    machine = Machine()
    sizes = itertools.product((10**6, 10**7, 10**8), (10**6, 10**7), (1, 4))
    trials = [
        machine.trial("recommend", Cost(x, y), 1e-3 * batch, [1e-9 * x + 4e-9 * y], 2e-3, batch)
        for x, y, batch in sizes
    ]
    trials += [machine.trial("rank", Cost(10**6, 7), 0.5, [0.25], 0) for _ in range(2)]
    timed = machine.measure(trials)
    model = cost_profile.fit(timed, "qwen3")
    host = model.hosts["recommend"]
    assert (host.constant, host.coefficients["requests"]) == (pytest.approx(2e-3), pytest.approx(1e-3))
    fitted = model.kinds["recommend"]
    assert set(fitted.coefficients) == {"products", "attention"}  # the others are 0 everywhere
    assert fitted.held_out is not None and fitted.points == 12
    # What follows no term is in the errors: the host's part grows with the batch alone.
    assert 0 < fitted.held_out.mean < 0.5
    assert model.kinds["rank"].coefficients == {} and model.kinds["rank"].constant == pytest.approx(0.75)
    report = cost_profile.report(timed, model)
    assert report["kinds"]["recommend"]["held_out"]["mean"] == fitted.held_out.mean
    assert report["hosts"]["recommend"]["constant"] == host.constant
    assert len(report["points"]) == 14 and report["points"][0]["cost"]["products"] == 10**6


def test_choices_have_the_corners_and_are_bounded() -> None:
    axes = [(1, 2, 4), (16, 32, 64, 128), (8, 64)]
    found = choose(axes, 12)
    assert len(found) == len(set(found)) == 12 and found == sorted(found)
    assert set(itertools.product((1, 4), (16, 128), (8, 64))) < set(found) < set(itertools.product(*axes))
    assert choose(axes, 99) == sorted(itertools.product(*axes))
    assert len(choose(axes, 3)) == 3 and choose([(5,)], 3) == [(5,)]


def test_spaced_values_halve() -> None:
    assert spaced(512, 4) == (64, 128, 256, 512)
    assert spaced(512, 4, least=100) == (100, 128, 256, 512)
    assert spaced(100, 4, unit=8) == (8, 24, 48, 100)
    assert spaced(1, 3) == (1,) and spaced(3, 4) == (1, 3)
    assert all(value in np.array(spaced(7, 3)) for value in (1, 3, 7))
