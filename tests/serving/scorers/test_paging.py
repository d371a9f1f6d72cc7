# SPDX-License-Identifier: Apache-2.0
"""Scorers whose embeddings are in pages of the pool, over HTTP: their scores are those of resident ones, bit for bit,
whatever the pages hold and wherever the border stands (HLEM-1, HLEM-10)."""

from __future__ import annotations

import dataclasses
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jgr.catalog.catalog import save_catalog
from jgr.config import Config, override
from jgr.models import scorers
from jgr.models.sasrec import SasrecConfig
from jgr.models.scorers import ScorerConfig
from tests.serving.scorer_fakes import CATALOG, HSTU, ITEMS, STU, ScorerServer, draw
from tests.serving.scorers.test_kept_users import CLIMBER, body

SASREC = SasrecConfig(
    n_items=len(ITEMS), max_items=6, hidden=8, layers=1, heads=2, mlp=8, items=HSTU.items
)  # fmt: skip
UNDATED_STU = dataclasses.replace(STU, time_rows=0)
FAMILIES: dict[str, ScorerConfig] = {"sasrec": SASREC, "hstu": HSTU, "stu": UNDATED_STU, "climber": CLIMBER}


def folder_of(folder: Path, cfg: ScorerConfig, tables: str = "float32") -> Path:
    def beside(folder: Path) -> None:
        save_catalog(CATALOG, folder / "catalog.jsonl")

    scorers.save(folder, cfg, draw(cfg), beside, tables)
    return folder


def settings(folder: Path, *more: str) -> Config:
    return override(
        Config(),
        f"model.path={folder}",
        "model.name=tiny",
        "model.compilation_cache=",
        "executors.sizes=4,8",
        "executors.number=1",
        "server.port=0",
        "cache.page_kb=1",
        *more,
    )


PAGED = ("embeddings.tables=paged", "cache.device_mb=0.016")


def asked(cfg: ScorerConfig, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    found = body(cfg, 1 + seed % 6, candidates=rng.permutation(ITEMS)[: 1 + seed % 19].tolist())
    found["history"] = rng.permutation(ITEMS)[: len(found["history"])].tolist()
    if isinstance(cfg, SasrecConfig):
        for name in ("history_times", "time", "history_actions"):
            found.pop(name, None)
    return found | {"user_id": f"u{seed % 3}"}


def answers(config: Config, bodies: list[dict[str, Any]]) -> tuple[list[Any], dict[str, float]]:
    with ScorerServer(config) as server:
        compiled = server.metric('jgr_compilations_total{phase="request"}')
        found = [server.rank(**each)["items"] for each in bodies]
        assert server.metric('jgr_compilations_total{phase="request"}') == compiled
        names = ("hits", "misses", "past")
        counts = {
            name: server.metric(f'jgr_embedding_rows_total{{event="{name}",table="items"}}') for name in names
        }
        counts["resident"] = server.metric('jgr_embedding_resident{table="items"}')
        counts["pages"] = server.metric('jgr_border_pages{of="held"}')
    return found, counts


@pytest.mark.parametrize("name", FAMILIES)
def test_paged_scores_are_bit_for_bit_those_of_resident_embeddings(tmp_path: Path, name: str) -> None:
    cfg = FAMILIES[name]
    folder = folder_of(tmp_path / name, cfg)
    bodies = [asked(cfg, seed) for seed in range(12)]
    resident, none = answers(settings(folder), bodies)
    paged, counts = answers(settings(folder, *PAGED), bodies)
    if name == "climber":  # XLA fuses the gather from another shape in another way: the last bits differ
        assert [[item["item_id"] for item in items] for items in paged] == [
            [item["item_id"] for item in items] for items in resident
        ]
        for one, other in zip(chain(*paged), chain(*resident), strict=True):
            assert one["score"] == pytest.approx(other["score"], abs=1e-6)
    else:
        assert paged == resident
    assert none["hits"] == 0 and counts["hits"] > counts["misses"] > 0 and counts["past"] == 0
    assert counts["misses"] == counts["resident"] <= len(ITEMS)  # each row crossed once
    assert counts["pages"] == 16
