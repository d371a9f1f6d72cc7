# SPDX-License-Identifier: Apache-2.0
"""An HTTP request and its answer as plain data, and an ASGI application that is asked without a socket."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jgr.serving.cluster.protocol import sent
from jgr.serving.cluster.ways import Stamp
from jgr.serving.errors import STATUS, RequestError
from jgr.serving.http.refusals import TRY_AGAIN, error_body

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
    """The whole answer to a request. ended: when a replica had it; came_ns: how long its request took to come there."""

    status: int
    headers: Headers
    body: bytes
    ended: Stamp = Stamp()
    came_ns: int = 0

    def __reduce__(self) -> Any:
        return sent(self)


class Uploads:
    """The uploads that one process has in hand: one, since each is held whole until all replicas have it."""

    def __init__(self) -> None:
        self._going_on = False

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Have an upload in hand. Raises RequestError where there is another."""
        if self._going_on:
            raise RequestError("unavailable", "another catalog is being uploaded; try again when it is over")
        self._going_on = True
        try:
            yield
        finally:
            self._going_on = False


async def read(
    scope: Scope, receive: Receive, most: int, within_s: float | None = None, part_s: float | None = None
) -> Asked:
    """Read a request whole. within_s, part_s: so long the body may take, and each part of it; None: for ever. Raises
    RequestError where it takes longer or has more than `most` bytes, and ConnectionError where the client leaves."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > most:
            raise _too_large(most)  # before all of it is sent
    try:
        async with asyncio.timeout(within_s):
            return head(scope)._replace(body=await _body(receive, most, part_s))
    except TimeoutError:
        raise RequestError("invalid_http", "the body did not come in time") from None


async def _body(receive: Receive, most: int, part_s: float | None) -> bytes:
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        async with asyncio.timeout(part_s):
            message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError
        part: bytes = message.get("body", b"")
        size, more = size + len(part), message.get("more_body", False)
        if size > most:
            raise _too_large(most)
        parts.append(part)
    return b"".join(parts)


def _too_large(most: int) -> RequestError:
    return RequestError("body_too_large", f"the body may have at most {most} bytes")


def head(scope: Scope) -> Asked:
    """A request without its body."""
    path = scope.get("raw_path", b"").decode("ascii") or quote(scope["path"])
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


def refusal(error: RequestError, request_id: str, path: str) -> Answered:
    """The answer that says why a request is refused. path: of the request."""
    body = error_body(error, request_id, path)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"x-request-id", request_id.encode()),
    ]
    if error.type == "unauthorized":
        headers.append((b"www-authenticate", b"Bearer"))
    if error.type in TRY_AGAIN:
        headers.append((b"retry-after", b"%d" % error.retry_after_s))
    return Answered(STATUS[error.type], headers, body)
