# SPDX-License-Identifier: Apache-2.0
"""A server that gives the replies that it is told, whatever it is asked."""

from __future__ import annotations

import json
import re
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tests.serving.fakes import PATIENCE_S


def reply(status: str, body: Any, *headers: str) -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {len(content)}", *headers])
    return head.encode() + b"\r\n\r\n" + content


BUSY = reply(
    "429 Too Many Requests",
    {"error": {"type": "overloaded", "message": "busy", "request_id": "r1"}},
    "Retry-After: 0",
)
ANSWER = reply(
    "200 OK",
    {
        "id": "r2", "model": "m@1", "catalog_version": "c", "items": [{"item_id": "x", "score": -1.5, "rank": 1}],
        "usage": {"prompt_tokens": 1, "history_items": 1, "unknown_items": 0, "unknown_item_ids": [],
                  "layout": "causal"},
        "timing_ms": {"queue": 0, "prepare": 0, "device": 0, "total": 0},
    },
)  # fmt: skip


@contextmanager
def scripted(
    *connections: bytes | tuple[bytes, ...] | None, tls: ssl.SSLContext | None = None
) -> Iterator[tuple[str, list[bytes]]]:
    """Serves so many connections, one after the other, with one reply or several; None: it closes without one.

    Yields its URL, and what it was asked so far. A client must open just these connections, and ask no more.
    """
    seen: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(PATIENCE_S)

        def serve() -> None:
            for replies in connections:
                connection, _ = listening.accept()
                connection.settimeout(PATIENCE_S)
                with suppress(ssl.SSLError, ConnectionError):  # where the client does not trust us
                    if tls is not None:
                        connection = tls.wrap_socket(connection, server_side=True)
                    for content in replies if isinstance(replies, tuple) else [replies]:
                        seen.append(_whole_request(connection))
                        connection.sendall(content or b"")
                connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http{'s' if tls else ''}://127.0.0.1:{listening.getsockname()[1]}", seen
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def _whole_request(connection: socket.socket) -> bytes:
    """Head and body. Who closes a connection with something unread resets it, and the reply may be lost with it."""
    received = b""
    while chunk := connection.recv(1 << 16):
        received += chunk
        head, end, body = received.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: *(\d+)", head)
        if end and len(body) >= int(length[1] if length else 0):
            break
    return received
