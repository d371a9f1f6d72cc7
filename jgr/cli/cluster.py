# SPDX-License-Identifier: Apache-2.0
"""`jgr cluster`: serves one or several models by replicas on Ray Serve, until SIGTERM or Ctrl-C.

Models are given as for `jgr serve`. Without --address Ray is started on this machine and ends with the command; with it
the application is deployed on a cluster that is there, and stays. The URL is printed to stdout once all replicas serve.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from absl import flags

from jgr import extras
from jgr.cli import console
from jgr.fields import UserError, one_line

if TYPE_CHECKING:
    from jgr.config import Config
    from jgr.config.fleet import FleetConfig
    from jgr.serving.cluster.replica import Source

HELP = "serve by several replicas on Ray Serve; needs jgr[cluster]"

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # it would tell others of this cluster
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",  # one event loop a process, and gRPC between them
    "RAY_SERVE_LOG_TO_STDERR": "1",  # that setting would keep the last 1000 lines of each process for itself
    "RAY_DEDUP_LOGS": "0",  # Ray leaves out what two processes say alike
    "RAY_COLOR_PREFIX": "0",  # Ray names the process before each line, in colors also where it writes to a file
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",  # it is for a load balancer of Ray's, and ends half a minute late
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",  # one that hangs does not drain, and keeps its device meanwhile
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "jgr.serving.cluster.doors:doors",  # heads that Ray fails at
}
LOGGING = {"log_level": "WARNING", "enable_access_log": False}
"""What Ray writes into its own logs; the access log of the servers is `server.access_log`."""

PROXY_S, LOOK_S = 30.0, 0.1
"""So long Ray's proxies have to listen once the replicas serve; and between two looks."""
HEAD_S = 5.0
"""So long the head of a Ray cluster may take to accept a connection. Ray itself tries for minutes."""
DRAINED_S, ANSWERED_S = 5.0, 0.2
"""So much longer than requests may take fronts have to say that all ended; and answers, to leave the proxies."""
TELL_S = 1.0
"""Between two looks for what keeps replicas from starting."""

_log = logging.getLogger(__name__)


def define_flags() -> None:
    flags.DEFINE_integer("replicas", None, "replicas; sets fleet.replicas", lower_bound=1)
    flags.DEFINE_float("devices", None, "GPUs of each replica; sets fleet.gpus", lower_bound=0)
    flags.DEFINE_integer("port", None, "port to listen on; sets server.port")
    flags.DEFINE_string("address", None, "address of a Ray cluster, or auto; default: Ray is started here")
    flags.DEFINE_bool("null", False, "serve numbered items without a model, to measure the fleet alone")


def main(argv: Sequence[str]) -> int:
    values = flags.FLAGS
    extras.require("cluster", "jgr cluster")
    given = {
        "fleet.replicas": values.replicas,
        "fleet.gpus": values.devices,
        "server.port": values.port,
    }
    own = [f"{key}={value}" for key, value in given.items() if value is not None]
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)

    from jgr.serving.cluster.replica import Source
    from jgr.serving.cluster.secret import keep_token, require_token
    from jgr.serving.http.ports import warn_if_open

    require_token(os.environ)  # Ray reads it when it is imported
    keep_token(os.environ, Path.home())

    source = Source(
        tuple(map(os.path.abspath, argv)),
        tuple(values.config),
        (*console.environment(), *values.set, *own),
        values.null,
    )
    configs = source.configs()  # before seconds of starting Ray
    console.size_threads(configs)  # replicas on this machine get this process's environment
    config = configs[0]
    warn_if_open(config.server, config.server.host)
    port = config.server.port
    if (
        values.address is None or not port
    ):  # a cluster that is there may serve this application on its port already
        port = own_port(config.server.host, port)
    return _serve(source, config, port, values.address)


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


def require_address(found: tuple[str, int], wanted: tuple[str, int]) -> None:
    """Raises UserError where Ray's proxies are told to listen elsewhere, hosts and ports: a cluster that is there keeps
    the address that its proxies began with, and nobody would be at the other one."""
    if found != wanted:
        (host, port), (own_host, own_port) = found, wanted
        raise UserError(
            f"server.host, server.port: the proxies of this Ray cluster listen on {host}:{port}, not "
            f"{own_host}:{own_port}: take that, or end Ray Serve there first"
        )


