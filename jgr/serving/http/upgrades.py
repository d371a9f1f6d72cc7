# SPDX-License-Identifier: Apache-2.0
"""Requests that ask for another protocol: that is ignored, as RFC 9110 allows, and they are answered as any other.

Java's HttpClient asks for HTTP/2 with the first request of a connection, others for a WebSocket. The parser takes such
a request to end with its head, and what follows to be in the other protocol. Left alone, a body would be lost where it
comes in one piece with the head, and where it does not, be read as the next request, whatever a client has put there.
So a parser which knows of the request's body alone goes on where the head ends.
"""

from __future__ import annotations

import sys
from typing import Any

import httptools

from jgr.serving.http.connection import Protocol

_FRAMING = (b"content-length", b"transfer-encoding")


class StaysHttp1(Protocol):
    """One connection on which `Upgrade` has no meaning."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._fed = self._rest = b""

    def data_received(self, data: bytes) -> None:
        self._rest = data
        while self._rest and not self.transport.is_closing():
            self._fed, self._rest = self._rest, b""
            super().data_received(self._fed)
        self._fed = self._rest = b""

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():  # else only its head has been read
            super().on_message_complete()

    def _unsupported_upgrade_warning(self) -> None:
        """uvicorn calls it while it handles the parser's error, which tells where the head ended."""
        error = sys.exception()
        assert isinstance(error, httptools.HttpParserUpgrade)
        self._rest = self._fed[error.args[0] :]
        framing = [b"%b: %b\r\n" % header for header in self.headers if header[0] in _FRAMING]
        if not self.cycle.keep_alive:
            framing.append(b"connection: close\r\n")
        calls = _Calls(self)
        self.parser = httptools.HttpRequestParser(calls)
        self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(framing))
        calls.in_known_head = False


class _Calls:
    """What a parser calls that goes on with a request whose head another has read: all but what tells of that head."""

    def __init__(self, connection: StaysHttp1) -> None:
        self._connection, self.in_known_head = connection, True
        self.on_body = connection.on_body
        self.on_message_complete = connection.on_message_complete

    def on_message_begin(self) -> None:
        if not self.in_known_head:
            self._connection.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self.in_known_head:
            self._connection.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.in_known_head:
            self._connection.on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self.in_known_head:
            self._connection.on_headers_complete()
