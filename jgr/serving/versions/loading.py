# SPDX-License-Identifier: Apache-2.0
"""From a model folder to the engine of its kind: a decoder's or a scorer's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jgr.cache.memory import Memory
from jgr.config import Config
from jgr.models import hub, retrievers, scorers
from jgr.models.config_file import read_object
from jgr.models.params import CheckpointError
from jgr.serving.decoders.loading import load_engine
from jgr.serving.engine.engine import AnyEngine
from jgr.serving.engine.metrics import Metrics
from jgr.serving.engine.opening import open_folder
from jgr.serving.policies.jobs import KINDS, Kind
from jgr.serving.scorers.loading import load_scorer_engine


def is_scorer(folder: Path) -> bool:
    """Whether a folder's config.json is a scorer's; one that cannot be read is left to others to refuse."""
    try:
        return read_object(folder / "config.json").get("model_type") in (*retrievers.MODELS, *scorers.MODELS)
    except CheckpointError:
        return False


def own_settings(config: Config) -> Config:
    """The configuration without the other family's way of caching, which takes no part of the pool for this model."""
    if config.model.path and is_scorer(hub.local(config.model.path)):
        return replace(config, cache=replace(config.cache, policy="none"))
    return replace(config, executors=replace(config.executors, share_user="request", growth=0))


def load_any(
    config: Config,
    metrics: Metrics | None = None,
    memory: Memory | None = None,
    kinds: Sequence[Kind] = KINDS,
) -> AnyEngine:
    """The engine that serves config.model, a scorer or a decoder, over config.catalog.

    Not yet started. metrics, memory: of the server that it joins. kinds: see load_engine; a scorer ranks, whatever they
    are. Raises UserError, which names what is missing or does not fit.
    """
    config = own_settings(hub.located(config))
    if is_scorer(open_folder(config)):
        return load_scorer_engine(config, metrics, memory)
    return load_engine(config, metrics, memory, kinds)
