# SPDX-License-Identifier: Apache-2.0
"""A scorer's embeddings in pages of the pool: the tables of its folder, the rows' cache, the border to its users."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jgr import extras
from jgr.cache.border import Border
from jgr.cache.embeddings import EmbeddingCache, Table
from jgr.cache.memory import Lease, Memory
from jgr.cache.meta import CacheMeta
from jgr.cache.pool import UserView
from jgr.cache.refill import RefillBudget
from jgr.config import Config, ConfigError
from jgr.embeddings.shards import LocalShard, Shard, Shards
from jgr.features.paged import NAME as FEATURES
from jgr.features.paged import table_of
from jgr.features.schema import Schema
from jgr.models import scorers, tables
from jgr.models.model_files import ModelFiles
from jgr.models.scorers import ScorerConfig
from jgr.models.table_file import TableFile
from jgr.serving.engine.memory_controller import make_controller
from jgr.serving.engine.paging_metrics import PagingCounts
from jgr.serving.policies.memory_signals import Limits, require_room
from jgr.serving.policies.shards import held, shard_of
from jgr.serving.scorers.border_control import BorderControl

BATCHES = 64
"""After so many batches it is looked anew which shards are here."""


@dataclass(frozen=True, eq=False)
class Paging:
    """What an engine has of its model's rows. lease: of the border, which engines of the same weights share."""

    lease: Lease[Border]
    rows: EmbeddingCache
    source: Shards
    _here: dict[str, Any] = field(default_factory=dict)

    @property
    def border(self) -> Border:
        return self.lease.held

    def close(self) -> None:
        self.lease.close()

    def shards(self, item_ids: Sequence[str]) -> Sequence[str]:
        """The names of the shards whose rows in use are on the device, see `policies.shards`."""
        pages, here = self.rows.pages, self._here
        if here.get("until", -1) < pages.batches:
            if "of" not in here:
                here["of"] = np.array([shard_of(item) for item in item_ids], np.int16)
            here["until"] = pages.batches + BATCHES
            here["held"] = held(here["of"], *pages.used_and_there(tables.ITEMS))
        found: Sequence[str] = here["held"]
        return found

    def missing_ns(self, rows: float) -> float:
        """What it takes to read so many missing embeddings, by what it took so far; 0 where none was missing yet."""
        counts = self.rows.counts(tables.ITEMS)
        read = counts.get("bytes", 0) / self.rows.tables[tables.ITEMS].row_bytes
        return counts.get("read_ns", 0) / read * rows if read else 0.0

    def counts(self) -> PagingCounts:
        """For /metrics."""
        rows, border = self.rows, self.border
        by_table = {
            name: {
                **rows.counts(name),
                **self.source.counts.get(name, {}),
                "resident": rows.pages.resident(name),
            }
            for name in rows.tables
        }
        return PagingCounts(
            by_table, rows.owned, border.wanted, border.total, rows.pages.empty, dict(border.counts)
        )


def open_tables(folder: Path, files: ModelFiles | None, cfg: ScorerConfig) -> dict[str, TableFile]:
    """The tables of a folder, by name. Raises TableError where one is not the model's."""
    specs, files = scorers.scorer(cfg).spec(cfg), files or ModelFiles(folder)
    return {name: tables.open_table(folder, name, specs, files) for name in tables.there(folder, cfg)}


def shards_of(table: TableFile, config: Config) -> list[Shard]:
    """The file, and the server of embeddings.remote for what that lacks. ShardError where it has not this table."""
    found: list[Shard] = [LocalShard(table)]
    of, settings = table.header, config.embeddings
    if of.held == of.rows:
        return found
    if not settings.remote:
        raise ConfigError(
            f"{table.path}: has {of.held} of {of.rows} rows; name the server that has the others, embeddings.remote"
        )
    extras.require("redis", "embeddings.remote")
    from jgr.embeddings.redis_shard import RedisShard

    return [*found, RedisShard(settings.remote, of.name, of.model, settings.timeout_ms / 1e3)]


