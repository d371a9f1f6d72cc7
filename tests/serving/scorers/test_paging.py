# SPDX-License-Identifier: Apache-2.0
"""Scorers whose embeddings are in pages of the pool, over HTTP: their scores are those of resident ones, bit for bit,
whatever the pages hold and wherever the border stands (HLEM-1, HLEM-10)."""

from __future__ import annotations

import dataclasses
import os
import shutil
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
import pytest

from jgr.cache.memory import Memory
from jgr.cache.pool import PoolLost
from jgr.catalog.catalog import save_catalog
from jgr.config import Config, UserError, override
from jgr.embeddings.redis_shard import upload
from jgr.embeddings.shards import ShardError
from jgr.models import retrievers, scorers
from jgr.models.sasrec import SasrecConfig
from jgr.models.scorers import ScorerConfig
from jgr.models.table_file import TableFile
from jgr.models.tables import ITEMS as ITEMS_TABLE
from jgr.models.tables import path_of
from jgr.serving.scorers.executors import PartWork
from jgr.serving.scorers.loading import load_scorer_engine
from jgr.serving.scorers.programs import Staging
from jgr.serving.versions.loading import load_any
from tests.features.redis_process import RedisProcess
from tests.serving.scorer_fakes import CATALOG, HSTU, ITEMS, STU, ScorerServer, draw
from tests.serving.scorers.test_kept_users import CLIMBER, body

SASREC = SasrecConfig(
    n_items=len(ITEMS), max_items=6, hidden=8, layers=1, heads=2, mlp=8, items=HSTU.items
)  # fmt: skip
TABLE = path_of(ITEMS_TABLE)
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
        "executors.sizes=8",
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
def test_paged_scores_are_those_of_resident_embeddings(tmp_path: Path, name: str) -> None:
    cfg = FAMILIES[name]
    folder = folder_of(tmp_path / name, cfg)
    bodies = [asked(cfg, seed) for seed in range(12)]
    share = () if name == "hstu" else ("executors.share_user=part",)  # one program, which reads and scores
    resident, none = answers(settings(folder, *share), bodies)
    paged, counts = answers(settings(folder, *PAGED, *share), bodies)
    if name == "climber":  # XLA fuses the gather from another shape in another way: the last bits differ
        assert [[item["item_id"] for item in items] for items in paged] == [
            [item["item_id"] for item in items] for items in resident
        ]
        for one, other in zip(chain(*paged), chain(*resident), strict=True):
            assert one["score"] == pytest.approx(other["score"], abs=1e-5)
    else:
        assert paged == resident
    assert none["hits"] == 0 and counts["hits"] > counts["misses"] > 0 and counts["past"] == 0
    assert counts["misses"] == counts["resident"] <= len(ITEMS)  # each row crossed once
    assert counts["pages"] == 16


def test_a_node_tells_the_shards_whose_rows_in_use_it_holds(tmp_path: Path) -> None:
    """HLEM-14: by the rows that were asked for twice; the first look may be before them."""
    engine: Any = load_any(settings(folder_of(tmp_path / "m", SASREC), *PAGED))
    paging = engine.served.paging
    paging.border.start()
    table = np.arange(8, dtype=np.int32)
    paging.rows.compile("items", 8)
    assert paging.missing_ns(100.0) == 0.0
    assert paging.shards(CATALOG.item_ids) == []
    for _ in range(70):
        paging.rows.rows("items", table)
    wanted = {f"shard {zlib.crc32(CATALOG.item_ids[row].encode()) % 4096}" for row in range(8)}
    assert set(paging.shards(CATALOG.item_ids)) == wanted
    counts = paging.rows.counts("items")
    assert paging.missing_ns(100.0) == pytest.approx(100 * counts["read_ns"] / 8)
    engine.served.close(True)


def moved_after_each_run(served: Any) -> Any:
    """The border of an engine, which goes from one end to the other and back from now on."""
    border, take = served.paging.border, served.take
    steps = iter(range(10_000))

    def moving(*given: Any) -> None:  # on the event loop
        step = next(steps)
        border.set_limit(border.least if step % 3 else border.most)
        take(*given)

    served.take = moving
    return border


