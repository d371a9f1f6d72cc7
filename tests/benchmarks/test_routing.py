# SPDX-License-Identifier: Apache-2.0
"""The two benchmarks of a fleet's router, small: what they run, and that their claims are about the worst run."""

from __future__ import annotations

from typing import Any, cast

import pytest

from benchmarks import routing_decision, routing_simulated
from benchmarks.harness import Quiet, Row
from benchmarks.titles import title
from jgr.evaluation.machine import CpuTimes
from jgr.simulation.fleet import World


class Still:
    """A machine that is always quiet."""

    def wait(self) -> CpuTimes:
        return CpuTimes(0, 0, 0)

    def was_quiet_since(self, start: CpuTimes) -> bool:
        return True


def test_every_decision_after_the_fleet_is_filled_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    world = routing_decision.world(9, 230, candidates=5)
    monkeypatch.setattr(routing_decision, "world", lambda nodes, requests: world)
    measured = routing_decision.measure(True, cast(Quiet, Still()))
    assert [row["of"] for row in measured.rows] == [*routing_decision.RULES, "report"]
    assert all(0 < row["p50_us"] <= row["p99_us"] for row in measured.rows)
    joint = measured.rows[0]
    assert [claim.value for claim in measured.claims] == [joint["p50_us"], joint["p99_us"]]
    assert len(routing_decision.decisions("joint", world)) == 30
    assert len(routing_decision.hearings(world)) == 9
    assert world.reports[0][0].users != world.reports[0][1].users


def test_a_claim_is_about_the_worst_run() -> None:
    def rows(load: float, tokens: float, p99: float, imbalance: float) -> list[Row]:
        made: list[Any] = []
        for rule, factor in (("joint", 1.0), ("load", 0.5), ("hit, patient", 0.25)):
            made.append(
                {
                    "rule": rule, "traffic": "both", "load": load, "report_s": 2.0, "routers": 1,
                    "tokens_an_answer": tokens * factor, "p99_ms": p99 * factor, "imbalance": imbalance * factor,
                }
            )  # fmt: skip
        return made

    both = [*rows(0.6, 100, 10, 1.5), *rows(1.1, 200, 20, 1.2)]
    both[1]["p99_ms"] = 20.0
    found = routing_simulated.claims(both)
    assert [claim.value for claim in found] == [4.0, 2.0, 1.5]
    assert not any(claim.holds for claim in found)
    assert len({title(claim.to_json()) for claim in found}) == 3


def test_a_run_is_a_row() -> None:
    world = World(nodes=2, users=50, items=100, candidates=5)
    out = routing_simulated.run(world, "joint", 40.0, 2.0, 2, 3.0)
    row = routing_simulated.row("both", "joint", 0.6, 2.0, 2, out)
    assert row["goodput"] == 1 and 0 < row["hit_rate"] < 1 and row["p99_ms"] > 4
    assert out == routing_simulated.run(world, "joint", 40.0, 2.0, 2, 3.0)
