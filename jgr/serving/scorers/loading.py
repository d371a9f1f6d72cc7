# SPDX-License-Identifier: Apache-2.0
"""From a scorer's folder to an engine: HSTU, SASRec, LRURec, the STU and Climber, as `scorers.save` writes them.

A scorer embeds the items themselves, so its catalog must have the items that it was trained on, in their order. All
else in the catalog, such as metadata, may change.
"""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax

from jgr.cache.histories import HistoryView
from jgr.cache.memory import Lease, Memory, tree_bytes
from jgr.cache.meta import CacheMeta
from jgr.cache.pool import StateView, UserView
from jgr.catalog.catalog import Catalog
from jgr.config import Config, ConfigError
from jgr.features.addresses import open_store
from jgr.features.cache import FeatureCache
from jgr.features.paged import PagedRecords
from jgr.features.schema import Schema
from jgr.features.stores import FeatureStore
from jgr.models import scorers, tables
from jgr.models.devices import ONE, Devices
from jgr.models.model_files import ModelFiles
from jgr.models.params import PyTree
from jgr.models.retrievers import items_digest
from jgr.models.scorers import ScorerConfig
from jgr.models.stu_scorer import HistoryIsWhole
from jgr.serving.engine.compilation import preparing
from jgr.serving.engine.engine import Engine, Rebuild
from jgr.serving.engine.metrics import Metrics
from jgr.serving.engine.opening import Again, counting_metrics, open_folder, read_catalog
from jgr.serving.engine.weights import Weights, once
from jgr.serving.policies.orchestration import USER_PART
from jgr.serving.policies.user_cache import UserCache
from jgr.serving.scorers.executors import Programs, ScorerExecutors
from jgr.serving.scorers.paging import make_control, make_paging, open_tables, share_of_rows
from jgr.serving.scorers.serve import ServedScorer
from jgr.serving.scorers.translation import ScorerTranslator
from jgr.serving.scorers.user_block import UserContent

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class ScorerModel:
    """A scorer in memory."""

    weights: Weights[ScorerConfig, PyTree]
    revision: str
    folder: Path
    files: ModelFiles | None = None

    @property
    def cfg(self) -> ScorerConfig:
        return self.weights.cfg

    @property
    def params(self) -> PyTree:
        return self.weights.params


@preparing()
def load_scorer(folder: Path, config: Config, devices: Devices = ONE) -> ScorerModel:
    """Read a scorer's folder. Raises CheckpointError where it is damaged, ConfigError for what scorers cannot do."""
    if config.model.dtype not in ("", "float32"):
        raise ConfigError("model.dtype: scorers are served in float32")
    if config.model.quantize:
        raise ConfigError("model.quantize: scorers are served in float32, only generators in 8 bits")
    paged = config.embeddings.tables == "paged"
    if paged and devices.count > 1:
        raise ConfigError("embeddings.tables: paged rows are for one device, not model.tensor_parallel")
    if config.features.tables == "paged" and not paged:
        raise ConfigError(
            "features.tables: paged records stand in the pages of embeddings' rows, and need embeddings.tables=paged"
        )
    if paged and config.executors.build == "op_by_op":
        raise ConfigError(
            "embeddings.tables: paged rows are for compiled programs, not executors.build=op_by_op"
        )
    if config.data_parallel.devices > 1:
        raise ConfigError("data_parallel.devices: a scorer is served by one device of a process")
    if devices.count > 1 and config.executors.share_user == "cache":
        raise ConfigError(
            "model.tensor_parallel: users of a scorer are kept (executors.share_user) on one device only"
        )
    files = ModelFiles(folder)
    scorers.require_size(folder, files)  # before `once` hashes them
    read = partial(scorers.load, folder, files, devices, paged)
    weights = once(files, ("scorer", devices, paged), read)
    return ScorerModel(weights, files.revision(), folder, files)