def test_scores_are_exact_while_the_border_moves_beside_kept_users(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", HSTU)
    kept = ("executors.share_user=cache", "executors.growth=2", "cache.device_mb=0.03")
    bodies = [asked(HSTU, seed) for seed in range(40)]
    resident, _ = answers(settings(folder, *kept), bodies)
    paged = (*kept, "embeddings.tables=paged", "memory.split=0.4", "executors.history_lengths=3")
    with ScorerServer(settings(folder, *paged)) as server:
        served: Any = server.engine.served
        border = moved_after_each_run(served)
        users_least = border.total - border.most
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda each: server.rank(**each)["items"], bodies))
        assert users_least > 0 and border.counts["moves"] > 40 and border.counts["to_users"] > 0
        for one, other in zip(chain(*found), chain(*resident), strict=True):
            assert one["item_id"] == other["item_id"]
            assert one["score"] == pytest.approx(other["score"], abs=1e-5)


def test_rows_of_16_bits_are_scored_as_the_rounded_table(tmp_path: Path) -> None:
    bodies = [asked(SASREC, seed) for seed in range(6)]
    folder = folder_of(tmp_path / "m", SASREC, "float16")
    share = "executors.share_user=part"
    paged, _ = answers(settings(folder, *PAGED, share), bodies)
    resident, _ = answers(settings(folder, share), bodies)
    assert paged == resident  # which reads the same table, rounded, as parameters
    whole, table = np.asarray(draw(SASREC).embed), TableFile(folder / TABLE).rows
    assert table.dtype == np.float16 and 0 < np.abs(table / whole - 1).max() <= 2**-11


