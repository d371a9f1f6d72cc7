# SPDX-License-Identifier: Apache-2.0
"""The process side of the server: socket, signals, slow clients, start and end, around uvicorn.

The one idea: a stop is a drain. SIGTERM or SIGINT makes the engine refuse new work while the socket stays
open, so that clients hear a 503 instead of a reset; what was accepted is finished, up to a time limit; then
the connections are closed and the exit code is 0. A second signal ends the process at once.

The whole of a request, head and body, must arrive within `READ_TIMEOUT_S`, however slowly it drips, and its
head must end within `MAX_HEAD_BYTES`; else the connection is closed.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from jgr.config import ServerConfig, UserError
from jgr.serving.engine import Engine
from jgr.serving.server import App
from jgr.serving.work import Progress

READ_TIMEOUT_S = 10.0
KEEP_ALIVE_S = 30
MAX_HEAD_BYTES = 1 << 16
CLOSE_TIMEOUT_S = 5
BACKLOG = 2048

_log = logging.getLogger(__name__)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. UserError where the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise UserError(
            f"server.host, server.port: cannot listen on {host}:{port}: {error.strerror}"
        ) from None


class Listener(uvicorn.Server):
    """Serves an engine on a socket until a signal or `stop`.

    on_progress: as of Executor.warm_up, in the worker thread. on_ready: called with the server's URL once
    requests are served. exit_code: 0, or 1 where the warm-up failed.
    """

    def __init__(
        self,
        engine: Engine,
        config: ServerConfig,
        *,
        on_progress: Progress = lambda done, total, label: None,
        on_ready: Callable[[str], None] = lambda url: None,
        read_timeout_s: float = READ_TIMEOUT_S,
    ) -> None:
        protocol: Any = partial(_Protocol, read_timeout_s=read_timeout_s)
        super().__init__(
            uvicorn.Config(
                App(engine, config),
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
        self._engine = engine
        self._drain_timeout_s = config.drain_timeout_s
        self._on_progress = on_progress
        self._on_ready = on_ready
        self._socket = bind(config.host, config.port)
        host, port = self._socket.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._warming: asyncio.Task[None]

    def serve_until_stopped(self) -> int:
        """Block until drained. The exit code."""
        self.run(sockets=[self._socket])
        return self.exit_code

    def stop(self) -> None:
        """Drain and end, as SIGTERM does. From any thread."""
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._warming = asyncio.create_task(self._warm_up())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if not await self._engine.drain(self._drain_timeout_s):
            _log.warning("not everything was finished after %g s", self._drain_timeout_s)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn's own handler raises the signal again after a clean end, which would hide the exit code.
        if self.should_exit:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        self.should_exit = True

    async def _warm_up(self) -> None:
        try:
            await self._engine.start(self._on_progress)
        except Exception:
            _log.exception("the warm-up failed")
            self.exit_code = 1
            self.should_exit = True
        else:
            if self._engine.status == "ready":
                self._on_ready(self.url)


class _Protocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with limits on a request's time to arrive and on the size of its head."""

    def __init__(self, *args: Any, read_timeout_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._read_timeout_s = read_timeout_s
        self._read_timer: asyncio.TimerHandle | None = None
        self._in_head = False
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.transport.close()

    def on_message_begin(self) -> None:
        self._in_head, self._head_bytes = True, 0
        if self._read_timer is None:
            self._start_timer()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._stop_timer()
        super().on_message_complete()

    def _start_timer(self) -> None:
        self._read_timer = self.loop.call_later(self._read_timeout_s, self._timed_out)

    def _stop_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _timed_out(self) -> None:
        # A pipelined request waits for the one before it, not for its client.
        if self.flow.read_paused:
            self._start_timer()
        elif not self.transport.is_closing():
            self.transport.close()
