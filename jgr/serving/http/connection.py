# SPDX-License-Identifier: Apache-2.0
"""One connection, around uvicorn's HTTP protocol: what a client may send and leave unread, and for how long.

A whole request, head and body, must arrive within `READ_TIMEOUT_S`, even if bytes keep coming; otherwise the connection
is closed. An admin's catalog has `UPLOAD_TIMEOUT_S`; nobody else's request has. A head over `MAX_HEAD_BYTES` or
`MAX_HEADER_FIELDS`, and bytes that are not HTTP, get the same kind of error body as every other refusal.

Answers that a client does not read wait in memory. `watch`, called once a second, cuts off a client that has not taken
everything in time; until it has, nothing more is written to it.
"""

from __future__ import annotations

import asyncio
import os
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from jgr.serving.errors import RETRY_AFTER_S, STATUS, RequestError
from jgr.serving.http.bounds import HEAD_TOO_LARGE, MAX_HEAD_BYTES, MAX_HEADER_FIELDS, READ_TIMEOUT_S
from jgr.serving.http.cold import UPLOAD_PATH
from jgr.serving.http.front import own_path
from jgr.serving.http.refusals import error_body
from jgr.serving.http.server import Departure, Headers, Visit

UPLOAD_TIMEOUT_S = 600.0
"""Seconds in which the body of a catalog must arrive; `READ_TIMEOUT_S` without a byte end it too."""
MAX_PIPELINED = 16
"""Requests that one connection may send ahead; then the server reads no more from it until one is answered."""
MAX_FRAMING_BYTES, FRAMING_PER_BYTE = 1 << 20, 16
"""What a request may have besides its head and its body, such as the sizes of chunks and the trailers: so many bytes,
and so many more for each byte of the body."""
MAX_UNREAD_BYTES = 64 << 20
"""How much of a body is discarded after its request was answered; then the connection is closed."""
LINGER_S, LINGER_BYTES = 1.0, 1 << 20
"""So long, and so much, what a client sends behind refused bytes is read and thrown away. A connection that is closed
with bytes unread is reset, and the client may lose the refusal (RFC 9112, 9.6)."""


@dataclass(frozen=True)
class Limits:
    """What connections may do. connections: how many there may be. may_upload: whether an upload with these headers may
    take as long as a catalog. refused: called for each connection that is one too many."""

    connections: int
    may_upload: Callable[[Headers], bool]
    refused: Callable[[], object]
    read_timeout_s: float = READ_TIMEOUT_S
    base_path: str = ""


class OneWrite:
    """The transport of one response, of which head and body leave in one write.

    uvloop writes at once, so that two writes are two calls of the system, and each may wake the client's process: under
    load that was a quarter of the event loop's time. The head waits for the first part of the body, or for the end.
    A body is not copied behind its head: many clients may be slow to read the same page.
    """

    def __init__(self, transport: asyncio.Transport, cycle: RequestResponseCycle) -> None:
        # The cycle holds this transport: left alone, all of a request would wait for the garbage collector.
        self._transport, self._cycle = transport, weakref.proxy(cycle)
        self._head: bytes | None = None
        self._began = False

    def write(self, data: bytes) -> None:
        if self._cycle.response_started and not self._began:  # "100 Continue" comes before
            self._began, self._head = True, data
        elif self._head is None:
            self._transport.write(data)
        else:
            head, self._head = self._head, None
            self._transport.writelines([head, data])

    def flush(self) -> None:
        if self._head is not None:
            self.write(b"")

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()


class Protocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, with limits.

    It also knows which request of a pipelining client is running (uvicorn only knows the newest), so that the running
    one is told when the client leaves.
    """

    def __init__(self, *args: Any, limits: Limits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._waits_since_s: float | None = None
        self._read_timer: asyncio.TimerHandle | None = None
        self._idle_until_s: float | None = None  # what came so far begins no request
        self._upload_ends_s: float | None = None
        self._in_head = False
        self._head_bytes = self._fields_bytes = 0  # as received, and as parsed so far
        self._received_bytes = self._body_bytes = self._unread_bytes = 0
        self._lingers_bytes: int | None = None  # what it may send still, where its bytes were refused
        self._running: RequestResponseCycle | None = None
        self._visit = Visit()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections:
            self._limits.refused()
            self._refuse(RequestError("unavailable", "the server has too many connections; try again later"))
            self.transport.close()  # one too many does not stay
        else:
            self._start_timer()

    def watch(self, now_s: float, timeout_s: float) -> int:
        """How many bytes have waited for the client since an earlier call; it is cut off where that is too long ago.

        From the first call that finds some, nothing more is written until all of them are gone, which the transport
        then tells (`resume_writing`): what waits can only get less.
        """
        unsent = self.unsent
        if unsent and self._waits_since_s is None:
            self._waits_since_s = now_s
            self.transport.set_write_buffer_limits(high=0)
            return 0
        if unsent and self._waits_since_s is not None and now_s - self._waits_since_s > timeout_s:
            self.transport.abort()
        return unsent

    @property
    def unsent(self) -> int:
        """Bytes that are written and not yet on their way to the client."""
        return self.transport.get_write_buffer_size()

    def resume_writing(self) -> None:
        if self._waits_since_s is not None:
            self._waits_since_s = None
            self.transport.set_write_buffer_limits()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._visit.end()
        self._give_up()
        super().connection_lost(exc)

    def _give_up(self) -> None:
        """Nobody gets an answer on this connection any more."""
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
            running.scope["jgr.departure"].happen()  # type: ignore[typeddict-item]
        self.pipeline.clear()

    def data_received(self, data: bytes) -> None:
        if self._lingers_bytes is not None:
            self._lingers_bytes -= len(data)
            if self._lingers_bytes < 0:
                self.transport.close()
            return
        idle = self.timeout_keep_alive_task
        self._idle_until_s = None if idle is None else idle.when()
        super().data_received(data)
        self._received_bytes += len(data)
        if self._ends:
            return
        if (
            self._idle_until_s is not None
        ):  # line breaks between requests, which the parser skips, gain no time
            self.timeout_keep_alive_task = self.loop.call_at(
                self._idle_until_s, self.timeout_keep_alive_handler
            )
        most = MAX_FRAMING_BYTES + (1 + FRAMING_PER_BYTE) * self._body_bytes
        if self._received_bytes > most or self._unread_bytes > MAX_UNREAD_BYTES:
            self._end_body()
            return
        if self._upload_ends_s is not None and self._read_timer is not None:
            self._stop_timer()
            self._start_timer(min(self._limits.read_timeout_s, self._upload_ends_s - self.loop.time()))
            if self.cycle.response_complete:  # refused: the rest of its body has no more time than another's
                self._upload_ends_s = None
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(_head_too_large())

    @property
    def _ends(self) -> bool:
        """Whether the connection is closed, or what it sends was refused."""
        return self._lingers_bytes is not None or self.transport.is_closing()

    def _end_body(self) -> None:
        """The body goes on for longer than it may: refuse it, or where it was answered already, hang up."""
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        else:
            self._refuse(RequestError("invalid_http", "the body has too large trailers, or too small chunks"))

    def on_message_begin(self) -> None:
        self._in_head, self._idle_until_s = True, None
        self._head_bytes = self._fields_bytes = 0
        self._received_bytes = self._body_bytes = self._unread_bytes = 0
        if self._read_timer is None:
            self._start_timer()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:  # a trailer has nothing to say here
            return
        self._fields_bytes += len(name) + len(value) + 4
        if len(self.headers) >= MAX_HEADER_FIELDS or self._fields_bytes > MAX_HEAD_BYTES:
            raise _head_too_large()
        super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self.cycle.response_complete:
            self._unread_bytes += len(body)
        super().on_body(body)

    def on_headers_complete(self) -> None:
        self._in_head = False
        if len(self.url) + self._fields_bytes > MAX_HEAD_BYTES:
            raise _head_too_large()
        self.scope["jgr.departure"] = Departure()  # type: ignore[typeddict-unknown-key]
        self.scope["jgr.visit"] = self._visit  # type: ignore[typeddict-unknown-key]
        super().on_headers_complete()
        path = self.scope["path"]
        uploads = self.scope["method"] == "POST" and path.endswith(UPLOAD_PATH)
        uploads = uploads and own_path(path, self._limits.base_path) == UPLOAD_PATH
        if uploads and self._limits.may_upload(self.headers):
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
            b"retry-after: %d\r\n" % RETRY_AFTER_S if error.type == "unavailable" else b"",
            b"x-request-id: %b\r\nconnection: close\r\n\r\n" % request_id.encode(),
        ]
        self.transport.write(b"".join([*head, body]))
        self._linger()

    def _linger(self) -> None:
        """Close the connection, when the client has had a moment to read what it was told."""
        self._give_up()
        self._stop_timer()
        if not self.transport.can_write_eof():  # TLS has no half of a connection
            self.transport.close()
            return
        self.transport.write_eof()
        self.flow.resume_reading()
        self._lingers_bytes = LINGER_BYTES
        self._read_timer = self.loop.call_later(LINGER_S, self.transport.close)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        cycle.transport = self._writes = OneWrite(self.transport, cycle)  # type: ignore[assignment]
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        self._writes.flush()  # the answer to HEAD has no body
        super().on_response_complete()

    def _start_timer(self, timeout_s: float | None = None) -> None:
        delay_s = self._limits.read_timeout_s if timeout_s is None else max(0.0, timeout_s)
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
    return RequestError("head_too_large", HEAD_TOO_LARGE)
