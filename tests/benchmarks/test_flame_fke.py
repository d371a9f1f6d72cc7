# SPDX-License-Identifier: Apache-2.0
"""The FKE benchmark counts every call and every FLOP once, and claims what its rows say."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest

from benchmarks import fke_stages, flame_fke
from benchmarks.fke_stages import Stage, Work
from benchmarks.flame_fke import Run
from jgr.models import climber_costs
from jgr.models.climber import BASE

TINY = dataclasses.replace(BASE, n_items=50, max_items=8, layers=1, hidden=8, heads=2, mlp=8, experts=2)


def test_calls_of_all_streams_are_counted() -> None:
    ticks = itertools.count(step=0.25)
    run = flame_fke.under_load(lambda: 0.0, 1, 1.0, clock=lambda: next(ticks))
    # Asked for the end, the start, and by the stream: before the first call, and behind every one.
    assert run.milliseconds == [250.0, 250.0]
    assert run.calls == 2 / 1.0


def test_answers_of_all_clients_are_counted() -> None:
    ticks, asked = itertools.count(step=0.25), list[str]()

    class Engine:
        async def answer(self, request: Any) -> Any:
            asked.append(request)

    requests: Any = ["a", "b", "c"]
    run = asyncio.run(flame_fke.drive(Engine(), requests, 1, 1.5, clock=lambda: next(ticks)))
    assert run.milliseconds == [250.0, 250.0, 250.0, 250.0]
    assert (run.calls, asked) == (4 / 1.5, ["a", "b", "c", "a"])


def test_the_served_builds_score_the_same_user(tmp_path: Path) -> None:
    engines = flame_fke.make_engines(tmp_path / "model", TINY, 3, 1)
    assert set(engines) == {"op_by_op", "xla", "fused"}
    with asyncio.Runner() as runner:
        try:
            for engine in engines.values():
                runner.run(engine.start())
            request = flame_fke.make_request(TINY, 3, 0)
            answers = [runner.run(engine.answer(request)) for engine in engines.values()]
        finally:
            for engine in engines.values():
                runner.run(engine.drain(None))
    fused = flame_fke.scores_of(answers[-1])
    assert sorted(fused) == sorted(request.candidates)
    assert all(len(scores) == 3 for scores in fused.values())
    assert flame_fke.difference(answers) < 1e-5
    moved = copy.deepcopy(answers[0])
    moved.items[1].scores["like"] += 0.25
    assert flame_fke.difference([*answers, moved]) == pytest.approx(0.25, abs=1e-5)


@pytest.mark.parametrize("candidates", [128, 512])
def test_the_stages_are_the_whole(candidates: int) -> None:
    works = fke_stages.works(BASE, candidates, 4, small=10)
    whole = climber_costs.cost(BASE, climber_costs.of_both(BASE, candidates))
    assert sum(work.flops for work in works.values()) == whole.flops
    products = (
        128 * (2 * 6 + 2 * 4) * 128 + 3 * (128 * 4 + 128 * 128 + 128) + 4 * 128 * 2
    )  # of a candidate's heads
    assert works["heads"].flops == 2 * candidates * products
    both = climber_costs.exponentials(BASE, climber_costs.of_both(BASE, candidates), 4)
    assert works["history"].exponentials + works["candidates"].exponentials == both


def test_rows_and_claims_say_what_was_timed() -> None:
    rates = {"square_1024": 4e9, "qkv": 5e9, "bytes": 1e9, "exponentials": 2e9}
    runs = {"op_by_op": [Run(1.0, [8.0, 12.0])], "xla": [Run(2.0, [4.0])], "fused": [Run(4.0, [2.0])]}
    row = flame_fke.make_row(TINY, 5, runs, rates, ("square_1024", "qkv"))
    fused = row["builds"]["fused"]
    assert fused["pairs_per_s"]["median"] == 20.0
    assert fused["share_of_matmul_peak"] == pytest.approx(4 * row["flops"] / 5e9, rel=1e-2)
    assert row["builds"]["op_by_op"]["latency_ms"] == {"mean": 10.0, "p99": 11.96, "calls": 2}

    stages = {
        "linear": Stage(lambda: None, Work(1e9, 1e8)),
        "history": Stage(lambda: None, Work(1e8, 1e8, 1e9)),
    }
    found = flame_fke.make_stages(stages, {"linear": 4.0, "history": 1.0}, rates, ("square_1024", "qkv"))
    assert found["linear"] == {"ms": 250.0, "least_ms": 200.0, "bound": "flops", "share": 0.8}
    assert found["history"] == {"ms": 1000.0, "least_ms": 500.0, "bound": "exponentials", "share": 0.5}

    row |= {"workload": "long", "max_difference": 1e-6, "stages": found}
    assert [(c.id, c.value, c.target) for c in flame_fke.claims([row], "cpu")] == [
        ("climber-builds-differ-by", 1e-6, 1e-4),
        ("fused-over-op-by-op-throughput-long", 4.0, 1.0),
        ("fused-climber-share-of-matmul-peak-long", fused["share_of_matmul_peak"], 0.5),
    ]
    on_gpu = {claim.id: claim for claim in flame_fke.claims([row], "gpu")}
    assert on_gpu["fused-over-op-by-op-throughput-long"].target == 6.1
    assert on_gpu["share-of-roofline-of-linear-long"].holds
    pairs = on_gpu["fused-pairs-per-s-long"]
    assert (pairs.value, pairs.target) == (5 * 4.0, 1.38e6)
