# SPDX-License-Identifier: Apache-2.0
"""What a server serves: from the names of folders and files, and single fields, to models that are loaded.

`jgr serve` and each replica of a fleet go this one way, so that the same names give the same answers.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from jgr.config import Config, ConfigError, ServerConfig, UserError, load_config, override
from jgr.fields import distinct
from jgr.models.manifest import folder_config, warn_of_prompt

if TYPE_CHECKING:
    from jgr.cache.memory import Memory
    from jgr.serving.engine.engine import AnyEngine
    from jgr.serving.engine.metrics import Metrics
    from jgr.serving.versions.deployment import Load

_log = logging.getLogger(__name__)


class Loaded(NamedTuple):
    """A model that is loaded. engine: not started yet. load: what loads it again; None: nothing does. load_from: what
    loads it from another folder.
    """

    engine: AnyEngine
    load: Load | None
    config: Config
    load_from: Callable[[str, Metrics], AnyEngine]


def load_all(
    folders: Sequence[str],
    assignments: Sequence[str],
    configs: Sequence[Config],
    null: bool = False,
    places: Sequence[str] = (),
) -> list[Loaded]:
    """Each model, loaded. The first configurations are those of the folders. null: numbered items, without a model.
    places: the folder that each model is loaded from this once in place of its own, with the settings there; "": its
    own. Slow imports happen here.

    Raises UserError for what cannot be served; where there are several models, it names the model.
    """
    first = list[Config]()
    for at, config in enumerate(configs):
        place = places[at] if at < len(places) else ""
        of_folder = at < len(folders) and place
        first.append(_settings(place, config, assignments) if of_folder else _at(config, place))
    memory = None if null else _memory(first)
    models = []
    for at, (config, here) in enumerate(zip(configs, first, strict=True)):
        engine, load = _named(here, null, len(configs) > 1, memory)
        load_from = partial(_load_at, config, memory)
        if load is not None:
            load = partial(_load_at, config, memory, config.model.path)
        if at < len(folders) and load is not None:
            load = partial(_load_again, folders[at], config, assignments, memory)
            load_from = partial(_load_from, config, assignments, memory)
        models.append(Loaded(engine, load, config, load_from))
    return models


def _at(config: Config, folder: str) -> Config:
    """The configuration, of a model in that folder; "": in its own."""
    return (
        dataclasses.replace(config, model=dataclasses.replace(config.model, path=folder))
        if folder
        else config
    )


def _load_at(config: Config, memory: Memory | None, folder: str, metrics: Metrics) -> AnyEngine:
    from jgr.serving.versions.loading import load_any

    return load_any(_at(config, folder), metrics, memory)


def _load_from(
    config: Config, assignments: Sequence[str], memory: Memory | None, folder: str, metrics: Metrics
) -> AnyEngine:
    return _load_again(folder, config, assignments, memory, metrics)


def configurations(
    paths: Sequence[str], assignments: Sequence[str], folders: Sequence[str] = (), loaded: bool = False
) -> list[Config]:
    """The configuration of each model, the folders' first: what the folder or file says, or the defaults if there is
    neither, with the assignments applied.

    An assignment `section.field=value` is for all models, `name:section.field=value` for the one whose file calls its
    model `name`. The first configuration's section `server` is used for all. Raises ConfigError for an unknown or
    repeated name, and if models are `loaded` for a file that names none.
    """
    files = [*map(folder_config, folders), *map(load_config, paths)] or [Config()]
    names = [file.model.name for file in files]
    own: dict[str, list[str]] = {name: [] for name in names}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        name, addressed, field = key.rpartition(":")
        if addressed and name not in own:
            raise ConfigError(
                f"--set {key}: no configuration has a model called {name!r}; there are {', '.join(own)}"
            )
        if addressed and name != names[0] and field.startswith("server."):
            raise ConfigError(f"--set {key}: the section server is that of the first model, {names[0]}")
        for model in [name] if addressed else own:
            own[model].append(f"{field}{equals}{value}")
    configs = [override(file, *own[name]) for file, name in zip(files, names, strict=True)]
    if loaded:
        _check_files(paths, configs[len(folders) :], folders)
    distinct("model.name", [config.model.name for config in configs])
    for file in files[1:]:
        if file.server not in (ServerConfig(), files[0].server):
            _log.warning("model %s: its section server is not used, the first's is", file.model.name)
    return [dataclasses.replace(config, server=configs[0].server) for config in configs]


def _check_files(paths: Sequence[str], configs: Sequence[Config], folders: Sequence[str]) -> None:
    """Raise ConfigError for a configuration file that names no model; see also `warn_of_prompt`."""
    for path, config in zip(paths, configs, strict=False):
        if not config.model.path:
            folder = folders[0] if folders else "FOLDER"
            raise ConfigError(
                f"{path}: model.path is not set, and each --config is a model of its own: jgr config {folder} "
                "--format=toml writes one file of both, or give single fields by --set"
            )
        warn_of_prompt(config, path)


def _load_again(
    folder: str, config: Config, assignments: Sequence[str], memory: Memory | None, metrics: Metrics
) -> AnyEngine:
    """A reload of a model that was given by its folder: what stands there now, its settings too, under the old name."""
    from jgr.serving.versions.loading import load_any

    return load_any(_settings(folder, config, assignments), metrics, memory)


def _settings(folder: str, config: Config, assignments: Sequence[str]) -> Config:
    """The configuration of the model in a folder, as that says, under the name of another one and for its server."""
    found = folder_config(folder)
    mine = ("", found.model.name, config.model.name)
    split = [assignment.partition("=") for assignment in assignments]
    own = [f"{key.rpartition(':')[2]}={value}" for key, _, value in split if key.rpartition(":")[0] in mine]
    found = override(found, *own, f"model.name={config.model.name}")
    return dataclasses.replace(found, server=config.server)


def _named(config: Config, null: bool, several: bool, memory: Memory | None) -> tuple[AnyEngine, Load | None]:
    """Call `make_engine`; if there are several models, its errors name the model."""
    try:
        return make_engine(config, null, memory)
    except UserError as error:
        if several:
            raise UserError(f"model {config.model.name!r}: {error}") from error
        raise


def _memory(configs: Sequence[Config]) -> Memory:
    """The cache memory of all models, as the first configuration says."""
    from jgr.cache.memory import Memory
    from jgr.serving.versions.loading import own_settings

    first = configs[0].cache
    for config in configs[1:]:
        own = config.cache
        if (own.device_mb, own.host_mb, own.page_kb) != (first.device_mb, first.host_mb, first.page_kb):
            _log.warning(
                "model %s: its cache.device_mb, host_mb, page_kb are not used, the first's are",
                config.model.name,
            )
    return Memory.of(*map(own_settings, configs))


def make_engine(config: Config, null: bool, memory: Memory | None = None) -> tuple[AnyEngine, Load | None]:
    """Make a model's engine, and the function that makes the next one for a reload. Slow imports happen here.

    memory: the caches' memory, which all engines share, so that a reload of the same weights keeps what is in it.
    """
    if null:
        from jgr.serving.decoders.null import null_engine

        return null_engine(config), None
    from jgr.serving.versions.loading import load_any

    memory = memory or _memory([config])
    return load_any(config, memory=memory), partial(load_any, config, memory=memory)
