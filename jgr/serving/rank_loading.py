# SPDX-License-Identifier: Apache-2.0
"""From a ranker's folder to an engine: HSTU, SASRec, LRURec, the STU and Climber, as `rankers.save` writes them.

A ranker embeds the items themselves, so its catalog must have the items that it was trained on, in their order; what
else the catalog says of them may be another.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jgr.catalog import Catalog
from jgr.config import Config, ConfigError
from jgr.features.addresses import open_store
from jgr.features.cache import FeatureCache
from jgr.features.schema import Schema
from jgr.models import rankers, retrievers
from jgr.models.params import PyTree
from jgr.models.rankers import RankerConfig
from jgr.models.retrievers import items_digest
from jgr.models.stu_ranker import HistoryIsWhole
from jgr.serving.compilation import preparing
from jgr.serving.engines import AnyEngine, Rebuild
from jgr.serving.loading import counting_metrics, load_engine, open_folder, read_catalog
from jgr.serving.metrics import Metrics
from jgr.serving.model_files import ModelFiles
from jgr.serving.policies.orchestration import READS
from jgr.serving.rank_cache import StatePool, UserCache
from jgr.serving.rank_engine import RankEngine
from jgr.serving.rank_executors import Programs, RankExecutors
from jgr.serving.rank_inputs import grown_by
from jgr.serving.rank_translation import RankTranslator

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class RankModel:
    """A ranker in memory."""

    cfg: RankerConfig
    params: PyTree
    revision: str
    folder: Path


def is_ranker(folder: Path) -> bool:
    """Whether a folder's config.json is a ranker's; what cannot be read is left to others to refuse."""
    try:
        given: Any = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return given.get("model_type") in (*retrievers.MODELS, *rankers.MODELS)
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def load_any(config: Config, metrics: Metrics | None = None) -> AnyEngine:
    """The engine that serves config.model, a ranker or what `loading.load_engine` takes, over config.catalog.

    Not yet started. metrics: of the server it joins. UserError names what is missing or does not fit.
    """
    folder = open_folder(config)
    if not is_ranker(folder):
        return load_engine(config, metrics)
    model = load_ranker(folder, config)
    return make_rank_engine(model, config, read_catalog(folder, config), metrics or counting_metrics())


@preparing()
def load_ranker(folder: Path, config: Config) -> RankModel:
    """Raises CheckpointError for a damaged folder, ConfigError for what rankers cannot do."""
    if config.model.dtype != "float32":
        raise ConfigError("model.dtype: rankers are served in float32")
    files = ModelFiles(folder)
    cfg, params = rankers.load(folder)
    return RankModel(cfg, params, files.revision(), folder)


@preparing()
def make_rank_engine(
    model: RankModel, config: Config, catalog: Catalog, metrics: Metrics, like: RankExecutors | None = None
) -> RankEngine:
    """An engine for a catalog, not yet started. like: executors of the model, whose programs are used.

    UserError where the catalog has other items than the model, or the feature store is none, or lacks a feature.
    """
    _fit(model, catalog)
    settings = config.executors
    needs = rankers.ranker(model.cfg).needs(model.cfg)
    features = _open_features(config, needs, catalog)
    schema = None if features is None else features.schema
    if like is not None and like.programs.schema == schema:
        programs = like.programs
    else:
        try:
            programs = Programs(
                model.cfg, model.params, settings.sizes, settings.share_user, schema, settings.growth
            )
        except HistoryIsWhole as error:
            raise ConfigError(f"executors.growth: {error}") from None
    pool = cache = None
    if settings.share_user == "cache":
        pool = StatePool(programs.kept, config.cache.device_mb, None if like is None else like.pool)
        growth = partial(grown_by, programs.user, settings.growth) if settings.growth else None
        cache = UserCache(pool, programs.user.size, growth)
    executors = RankExecutors(programs, settings.number, pool, bind=config.features.bind_threads)
    _log.info(
        "model %s@%s: %s of %d items, on %s; catalog %s; %d programs to compile",
        config.model.name,
        model.revision,
        type(model.cfg).__name__.removesuffix("Config"),
        catalog.n_items,
        jax.devices()[0].device_kind,
        catalog.version,
        programs.to_compile,
    )
    translator = RankTranslator(
        config.model.name, catalog, needs, programs.user, config, revision=model.revision
    )
    return RankEngine(
        translator,
        executors,
        config,
        tasks=len(needs.tasks),
        reads=READS in programs.layouts,
        metrics=metrics,
        features=features,
        cache=cache,
        rebuild=Rebuild(
            partial(_fit, model),
            partial(make_rank_engine, model, config, metrics=metrics, like=executors),
        ),
    )


def _fit(model: RankModel, catalog: Catalog) -> None:
    """ConfigError where the catalog's items are not the model's."""
    if model.cfg.items != items_digest(catalog.item_ids) or model.cfg.n_items != catalog.n_items:
        raise ConfigError(
            f"{model.folder}: the model was trained on other items than the catalog's, or on another order of them"
        )


def _open_features(config: Config, needs: rankers.Needs, catalog: Catalog) -> FeatureCache | None:
    """The cache of the features that the model reads; None where it reads none, or no store is configured."""
    settings = config.features
    if not needs.features:
        return None
    if not settings.store:
        names = ", ".join(name for name, _ in needs.features)
        _log.warning("features.store is not set: items are ranked without their features %s", names)
        return None
    store = open_store(settings.store, settings.timeout_ms / 1e3)
    try:
        text = store.schema()
        if text is None:
            raise ConfigError("features.store: it holds no features; load them by jgr features load")
        schema = Schema.parse(text)
        widths = {feature.name: feature.width for feature in schema.features}
        for name, width in needs.features:
            if widths.get(name) != width:
                raise ConfigError(f"features.store: the model reads {name}[{width}]; the store has {schema}")
    except Exception:
        store.close()
        raise
    return FeatureCache(store, schema, catalog.item_ids, settings)
