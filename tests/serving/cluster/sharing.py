# SPDX-License-Identifier: Apache-2.0
"""Replicas in one process that share a ranker's items, and the engine without a cache that they are held against."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import jgr
from jgr.catalog.catalog import load_catalog
from jgr.models import manifest
from tests.serving.cluster.local import LocalFleet
from tests.serving.decoders.test_cached_server import N_ITEMS, make_config

IDS = [f"i{row}" for row in range(N_ITEMS)]
HISTORY = ["i3", "i5", "i8"]
SETTINGS = (
    "cache.policy=item",
    "cache.shadow=0",
    "cache.item_share=0.5",
    "rank.requests=2",
    "profiles.batch=1",
    "fleet.items_mb=0.25",
    "fleet.fetched_mb=0.05",
    "fleet.fetch=always",
    "fleet.fetch_ms=60000",
)


def write_ranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "ranker"
    cache = tmp_path_factory.mktemp("programs")
    config = make_config(folder, *SETTINGS, f"model.compilation_cache={cache}")
    manifest.write(folder, config, load_catalog(folder / "catalog.jsonl"))
    return folder


class Reference:
    """One engine without a cache."""

    def __init__(self, folder: Path) -> None:
        self._engine = jgr.Engine(str(folder), [*SETTINGS[1:], "cache.policy=none"], ["rank"])

    def __call__(self, rows: Sequence[int]) -> Any:
        answer = self._engine.rank(HISTORY, [IDS[row] for row in rows], layout="item_prefix")
        assert answer.usage.cached_tokens == 0
        return pytest.approx({item.item_id: item.score for item in answer.items}, abs=1e-4)

    def close(self) -> None:
        self._engine.close()


def scores(answer: Any) -> dict[str, float]:
    return {item["item_id"]: item["score"] for item in answer["items"]}


def share(fleet: LocalFleet, name: str) -> Any:
    """A replica's part in the items."""
    return fleet.replicas[name].item_share


def served(
    folder: Path,
    settings: Sequence[str],
    run: Callable[[LocalFleet], Awaitable[None]],
    count: int = 2,
    beyond: int = 0,
) -> None:
    async def whole() -> None:
        fleet = LocalFleet(folder, [*SETTINGS, *settings], count, beyond)
        try:
            await fleet.start()
            await run(fleet)
        finally:
            await fleet.close()

    asyncio.run(whole())


async def item_bytes(fleet: LocalFleet, name: str, purpose: str) -> int:
    found = await fleet.series(name, "jgr_fleet_item_bytes_total")
    return round(sum(value for labels, value in found.items() if purpose in labels))
