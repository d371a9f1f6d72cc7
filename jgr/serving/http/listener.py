# SPDX-License-Identifier: Apache-2.0
"""The server as a process, around uvicorn: socket, signals, slow clients, start and end.

The one idea: a stop is a drain. SIGTERM or SIGINT makes the engine refuse new work while the socket stays
open, so that clients get a 503 instead of a reset. Accepted requests are finished, up to a time limit; then
the connections are closed and the exit code is 0. A second signal ends the process at once. SIGHUP reloads the
models, one after the other.

A whole request, head and body, must arrive within `READ_TIMEOUT_S` (a catalog within `UPLOAD_TIMEOUT_S`), even if
bytes keep coming; otherwise the connection is closed. A head over `MAX_HEAD_BYTES`, and bytes that are not HTTP, get
the same kind of error body as every other refusal.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from jgr.config import Config, UserError
from jgr.serving.api import STATUS, RequestError
from jgr.serving.engine.contract import Progress
from jgr.serving.engine.engine import AnyEngine
from jgr.serving.http.server import UPLOAD_PATH, App, error_body
from jgr.serving.versions.deployment import Deployment, Load
from jgr.serving.versions.served_models import Models

READ_TIMEOUT_S = 10.0
UPLOAD_TIMEOUT_S = 600.0
"""Seconds in which the body of a catalog must arrive; `READ_TIMEOUT_S` without a byte end it too."""
KEEP_ALIVE_S = 30
MAX_HEAD_BYTES = 1 << 16
MAX_PIPELINED = 16
"""Requests that one connection may send ahead; then the server reads no more from it until one is answered."""
MAX_FRAMING_BYTES, FRAMING_PER_BYTE = 1 << 20, 16
"""What a request may have besides its head and its body, such as the sizes of chunks and the trailers: so many bytes,
and so many more for each byte of the body."""
MAX_UNREAD_BYTES = 64 << 20
"""How much of a body is discarded after its request was answered; then the connection is closed."""
CLOSE_TIMEOUT_S = 5
BACKLOG = 2048

_log = logging.getLogger(__name__)


def bind(host: str, port: int) -> socket.socket:
    """Open a listening socket. Raises UserError if the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise UserError(
            f"server.host, server.port: cannot listen on {host}:{port}: {error.strerror}"
        ) from None