@pytest.mark.parametrize(
    ("tables", "more", "message"),
    [
        ("none", PAGED, "embeddings.tables: paged, but .* has no embeddings/items.table"),
        ("float32", (*PAGED, "model.dtype=bfloat16"), "model.dtype"),
        (
            "float32",
            (*PAGED, "executors.share_user=cache", "memory.split=0.01", "memory.least=0.001"),
            "0 of 16 pages of 1 KB for rows",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_at_start(
    tmp_path: Path, tables: str, more: tuple[str, ...], message: str
) -> None:
    folder = folder_of(tmp_path / "m", SASREC, tables)
    with pytest.raises(UserError, match=message):
        load_any(settings(folder, *more))


def test_a_damaged_table_is_refused_at_start(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", SASREC)
    with open(folder / TABLE, "r+b") as file:
        file.truncate(5000)
    with pytest.raises(UserError, match=r"items\.table: damaged checkpoint: it has 5000 bytes"):
        load_any(settings(folder, *PAGED))


def test_rows_that_a_dead_server_has_are_an_error_and_the_others_are_served(tmp_path: Path) -> None:
    server = RedisProcess(tmp_path)
    params = draw(SASREC)
    folder = tmp_path / "m"
    with_catalog = partial(save_catalog, CATALOG)
    retrievers.save(folder, SASREC, params, lambda to: with_catalog(to / "catalog.jsonl"), "float32", held=30)
    header = TableFile(folder / TABLE).header
    upload(server.address, msgspec.structs.replace(header, held=60), np.asarray(params.embed), 5.0)
    with pytest.raises(UserError, match="has 30 of 60 rows"):
        load_any(settings(folder))
    with pytest.raises(UserError, match=r"items\.table: has 30 of 60 rows; name .*, embeddings\.remote"):
        load_any(settings(folder, *PAGED))
    remote = (f"embeddings.remote={server.address}", "embeddings.timeout_ms=2000")
    with ScorerServer(settings(folder, *PAGED, *remote)) as served:
        here = {"history": ITEMS[:3], "candidates": ITEMS[10:14]}
        there = {"history": ITEMS[:3], "candidates": ITEMS[50:54]}
        right = served.rank(**there)["items"]
        server.kill()
        assert served.rank(**there)["items"] == right  # they are on the device
        status, answer = served.call("/v1/rank", there | {"candidates": ITEMS[55:57]})
        assert status == 503 and answer["error"]["type"] == "unavailable"
        assert served.metric('jgr_embedding_rows_total{event="failed",table="items"}') == 2
        assert len(served.rank(**here)["items"]) == 4
    with pytest.raises(UserError, match=r"table items: the server of embeddings\.remote failed"):
        load_any(settings(folder, *PAGED, *remote))


@pytest.mark.parametrize("how", ["touched", "renamed"])
def test_a_reload_reads_the_table_that_is_there_now(tmp_path: Path, how: str) -> None:
    """A file that was written to is not read any more, until the model is loaded again; it may be the same bytes."""
    config = settings(folder_of(tmp_path / "m", SASREC), *PAGED)
    table, memory = tmp_path / "m" / TABLE, Memory.of(config)
    first: Any = load_scorer_engine(config, memory=memory)
    rows, known = first.served.paging.rows, np.arange(4, dtype=np.int32)
    first.served.paging.border.start()
    rows.compile("items", 4)
    expected = np.asarray(draw(SASREC).embed)
    assert (np.asarray(rows.rows("items", known)) == expected[known]).all()
    if how == "renamed":
        shutil.copyfile(table, tmp_path / "new")
        os.replace(tmp_path / "new", table)
    else:
        os.utime(table, (1, 1))
        with pytest.raises(ShardError, match="was written to while it is served"):
            rows.rows("items", known + 8)
        assert (np.asarray(rows.rows("items", known)) == expected[known]).all()  # these are on the device
    second: Any = load_scorer_engine(config, memory=memory)
    assert second.served.paging.rows is rows
    assert (np.asarray(rows.rows("items", known + 8)) == expected[known + 8]).all()
    if how == "renamed":  # it is the new file that is read
        os.utime(table, (1, 1))
        with pytest.raises(ShardError, match="was written to while it is served"):
            rows.rows("items", known + 16)
    for engine in (first, second):
        engine.served.close(True)


class Unreadable:
    """An array whose program failed after it was dispatched."""

    def block_until_ready(self) -> None:
        raise ArithmeticError("the device is gone")

    def __array__(self, *_: Any) -> Any:
        raise ArithmeticError("the device is gone")


def carried(run: Any, self: Any, program: Any, *others: Any) -> Any:
    """What a device does: a program that is given what could not be computed fails as well, and later."""
    broken = any(isinstance(leaf, Unreadable) for leaf in jax.tree.leaves(others))
    return Unreadable() if broken else run(self, program, *others)


def spoil(rows: Any) -> None:
    """The next write of rows fails after it was dispatched; whatever reads the pool then does so too."""
    writes = iter([True])

    def spoilt(kind: str, program: Any) -> Any:
        def run(array: Any, *others: Any) -> Any:
            fails = isinstance(array, Unreadable) or (kind == "write" and next(writes, False))
            return Unreadable() if fails else program(array, *others)

        return run

    made = rows._programs._made
    made.update({key: spoilt(key[0], program) for key, program in made.items()})


@pytest.mark.parametrize("found", ["at_the_end", "at_the_next_dispatch"])
@pytest.mark.parametrize("share", ["part", "request", "cache"])
def test_a_write_of_rows_that_fails_on_the_device_costs_one_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: str, found: str
) -> None:
    if found == "at_the_end":
        run = Staging.run
        monkeypatch.setattr(Staging, "run", lambda *given: carried(run, *given))
    more = (f"executors.share_user={share}", "cache.device_mb=0.06")
    bodies = [{"user_id": "u", "history": ITEMS[:3], "candidates": ITEMS[at : at + 4]} for at in (10, 20, 30)]
    right, _ = answers(settings(folder_of(tmp_path / "m", SASREC), *PAGED, *more), bodies)
    with ScorerServer(settings(tmp_path / "m", *PAGED, *more)) as server:
        served: Any = server.engine.served
        rows = served.paging.rows
        assert server.rank(**bodies[0])["items"] == right[0]
        epoch = rows.pool.epoch
        spoil(rows)
        status, answer = server.call("/v1/rank", bodies[1])
        assert (status, answer["error"]["type"]) == (500, "internal")
        assert [server.rank(**each)["items"] for each in bodies] == right
        assert rows.pool.epoch == epoch + 1


def test_a_shard_that_fails_loses_no_pool_and_a_run_behind_one_that_lost_it_is_run_again(
    tmp_path: Path,
) -> None:
    engine: Any = load_any(settings(folder_of(tmp_path / "m", SASREC), *PAGED))
    executors, pool = engine.served.executors, engine.served.paging.rows.pool
    executors.warm_up(lambda *_: None)
    executor, source = executors._executors[-1], engine.served.paging.source
    user, epoch = executors._full(3), pool.epoch
    work = PartWork(np.arange(50, 54, dtype=np.int32), user)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ShardError):
        patch.setattr(source, "read", _fails)
        executor.run(work)
    assert pool.epoch == epoch
    pending = executor.launch(work)
    pool.lose(epoch, ArithmeticError("another run found that a write has failed"))
    with pytest.raises(PoolLost):
        executor.collect(work, Unreadable())
    assert pool.epoch == epoch + 1
    np.testing.assert_array_equal(executor.run(work), np.asarray(pending)[0, :4])
    engine.served.close(True)


def _fails(*_: Any) -> Any:
    raise ShardError("table items: failed on purpose")
