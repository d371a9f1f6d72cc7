# SPDX-License-Identifier: Apache-2.0
"""How long a router takes for one request: rank the nodes, book it at the best one, end an earlier one.

100 nodes report 2000 of 20,000 users and 5000 of 20,000 items each, in filters of 8 KB, and 200 requests are in
flight. A request has a user, 100 candidates and a deadline. Beside the decision, a report is heard in which a tenth of
the entries are others than in the one before. One call after the other in one thread; nothing is sent anywhere.

    python -m benchmarks.routing_decision [--quick]
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks import harness
from benchmarks.harness import Benchmark, Claim, Measured, Quiet, Row, rounded
from jgr.serving.policies.digests import digest
from jgr.serving.policies.routing import Ask, Report, Router
from jgr.serving.policies.routing_terms import RULES, Rule

NODES, CANDIDATES, IN_FLIGHT = 100, 100, 200
USERS = ITEMS = 20_000
HELD_USERS, HELD_ITEMS = 2000, 5000
BITS = 16


class World(NamedTuple):
    """Requests, and two reports of each node: [node][0 or 1]."""

    asks: Sequence[Ask]
    reports: Sequence[tuple[Report, Report]]


def world(nodes: int, requests: int, candidates: int = CANDIDATES, seed: int = 0) -> World:
    """Everybody is asked for alike, so that nothing is looked up twice in a row."""
    rng = np.random.default_rng(seed)
    asks = [
        Ask(
            str(number),
            f"user:{rng.integers(USERS)}",
            1500.0,
            tuple(f"item:{row}" for row in rng.choice(ITEMS, candidates, replace=False)),
            15.0,
            32.0,
            100_000_000,
        )
        for number in range(requests)
    ]
    return World(asks, [_reports(rng) for _ in range(nodes)])


def _reports(rng: np.random.Generator) -> tuple[Report, Report]:
    users, items = rng.permutation(USERS)[: 2 * HELD_USERS], rng.permutation(ITEMS)[: 2 * HELD_ITEMS]
    made = []
    for late in (0, 1):
        moved_users, moved_items = late * HELD_USERS // 10, late * HELD_ITEMS // 10
        made.append(
            Report(
                digest((f"user:{row}" for row in users[moved_users : moved_users + HELD_USERS]), BITS),
                digest((f"item:{row}" for row in items[moved_items : moved_items + HELD_ITEMS]), BITS),
                float(10_000 + late),
                {"me": 100.0, "other": float(rng.integers(10_000))},
            )
        )
    return made[0], made[1]


def decisions(rule: Rule, given: World) -> list[float]:
    """The time of each decision, in us, after the first that fill the fleet."""
    router = Router("me", rule, BITS)
    names = [f"node-{number}" for number in range(len(given.reports))]
    router.become(names)
    for name, (report, _) in zip(names, given.reports, strict=True):
        router.heard(name, report)
    flying: deque[str] = deque()
    took_us = []
    for number, ask in enumerate(given.asks):
        now_ns = number * 1_000_000
        begun = time.perf_counter_ns()
        name = router.rank(ask, now_ns)[0]
        router.sent(ask, name, now_ns)
        if len(flying) >= IN_FLIGHT:
            router.ended(flying.popleft())
        took_us.append((time.perf_counter_ns() - begun) / 1e3)
        flying.append(ask.id)
    router.check()
    return took_us[IN_FLIGHT:]


def hearings(given: World) -> list[float]:
    """The time that each second report takes, in us."""
    router = Router("me", "joint", BITS)
    names = [f"node-{number}" for number in range(len(given.reports))]
    router.become(names)
    took_us = []
    for late in (0, 1):
        for name, reports in zip(names, given.reports, strict=True):
            begun = time.perf_counter_ns()
            router.heard(name, reports[late])
            took_us.append((time.perf_counter_ns() - begun) / 1e3)
    router.check()
    return took_us[len(names) :]


def quantiles(runs: Sequence[Sequence[float]]) -> dict[str, float]:
    """The median over the runs of each run's median and 99th percentile."""
    each = np.median([np.percentile(run, (50, 99)) for run in runs], axis=0)
    return {"p50_us": rounded(float(each[0])), "p99_us": rounded(float(each[1]))}


def measure(quick: bool, quiet: Quiet) -> Measured:
    """Claims on the joint score's median and 99th percentile; rows of all rules, and of a report."""
    rounds, requests = (1, 1000) if quick else (5, 5000)
    given = world(NODES, requests)
    variants: dict[str, Callable[[], list[float]]] = {rule: partial(decisions, rule, given) for rule in RULES}
    variants["report"] = partial(hearings, given)
    found = harness.interleave(variants, rounds, quiet)
    rows: list[Row] = [
        {"of": name, "nodes": NODES, "candidates": CANDIDATES, **quantiles(runs)}
        for name, runs in found.items()
    ]
    joint = quantiles(found["joint"])
    return Measured(
        [Claim(f"routing-decision-{q}", joint[f"{q}_us"], "us", "lower", 100.0) for q in ("p50", "p99")],
        rows,
    )


if __name__ == "__main__":
    harness.main(Benchmark("routing_decision", measure, ("numpy",), (Path(__file__),)))