def require_head(address: str) -> None:
    """Raises UserError where nobody listens on the address of a Ray cluster, HOST:PORT. What Ray finds itself, such as
    auto, is left to it."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), HEAD_S).close()
    except (OSError, OverflowError) as error:
        raise UserError(f"--address={address}: no Ray cluster answers: {one_line(error)}") from None


def require_room(fleet: FleetConfig, found: Mapping[str, float]) -> None:
    """Raises UserError where a machine alone has fewer cores or GPUs than its replicas ask for: some would wait for
    ever. found: what Ray has, by its names."""
    for kind, field, each in (("CPU", "cpus", fleet.cpus), ("GPU", "gpus", fleet.gpus)):
        if fleet.replicas * each > found.get(kind, 0.0):
            raise UserError(
                f"fleet.replicas: {fleet.replicas} with fleet.{field}={each:g} need {fleet.replicas * each:g} {kind}s, "
                f"and Ray finds {found.get(kind, 0.0):g} here: take fewer replicas, or less for each"
            )


def failure(message: str) -> str:
    """What Ray says of a deployment that is not whole yet, in one line: of a traceback what was raised."""
    lines = message.strip().splitlines()
    frames = [at for at, line in enumerate(lines) if line.startswith("  ")]
    raised = lines[frames[-1] + 1 :] if frames else lines
    kind, colon, said = " ".join(raised or lines[-1:]).partition(": ")
    return one_line(said if colon and kind.startswith("jgr.") else f"{kind}{colon}{said}")


def tell_failures(
    messages: Callable[[], Mapping[str, str]], over: threading.Event, every_s: float = TELL_S
) -> None:
    """Log what keeps deployments, by their names, from being whole, each reason once, and when they are whole again,
    until `over`: Ray tries again."""
    told: dict[str, set[str]] = {}
    while not over.wait(every_s):
        for name, message in messages().items():
            if why := failure(message):
                if why not in (known := told.setdefault(name, set())):
                    known.add(why)
                    _log.warning("%s: %s", name, why)
            elif told.pop(name, None):
                _log.info("%s: whole again", name)


@contextmanager
def _failures_told() -> Iterator[None]:
    """Tell meanwhile what keeps replicas from starting, those too that Ray starts later for others."""
    over = threading.Event()
    teller = threading.Thread(target=tell_failures, args=(_messages, over), daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()


def _messages() -> dict[str, str]:
    """What Ray says of each deployment, by its name, "" of one that is whole; nothing while nobody can be asked."""
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    from jgr.serving.cluster.application import NAME

    try:
        found = serve.status().applications.get(NAME)
    except (RayError, RayServeException):
        return {}
    told = {} if found is None else found.deployments
    return {name: each.message for name, each in told.items() if each.message or each.status == "HEALTHY"}


class _Stop(Exception):
    """A signal has come before the fleet serves."""


class _Signals:
    """SIGTERM and SIGINT: before `serves` they end the start, after it `ended` is set."""

    def __init__(self) -> None:
        self.serves, self.ended = False, threading.Event()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.serves:
            _log.info("%s: no more requests are taken, what was accepted is finished", name)
        elif not self.ended.is_set():
            self.ended.set()
            _log.info("%s: the start is given up", name)
            raise _Stop
        self.ended.set()


def _serve(source: Source, config: Config, port: int, address: str | None) -> int:
    """config: of the first model, as it was at the start: its folder may be damaged when all ends."""
    import ray
    from ray import serve

    from jgr.serving.cluster.secret import HOW, require_closed

    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # it tells of what nobody has asked for
    if address is None:
        _log.info("starting Ray on this machine")
    else:
        require_head(address)
    try:
        ray.init(address=address, include_dashboard=False, logging_level=logging.WARNING)
    except (ray.exceptions.AuthenticationError, ConnectionError) as error:
        raise UserError(f"the Ray cluster at {address} cannot be used: {one_line(error)}; {HOW}") from None
    signals, drain_s = _Signals(), None
    for number in (signal.SIGTERM, signal.SIGINT):  # Ray has just set its own, which end at once
        signal.signal(number, signals)
    try:
        require_closed(ray.get_runtime_context().gcs_address)
        if address is None:
            require_room(config.fleet, ray.cluster_resources())
        with _failures_told():
            host = config.server.host
            _deploy(source, host, port)
            signals.serves = True
            print(f"http://{host}:{port}", flush=True)
            signals.ended.wait()
            drain_s = config.server.drain_timeout_s
    except _Stop:
        pass
    finally:
        signals.serves = True  # a second signal does not break what ends
        if address is None:
            asyncio.run(_end(drain_s, serve.shutdown))
        ray.shutdown()
    _log.info("ended")
    return 0


async def _end(drain_s: float | None, shut_down: Callable[[], None]) -> None:
    """Shut down once what was accepted is finished, so many seconds later at the latest; None: at once."""
    if drain_s is not None:
        await _drain(drain_s)
    await asyncio.to_thread(shut_down)  # beside this event loop, which Ray's handle of the fronts needs


async def _drain(timeout_s: float) -> None:
    """Have all fronts refuse what comes, and finish what they have: Ray ends its proxies at once."""
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException
    from ray.serve.handle import DeploymentHandle

    from jgr.serving.cluster.application import FRONT, NAME
    from jgr.serving.cluster.replicas import begun, soon

    # Not one that Ray keeps, and would end in its own way.
    fronts = begun(DeploymentHandle(FRONT, NAME))
    try:
        left = await soon(fronts, "drain", timeout_s, within_s=timeout_s + DRAINED_S)
    except (RayError, RayServeException, TimeoutError) as error:
        _log.warning("not all of what was accepted is finished: %s", one_line(error))
        return
    if sum(left):
        _log.warning("%d requests were not finished within %g s", sum(left), timeout_s)
    await asyncio.sleep(ANSWERED_S)


def _deploy(source: Source, host: str, port: int) -> None:
    """Have Ray serve the application. Raises UserError where its replicas do not start."""
    from ray import serve
    from ray.serve.context import _get_global_client

    from jgr.serving.cluster.application import NAME, application

    serve.start(http_options={"host": host, "port": port}, proxy_location="EveryNode", logging_config=LOGGING)
    http = _get_global_client().http_config  # Ray tells it nowhere else without its dashboard
    require_address((http.host, http.port), (host, port))
    built = application(source)
    _log.info("deployed; replicas load their models and compile")
    try:
        serve.run(built, name=NAME, logging_config=LOGGING)
    except RuntimeError as error:
        why = [f"{name}: {failure(message)}" for name, message in _messages().items() if message]
        raise UserError(f"the fleet does not start: {'; '.join(why) or one_line(error)}") from None
    require_proxy(lambda: serve.status().proxies.values(), f"{host}:{port}")
