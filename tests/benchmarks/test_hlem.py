# SPDX-License-Identifier: Apache-2.0
"""The virtual server of hlem_split over a small world, and what hlem_border counts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from benchmarks import hlem_live, hlem_split, hlem_world
from benchmarks.hlem_border import Link
from benchmarks.hlem_live import History, Live
from benchmarks.hlem_world import Costs, Requests, World
from jgr.cache.entries import serves
from jgr.models import table_file

COSTS = Costs((0.001, 0.0, 0.0), (0.0005, 0.0))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[World, Path]:
    random = np.random.default_rng(0)
    shape = (4 * 200, hlem_world.TABLES)
    world = World(
        np.full(4, 100, np.int32),
        np.arange(4) * 200,
        random.integers(0, 500, shape, np.int32),
        random.integers(0, 500, (8, 2, hlem_world.TABLES), np.int32),
        np.ones(4),
        np.ones(8),
    )
    path = tmp_path_factory.mktemp("t") / "rows.table"
    table_file.write(
        path, "rows", [hlem_world.expected(np.arange(500))], width=hlem_world.WIDTH, dtype="float16"
    )
    return world, path


def asked(users: list[int], gap_s: float = 0.1) -> Requests:
    count = len(users)
    return Requests(np.arange(count) * gap_s, np.array(users, np.int32), np.zeros(count, np.int32))


def test_latencies_are_the_window_the_link_and_the_costs(
    small: tuple[World, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hlem_live, "POOL_BYTES", 8 << 20)
    world, path = small
    live = Live(world, COSTS, path, 1e6, 0.5)
    found = live.run(asked([0, 0, 1]), 1)
    unique = len(np.unique(np.concatenate([world.rows[:101].ravel(), world.drawn[0].ravel()])))
    first_s = hlem_live.WINDOW_S + hlem_live.TRANSFER_S + unique * 128 / 1e6 + 0.001 + 0.0005
    assert found.latency_ms[0] == pytest.approx(first_s * 1e3)
    assert found.latency_ms[1] < found.latency_ms[0], "the user and most rows are kept"
    assert found.user_hits[0] == pytest.approx(1 / 3)
    counts = live.rows.counts("rows")
    assert found.row_hits[0] == pytest.approx(counts["hits"] / (counts["hits"] + counts["misses"]))
    assert found.work_s == pytest.approx(0.0015 + 0.0005 + 0.0015)


def test_what_is_read_back_is_compared(small: tuple[World, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hlem_live, "POOL_BYTES", 8 << 20)
    monkeypatch.setattr(hlem_live, "CHECK_EVERY", 1)
    world, path = small
    assert Live(world, COSTS, path, 1e6, 0.5).run(asked([0, 1, 0]), 1).checked > 500
    live = Live(world, COSTS, path, 1e6, 0.5)
    monkeypatch.setattr(hlem_world, "expected", lambda rows: np.zeros((len(rows), hlem_world.WIDTH)))
    with pytest.raises(AssertionError, match="a row is not the table's"):
        live.run(asked([0]), 1)


def test_tables_of_their_own_hold_the_same_rows(
    small: tuple[World, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hlem_live, "POOL_BYTES", 8 << 20)
    monkeypatch.setattr(hlem_live, "CHECK_EVERY", 1)
    monkeypatch.setattr(hlem_world, "ROWS", 500)
    world, fused = dataclasses.replace(small[0], firsts=(0, 120, 400)), small[1]
    hlem_world.write_tables(tmp_path, world.firsts)
    asks = asked([0, 1, 0, 2])
    apart = Live(world, COSTS, tmp_path, 1e6, 0.5)
    found, one = apart.run(asks, 1), Live(world, COSTS, fused, 1e6, 0.5).run(asks, 1)
    assert (found.checked, found.row_hits[0]) == (one.checked, one.row_hits[0])
    assert all(apart.rows.counts(name)["misses"] for name in ("rows0", "rows1", "rows2"))
    late_s = found.link_s - one.link_s
    assert late_s == pytest.approx(2 * hlem_live.TRANSFER_S * round(late_s / (2 * hlem_live.TRANSFER_S)))
    assert late_s > 0, "three transfers, and not one"


def test_runs_with_tables_apart_are_compared_with_the_fused_one_and_nothing_else() -> None:
    tasks = hlem_split.make_tasks(quick=False, limit_ms=30.0, epochs=20)
    assert [task.separate for task in tasks].count(True) == 2
    tails = {task: 20.0 + 10 * task.split + 3.0 * task.separate for task in tasks}
    some = np.ones(20)
    found = {
        task: hlem_live.Epochs(tail * some, some, some, some, some, 0.5, 1.0, 1.0, 1, 0)
        for task, tail in tails.items()
    }
    claims = {claim.id: claim.value for claim in hlem_split.claims(found, modelled=0.1)}
    assert claims["hlem-split-separate-over-fused"] == pytest.approx(28 / 25)
    assert claims["hlem-split-full-over-best-static-steady"] == pytest.approx(25 / 21, rel=1e-3)
    assert claims["hlem-split-modelled-over-best"] == 1.0 and len(claims) == 12


def test_a_history_serves_one_that_grew() -> None:
    class Valid:
        tokens, digest = 5, History(3, 5).digest

    assert serves(Valid(), History(3, 9)) and not serves(Valid(), History(3, 4))
    assert not serves(Valid(), History(4, 9))


def test_a_link_carries_one_read_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("benchmarks.hlem_border.time.perf_counter", lambda: 0.0)
    monkeypatch.setattr("benchmarks.hlem_border.time.sleep", slept.append)

    class Source:
        counts = None

        def read(self, table: str, rows: np.ndarray) -> np.ndarray:
            return np.zeros((len(rows), 10), np.uint8)

    link = Link(Source(), 100.0)
    for count in (10, 20):
        assert len(link.read("t", np.arange(count))) == count
    assert slept == [1.0, 3.0]
