# SPDX-License-Identifier: Apache-2.0
"""An HTTP request and its answer as plain data, and an ASGI application that is asked without a socket."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple
from urllib.parse import unquote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jgr.serving.cluster.protocol import sent
from jgr.serving.errors import RequestError

Headers = list[tuple[bytes, bytes]]


class Asked(NamedTuple):
    """A request. path: as it was sent, with its escapes. client: address and port."""

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    client: tuple[str, int] | None = None

    def __reduce__(self) -> Any:
        return sent(self)


class Answered(NamedTuple):
    """The whole answer to a request."""

    status: int
    headers: Headers
    body: bytes

    def __reduce__(self) -> Any:
        return sent(self)


async def read(scope: Scope, receive: Receive, most: int) -> Asked:
    """Read a request whole. Raises RequestError where its body has more than `most` bytes, and ConnectionError where
    the client leaves."""
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError
        part: bytes = message.get("body", b"")
        size, more = size + len(part), message.get("more_body", False)
        if size > most:
            raise RequestError("body_too_large", f"the body may have at most {most} bytes")
        parts.append(part)
    return head(scope)._replace(body=b"".join(parts))


def head(scope: Scope) -> Asked:
    """A request without its body."""
    path = scope.get("raw_path", b"").decode("ascii") or scope["path"]
    client = scope.get("client")
    headers = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
    return Asked(
        scope["method"], path, scope["query_string"], headers, b"", tuple(client) if client else None
    )


async def ask(application: ASGIApp, asked: Asked, **own: Any) -> Answered:
    """The application's answer. own: further members of the scope. A caller that is cancelled cancels its work."""
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": asked.method,
        "scheme": "http",
        "path": unquote(asked.path),
        "raw_path": asked.path.encode("ascii"),
        "root_path": "",
        "query_string": asked.query,
        "headers": asked.headers,
        "client": asked.client,
        "server": None,
        **own,
    }
    parts: list[bytes] = []
    head: Message = {"status": 500, "headers": []}
    sent = False

    async def receive() -> Message:
        nonlocal sent
        if sent:  # the client stays until it has its answer; where it leaves, this task is cancelled
            await asyncio.Event().wait()
        sent = True
        return {"type": "http.request", "body": asked.body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal head
        if message["type"] == "http.response.start":
            head = message
        else:
            parts.append(message.get("body", b""))

    await application(scope, receive, send)
    headers = [(bytes(name), bytes(value)) for name, value in head["headers"]]
    return Answered(head["status"], headers, b"".join(parts))


async def reply(send: Send, answered: Answered) -> None:
    """Send an answer on."""
    await send({"type": "http.response.start", "status": answered.status, "headers": answered.headers})
    await send({"type": "http.response.body", "body": answered.body})
