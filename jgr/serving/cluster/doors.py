# SPDX-License-Identifier: Apache-2.0
"""What stands before Ray's proxy: it refuses heads, and leaves out headers, that Ray would fail at or be steered by.

Ray calls `doors` in each proxy where RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names it, as `jgr cluster` has it.
"""

from __future__ import annotations

import os
from typing import Any

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import HTTP_PROTOCOLS
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from jgr.serving.cluster.relay import refusal, reply
from jgr.serving.errors import RequestError
from jgr.serving.http.bounds import MAX_HEAD_BYTES, REQUEST_ID

STEERS = (
    b"serve_multiplexed_model_id",
    b"x_session_id",
    b"x_request_timeout_seconds",
    b"x_request_disconnect_disabled",
)
"""Headers, with _ for -, by which a client would choose a front, or its own timeout, past jgr's routing, or have its
work go on when it has left. Ray answers 500 where they are no text, and keeps what it had begun for the request."""
MOST_READ = 1 << 17
"""Bytes of a head that are read: one beyond MAX_HEAD_BYTES that ends before gets an answer that says why."""


def doors() -> list[Middleware]:
    """What Ray puts around its proxy, whose server is started after this."""
    # Ray has no setting for it: uvicorn takes what this table names where it is not told which protocol.
    HTTP_PROTOCOLS["auto"] = f"{__name__}:ShortHeads"
    return [Middleware(Doors)]


class ShortHeads(HttpToolsProtocol):
    """uvicorn's protocol, which hangs up where a head goes on beyond what is read of one. The parser copies a header
    with each part that comes of it: a large one would hold up the whole proxy for seconds."""

    _in_head, _head_bytes = False, 0

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MOST_READ:
                self.send_400_response("The head is too large.")

    def on_message_begin(self) -> None:
        self._in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> Any:
        self._in_head = False
        return super().on_headers_complete()


class Doors:
    """An ASGI application before another one."""

    def __init__(self, application: ASGIApp) -> None:
        self._application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            headers = scope["headers"]
            size = len(scope.get("raw_path") or b"") + len(scope["query_string"])
            size += sum(len(name) + len(value) + 4 for name, value in headers)
            if size > MAX_HEAD_BYTES and scope["type"] == "http":
                error = RequestError(
                    "head_too_large",
                    f"the request line and the headers may have at most {MAX_HEAD_BYTES} bytes",
                )
                await reply(send, refusal(error, os.urandom(16).hex(), scope["path"]))
                return
            scope["headers"] = [each for each in headers if _passes(*each)]
        await self._application(scope, receive, send)


def _passes(name: bytes, value: bytes) -> bool:
    if name == b"x-request-id":
        return REQUEST_ID.fullmatch(value) is not None  # without one Ray makes one up
    return name.replace(b"-", b"_") not in STEERS
