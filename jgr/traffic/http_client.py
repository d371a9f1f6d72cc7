# SPDX-License-Identifier: Apache-2.0
"""A lean HTTP/1.1 client for loads: one request at a time on a kept connection, bytes in, verdict out.

The one idea: a request is rendered once and sent many times, and an answer is parsed (by httptools) only as far as the
report needs: its status, its end, and why it is an error. No task is made for a request.

It is code of our own because a library's would send less: a request costs this process 57 us of its CPU, where urllib3
takes 120 us (and a thread for each request that waits), and httpx 300 us, or 800 us on an event loop (requests for
50 items each, to the server of benchmarks/load_client.py).
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol, cast

import httptools
import msgspec

from jgr.client.address import parse_url, tls_context
from jgr.traffic.schedule import LoadError, Request

MAX_HEAD_BYTES = 1 << 16
MAX_ANSWER_BYTES = 1 << 26
_MAX_ERROR_BYTES = 1 << 16
_MAX_REASON_CHARS = 64
_tls_context = lru_cache(1)(tls_context)  # to read the authorities takes longer than a handshake


class Verdict(NamedTuple):
    """How a request ended. status: HTTP's as text, or "timeout", "disconnected", "bad_response". reason: error.type."""

    status: str
    reason: str = ""


TIMEOUT = Verdict("timeout")
DISCONNECTED = Verdict("disconnected")
BAD_RESPONSE = Verdict("bad_response")

Done = Callable[[Verdict], None]


class Connection(Protocol):
    """A connection that carries one request at a time. usable: whether it can carry another."""

    @property
    def usable(self) -> bool: ...
    def send(self, wire: bytes, done: Done) -> None:
        """Send a rendered request; `done` is called once, with how it ended, unless the connection is closed first."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Target:
    """Where a server is. api_key: the key to send; empty: none. secure, path: see Address. ca_file: see tls_context."""

    host: str
    port: int
    api_key: str = ""
    secure: bool = False
    path: str = ""
    ca_file: str | None = None

    @property
    def is_loopback(self) -> bool:
        """Whether the host is certainly this machine: a loopback address or localhost. No other name is looked up."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def render(self, request: Request) -> bytes:
        """The bytes of a request to this server."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        head = (
            f"POST {self.path}{request.path} HTTP/1.1\r\nHost: {host}:{self.port}\r\n"
            "Content-Type: application/json\r\n"
        )
        if self.api_key:
            head += f"Authorization: Bearer {self.api_key}\r\n"
        return f"{head}Content-Length: {len(request.body)}\r\n\r\n".encode() + request.body


def target_of(url: str, api_key: str = "", ca_file: str | None = None) -> Target:
    """The server of a URL. Raises UserError for a URL, a key or a file that cannot be used."""
    secure, host, port, path = parse_url(url)
    if not re.fullmatch(r"[!-~]*", api_key):
        raise LoadError("the API key must be printable ASCII without spaces")
    if secure:
        _tls_context(ca_file)
    return Target(host, port, api_key, secure, path, ca_file)


class HttpConnection(asyncio.Protocol):
    """A connection by HTTP/1.1 with keep-alive."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._done: Done | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._received = 0
        self._head_ended = self._complete = self._kept = False
        self._body = bytearray()

    @classmethod
    async def open(cls, target: Target) -> HttpConnection:
        """Connect to a server. Raises OSError if none answers."""
        loop = asyncio.get_running_loop()
        tls = _tls_context(target.ca_file) if target.secure else None
        _, connection = await loop.create_connection(cls, target.host, target.port, ssl=tls)
        return connection

    @property
    def usable(self) -> bool:
        return self._transport is not None

    def send(self, wire: bytes, done: Done) -> None:
        assert self._transport is not None and self._done is None
        self._done, self._received = done, 0
        self._head_ended = self._complete = False
        self._transport.write(wire)

    def close(self) -> None:
        self._done = None
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(DISCONNECTED, usable=False)

    def data_received(self, data: bytes) -> None:
        if self._done is None:  # nobody asked
            self.close()
            return
        self._received += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._end(BAD_RESPONSE, usable=False)
            return
        if self._complete:
            status = self._parser.get_status_code()
            reason = _reason(self._body) if self._body else ""
            self._end(Verdict(str(status), reason), usable=self._kept)
        elif self._received > (MAX_ANSWER_BYTES if self._head_ended else MAX_HEAD_BYTES):
            self._end(BAD_RESPONSE, usable=False)

    def _end(self, verdict: Verdict, usable: bool) -> None:
        done, self._done = self._done, None
        self._body.clear()
        if not usable:
            self.close()
        if done is not None:
            done(verdict)

    # What httptools calls.

    def on_headers_complete(self) -> None:
        self._head_ended = True

    def on_body(self, data: bytes) -> None:
        if self._parser.get_status_code() >= 400 and len(self._body) < _MAX_ERROR_BYTES:
            self._body += data

    def on_message_complete(self) -> None:
        self._complete = True
        self._kept = self._parser.should_keep_alive()  # forgotten once the parser begins the next message


class _Error(msgspec.Struct):
    type: str


class _Refusal(msgspec.Struct):
    error: _Error


_decode = msgspec.json.Decoder(_Refusal).decode


def _reason(body: bytes | bytearray) -> str:
    """The body's error.type; empty for a body of another form.

    It is printed, so what a terminal would obey is replaced.
    """
    try:
        reason = _decode(body).error.type
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    return "".join(char if char.isprintable() else "?" for char in reason[:_MAX_REASON_CHARS])
