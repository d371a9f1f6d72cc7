# SPDX-License-Identifier: Apache-2.0
"""Candidates' features in the pages of the embeddings' rows, over HTTP and from a Redis server: scores are those of
records kept on the host, bit for bit, whatever the pages hold and wherever the border stands (FLAME-1, HLEM-10)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jgr.config import Config, UserError
from jgr.features.addresses import open_store
from jgr.features.schema import Schema
from jgr.models.climber import Feature
from jgr.serving.versions.loading import load_any
from tests.features.redis_process import RedisProcess
from tests.serving.scorer_fakes import CATALOG, ITEMS, ScorerServer
from tests.serving.scorers.test_kept_users import CLIMBER
from tests.serving.scorers.test_paging import asked, folder_of, moved_after_each_run, settings

CFG = dataclasses.replace(CLIMBER, features=(Feature("price", 1), Feature("genres", 3, 16)))
SCHEMA = Schema.parse("price:float32,genres:int32[3],unread:int8")
RNG = np.random.default_rng(0)
RECORDS = SCHEMA.pack(
    {
        "price": RNG.normal(0, 50, (len(ITEMS), 1)),
        "genres": RNG.integers(0, 40, (len(ITEMS), 3)),
        "unread": RNG.integers(0, 9, (len(ITEMS), 1)),
    }
)
WITHOUT = 7
"""The store has none of every so many items."""
KEPT = [row for row in range(len(ITEMS)) if row % WITHOUT]
ROOMY = ("embeddings.tables=paged", "cache.device_mb=0.032")
BODIES = [asked(CFG, seed) for seed in range(24)]
SLOW = ("features.max_wait_ms=30000", "features.timeout_ms=30000", "features.absent_ttl_s=3600")


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisProcess]:
    server = RedisProcess(tmp_path)
    store = open_store(server.address, 30.0)
    store.put_many([ITEMS[row] for row in KEPT], [RECORDS[row] for row in KEPT])
    store.set_schema(str(SCHEMA))
    store.close()
    yield server
    server.kill()


def configured(folder: Path, redis: RedisProcess, *more: str) -> Config:
    return settings(folder_of(folder, CFG), f"features.store={redis.address}", *SLOW, *more)


def event(server: ScorerServer, name: str, table: str = "features") -> float:
    return server.metric(f'jgr_embedding_rows_total{{event="{name}",table="{table}"}}')


def of_store(server: ScorerServer, name: str) -> float:
    return server.metric(f'jgr_feature_events_total{{event="{name}"}}')


def answers(server: ScorerServer, bodies: list[dict[str, Any]] = BODIES) -> list[Any]:
    """Items and counts of missing features of each answer."""
    found = [server.rank(**body) for body in bodies]
    return [(answer["items"], answer["usage"]["feature_missing"]) for answer in found]


@pytest.mark.parametrize("share", ["part", "request", "cache"])
def test_scores_are_those_of_records_on_the_host_bit_for_bit(
    tmp_path: Path, redis: RedisProcess, share: str
) -> None:
    config = f"executors.share_user={share}"
    with ScorerServer(configured(tmp_path / "m", redis, *ROOMY, config)) as server:
        host = answers(server)
    with ScorerServer(configured(tmp_path / "p", redis, *ROOMY, config, "features.tables=paged")) as server:
        compiled = server.metric('jgr_compilations_total{phase="request"}')
        paged = answers(server)
        assert server.metric('jgr_compilations_total{phase="request"}') == compiled
        looked_up = {item for body in BODIES for item in body["candidates"]}
        assert of_store(server, "fetched") == len(looked_up)  # each record came once
        there = {ITEMS.index(item) for item in looked_up} & set(KEPT)
        assert server.metric('jgr_embedding_resident{table="features"}') == len(there)
        assert event(server, "hits") > event(server, "misses") > 0 == event(server, "evicted")
        assert (
            server.metric('jgr_embedding_bytes_total{table="features"}') == len(there) * SCHEMA.record_bytes
        )
        assert event(server, "hits", "items") > 0
    assert paged == host
    missing = [sum(not ITEMS.index(item) % WITHOUT for item in body["candidates"]) for body in BODIES]
    assert [count for _, count in paged] == missing


def test_scores_are_exact_while_rows_records_and_users_take_pages_from_each_other(
    tmp_path: Path, redis: RedisProcess
) -> None:
    kept = ("embeddings.tables=paged", "executors.share_user=cache", "cache.device_mb=0.03")
    with ScorerServer(configured(tmp_path / "m", redis, *kept)) as server:
        host = answers(server)
    with ScorerServer(configured(tmp_path / "p", redis, *kept, "features.tables=paged")) as server:
        served: Any = server.engine.served
        border = moved_after_each_run(served)
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda body: server.rank(**body), BODIES * 2))
        assert border.counts["moves"] > 40 and event(server, "evicted") > 0
        assert of_store(server, "fetched") > len(KEPT)  # what went was fetched again
    assert [(answer["items"], answer["usage"]["feature_missing"]) for answer in found] == host * 2


def test_a_store_that_dies_or_lies_is_counted_and_what_is_in_pages_is_served(
    tmp_path: Path, redis: RedisProcess
) -> None:
    store = open_store(redis.address, 30.0)
    other = Schema.parse("price:float32,genres:int32[3],unread:int16").default
    cut, bad = RECORDS[51][:-4], np.array([[np.nan]])
    nan = SCHEMA.pack({"price": bad, "genres": np.zeros((1, 3)), "unread": np.zeros((1, 1))})[0]
    store.put_many([ITEMS[row] for row in (51, 52, 53)], [cut, other, nan])
    store.close()
    here = {"history": ITEMS[:3], "history_times": [0, 1, 2], "time": 9, "candidates": ITEMS[8:14]}
    wrong = here | {"candidates": [ITEMS[8], *ITEMS[51:54]]}
    none = here | {"candidates": ITEMS[15:18]}
    more = (*ROOMY, "features.tables=paged", "features.max_wait_ms=2000")
    with ScorerServer(configured(tmp_path / "m", redis, *more)) as server:
        right = server.rank(**here)
        assert right["usage"]["feature_missing"] == 0
        assert server.rank(**wrong)["usage"]["feature_missing"] == 3 == of_store(server, "invalid")
        assert server.metric('jgr_embedding_resident{table="features"}') == 6  # no wrong one
        redis.kill()
        assert server.rank(**here)["items"] == right["items"]
        assert server.rank(**none)["usage"]["feature_missing"] == 3
        assert of_store(server, "failures") == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("features.tables=paged",), "features.tables: paged .* need embeddings.tables=paged"),
        (
            (*ROOMY, "features.tables=paged", "cache.device_mb=0.001"),
            "cache.device_mb: 1 pages of 1 KB; a batch needs 2 for rows",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_at_start(
    tmp_path: Path, redis: RedisProcess, more: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        load_any(configured(tmp_path / "m", redis, *more))


def test_a_record_larger_than_a_page_is_refused_at_start(tmp_path: Path, redis: RedisProcess) -> None:
    store = open_store(redis.address, 30.0)
    store.set_schema("price:float32,genres:int32[3],text:float32[300]")
    store.close()
    with pytest.raises(UserError, match="pages of 1024 bytes, but a row of features has 1232"):
        load_any(configured(tmp_path / "m", redis, *ROOMY, "features.tables=paged"))


def test_a_reload_shares_the_pages_and_another_schema_is_refused(tmp_path: Path, redis: RedisProcess) -> None:
    """Records of another schema would be taken for those that stand there, if they are as long."""
    first: Any = load_any(configured(tmp_path / "m", redis, *ROOMY, "features.tables=paged"))
    second: Any = first.rebuild.engine(CATALOG)
    assert second.served.paging.rows is first.served.paging.rows
    assert second.served.executors.programs is first.served.executors.programs
    first.served.starting()
    first.served.executors.records.compile(8)
    asked_for = np.array([1, 2], np.int32)
    assert first.served.features.get_many(asked_for).missing == 0
    got = second.served.features.get_many(asked_for)  # its states are its own, so it asks too
    assert got.records["price"].tolist() == SCHEMA.records(RECORDS[1:3])["price"].tolist()
    assert second.served.features.counts().fetched == 2 == second.served.features.counts().entries
    store = open_store(redis.address, 30.0)
    store.set_schema("genres:int32[3],price:float32,unread:int8")
    store.close()
    with pytest.raises(
        UserError, match=r"features\.store: its schema is genres.* has records of price.* a start of"
    ):
        first.rebuild.engine(CATALOG)
    for engine in (first, second):
        engine.served.paging.border.check()
        engine.served.close(True)
