# SPDX-License-Identifier: Apache-2.0
"""What stands before Ray's proxy: it refuses heads, and leaves out headers, that Ray would fail at or be steered by.

Ray calls `doors` in each proxy where RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names it, as `jgr cluster` has it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from functools import partial
from typing import Any

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import HTTP_PROTOCOLS
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from jgr.serving.cluster import ways
from jgr.serving.cluster.hints import WORK
from jgr.serving.cluster.relay import refusal, reply
from jgr.serving.errors import RequestError
from jgr.serving.http.bounds import (
    HEAD_TOO_LARGE,
    MAX_HEAD_BYTES,
    MAX_HEADER_FIELDS,
    READ_TIMEOUT_S,
    REQUEST_ID,
    is_of_no_client,
)
from jgr.serving.policies.window import Window

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
    logging.getLogger("uvicorn.error").addFilter(is_of_no_client)
    # Ray has no setting for it: uvicorn takes what this table names where it is not told which protocol.
    HTTP_PROTOCOLS["auto"] = f"{__name__}:ShortHeads"
    return [Middleware(Doors)]


class ShortHeads(HttpToolsProtocol):
    """uvicorn's protocol, which hangs up where a head goes on beyond what is read of one, and where a body does not end
    after its answer. The parser copies a header with each part that comes of it: a large one would hold up the whole
    proxy for seconds."""

    _in_head, _head_bytes = False, 0
    _unread: Any = None  # what was answered before its body was whole

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MOST_READ:
                self.send_400_response("The head is too large.")

    def on_message_begin(self) -> None:
        self._in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) <= MAX_HEADER_FIELDS:  # one too many is enough for Doors to refuse it
            super().on_header(name, value)

    def on_headers_complete(self) -> Any:
        self._in_head = False
        return super().on_headers_complete()

    def on_response_complete(self) -> None:
        """uvicorn reads on for ever where an answer came before the request's body was whole."""
        cycle: Any = self.cycle
        super().on_response_complete()
        if cycle.more_body:  # not at once: who still sends would get a reset in place of the answer
            self._unread = cycle
            self.loop.call_later(READ_TIMEOUT_S, self._hang_up, cycle)

    def on_message_complete(self) -> None:
        self._unread = None
        super().on_message_complete()

    def _hang_up(self, cycle: Any) -> None:
        if self._unread is cycle and not self.transport.is_closing():
            self.transport.close()


class Doors:
    """An ASGI application before another one."""

    def __init__(self, application: ASGIApp) -> None:
        self._application, self._back, self._window = application, ways.Way(), Window()
        self._refused = 0  # that no front was told of yet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self._application(scope, receive, send)
        headers = scope["headers"]
        size = len(scope.get("raw_path") or b"") + len(scope["query_string"])
        size += sum(len(name) + len(value) + 4 for name, value in headers)
        too_large = size > MAX_HEAD_BYTES or len(headers) > MAX_HEADER_FIELDS
        if too_large and scope["type"] == "http":
            return await _refuse(RequestError("head_too_large", HEAD_TOO_LARGE), scope, send)
        if scope["type"] == "http" and scope["path"].endswith(WORK):
            return await self._let_in(scope, receive, send)
        await self._pass_in(scope, receive, send)

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request for a model's work in, or refuse it. It counts from when its body is there: a client that is
        slow to send it keeps no others out."""
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                first: Message | None = await receive()
        except TimeoutError:
            return await _refuse(RequestError("invalid_http", "the body did not come in time"), scope, send)
        assert first is not None
        if first["type"] == "http.disconnect":
            return
        inside = not first.get("more_body", False)
        if inside and not self._window.enter(ways.stamp().at_ns):
            self._refused += 1
            hand = self._window.inside
            what = f"the fleet has {hand} requests in hand, and more would make all of them late"
            return await _refuse(RequestError("overloaded", what), scope, send)

        async def received() -> Message:
            nonlocal first, inside
            if first is not None:
                message, first = first, None
                return message
            message = await receive()
            if not inside and message["type"] == "http.request" and not message.get("more_body", False):
                inside = True
                self._window.inside += 1  # its beginning was passed on already
            return message

        try:
            await self._pass_in(scope, received, send)
        finally:
            if inside:
                self._window.leave()

    async def _pass_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        came, own = ways.stamp(), _request_id(scope).encode()
        scope["headers"] = [
            *((name, value) for name, value in scope["headers"] if _passes(name, value, own)),
            (ways.ARRIVED, ways.written(came, self._back.mean_ns, self._refused)),
        ]
        self._refused = 0
        await self._application(scope, receive, partial(self._pass_on, send, came))

    async def _pass_on(self, send: Send, came: ways.Stamp, message: Message) -> None:
        """Pass an answer on, and see how long it took to come here, and whether its request was held up."""
        left = [value for name, value in message.get("headers", ()) if name == ways.LEFT]
        if left:
            moment, held_up, _ = ways.read(left[0])
            self._back.took(ways.since_ns(moment))
            if held_up != ways.UNTOLD:
                self._window.answered(held_up != 0, came.at_ns, ways.stamp().at_ns)
            message = {**message, "headers": [each for each in message["headers"] if each[0] != ways.LEFT]}
        await send(message)


async def _refuse(error: RequestError, scope: Scope, send: Send) -> None:
    await reply(send, refusal(error, _request_id(scope) or os.urandom(16).hex(), scope["path"]))


def _request_id(scope: Scope) -> str:
    given = [
        value for name, value in scope["headers"] if name == b"x-request-id" and REQUEST_ID.fullmatch(value)
    ]
    return given[-1].decode() if given else ""


def _passes(name: bytes, value: bytes, request_id: bytes) -> bool:
    if name == b"x-request-id":
        return value == request_id  # without one Ray makes one up, and of several it takes the first
    return name != ways.ARRIVED and name.replace(b"-", b"_") not in STEERS