class Listener(uvicorn.Server):
    """Serves `engine`, and the further models in `more`, on a socket until a signal or `stop`.

    load: makes the new engine for a reload; None: reloads are refused. on_progress: told how the warm-up goes on, in
    the worker thread; see contract.Executors.warm_up. on_ready: called with the server's URL once all models are
    served. exit_code: 0, or 1 after a failed warm-up. Raises ConfigError if two models have the same name.
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
        read_timeout_s: float = READ_TIMEOUT_S,
    ) -> None:
        self.models = Models([Deployment(engine, config.catalog, load), *more])
        protocol: Any = partial(_Protocol, read_timeout_s=read_timeout_s)
        super().__init__(
            uvicorn.Config(
                App(self.models, config.server),
                loop="uvloop",
                http=protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
            )
        )
        self.exit_code = 0
        self._drain_timeout_s = config.server.drain_timeout_s
        self._on_progress = on_progress
        self._on_ready = on_ready
        self._socket = bind(config.server.host, config.server.port)
        host, port = self._socket.getsockname()[:2]
        if not (ipaddress.ip_address(host).is_loopback or config.server.api_key):
            _log.warning(
                "server.host: other machines can reach %s, and server.api_key is not set: anybody may ask",
                host,
            )
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._warming: asyncio.Task[None]

    def serve_until_stopped(self) -> int:
        """Serve until the server is drained, and return the exit code."""
        self.run(sockets=[self._socket])
        return self.exit_code

    def stop(self) -> None:
        """Drain and end, as SIGTERM does. May be called from any thread."""
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if threading.current_thread() is threading.main_thread():
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.models.reload_all)
        self._warming = asyncio.create_task(self._warm_up())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if not await self.models.drain(self._drain_timeout_s):
            _log.warning("not everything was finished after %g s", self._drain_timeout_s)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Not uvicorn's own handler: it raises the signal again after a clean end, which would hide the exit code.
        if self.should_exit:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        self.should_exit = True

    async def _warm_up(self) -> None:
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
                self._on_ready(self.url)


class _Protocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, with limits on the time that a request takes to arrive and on the size of its head.

    It also knows which request of a pipelining client is running (uvicorn only knows the newest), so that the running
    one is told when the client leaves.
    """

    def __init__(self, *args: Any, read_timeout_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._read_timeout_s = read_timeout_s
        self._read_timer: asyncio.TimerHandle | None = None
        self._upload_ends_s: float | None = None
        self._in_head = False
        self._head_bytes = self._received_bytes = self._body_bytes = self._unread_bytes = 0
        self._running: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._received_bytes += len(data)
        most = MAX_FRAMING_BYTES + (1 + FRAMING_PER_BYTE) * self._body_bytes
        if self._received_bytes > most or self._unread_bytes > MAX_UNREAD_BYTES:
            self._end_body()
        if self._upload_ends_s is not None and self._read_timer is not None:
            self._stop_timer()
            self._start_timer(min(self._read_timeout_s, self._upload_ends_s - self.loop.time()))
        if self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(_head_too_large())

    def _end_body(self) -> None:
        """The body goes on for longer than it may: refuse it, or where it was answered already, hang up."""
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        elif not self.transport.is_closing():
            self._refuse(RequestError("invalid_http", "the body has too large trailers, or too small chunks"))

    def on_message_begin(self) -> None:
        self._in_head = True
        self._head_bytes = self._received_bytes = self._body_bytes = self._unread_bytes = 0
        if self._read_timer is None:
            self._start_timer()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # a trailer has nothing to say here
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self.cycle.response_complete:
            self._unread_bytes += len(body)
        super().on_body(body)

    def on_headers_complete(self) -> None:
        self._in_head = False
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > MAX_HEAD_BYTES:
            raise _head_too_large()
        super().on_headers_complete()
        if self.scope["method"] == "POST" and self.scope["path"] == UPLOAD_PATH:
            self._upload_ends_s = self.loop.time() + UPLOAD_TIMEOUT_S
        if len(self.pipeline) < MAX_PIPELINED:
            self.flow.resume_reading()  # only a transport that is read tells that its client has left

    def on_message_complete(self) -> None:
        self._upload_ends_s = None
        self._stop_timer()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        # The parser wraps what its callbacks raise in an error of its own.
        cause = sys.exception()
        context = cause.__context__ if cause is not None else None
        self._refuse(context if isinstance(context, RequestError) else RequestError("invalid_http", msg))

    def _refuse(self, error: RequestError) -> None:
        """Refuse bytes that are not a valid request with an error body, and close the connection.

        If earlier requests of the connection still wait for their answers, close it after the last of those instead.
        """
        if self._running is not None and self.pipeline and self.cycle.more_body:
            self.pipeline.popleft()  # the damaged request itself
            self.cycle = self.pipeline[0][0] if self.pipeline else self._running
        if self._running is not None and not (self.cycle.response_complete or self.cycle.more_body):
            self.cycle.keep_alive = False
            self.flow.pause_reading()
            return
        request_id = os.urandom(16).hex()
        body = error_body(error, request_id)
        head = [
            STATUS_LINE[STATUS[error.type]],
            *(b"%b: %b\r\n" % header for header in self.server_state.default_headers),
            b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body),
            b"x-request-id: %b\r\nconnection: close\r\n\r\n" % request_id.encode(),
        ]
        self.transport.write(b"".join([*head, body]))
        self.transport.close()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _start_timer(self, timeout_s: float | None = None) -> None:
        delay_s = self._read_timeout_s if timeout_s is None else max(0.0, timeout_s)
        self._read_timer = self.loop.call_later(delay_s, self._timed_out)

    def _stop_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _timed_out(self) -> None:
        running = self._running
        # The client is not slow if its request waits for the answer to the one before it.
        if running is not None and not (running.response_complete or running.more_body):
            self._start_timer()
        elif not self.transport.is_closing():
            self.transport.close()


def _head_too_large() -> RequestError:
    return RequestError(
        "head_too_large", f"the request line and the headers may have at most {MAX_HEAD_BYTES} bytes"
    )
