# SPDX-License-Identifier: Apache-2.0
"""The PDA benchmark's world: its network, its requests, its two ways to the model, and what it claims."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from benchmarks import flame_pda, flame_serving, pda_world
from benchmarks.delay_proxy import Line, Network
from benchmarks.pda_world import CANDIDATES, HISTORY, SCHEMA, Traffic
from jgr.features.addresses import open_store


def test_latencies_are_lognormal_as_asked() -> None:
    line = Line(Network(median_ms=5.0, p99_ms=20.0), seed=0)
    drawn = np.array([line.latency_s() for _ in range(100_000)]) * 1e3
    assert np.percentile(drawn, [50, 99]) == pytest.approx([5.0, 20.0], rel=0.03)


def test_answers_share_the_link() -> None:
    line = Line(Network(bytes_per_s=1000.0), seed=0)
    assert line.arrival_s(10.0, 500) == pytest.approx(10.5)
    assert line.arrival_s(10.1, 100) == pytest.approx(10.6)  # behind the first
    assert line.arrival_s(20.0, 100) == pytest.approx(20.1)


def test_requests_are_distinct_within_and_zipf_over_items() -> None:
    (whole,) = Traffic(CANDIDATES).requests(1)
    assert sorted(whole.rows.tolist()) == list(range(CANDIDATES))
    requests = list(Traffic(5000, seed=1).requests(200))
    assert all(len(set(request.ids)) == CANDIDATES for request in requests)
    assert all(request.ids == [str(row) for row in request.rows] for request in requests)
    assert requests[0].history.shape == (HISTORY,)
    history = np.concatenate([request.history for request in requests])
    share = 1 / np.arange(1, 5001) ** 1.05
    counted = np.bincount(history, minlength=5000)[:3] / len(history)
    assert counted == pytest.approx((share / share.sum())[:3], rel=0.05)


def test_records_are_as_long_as_the_text_says() -> None:
    assert len(SCHEMA.features) == 12 and SCHEMA.record_bytes == 364
    assert SCHEMA.faults(list(pda_world.random_records(3, np.random.default_rng(0)))) == []


def test_all_paths_are_the_served_engine_and_agree_and_count_what_they_took(tmp_path: Path) -> None:
    """Over a store of this machine: the paths' engines give one request the same scores, each by its features."""
    items, address = 300, str(tmp_path / "features.sqlite")
    store = open_store(address, 30.0, create=True)
    pda_world.fill(store, items)
    store.close()
    flame_serving.save(tmp_path / "model", dataclasses.replace(pda_world.MODEL, n_items=items))
    setting = flame_pda.Setting(items=items, cache_mb=8.0, ttl_s=1e4)
    with ExitStack() as stack:
        runner, systems = stack.enter_context(asyncio.Runner()), {}
        for path in flame_pda.PATHS:
            engine = flame_pda.make_engine(tmp_path / "model", items, address, path, setting)
            far = open_store(address, 30.0)
            systems[path] = flame_pda.System(runner, engine, far, Traffic(items), setting)
            stack.callback(systems[path].close)
        flame_pda.agree(runner, [system.engine for system in systems.values()])
        found = {path: system.run(5 / flame_pda.FIRST_RATE) for path, system in systems.items()}
    assert all(len(served.answers) == 5 for served in found.values())
    everything = 5 * CANDIDATES * SCHEMA.record_bytes
    # Without a cache too, requests that overlap share a fetch that is under way.
    assert found["sync_missing"].bytes < found["no_cache"].bytes <= everything
    missing = {path: sum(answer.missing for answer in served.answers) for path, served in found.items()}
    assert missing["no_cache"] == missing["sync_missing"] == 0 < missing["full"]


def test_claims_are_ratios_of_medians() -> None:
    def row(path: str, pairs: float, mean: float) -> dict[str, object]:
        return {"path": path, "pairs_per_s_at_load": {"median": pairs}, "mean_ms": {"median": mean}}

    found = flame_pda.claims([row("no_cache", 10.0, 8.0), row("full", 25.0, 2.0)])
    assert [(claim.value, claim.target) for claim in found] == [(2.5, 1.9), (4.0, 1.7)]
