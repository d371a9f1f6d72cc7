# SPDX-License-Identifier: Apache-2.0
"""Categories of features and values of slots whose embeddings are in pages of the pool, over HTTP: scores are those of
resident ones, and a row crosses once (HLEM-1). Two dozen tables share the pool, as those of DLRM do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from jgr.cli.embeddings import upload
from jgr.config import Config, UserError
from jgr.features.addresses import open_store
from jgr.features.schema import Schema
from jgr.models import scorers, tables
from jgr.models.climber import ClimberConfig, Feature
from jgr.models.table_file import TableFile
from jgr.serving.versions.loading import load_any
from tests.features.redis_process import RedisProcess
from tests.serving.scorer_fakes import ITEMS, ScorerServer
from tests.serving.scorers.test_kept_users import CLIMBER
from tests.serving.scorers.test_paging import (
    UNDATED_STU,
    asked,
    folder_of,
    moved_after_each_run,
    settings,
)

CATEGORIES = tuple(Feature(f"f{at}", 1 + at % 3, 5 + 3 * at) for at in range(24))
"""Of 1 to 3 categories an item, with tables of 5 to 74 rows."""
WIDE = dataclasses.replace(CLIMBER, features=(Feature("price", 1), *CATEGORIES))
SCHEMA = Schema.parse("price:float32," + ",".join(f"{of.name}:int32[{of.width}]" for of in CATEGORIES))
RNG = np.random.default_rng(0)
COLUMNS = {"price": RNG.normal(0, 50, (len(ITEMS), 1))} | {
    of.name: RNG.integers(-1, 10 * of.rows, (len(ITEMS), of.width)) * RNG.integers(0, 2, (len(ITEMS), 1))
    for of in CATEGORIES
}
"""Many more ids than rows, half of the items without one, and a few ids that are none."""
WITHOUT = 7
"""The store has none of every so many items."""
SLOW = ("features.max_wait_ms=30000", "features.timeout_ms=30000", "features.absent_ttl_s=3600")
PAGED = ("embeddings.tables=paged", "cache.device_mb=0.2")
KEPT = 20
SHARES = ("part", "request", "cache")


@pytest.fixture(autouse=True)
def every_table_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "LEAST_ROWS", 0)


@pytest.fixture
def wide(tmp_path: Path) -> Iterator[Callable[..., Config]]:
    """The configuration of a Climber with all the tables, and its store."""
    server = RedisProcess(tmp_path)
    store = open_store(server.address, 30.0)
    kept = [row for row in range(len(ITEMS)) if row % WITHOUT]
    records = SCHEMA.pack(COLUMNS)
    store.put_many([ITEMS[row] for row in kept], [records[row] for row in kept])
    store.set_schema(str(SCHEMA))
    store.close()
    folder = folder_of(tmp_path / "wide", WIDE)
    yield lambda *more: settings(folder, f"features.store={server.address}", *SLOW, *more)
    server.kill()


def event(server: ScorerServer, name: str, table: str) -> float:
    return server.metric(f'jgr_embedding_rows_total{{event="{name}",table="{table}"}}')


def resident(server: ScorerServer, table: str) -> float:
    return server.metric(f'jgr_embedding_resident{{table="{table}"}}')


def items_of(server: ScorerServer, bodies: list[dict[str, Any]]) -> list[Any]:
    compiled = server.metric('jgr_compilations_total{phase="request"}')
    found = [server.rank(**body)["items"] for body in bodies]
    assert server.metric('jgr_compilations_total{phase="request"}') == compiled
    return found


def require_same(one: list[Any], other: list[Any]) -> None:
    """XLA fuses a gather from an array of another shape in another way: Climber's last bits differ."""
    for left, right in zip(chain(*one), chain(*other), strict=True):
        assert left["item_id"] == right["item_id"]
        assert left["score"] == pytest.approx(right["score"], abs=1e-5)


def rows_asked_for(bodies: list[dict[str, Any]], of: Feature) -> set[int]:
    """Computed here once more, from what the store was given."""
    found = set[int]()
    for item in {item for body in bodies for item in body["candidates"]}:
        row = ITEMS.index(item)
        if row % WITHOUT:
            found |= {int(value) % of.rows for value in COLUMNS[of.name][row] if value > 0}
    return found


@pytest.mark.parametrize("share", ["part", "request"])
def test_categories_in_pages_are_scored_as_resident_ones_and_cross_once(
    wide: Callable[..., Config], share: str
) -> None:
    bodies = [asked(WIDE, seed) for seed in range(12)]
    shared = f"executors.share_user={share}"
    with ScorerServer(wide(shared)) as server:
        expected = items_of(server, bodies)
    with ScorerServer(wide(shared, *PAGED)) as server:
        require_same(items_of(server, bodies), expected)
        for of in CATEGORIES:
            rows = rows_asked_for(bodies, of)
            name = f"features.{of.name}"
            assert rows and resident(server, name) == len(rows) == event(server, "misses", name)
            assert event(server, "past", name) == 0 < event(server, "hits", name)


