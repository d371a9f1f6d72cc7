# SPDX-License-Identifier: Apache-2.0
"""Accepts connections that begin with a TLS handshake.

The one idea: a connection counts from when it is accepted. uvicorn's protocol, which counts connections and gives each
its time, begins when the handshake is done: a client that never begins one would hold a file of the process and count
for nothing. So sockets are accepted here, as many as there is room for, and a handshake has the time of a request.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Sized
from contextlib import suppress

from jgr.serving.http.connection import Limits

SPARE = 64
"""Handshakes beyond the limit on connections: a client that is one too many gets its 503 behind one."""
PAUSE_S = 0.1
"""Between two tries where a connection cannot be accepted."""

_log = logging.getLogger(__name__)


class TlsDoor:
    """The end of a listening socket, as uvicorn ends its own servers. There is none before `open`.

    connections: those whose handshakes are done. Belongs to the event loop.
    """

    def __init__(
        self,
        listening: socket.socket,
        context: ssl.SSLContext,
        protocol: Callable[[], asyncio.Protocol],
        connections: Sized,
        limits: Limits,
    ) -> None:
        self._listening, self._context, self._protocol = listening, context, protocol
        self._connections, self._limits = connections, limits
        self._accepting: asyncio.Task[None]
        self.greetings: set[asyncio.Task[None]] = set()
        """One for each connection whose handshake is not done."""

    def open(self) -> None:
        """Begin to accept."""
        self._listening.setblocking(False)
        self._accepting = asyncio.create_task(self._accept())

    def close(self) -> None:
        """Accept no more, and end the handshakes that are not done."""
        for task in (self._accepting, *self.greetings):
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until nothing is left of what `close` ends."""
        await asyncio.gather(self._accepting, *self.greetings, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listening)
            except OSError as error:
                _log.warning("a connection cannot be accepted: %s", error)
                await asyncio.sleep(PAUSE_S)
                continue
            if len(self.greetings) + len(self._connections) >= self._limits.connections + SPARE:
                connection.close()
                self._limits.refused()
                continue
            greeting = asyncio.create_task(self._greet(connection))
            self.greetings.add(greeting)
            greeting.add_done_callback(self.greetings.discard)

    async def _greet(self, connection: socket.socket) -> None:
        """Make the connection's handshake; its protocol takes over then."""
        with suppress(
            OSError
        ):  # it took too long, was no handshake, or the client left; the transport is closed
            await asyncio.get_running_loop().connect_accepted_socket(
                self._protocol,
                connection,
                ssl=self._context,
                ssl_handshake_timeout=self._limits.read_timeout_s,
            )
