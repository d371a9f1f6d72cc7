# SPDX-License-Identifier: Apache-2.0
"""The DSO benchmark's requests, its baselines' shapes, and what it claims."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks import flame_dso, flame_serving
from benchmarks.flame_dso import (
    ACTIVE,
    FOUR_SIZES,
    MODEL,
    PATHS,
    QUICK_PATHS,
    VISITS,
    Setting,
    ShapeOnDemand,
    Traffic,
)
from jgr.models import params
from jgr.models.scorers import scorer
from jgr.serving.scorers.executors import PartWork
from jgr.serving.scorers.user_block import new_block, user_layout

SMALL = replace(MODEL, n_items=1100, max_items=8, layers=1, hidden=8, heads=2, mlp=8)


def test_users_come_back_with_the_same_history() -> None:
    requests = list(itertools.islice(Traffic("uniform", SMALL), 2 * ACTIVE * VISITS))
    first, again = requests[:ACTIVE], requests[ACTIVE : 2 * ACTIVE]
    assert [r.history for r in first] == [r.history for r in again]
    assert len({r.user_id for r in requests}) == 2 * ACTIVE
    assert all(len(set(r.candidates)) == len(r.candidates) for r in requests)
    assert all(r.history_times == sorted(r.history_times or []) for r in requests)


def test_sizes_are_as_the_mixes_say() -> None:
    sizes = [Traffic("uniform", SMALL, seed).size() for seed in range(2000)]
    assert (min(sizes) < 20, max(sizes) > 1000, max(sizes) <= 1024) == (True, True, True)
    assert np.mean(sizes) == pytest.approx(512, rel=0.05)
    assert {Traffic("four_sizes", SMALL, seed).size() for seed in range(100)} == set(FOUR_SIZES)


def test_a_baseline_pads_keeps_a_bounded_number_of_programs_and_scores_the_same() -> None:
    drawn = params.initialize(scorer(SMALL).spec(SMALL), jax.random.key(0))
    powers = ShapeOnDemand(SMALL, drawn, lambda n: 1 << (n - 1).bit_length(), (), 8, kept=1)
    block, views = new_block(user_layout(powers._needs))
    views["rows"][:3] = [1, 2, 3]
    rows = np.arange(5, dtype=np.int32)
    whole = powers.score(PartWork(rows, block))
    assert whole.shape == (5, 3)
    np.testing.assert_allclose(powers.score(PartWork(rows[:3], block)), whole[:3], atol=1e-5)
    assert (powers.pairs, powers.padding, powers.compiled) == (8, 3 + 1, 2)
    assert list(powers._programs) == [4]


def test_all_paths_are_the_served_engine_and_agree(tmp_path: Path) -> None:
    setting = Setting(cfg=SMALL, sizes=(1024,), smallest=1024, cached_users=2)
    flame_serving.save(tmp_path / "model", SMALL)
    engines = {path: flame_dso.make_engine(path, setting, tmp_path / "model") for path in QUICK_PATHS}
    with asyncio.Runner() as runner:
        try:
            for engine in engines.values():
                runner.run(engine.start())
            flame_dso.agree(runner, engines, SMALL)
            run = runner.run(flame_dso.System(engines["dso_cached"], "four_sizes", SMALL, 2 * ACTIVE).run())
        finally:
            for engine in engines.values():
                runner.run(engine.drain(None))
    assert len(run.latencies_ms) == 2 * ACTIVE and run.pairs >= 128 * 2 * ACTIVE
    assert run.cached == 0  # of sixteen users in turn the room for two finds none again


def test_claims_are_ratios_to_the_power_of_two() -> None:
    def row(mix: str, path: str) -> dict[str, Any]:
        speed = {"dso": 30.0, "dso_cached": 50.0}.get(path, 20.0)
        p99 = {("uniform", "dso"): 5.0, ("four_sizes", "dso"): 9.0}.get((mix, path), 10.0)
        mean = {"median": 1.0}
        return {"mix": mix, "path": path, "pairs_per_s": {"median": speed}, "p99_ms": p99, "mean_ms": mean}

    found = flame_dso.claims([row(mix, path) for mix in flame_dso.MIXES for path in PATHS])
    assert [(claim.value, claim.target, claim.holds) for claim in found][:3] == [
        (1.5, 1.3, True),
        (0.9, 1.0, True),
        (2.5, 1.3, True),
    ]
