# SPDX-License-Identifier: Apache-2.0
"""`jgr cluster`: serves one or several models by replicas on Ray Serve, until SIGTERM or Ctrl-C.

Models are given as for `jgr serve`. Without --address Ray is started on this machine and ends with the command; with it
the application is deployed on a cluster that is there, and stays. The URL is printed to stdout once a replica serves.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import TYPE_CHECKING

from absl import flags

from jgr import extras
from jgr.cli import console
from jgr.fields import UserError, one_line

if TYPE_CHECKING:
    from jgr.serving.cluster.replica import Source

HELP = "serve by several replicas on Ray Serve; needs jgr[cluster]"

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # it would tell others of this cluster
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",  # one event loop a process, and gRPC between them
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",  # it is for a load balancer of Ray's, and ends half a minute late
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",  # one that hangs does not drain, and keeps its device meanwhile
}
LOGGING = {"log_level": "WARNING", "enable_access_log": False}
"""What Ray writes into its own logs; the access log of the servers is `server.access_log`."""

PROXY_S, LOOK_S = 30.0, 0.1
"""So long Ray's proxies have to listen once the replicas serve; and between two looks."""

_log = logging.getLogger(__name__)


def define_flags() -> None:
    flags.DEFINE_integer("replicas", None, "replicas; sets fleet.replicas", lower_bound=1)
    flags.DEFINE_integer("port", None, "port to listen on; sets server.port")
    flags.DEFINE_string("address", None, "address of a Ray cluster, or auto; default: Ray is started here")
    flags.DEFINE_bool("null", False, "serve numbered items without a model, to measure the fleet alone")


def main(argv: Sequence[str]) -> int:
    values = flags.FLAGS
    extras.require("cluster", "jgr cluster")
    given = {"fleet.replicas": values.replicas, "server.port": values.port}
    own = [f"{key}={value}" for key, value in given.items() if value is not None]
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)

    from jgr.serving.cluster.replica import Source
    from jgr.serving.cluster.secret import require_token

    require_token(os.environ)  # Ray reads it when it is imported

    source = Source(
        tuple(map(os.path.abspath, argv)),
        tuple(values.config),
        (*console.environment(), *values.set, *own),
        values.null,
    )
    configs = source.configs()  # before seconds of starting Ray
    console.keep_enough_threads(configs)  # replicas on this machine get this process's environment
    config = configs[0]
    port = config.server.port
    if (
        values.address is None or not port
    ):  # a cluster that is there may serve this application on its port already
        port = own_port(config.server.host, port)
    ended = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        _log.info(
            "%s: no more requests are taken, what was accepted is finished", signal.Signals(number).name
        )
        ended.set()

    return _serve(source, config.server.host, port, values.address, ended, stop)


def own_port(host: str, port: int = 0) -> int:
    """A port that nobody listens on now, the one that is given unless that is 0. Raises UserError where it cannot be
    used: Ray would start its proxy again and again, and whoever listens there would answer."""
    from jgr.serving.http.ports import bind

    with bind(host, port) as found:
        own: int = found.getsockname()[1]
    return own


def require_proxy(proxies: Callable[[], Iterable[str]], address: str, patience_s: float = PROXY_S) -> None:
    """Wait until one of Ray's proxies, whose states are given, listens. Raises UserError where none does so long."""
    ends_s = time.monotonic() + patience_s
    while "HEALTHY" not in (states := [str(getattr(each, "value", each)) for each in proxies()]):
        if time.monotonic() > ends_s:
            found = ", ".join(states) or "there is none"
            raise UserError(
                f"server.host, server.port: no proxy of Ray listens on {address} ({found}); something else may, and "
                "Ray's logs tell"
            )
        time.sleep(LOOK_S)


def _serve(
    source: Source,
    host: str,
    port: int,
    address: str | None,
    ended: threading.Event,
    stop: Callable[[int, FrameType | None], None],
) -> int:
    import ray
    from ray import serve

    from jgr.serving.cluster.application import NAME, application
    from jgr.serving.cluster.secret import HOW, require_closed

    try:
        ray.init(address=address, include_dashboard=False, logging_level=logging.WARNING)
    except (ray.exceptions.AuthenticationError, ConnectionError) as error:
        raise UserError(f"the Ray cluster at {address} cannot be used: {one_line(error)}; {HOW}") from None
    for number in (signal.SIGTERM, signal.SIGINT):  # Ray has just set its own, which end at once
        signal.signal(number, stop)
    try:
        require_closed(ray.get_runtime_context().gcs_address)
        serve.start(http_options={"host": host, "port": port}, proxy_location="EveryNode")
        serve.run(application(source), name=NAME, logging_config=LOGGING)
        require_proxy(lambda: serve.status().proxies.values(), f"{host}:{port}")
        print(f"http://{host}:{port}", flush=True)
        ended.wait()
    finally:
        if address is None:
            serve.shutdown()
        ray.shutdown()
    _log.info("ended")
    return 0
