# SPDX-License-Identifier: Apache-2.0
"""The search for a capacity against a queue whose capacity is known, with and without noise."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from jgr.traffic import load_lines
from jgr.traffic.capacity import ROUNDS, Found, Round, find, holds, requests_needed
from jgr.traffic.schedule import LoadError

SERVICE_S, LIMIT_S, SHARE = 0.010, 0.100, 0.99


def _waits(rate: float, n: int, rng: np.random.Generator) -> np.ndarray:
    """Waits of n requests of a Poisson process at one server of constant service time, by Lindley's recursion."""
    steps = SERVICE_S - rng.exponential(1 / rate, n)
    walk = np.concatenate([[0.0], np.cumsum(steps)])
    return (walk - np.minimum.accumulate(walk))[:-1]


def _true_capacity() -> float:
    """The rate at which the share waits at most LIMIT_S - SERVICE_S: Erlang's formula for M/D/1, by bisection."""

    def share(rate: float) -> float:
        load, patience = rate * SERVICE_S, (LIMIT_S - SERVICE_S) / SERVICE_S
        terms = [
            (load * (k - patience)) ** k / math.factorial(k) * math.exp(-load * (k - patience))
            for k in range(math.floor(patience) + 1)
        ]
        return (1 - load) * sum(terms)

    low, high = 1.0, 99.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if share(middle) >= SHARE else (low, middle)
    return low


def _queue(seed: int, stall: Callable[[int], bool] = lambda number: False) -> Callable[[float], Round]:
    """Rounds of an M/D/1 queue; one that stalls loses a tenth of its requests to another process of the machine."""
    rng, rounds = np.random.default_rng(seed), 0

    def measure(rate: float) -> Round:
        nonlocal rounds
        n = max(20_000, requests_needed(SHARE))
        late = _waits(rate, n, rng) + SERVICE_S > LIMIT_S
        if stall(rounds):
            late[: n // 10] = True
        rounds += 1
        return Round(n, int(n - late.sum()), {"rate": rate})

    return measure


@pytest.mark.parametrize("first", [1.0, 40.0, 1000.0])
def test_it_finds_the_capacity_of_a_queue_from_either_side(first: float) -> None:
    true = _true_capacity()
    assert 70 < true < 85  # of the 100 a second that the server could do without a limit
    found = find(_queue(0), first, SHARE, most_probes=30)
    assert found.capacity is not None and found.fails_at is not None
    assert found.fails_at / found.capacity <= 1.05
    assert 0.93 * true < found.capacity < 1.02 * true
    assert all(probe.holds == (probe.rate <= found.capacity) for probe in found.probes)


def test_a_stall_of_the_machine_does_not_fail_a_rate() -> None:
    # Every other round is disturbed: each rate that holds needs its second round, or not even that.
    true, calm = _true_capacity(), find(_queue(1), 20.0, SHARE, most_probes=30)
    found = find(_queue(1, stall=lambda number: number % 2 == 0), 20.0, SHARE, most_probes=30)
    assert found.capacity is not None and calm.capacity is not None
    assert 0.93 * true < found.capacity < 1.02 * true
    assert max(len(probe.rounds) for probe in found.probes if probe.holds) == ROUNDS == 2
    assert {len(probe.rounds) for probe in calm.probes if probe.holds} == {1}


def _cliff(limit: float) -> Callable[[float], Round]:
    return lambda rate: Round(1000, 1000 if rate <= limit else 0, {})


def test_the_bracket_grows_and_the_probes_are_bounded() -> None:
    found = find(_cliff(35.0), 10.0, SHARE, most_probes=4)
    assert [probe.rate for probe in found.probes] == [10.0, 20.0, 40.0, pytest.approx(math.sqrt(800))]
    assert found.capacity == pytest.approx(math.sqrt(800))
    assert found.fails_at == 40.0
    assert find(_cliff(1e9), 10.0, SHARE, most_probes=3)[:2] == (40.0, None)
    assert find(_cliff(0.0), 10.0, SHARE, most_probes=3)[:2] == (None, 2.5)
    assert find(_cliff(0.0), 10.0, SHARE, most_probes=16, lowest=2.0)[:2] == (None, 2.5)
    assert find(_cliff(0.0), 1.0, SHARE, most_probes=16, lowest=2.0)[:2] == (None, 1.0)


def test_a_round_holds_only_with_confidence() -> None:
    # 99.2 % of 1,000 in time is above the share, and too few to show it.
    assert not holds(Round(1000, 992, {}), SHARE)
    assert holds(Round(10_000, 9_930, {}), SHARE)
    assert not holds(Round(0, 0, {}), SHARE)
    n = requests_needed(SHARE)
    assert holds(Round(n, n - 1, {}), SHARE) and not holds(Round(n - 1, n - 2, {}), SHARE)
    # The exact law: of n requests with a share of .99, at most one is late with a probability of at most .025.
    late = 0.99**n + n * 0.01 * 0.99 ** (n - 1)
    assert late <= 0.025 < 0.99 ** (n - 1) + (n - 1) * 0.01 * 0.99 ** (n - 2)
    with pytest.raises(LoadError, match="above 0 and below 1"):
        requests_needed(1.0)


def test_a_rate_at_which_the_share_is_missed_hardly_ever_holds() -> None:
    rng = np.random.default_rng(0)
    n = requests_needed(SHARE)
    rounds = rng.binomial(n, SHARE - 1e-9, (20_000, ROUNDS))
    passed = np.array([holds(Round(n, hits, {}), SHARE) for hits in range(n + 1)])[rounds].any(axis=1)
    assert passed.mean() < 0.05


def _report(found: Found) -> dict[str, object]:
    return {
        "slo_ms": 100.0, "share": SHARE, "capacity_per_s": found.capacity, "fails_at_per_s": found.fails_at,
        "client_limited": False,
        "probes": [{"rate": p.rate, "holds": p.holds, "rounds": [r.figures for r in p.rounds]} for p in found.probes],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (35.0, "capacity  28.28/s, and 40/s does not hold"),
        (1e9, "at least 80/s"),
        (0.0, "none of the rates holds, down to 1.25/s"),
    ],
)
def test_the_lines_say_what_was_tried(limit: float, words: str) -> None:
    first, probes = load_lines.capacity_lines(_report(find(_cliff(limit), 10.0, SHARE, most_probes=4)))
    assert words in first
    assert "99.00% of the requests" in first
    assert probes.startswith(f"probes    10/s {'holds' if limit else 'does not hold (in 2 rounds)'}, ")