def test_scores_are_exact_while_two_dozen_tables_and_users_take_pages_from_each_other(
    wide: Callable[..., Config],
) -> None:
    bodies = [asked(WIDE, seed) for seed in range(40)]
    kept = ("executors.share_user=cache", "cache.device_mb=0.12")
    with ScorerServer(wide(*kept)) as server:
        expected = items_of(server, bodies)
    with ScorerServer(wide(*kept, "embeddings.tables=paged", "memory.split=0.7")) as server:
        border = moved_after_each_run(server.engine.served)
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda body: server.rank(**body)["items"], bodies))
        assert border.counts["moves"] > 40 and border.counts["to_users"] > 0
        assert sum(event(server, "evicted", f"features.{of.name}") for of in CATEGORIES) > 0
    require_same(found, expected)


def test_rows_that_the_folder_lacks_of_any_table_come_from_a_server(
    tmp_path: Path, wide: Callable[..., Config]
) -> None:
    whole, few = tmp_path / "wide", tmp_path / "few"
    remote = wide().features.store  # features and rows have keys of their own, so one server will do
    report = upload(whole, remote, KEPT, few, overwrite=False)
    cut = {of.name: of.rows for of in CATEGORIES if of.rows > KEPT}
    assert {name: there["new"] for name, there in report.items()} == {
        "items": len(ITEMS) - KEPT,
        **{f"features.{name}": rows - KEPT for name, rows in cut.items()},
    }
    bodies = [asked(WIDE, seed) for seed in range(12)]
    with ScorerServer(wide(*PAGED)) as server:
        expected = items_of(server, bodies)
    lacking = (f"model.path={few}", f"embeddings.remote={remote}", "embeddings.timeout_ms=30000")
    with ScorerServer(wide(*PAGED, *lacking)) as server:
        assert items_of(server, bodies) == expected
        for of in CATEGORIES:
            far = {row for row in rows_asked_for(bodies, of) if row >= KEPT}
            assert event(server, "remote", f"features.{of.name}") == len(far)
            assert of.name not in cut or far
    with redis.Redis.from_url(remote) as client:
        client.delete(*client.keys("jgr:rows:features.f23:*"))
    with pytest.raises(
        UserError, match=r"table features\.f23: the server of embeddings\.remote has no rows of"
    ):
        load_any(wide(*PAGED, *lacking))


@pytest.mark.parametrize("share", SHARES)
def test_values_of_slots_in_pages_are_scored_as_resident_ones_bit_for_bit(tmp_path: Path, share: str) -> None:
    folder = folder_of(tmp_path / "m", UNDATED_STU)
    contexts: list[dict[str, int]] = [{"slot0": 3, "slot1": 1}, {"slot1": 0}, {}, {"slot0": 0}]
    bodies = [asked(UNDATED_STU, seed) | {"context": contexts[seed % 4]} for seed in range(12)]
    shared = f"executors.share_user={share}"
    with ScorerServer(settings(folder, shared)) as server:
        expected = items_of(server, bodies)
    with ScorerServer(settings(folder, shared, *PAGED)) as server:
        assert items_of(server, bodies) == expected
        assert (
            resident(server, "slots") == 4 == event(server, "misses", "slots")
        )  # rows 0, 3, 4 + 0 and 4 + 1
    without = [body | {"context": {}} for body in bodies]
    with ScorerServer(settings(folder, shared, *PAGED)) as server:
        assert items_of(server, without) != expected
        assert resident(server, "slots") == 0


def test_only_tables_worth_a_page_are_written_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "LEAST_ROWS", 50)
    folder = folder_of(tmp_path / "m", WIDE, "float16")
    large = [f"features.{of.name}" for of in CATEGORIES if of.rows >= 50]
    assert sorted(path.name for path in (folder / "embeddings").iterdir()) == sorted(
        ["items.table", *(f"{name}.table" for name in large)]
    )
    cfg, params = scorers.load(folder, paged=True)
    assert isinstance(cfg, ClimberConfig)
    assert tables.missing(cfg, params) == ("items", *large)
    whole = scorers.load(folder)[1]
    assert not tables.missing(cfg, whole)
    read = np.asarray(whole.features[CATEGORIES[-1].name])
    assert (read == TableFile(folder / "embeddings" / f"{large[-1]}.table").rows).all()


def test_what_cannot_be_served_is_refused_at_start(tmp_path: Path, wide: Callable[..., Config]) -> None:
    with pytest.raises(
        UserError, match=r"features\.tables: paged, but the rows of features\.f0 are in a table"
    ):
        load_any(wide(*PAGED, "features.tables=paged"))
    with pytest.raises(UserError, match=r"cache.device_mb: 20 pages of 1 KB; a batch needs 25 for rows"):
        load_any(wide(PAGED[0], "cache.device_mb=0.02"))
    table = tmp_path / "wide" / "embeddings" / "features.f3.table"
    content = table.read_bytes()
    table.write_bytes(content[:4200])
    for more in ((), PAGED):
        with pytest.raises(UserError, match=r"features\.f3\.table: damaged checkpoint: it has 4200 bytes"):
            load_any(wide(*more))
    table.unlink()
    for more in ((), PAGED):
        with pytest.raises(UserError, match=r"features\.f3\.table"):
            load_any(wide(*more))
