# SPDX-License-Identifier: Apache-2.0
"""`jgr serve`: serves one or several models over HTTP, until SIGTERM or Ctrl-C.

Each argument, a folder that `jgr train` or `jgr convert` wrote, and each --config is a model. The URL is printed to
stdout once requests are served; everything else goes to stderr. SIGHUP reads the keys and the models' folders again.
Exit codes: 0 after a drain, or after a stop before a model was loaded; 1 after a failed warm-up; 2 for a configuration
that cannot be served.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING

from absl import flags

from jgr.cli import console
from jgr.config import Config, UserError
from jgr.heap import give_back

if TYPE_CHECKING:
    from jgr.serving.versions.sources import Loaded

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
    from jgr.serving.http.ports import hold_ports
    from jgr.serving.versions.sources import configurations, load_all

    given = {
        "server.api_key": flags.FLAGS.api_key,
        "server.port": flags.FLAGS.port,
        "features.store": flags.FLAGS.feature_store,
    }
    own = [f"{key}={value}" for key, value in given.items() if value is not None]
    assignments = [*console.environment(), *flags.FLAGS.set, *own]
    configs = configurations(flags.FLAGS.config, assignments, argv, loaded=not flags.FLAGS.null)
    if not flags.FLAGS.null:
        _require_folders(configs)
    console.size_threads(configs)
    # Before minutes of loading, in which nobody else can take the port; the ports before slow imports too.
    held = hold_ports(configs[0].server)
    from jgr.serving.engine.tracing import require_opentelemetry
    from jgr.serving.http.front import check_grpc, check_tls
    from jgr.serving.http.keys import read_keys

    read_keys(configs[0].server)
    require_opentelemetry(configs[0].server)
    check_tls(configs[0].server)
    check_grpc(configs[0].server)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the folder is being read already
    return serve(load_all(argv, assignments, configs, flags.FLAGS.null), held)


def _require_folders(configs: Sequence[Config]) -> None:
    """Raise UserError for a model that is not there, before another one is loaded."""
    from jgr.models import hub

    for path, name in ((config.model.path, config.model.name) for config in configs):
        # What loads a model tells of these.
        elsewhere = not path or "\0" in path or path.startswith(hub.SCHEME)
        if not elsewhere and not os.path.isdir(path):
            which = f"model {name!r}: " if len(configs) > 1 else ""
            raise UserError(f"{which}{path}: no such model folder (model.path){hub.hint(path)}")


def serve(models: Sequence[Loaded], held: socket.socket | None = None) -> int:
    """Serve until a signal, and return the exit code. held: see Listener."""
    from jgr.serving.cluster.own_items import read_kv
    from jgr.serving.http.listener import Listener
    from jgr.serving.versions.deployment import Deployment

    (engine, load, config, _), *others = models
    more = [Deployment(one.engine, one.config.catalog, one.load) for one in others]
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(console.progress_bar("compiling"))

        def announce(url: str) -> None:
            stack.close()
            console.collect_as_usual()
            _settle()
            print(url, flush=True)

        # A thread that launches runs needs the interpreter often, and each time waits so long for a busy event loop.
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        listener = Listener(
            engine, config, load=load, more=more, on_progress=bar, on_ready=announce, held=held
        )
        read_kv(listener.models, config)
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
    give_back()


def _leave(number: int, frame: FrameType | None) -> None:
    # No request was accepted, so none is lost; a thread that is still loading is not waited for.
    print("jgr: stopped before the model was loaded", file=sys.stderr, flush=True)
    os._exit(0)