def share_of_rows(config: Config, memory: Memory) -> int:
    """Pages that rows have at first; 0 where embeddings are parameters."""
    settings = config.embeddings
    if settings.tables != "paged":
        return 0
    share = config.memory.split if config.executors.share_user == "cache" else 1.0
    return int(memory.limit(config.model.name) * share)


def make_control(
    config: Config, paging: Paging | None, kept: bool, clock: Callable[[], int]
) -> BorderControl | None:
    """What moves the border between rows and users; None: memory.controller is static. kept: whether users are.

    A border has one, which the engines that share the border share: what it learnt goes on, and no two move one border.

    UserError where there is no border, where it leaves too little room at an end, or for a controller's file.
    """
    settings = config.memory
    if settings.controller == "static":
        return None
    if paging is None or not kept:
        raise ConfigError(
            f"memory.controller ({settings.controller}) moves the border between embedding rows and kept users: it "
            "needs embeddings.tables=paged and executors.share_user=cache"
        )
    border, rows, page = paging.border, paging.rows, paging.rows.pool.page_bytes
    limits = Limits(settings.least, settings.most, settings.split, settings.limit_ms)
    require_room(limits, border.total * page, (border.total - border.most) * page, border.least * page)

    def counts() -> Mapping[str, int]:
        return sum((Counter(rows.counts(name)) for name in rows.tables), Counter())

    if border.control is None:
        border.control = BorderControl(make_controller(settings), border, settings, counts, clock)
    assert isinstance(border.control, BorderControl)
    return border.control


def make_paging(
    files: Mapping[str, TableFile],
    config: Config,
    memory: Memory,
    revision: str,
    largest: Mapping[str, int],
    users: tuple[CacheMeta, UserView] | None,
    schema: Schema | None = None,
) -> Paging:
    """Put the rows of tables into the model's pages. largest: by table, rows of the largest batch. users: those that
    have the other pages, and the view of their cells; None: no users are kept. schema: of records that stand there too.

    ConfigError where the pages are too few for a batch, or too small for a row, and where an engine that runs has
    records of another schema there.
    """
    pages, name, batches = memory.pages, config.model.name, dict(largest)
    headers = {of: file.header for of, file in files.items()}
    shapes = {of: Table(has.rows, has.width, has.numpy_dtype) for of, has in headers.items()}
    if schema is not None:
        shapes[FEATURES] = table_of(schema, headers[tables.ITEMS].rows)
        batches[FEATURES] = max(config.executors.sizes)
    for called, of in shapes.items():
        if of.row_bytes > pages.page_bytes or of.row_bytes % 4:
            raise ConfigError(
                f"cache.page_kb: pages of {pages.page_bytes} bytes, but a row of {called} has {of.row_bytes}, "
                "which must be at most a page's and whole words of 4"
            )

    def make() -> Border:
        shards = Shards({of: shards_of(file, config) for of, file in files.items()})
        budget = RefillBudget(config.embeddings.link_mb_s * 2**20)
        host = memory.host
        rows = EmbeddingCache(
            memory.pool,
            shapes,
            shards,
            catch_up=(lambda: None) if host is None else host.catch_up,
            budget=budget,
        )
        least = sum(-(-batches[of] // rows.pages.per_page(of)) for of in shapes)
        meta, view = users or (None, None)
        one_user = 0
        if view is not None:
            one_user = -(-view.room.of(view.longest) // (pages.page_bytes // view.room.bytes))
        total = memory.limit(name)
        return Border(
            rows,
            meta,
            pages,
            f"{name}@{revision}/rows{'' if users is None else '-and-users'}",
            total,
            share_of_rows(config, memory),
            least,
            one_user,
        )

    lease = memory.lease(("rows", name, revision, users is None), make)
    rows = lease.held.rows
    assert isinstance(rows, EmbeddingCache)
    assert isinstance(rows.source, Shards)
    if rows.tables != shapes:
        had = rows.tables[FEATURES].brought if FEATURES in rows.tables else "none"
        lease.close()
        raise ConfigError(
            f"features.store: its schema is {schema} now; the model that is served has records of {had} in the pool's "
            "pages, and another schema needs a start of the server"
        )
    for table, file in files.items():
        rows.source.reopen(table, file)  # the one that the lease began with may have been written to since
    return Paging(lease, rows, rows.source)
