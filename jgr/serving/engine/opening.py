# SPDX-License-Identifier: Apache-2.0
"""The first steps of loading any model: its folder, a device, its catalog, metrics."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jgr.catalog.catalog import Catalog, load_catalog
from jgr.config import Config, ConfigError
from jgr.models import manifest
from jgr.models.model_files import ModelFiles, check_folder
from jgr.ops import native
from jgr.serving.engine.compilation import CompilationCounter, use_compilation_cache
from jgr.serving.engine.metrics import Metrics
from jgr.serving.engine.settings import settings_digest


@dataclass(frozen=True, eq=False)
class Again:
    """How a version is loaded once more, from the folder that it was loaded from. It holds no weights.

    version: the version as answers name it. files: its files, as they were found; None: they are gone. load: makes an
    engine of what is there now, not started. folder: where that is. settings: see `settings_digest`.
    """

    version: str
    files: ModelFiles | None
    load: Callable[[Metrics], Any]
    folder: str
    settings: str

    @staticmethod
    def of(
        version: str,
        files: ModelFiles | None,
        folder: Path,
        config: Config,
        load: Callable[[Config, Metrics], Any],
    ) -> Again | None:
        """folder: the model's, which config.model.path may have named by a link that is switched later.

        None where there are no files, since the model was not loaded from any.
        """
        if files is None:
            return None
        found = replace(config, model=replace(config.model, path=str(folder)))
        return Again(version, files, partial(load, found), str(folder), settings_digest(config))


def open_folder(config: Config) -> Path:
    """The model's folder, with a device and a compilation cache. ConfigError where there is none of either.

    UserError where something in the folder could not be read to an end; see check_folder.
    """
    if not config.model.path:
        raise ConfigError("model.path: the folder of the model is not set")
    check_folder(config.model.path)
    try:
        jax.devices()
    except RuntimeError as error:  # the backend that JAX_PLATFORMS names is not there
        raise ConfigError(f"there is no device to serve on: {error}") from None
    if not config.model.native:
        native.use(False)
    if config.model.compilation_cache:
        use_compilation_cache(Path(os.path.expanduser(config.model.compilation_cache)))
    # A link that is switched from here on does not mix two models. Path.resolve would end at a loop of links.
    return Path(os.path.realpath(config.model.path))


def read_catalog(folder: Path, config: Config) -> Catalog:
    """The catalog of config.catalog.path, else the model folder's own, which must be the one that its manifest
    names."""
    return load_catalog(config.catalog.path) if config.catalog.path else manifest.own_catalog(folder)


def counting_metrics() -> Metrics:
    """The metrics of a server's first engine, which count what the process compiles from now on."""
    counter = CompilationCounter()
    return Metrics(lambda: counter.counts)
