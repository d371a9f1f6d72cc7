# SPDX-License-Identifier: Apache-2.0
"""`jgr serve` with a folder of `jgr kv build` (cache.kv), over real HTTP: what nobody asked for before comes from the
files, answers are those without, and whatever is wrong with the files is a clear error or a miss."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from jgr.cli.kv import build
from jgr.config import Config, ConfigError, UserError, override
from jgr.placement.kv_folder import BLOCKS, INDEX
from jgr.serving.cluster.own_items import read_kv
from jgr.serving.decoders.item_blocks import compute
from jgr.serving.decoders.loading import load_engine
from jgr.serving.versions.deployment import Deployment
from jgr.serving.versions.served_models import Models
from tests.serving.decoders.test_cached_server import N_ITEMS, PATIENCE_S, Served, ids, make_config, scores

HISTORY, ROWS = ids(*range(6)), ids(20, 21, 3, 22)


class World(NamedTuple):
    config: Config
    folder: Path


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    settings = ("cache.policy=blocks", "cache.repair_tokens=1", "cache.item_share=0.5")
    config = make_config(tmp_path_factory.mktemp("model"), *settings)
    folder = tmp_path_factory.mktemp("kv")
    report = asyncio.run(build(config, folder))
    assert report["items"] == N_ITEMS
    more = ("cache.kv_mb=1", "fleet.fetch=always", "fleet.fetch_ms=10000")
    return World(override(config, *more), folder)


@pytest.fixture(scope="module")
def alone(world: World) -> Iterator[dict[str, Any]]:
    """The answer of a server without the folder."""
    server = Served(world.config, ["rank"])
    answer = server.rank("u", HISTORY, ROWS)
    server.stop()
    assert answer["usage"]["cached_tokens"] == 0
    yield answer


def first_answer(config: Config, break_it: Any = lambda: None) -> tuple[dict[str, Any], list[float]]:
    """What a server that was never asked before answers, and how many candidates were fetched and computed."""
    server = Served(config, ["rank"])
    try:
        read_kv(server._listener.models, config)  # as jgr serve does
        break_it()
        answer = server.rank("u", HISTORY, ROWS)
        text = server.call("/metrics").body.decode()
        counted = [
            float(found[1]) if found else 0.0
            for outcome in ("fetched", "computed")
            for found in [re.search(rf'^jgr_fleet_items_missing_total{{.*"{outcome}".*}} (\S+)$', text, re.M)]
        ]
        again = server.rank("u", HISTORY, ROWS)
        assert scores(again) == pytest.approx(scores(answer), abs=1e-5)
        return answer, counted
    finally:
        server.stop()


def test_candidates_that_nobody_asked_for_come_from_the_folder(world: World, alone: dict[str, Any]) -> None:
    answer, counted = first_answer(override(world.config, f"cache.kv={world.folder}"))
    assert counted == [4, 0]
    assert scores(answer) == pytest.approx(scores(alone), abs=1e-4)
    items = [part for part in answer["explain"] if part["segment"] == "item"]
    assert [part["cached_tokens"] for part in items] == [1] * 4, (
        "all but the first token of each, which is computed"
    )
    assert answer["usage"]["computed_tokens"] < alone["usage"]["computed_tokens"]


@pytest.mark.parametrize("what", ["deleted", "cut", "damaged"])
def test_whatever_becomes_of_the_files_the_answer_is_right(
    world: World, alone: dict[str, Any], tmp_path: Path, what: str
) -> None:
    folder = tmp_path / "kv"
    shutil.copytree(world.folder, folder)
    blocks = folder / BLOCKS
    if what == "cut":
        blocks.write_bytes(blocks.read_bytes()[: blocks.stat().st_size // 2])
    if what == "damaged":
        blocks.write_bytes(bytes(blocks.stat().st_size))

    def delete() -> None:
        if what == "deleted":
            shutil.rmtree(folder)

    answer, (fetched, computed) = first_answer(override(world.config, f"cache.kv={folder}"), delete)
    assert scores(answer) == pytest.approx(scores(alone), abs=1e-4)
    assert fetched + computed == 4
    if what == "deleted":
        assert fetched == 4, "what is mapped is there as long as it is mapped"
    else:
        assert computed > 0, "a block that is not whole is computed"


def test_a_folder_that_does_not_fit_is_refused_at_the_start(world: World, tmp_path: Path) -> None:
    def refused(*settings: str) -> str:
        config = override(world.config, *settings)
        with pytest.raises(UserError) as caught:
            read_kv(Models([Deployment(load_engine(config), config.catalog)]), config)
        return str(caught.value)

    assert "there is no such folder" in refused(f"cache.kv={tmp_path}/none")
    assert "is of another model, or of other cells" in refused(
        f"cache.kv={world.folder}", "cache.cell_tokens=1"
    )
    none = refused(f"cache.kv={world.folder}", "cache.policy=user", "cache.repair_tokens=0")
    assert "cache.kv: no model keeps items" in none
    with pytest.raises(
        ConfigError, match=r"server\.journal: cannot be replayed with fleet\.items or cache\.kv"
    ):
        load_engine(override(world.config, f"cache.kv={world.folder}", f"server.journal={tmp_path}/j"))
    assert (world.folder / INDEX).exists()


def test_an_engine_that_fell_back_computes_items_for_others_and_fetches_none(
    world: World, tmp_path: Path
) -> None:
    """Its own prompts are computed whole, but what an item is alone is exact all the same."""
    drift = ("cache.repair_share=0.25", "cache.shadow=0.01", "cache.max_drift=0.04")
    config = override(world.config, *drift)
    assert asyncio.run(build(config, tmp_path / "kv"))["items"] == N_ITEMS

    server = Served(override(config, f"cache.kv={tmp_path / 'kv'}"), ["rank"])
    try:
        read_kv(server._listener.models, server.config)
        watch = server.engine.served.watch
        while not watch.fell_back:
            watch.observe(-1.0)
        answer = server.rank("u", HISTORY, ROWS)
        assert answer["usage"]["full_recompute"]
        assert "jgr_fleet_items_missing_total{" not in server.call("/metrics").body.decode()
        loop = server.engine._loop
        made = asyncio.run_coroutine_threadsafe(compute(server.engine, [1, 2, 29]), loop).result(PATIENCE_S)
        assert sorted(made) == [1, 2, 29]
    finally:
        server.stop()


def test_several_devices_keep_no_items_for_others(world: World, tmp_path: Path) -> None:
    config = override(world.config, "model.tensor_parallel=2")
    with pytest.raises(UserError, match="jgr kv build: computes on one device, not with model"):
        asyncio.run(build(config, tmp_path / "kv"))