@preparing()
def load_scorer_engine(
    config: Config, metrics: Metrics | None = None, memory: Memory | None = None
) -> Engine[ServedScorer]:
    """The engine that serves config.model, a scorer, over config.catalog, not yet started.

    metrics, memory: of the server that it joins. Raises a UserError that names what is missing or does not fit.
    """
    folder = open_folder(config)
    memory = memory or Memory.of(config)
    model = load_scorer(folder, config, memory.devices_of(config))
    return make_scorer_engine(
        model, config, read_catalog(folder, config), metrics or counting_metrics(), memory
    )


@preparing()
def make_scorer_engine(
    model: ScorerModel,
    config: Config,
    catalog: Catalog,
    metrics: Metrics,
    memory: Memory | None = None,
    like: ScorerExecutors | None = None,
) -> Engine[ServedScorer]:
    """An engine for a catalog, not yet started. memory: the server's; None: one of its own. like: executors of the
    model, whose programs are used.

    UserError where the catalog has other items than the model, or the feature store is none, or lacks a feature.
    """
    _fit(model, catalog)
    with ExitStack() as undo:  # what was opened for an engine that is not made after all
        engine = _make_engine(model, config, catalog, metrics, memory or Memory.of(config), like, undo)
        undo.pop_all()
    return engine


def _make_engine(
    model: ScorerModel,
    config: Config,
    catalog: Catalog,
    metrics: Metrics,
    memory: Memory,
    like: ScorerExecutors | None,
    undo: ExitStack,
) -> Engine[ServedScorer]:
    settings = config.executors
    needs = scorers.scorer(model.cfg).needs(model.cfg)
    store, schema = _open_features(config, needs, undo) or (None, None)
    apart = config.features.tables == "paged"
    if like is not None and like.programs.schema == schema:
        programs = like.programs
    else:
        try:
            programs = Programs(
                model.cfg,
                model.params,
                settings.sizes,
                settings.share_user,
                schema,
                settings.growth,
                settings.build,
                memory.devices_of(config),
                settings.history_lengths,
                apart,
            )
        except HistoryIsWhole as error:
            raise ConfigError(f"executors.growth: {error}") from None
    states: UserView | None = None
    cache = lease = None
    if settings.share_user == "cache":
        catch_up = {} if memory.host is None else {"catch_up": memory.host.catch_up}
        like_states = None if like is None else like.states
        if programs.along is None:
            if config.cache.quantize:
                raise ConfigError(
                    "cache.quantize: this model keeps one state of a user and no keys and values by event, which is "
                    "held as it is computed"
                )
            states = StateView(memory.pool, programs.kept, like_states, **catch_up)
        else:
            states = HistoryView(
                memory.pool,
                programs.kept,
                programs.along,
                config.cache.cell_tokens,
                settings.growth,
                [window.tokens for window in programs.windows if window.tokens is not None],
                like_states,
                quantize=config.cache.quantize,
                **catch_up,
            )
        lease = _lease(model, config, memory, states)
        undo.callback(lease.close)
        if needs.dated:
            _log.warning(
                "executors.share_user=cache: every event of this model depends on how long before the request it was, "
                "so what is kept of a user serves requests of the same second alone"
            )
        cache = _user_cache(programs, states, lease.held)
    paging = None
    if programs.gathering is not None:
        files = open_tables(model.folder, model.files, model.cfg)
        if apart and (of := next((name for name in files if name.startswith(tables.FEATURE)), "")):
            raise ConfigError(
                f"features.tables: paged, but the rows of {of} are in a table, and the host must see an item's "
                "categories to look them up; use features.tables=host"
            )
        largest = {name: counts[-1] for name, counts in programs.counts.items()}
        users = None if lease is None or states is None else (lease.held, states)
        records_of = schema if apart else None
        paging = make_paging(files, config, memory, model.revision, largest, users, records_of)
        undo.callback(paging.close)
    features, records = None, None
    if store is not None and schema is not None:
        pages = paging.rows if apart and paging is not None else None
        features = FeatureCache(store, schema, catalog.item_ids, config.features, pages=pages)
        records = None if pages is None else PagedRecords(pages, features)
    executors = ScorerExecutors(
        programs,
        settings.number,
        states,
        None if paging is None else paging.rows,
        records,
        bind=config.features.bind_threads,
    )
    _log.info(
        "model %s@%s: %s of %d items, on %s; catalog %s; %d shapes",
        config.model.name,
        model.revision,
        type(model.cfg).__name__.removesuffix("Config"),
        catalog.n_items,
        jax.devices()[0].device_kind,
        catalog.version,
        len(programs.layouts),
    )
    translator = ScorerTranslator(
        config.model.name, catalog, needs, programs.user, config, revision=model.revision
    )
    served = ServedScorer(
        translator,
        executors,
        config,
        reads=USER_PART in programs.layouts,
        metrics=metrics,
        features=features,
        cache=cache,
        lease=lease,
        paging=paging,
        control=make_control(config, paging, cache is not None, time.monotonic_ns),
        pool=None if states is None and paging is None else memory.pool,
        memory={
            "weights": tree_bytes(model.params),
            "features": 0 if features is None else features.host_bytes,
            "buffers": executors.buffer_bytes,
            **memory.parts(config.model.name),
        },
    )
    rebuild = Rebuild(
        partial(_fit, model),
        partial(make_scorer_engine, model, config, metrics=metrics, memory=memory, like=executors),
        Again.of(
            f"{config.model.name}@{model.revision}",
            model.files,
            model.folder,
            config,
            partial(load_scorer_engine, memory=memory),
        ),
    )
    return Engine(served, config.server.default_deadline_ms, rebuild=rebuild, journal=config.server.journal)


