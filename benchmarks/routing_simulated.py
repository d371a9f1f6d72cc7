# SPDX-License-Identifier: Apache-2.0
"""What each rule of a fleet's router costs where reports are stale, in virtual time: eight nodes, one and two routers.

The routers are those of a live fleet; what stands for the nodes is told in jgr/simulation/fleet.py. Reports come every
.2, 2 and 7 s, requests at 60, 85 and 110 % of what rotation can do. Three sorts of traffic: a user's tokens are about
two thirds of a prompt, nearly all of it, or a fifth. Counts alone, so that the machine need not be quiet.

The joint score is compared in each run with two others: with *hit*, where requests wait as long as they must, since it
would else be asked for fewer tokens the more requests it loses; and with *load*, in the 99th percentile of latency.

    python -m benchmarks.routing_simulated [--quick]
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import Benchmark, Claim, Measured, Quiet, Row, rounded
from jgr.serving.policies.routing import Router
from jgr.serving.policies.routing_terms import RULES, Rule
from jgr.simulation.fleet import SECOND, Outcomes, World, capacity, simulate, traffic

WORLDS = {
    "both": World(),
    "users": World(candidates=20, item_tokens=8),
    "items": World(user_tokens=400.0, candidates=100, item_tokens=15, user_room=160_000, item_room=45_000),
}
LOADS, PERIODS_S, ROUTERS = (0.6, 0.85, 1.1), (0.2, 2.0, 7.0), (1, 2)
PATIENT_NS = 1 << 60


def run(world: World, rule: Rule, rate: float, period_s: float, routers: int, seconds: float) -> Outcomes:
    """The last two thirds of a run."""
    return simulate(
        world,
        [Router(str(number), rule) for number in range(routers)],
        traffic(world, rate, seconds, seed=1),
        round(period_s * SECOND),
        warm_ns=round(seconds / 3 * SECOND),
    )


def row(name: str, rule: str, load: float, period_s: float, routers: int, out: Outcomes) -> Row:
    """One run's figures."""
    return {
        "traffic": name,
        "rule": rule,
        "load": load,
        "report_s": period_s,
        "routers": routers,
        "hit_rate": rounded(out.hit_rate),
        "tokens_an_answer": rounded(out.tokens),
        "goodput": rounded(out.goodput),
        "p99_ms": rounded(out.quantile_ms(0.99)),
        "imbalance": rounded(out.imbalance),
    }


def claims(rows: Sequence[Row]) -> list[Claim]:
    """The worst of all runs with the joint score."""
    at = {(r["rule"], r["traffic"], r["load"], r["report_s"], r["routers"]): r for r in rows}
    joint = {key[1:]: found for key, found in at.items() if key[0] == "joint"}
    tokens = [
        found["tokens_an_answer"] / at["hit, patient", *key]["tokens_an_answer"]
        for key, found in joint.items()
    ]
    tail = [found["p99_ms"] / at["load", *key]["p99_ms"] for key, found in joint.items()]
    skew = [found["imbalance"] for found in joint.values()]
    return [
        Claim("routing-simulated-tokens-over-hit-only", rounded(max(tokens)), "x", "lower", 1.1),
        Claim("routing-simulated-p99-over-load-only", rounded(max(tail)), "x", "lower", 1.1),
        Claim("routing-simulated-imbalance", rounded(max(skew)), "x", "lower", 1.3),
    ]


def measure(quick: bool, quiet: Quiet) -> Measured:
    """Claims on the joint score's worst runs; a row for each run."""
    seconds = 6.0 if quick else 60.0
    rows: list[Row] = []
    for name, world in list(WORLDS.items())[: 1 if quick else None]:
        most = capacity(world, seconds)
        for load, period_s, routers in itertools.product(LOADS, PERIODS_S, ROUTERS):
            harness.note(
                f"{name}, {load:.0%} of {most:.0f} requests a second, {period_s} s, {routers} routers"
            )
            given = (load * most, period_s, routers, seconds)
            for rule in ("joint", "hit", "load") if quick else RULES:
                rows.append(row(name, rule, load, period_s, routers, run(world, rule, *given)))
            patient = run(replace(world, left_ns=PATIENT_NS), "hit", *given)
            rows.append(row(name, "hit, patient", load, period_s, routers, patient))
    return Measured(claims(rows), rows)


if __name__ == "__main__":
    harness.main(Benchmark("routing_simulated", measure, ("numpy",), (Path(__file__),)))
