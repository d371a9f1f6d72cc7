# SPDX-License-Identifier: Apache-2.0
"""The server as a process, around uvicorn: socket, signals, slow clients, start and end.

The one idea: a stop is a drain. SIGTERM or SIGINT makes the engine refuse new work while the socket stays
open, so that clients get a 503 instead of a reset. Accepted requests are finished, up to a time limit; then
the connections are closed and the exit code is 0. A second signal ends the process at once. SIGHUP reloads the
keys and then the models, one after the other.

What one connection may do is in `jgr.serving.http.connection`. Here is how many there may be, for which the process
needs files to be open, and the second's tick at which those that do not read their answers are looked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn

from jgr.config import Config, ServerConfig, UserError
from jgr.heap import give_back
from jgr.serving.engine.contract import Progress
from jgr.serving.engine.engine import AnyEngine
from jgr.serving.http.bounds import READ_TIMEOUT_S, is_of_no_client
from jgr.serving.http.connection import Limits, Protocol
from jgr.serving.http.front import check_grpc, check_tls, front
from jgr.serving.http.ports import bind, listen, warn_if_open
from jgr.serving.http.server import App
from jgr.serving.http.tls import TlsDoor
from jgr.serving.http.upgrades import StaysHttp1
from jgr.serving.versions.deployment import Deployment, Load
from jgr.serving.versions.served_models import Models

if TYPE_CHECKING:
    from jgr.serving.http.kserve_grpc import GrpcServer

KEEP_ALIVE_S = 30
CLOSE_TIMEOUT_S = 5.0
"""Seconds, after the drain, in which requests may still arrive and answers leave."""
GIVE_UP_TIMEOUT_S = 10
"""Then uvicorn ends what is left; it is not left to it, since it would say so with a traceback."""
OTHER_FILES = 256
"""Files that a process has open besides its connections."""
TICKS_A_SECOND = 10
MAX_UNSENT_BYTES = 256 << 20
"""What all clients together may leave unread for over a second; those that leave the most are cut off."""
FLOOD_BYTES = 64 << 20
"""Where unfinished bodies have held more than this, their memory goes back to the system once they are gone."""

_log = logging.getLogger(__name__)


class Listener(uvicorn.Server):
    """Serves `engine`, and the further models in `more`, on a socket until a signal or `stop`.

    load: makes the new engine for a reload; None: reloads are refused. on_progress: told how the warm-up goes on, in
    the worker thread; see contract.Executors.warm_up. on_ready: called with the server's URL once all models are
    served. held: the server's address, where `ports.hold` has taken it already. exit_code: 0, or 1 after a failed
    warm-up. Raises ConfigError if two models have the same name, and for keys that cannot be used, and for traces that
    cannot be sent.
    """

    def __init__(
        self,
        engine: AnyEngine,
        config: Config,
        *,
        load: Load | None = None,
        more: Sequence[Deployment] = (),
        on_progress: Progress = lambda done, total, label: None,
        on_ready: Callable[[str], None] = lambda url: None,
        held: socket.socket | None = None,
        read_timeout_s: float = READ_TIMEOUT_S,
        close_timeout_s: float = CLOSE_TIMEOUT_S,
    ) -> None:
        self.models = Models([Deployment(engine, config.catalog, load), *more])
        server = config.server
        check_tls(server)
        app = App(self.models, server)
        self.app = app
        connections = connections_that_fit(server.max_connections, 1 if server.grpc_port is None else 2)
        self.grpc = _grpc_server(app, server, connections, read_timeout_s)
        refused = self.models.deployments[0].metrics.refused["connections"]
        limits = Limits(
            connections,
            app.may_upload,
            refused.inc,
            read_timeout_s,
            server.base_path,
        )
        self._limits = limits
        protocol: Any = partial(StaysHttp1, limits=limits)
        super().__init__(
            uvicorn.Config(
                front(app, server),
                loop="uvloop",
                http=protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=GIVE_UP_TIMEOUT_S,
                ssl_certfile=server.tls_certificate or None,
                ssl_keyfile=server.tls_key or None,
            )
        )
        logging.getLogger("uvicorn.error").addFilter(is_of_no_client)
        self.exit_code = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._flooded = False
        self._signal = ""
        self._drain_timeout_s = server.drain_timeout_s
        self._write_timeout_s = server.write_timeout_s
        self._close_timeout_s = close_timeout_s
        self._on_progress = on_progress
        self._on_ready = on_ready
        self._socket = bind(server.host, server.port) if held is None else listen(held)
        host, port = self._socket.getsockname()[:2]
        warn_if_open(server, host)
        scheme = "https" if server.tls_certificate else "http"
        self.url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        self._warming: asyncio.Task[None]

    def serve_until_stopped(self) -> int:
        """Serve until the server is drained, and return the exit code. In the main thread SIGHUP reloads meanwhile."""
        if threading.current_thread() is not threading.main_thread():
            self.run(sockets=[self._socket])
            return self.exit_code
        # Not by the loop, which leaves the signal's default action behind when it closes: that ends the process.
        before = signal.signal(signal.SIGHUP, self._hang_up)
        try:
            self.run(sockets=[self._socket])
        finally:
            signal.signal(signal.SIGHUP, before or signal.SIG_DFL)
        return self.exit_code

    def stop(self) -> None:
        """Drain and end, as SIGTERM does. May be called from any thread."""
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets if self.config.ssl is None else [])
        if self.config.ssl is not None:
            door: Any = self._tls_door(self.config.ssl)
            self.servers.append(door)
        names = ", ".join(deployment.name for deployment in self.models.deployments)
        _log.info(
            "listening on %s; %s being compiled",
            self.url,
            f"{names} is" if "," not in names else f"{names} are",
        )
        self._loop = asyncio.get_running_loop()
        if self.grpc is not None:
            await self.grpc.start()
        self._warming = asyncio.create_task(self._warm_up())

    def _tls_door(self, context: ssl.SSLContext) -> TlsDoor:
        """Accepts connections in place of uvicorn, which counts them too late."""
        protocol: Any = self.config.http_protocol_class
        made = partial(protocol, self.config, self.server_state, self.lifespan.state)
        door = TlsDoor(self._socket, context, made, self.server_state.connections, self._limits)
        door.open()
        return door

    async def on_tick(self, counter: int) -> bool:
        if counter % TICKS_A_SECOND == 0:
            self._cut_off_slow_readers()
            self._give_back_after_a_flood()
        return await super().on_tick(counter)

    def reload(self) -> None:
        """Read the keys again, and begin to reload the models."""
        self.app.keys.reload()
        self.models.reload_all()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        start_s = asyncio.get_running_loop().time()
        _log.info("%s: no more requests are taken, what was accepted is finished", self._signal or "stopping")
        if await self.models.drain(self._drain_timeout_s):
            _log.info("drained after %.1f s", asyncio.get_running_loop().time() - start_s)
        else:
            _log.warning("not everything was finished after %g s", self._drain_timeout_s)
        if self.grpc is not None:
            await self.grpc.stop(self._close_timeout_s)
        ending = asyncio.create_task(self._end_requests())
        await super().shutdown(sockets)
        ending.cancel()
        if self.app.traces is not None:
            await asyncio.to_thread(self.app.traces.close)

    async def _end_requests(self) -> None:
        """Once its time is over, refuse what has not arrived yet, and hang up on who does not read."""
        await asyncio.sleep(self._close_timeout_s)
        for connection in self._connections:
            if connection.unsent:
                connection.transport.abort()
        tasks = set(self.server_state.tasks)
        if tasks:  # those whose client did not read end by themselves now
            _, tasks = await asyncio.wait(tasks, timeout=0.1)
        if tasks:
            _log.warning("requests that had not arrived in time got a 503: %d", len(tasks))
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for connection in self._connections:
            connection.transport.close()
        await asyncio.sleep(0.1)
        for connection in self._connections:
            connection.transport.abort()  # with TLS it waits for the client to agree that it is over

    @property
    def _connections(self) -> list[Protocol]:
        connections: list[Any] = list(self.server_state.connections)
        return connections

    def _cut_off_slow_readers(self) -> None:
        now_s = asyncio.get_running_loop().time()
        waiting = [(one.watch(now_s, self._write_timeout_s), one) for one in self._connections]
        beyond = sum(size for size, _ in waiting) - MAX_UNSENT_BYTES
        while beyond > 0:
            size, connection = most = max(waiting, key=itemgetter(0))
            waiting.remove(most)
            connection.transport.abort()
            beyond -= size

    def _give_back_after_a_flood(self) -> None:
        """Called once a second: one without a flood, after one with, is its end."""
        bodies = self.app.bodies
        peak, bodies.peak = bodies.peak, bodies.held
        if peak <= FLOOD_BYTES and self._flooded:
            asyncio.get_running_loop().run_in_executor(None, give_back)
        self._flooded = peak > FLOOD_BYTES

    def _hang_up(self, sig: int, frame: FrameType | None) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it is closed: there is nothing left to reload
                self._loop.call_soon_threadsafe(self.reload)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Not uvicorn's own handler: it raises the signal again after a clean end, which would hide the exit code.
        if self.should_exit:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        self._signal = signal.Signals(sig).name
        self.should_exit = True

    async def _warm_up(self) -> None:
        start_s = asyncio.get_running_loop().time()
        try:
            await self.models.start(self._on_progress)
        except Exception as error:
            failed = ", ".join(d.name for d in self.models.deployments if d.status == "failed")
            if isinstance(error, UserError):
                _log.error("the warm-up of model %s failed: %s", failed, error)
            else:
                _log.exception("the warm-up of model %s failed", failed)
            self.exit_code = 1
            self.should_exit = True
        else:
            if self.models.status == "ready":
                _log.info("ready after %.1f s", asyncio.get_running_loop().time() - start_s)
                self._on_ready(self.url)


def _grpc_server(
    app: App, config: ServerConfig, connections: int, read_timeout_s: float
) -> GrpcServer | None:
    """The gRPC service, which does not listen yet; None where it is off. Raises UserError where it cannot be."""
    if config.grpc_port is None:
        return None
    check_grpc(config)
    from jgr.serving.http.kserve_grpc import GrpcServer

    bind(config.host, config.grpc_port, "server.grpc_port").close()  # gRPC would not say why it cannot listen
    return GrpcServer(app, config, connections, read_timeout_s)


def connections_that_fit(wanted: int, ports: int = 1) -> int:
    """As many of the wanted connections to each port as the process may have files for, after raising its limit where
    it can."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = ports * wanted + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    files = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if files > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    if files == needed:
        return wanted
    fit = max(1, (files - OTHER_FILES) // ports)
    _log.warning(
        "server.max_connections: the process may open %d files, so it takes %d connections, not %d: raise ulimit -n",
        files,
        fit,
        wanted,
    )
    return fit