def _user_cache(programs: Programs, states: UserView, meta: CacheMeta) -> UserCache:
    if programs.along is None:
        return UserCache(meta)
    slots, grows = len(programs.needs.slots), programs.growth > 0
    return UserCache(meta, partial(UserContent, programs.user, slots, states.longest, grows), programs.growth)


def _lease(model: ScorerModel, config: Config, memory: Memory, states: UserView) -> Lease[CacheMeta]:
    """The meta service of users' states. ConfigError where the model's part of the pool does not hold the longest."""
    name, room = config.model.name, states.room
    pages, cells = memory.limit(name) - share_of_rows(config, memory), room.of(states.longest)
    if pages * (memory.pages.page_bytes // room.bytes) < cells:
        size, need = (x / 2**20 for x in (pages * memory.pages.page_bytes, room.bytes * cells))
        raise ConfigError(
            f"cache.device_mb: {size:.3g} MB is less than the longest user's state of {need:.3g} MB"
        )

    growth, quantize = config.executors.growth, config.cache.quantize

    def make() -> CacheMeta:
        owner = f"{name}@{model.revision}/{room.bytes}{quantize}/{growth}"
        moving = config.embeddings.tables == "paged"  # by the border to the embeddings' rows
        meta = CacheMeta(memory.pages, {"user": room}, owner=owner, moving=moving)
        meta.set_limit("user", pages)
        return meta

    return memory.lease(("states", name, model.revision, room, growth, quantize), make)


def _fit(model: ScorerModel, catalog: Catalog) -> None:
    """ConfigError where the catalog's items are not the model's."""
    if model.cfg.items != items_digest(catalog.item_ids) or model.cfg.n_items != catalog.n_items:
        raise ConfigError(
            f"{model.folder}: the model was trained on other items than the catalog's, or on another order of them"
        )


def _open_features(
    config: Config, needs: scorers.Needs, undo: ExitStack
) -> tuple[FeatureStore, Schema] | None:
    """The store of the features that the model reads; None where it reads none, or no store is configured."""
    settings = config.features
    if not needs.features:
        return None
    if not settings.store:
        names = ", ".join(name for name, _ in needs.features)
        _log.warning("features.store is not set: items are ranked without their features %s", names)
        return None
    store = open_store(settings.store, settings.timeout_ms / 1e3)
    undo.callback(store.close)
    text = store.schema()
    if text is None:
        raise ConfigError("features.store: it holds no features; load them by jgr features load")
    schema = Schema.parse(text)
    widths = {feature.name: feature.width for feature in schema.features}
    for name, width in needs.features:
        if widths.get(name) != width:
            raise ConfigError(f"features.store: the model reads {name}[{width}]; the store has {schema}")
    return store, schema
