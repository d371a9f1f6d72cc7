# SPDX-License-Identifier: Apache-2.0
"""`jgr serve`: serves one or several models over HTTP, until SIGTERM or Ctrl-C.

Each argument, a folder that `jgr train` or `jgr convert` wrote, and each --config is a model. The URL is printed to
stdout once requests are served; everything else goes to stderr. SIGHUP reads the keys and the models' folders again.
Exit codes: 0 after a drain, or after a stop before a model was loaded; 1 after a failed warm-up; 2 for a configuration
that cannot be served.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import logging
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

from absl import flags

from jgr.cli import console
from jgr.config import Config, ConfigError, ServerConfig, UserError, load_config, override
from jgr.fields import distinct

if TYPE_CHECKING:
    from jgr.cache.memory import Memory
    from jgr.serving.engine.engine import AnyEngine
    from jgr.serving.engine.metrics import Metrics
    from jgr.serving.versions.deployment import Load

HELP = "serve recommendations over HTTP; each folder, or --config, is a model"

JOIN_TIMEOUT_S = 1.0
SWITCH_INTERVAL_S = 5e-5

_log = logging.getLogger(__name__)


def define_flags() -> None:
    flags.DEFINE_string(
        "api_key",
        None,
        "key that clients must send as 'Authorization: Bearer ...'; sets server.api_key, and ps shows it: "
        "JGR_SERVER__API_KEY_FILE=FILE does not",
    )
    flags.DEFINE_integer("port", None, "port to listen on, 0 for any free one; sets server.port")
    flags.DEFINE_string(
        "feature_store", None, "redis://host:port/db or an SQLite file; sets features.store of every model"
    )
    flags.DEFINE_bool("null", False, "serve numbered items without a model, to measure the server alone")


def main(argv: Sequence[str]) -> int:
    from jgr.serving.engine.tracing import require_opentelemetry
    from jgr.serving.http.front import check_grpc, check_tls
    from jgr.serving.http.keys import read_keys

    given = {
        "server.api_key": flags.FLAGS.api_key,
        "server.port": flags.FLAGS.port,
        "features.store": flags.FLAGS.feature_store,
    }
    own = [f"{key}={value}" for key, value in given.items() if value is not None]
    assignments = [*console.environment(), *flags.FLAGS.set, *own]
    configs = configurations(flags.FLAGS.config, assignments, argv, loaded=not flags.FLAGS.null)
    read_keys(configs[0].server)  # before minutes of loading
    require_opentelemetry(configs[0].server)
    check_tls(configs[0].server)
    check_grpc(configs[0].server)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the folder is being read already
    memory = None if flags.FLAGS.null else _memory(configs)
    models = []
    for at, config in enumerate(configs):
        engine, load = _named(config, flags.FLAGS.null, len(configs) > 1, memory)
        if at < len(argv) and load is not None:
            load = partial(_load_again, argv[at], config, assignments, memory)
        models.append((engine, load, config))
    return serve(models)


def configurations(
    paths: Sequence[str], assignments: Sequence[str], folders: Sequence[str] = (), loaded: bool = False
) -> list[Config]:
    """The configuration of each model, the folders' first: what the folder or file says, or the defaults if there is
    neither, with the assignments applied.

    An assignment `section.field=value` is for all models, `name:section.field=value` for the one whose file calls its
    model `name`. The first configuration's section `server` is used for all. Raises ConfigError for an unknown or
    repeated name, and if models are `loaded` for a file that names none.
    """
    from jgr.models.manifest import folder_config

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
    """Raise ConfigError for a configuration file that names no model; see also console.warn_of_prompt."""
    for path, config in zip(paths, configs, strict=False):
        if not config.model.path:
            folder = folders[0] if folders else "FOLDER"
            raise ConfigError(
                f"{path}: model.path is not set, and each --config is a model of its own: jgr config {folder} "
                "--format=toml writes one file of both, or give single fields by --set"
            )
        console.warn_of_prompt(config, path)


def _load_again(
    folder: str, config: Config, assignments: Sequence[str], memory: Memory | None, metrics: Metrics
) -> AnyEngine:
    """A reload of a model that was given by its folder: what stands there now, its settings too, under the old name."""
    from jgr.models.manifest import folder_config
    from jgr.serving.versions.loading import load_any

    found = folder_config(folder)
    mine = ("", found.model.name, config.model.name)
    split = [assignment.partition("=") for assignment in assignments]
    own = [f"{key.rpartition(':')[2]}={value}" for key, _, value in split if key.rpartition(":")[0] in mine]
    found = override(found, *own, f"model.name={config.model.name}")
    return load_any(dataclasses.replace(found, server=config.server), metrics, memory)


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


def serve(models: Sequence[tuple[AnyEngine, Load | None, Config]]) -> int:
    """Serve until a signal, and return the exit code."""
    from jgr.serving.http.listener import Listener
    from jgr.serving.versions.deployment import Deployment

    (engine, load, config), *others = models
    more = [Deployment(engine, config.catalog, load) for engine, load, config in others]
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(console.progress_bar("compiling"))

        def announce(url: str) -> None:
            stack.close()
            _settle()
            print(url, flush=True)

        # A thread that launches runs needs the interpreter often, and each time waits so long for a busy event loop.
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        listener = Listener(engine, config, load=load, more=more, on_progress=bar, on_ready=announce)
        for deployment in listener.models.deployments:
            deployment.changed.append(_settle)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, listener.handle_exit)
        code = listener.serve_until_stopped()
    _log.info("ended with code %d", code)
    if not listener.models.join(JOIN_TIMEOUT_S):
        # A running device program cannot be interrupted, and Python must not exit while a thread is inside one.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(code)
    return code


def _settle() -> None:
    """Leave what is loaded and compiled out of the garbage collector's rounds, each of which stops all threads for a
    tenth of a second otherwise. What a load took and gave back goes back to the system, where the C library can: else
    the next one may find it in pieces and take more."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)


def _leave(number: int, frame: FrameType | None) -> None:
    # No request was accepted, so none is lost; a thread that is still loading is not waited for.
    print("jgr: stopped before the model was loaded", file=sys.stderr, flush=True)
    os._exit(0)
