# SPDX-License-Identifier: Apache-2.0
"""A server of a few lines, which sends the answers that it is given."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from jgr.traffic.http_client import Target

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nbody"


@asynccontextmanager
async def tcp_server(
    answers: list[bytes], received: list[bytes], tls: ssl.SSLContext | None = None
) -> AsyncIterator[Target]:
    """Answers the n-th request of a connection with answers[n], and closes the connection after the last one.

    tls: with which it is asked by https, by whoever knows its authority. Whoever connects must have closed its side
    before the block ends.
    """
    handlers: list[asyncio.Task[Any] | None] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.append(asyncio.current_task())
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            for answer in answers:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                received.append(head + await reader.readexactly(length))
                writer.write(answer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=tls)
    async with server:
        host, port = server.sockets[0].getsockname()
        yield Target(host, port, "k3y", secure=tls is not None)
        await asyncio.gather(*filter(None, handlers))
