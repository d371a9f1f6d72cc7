# SPDX-License-Identifier: Apache-2.0
"""Requests that ask for another protocol, over real sockets: they are answered as any other."""

from __future__ import annotations

import json
import logging

import pytest

from tests.serving.fakes import LiveServer
from tests.serving.http.test_http import read_replies, recommend

H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
WEBSOCKET = b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
BODY = json.dumps({"history": ["a"], "top_k": 1}).encode()
LAST = b"GET /health/live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


def head(wish: bytes, framing: bytes, method: bytes = b"POST", path: bytes = b"/v1/recommend") -> bytes:
    return b"%b %b HTTP/1.1\r\nhost: x\r\n%b%b\r\n" % (method, path, wish, framing)


@pytest.mark.parametrize("wish", [H2C, WEBSOCKET])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    ("framing", "body"),
    [
        (b"content-length: %d\r\n" % len(BODY), BODY),
        (b"transfer-encoding: chunked\r\n", b"5\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (BODY[:5], len(BODY) - 5, BODY[5:])),
    ],
)  # fmt: skip
def test_a_body_is_read_whether_it_comes_with_the_head_or_after_it(
    server: LiveServer,
    caplog: pytest.LogCaptureFixture,
    wish: bytes,
    apart: bool,
    framing: bytes,
    body: bytes,
) -> None:
    caplog.set_level(logging.WARNING)
    with server.connect() as connection:
        if apart:
            connection.sendall(head(b"expect: 100-continue\r\n" + wish, framing))
            assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
            connection.sendall(body)
        else:
            connection.sendall(head(wish, framing) + body)
        connection.sendall(head(wish, b"", b"GET", b"/health/live") + recommend("b") + LAST)
        replies = read_replies(connection)
    assert [status for status, _, _ in replies] == [200] * 4
    assert [reply["items"][0]["item_id"] for _, _, reply in (replies[0], replies[2])] == ["c", "d"]  # type: ignore[index]
    assert not caplog.records


@pytest.mark.parametrize("wish", [H2C, WEBSOCKET])
def test_a_body_is_never_read_as_a_request(server: LiveServer, wish: bytes) -> None:
    hidden = b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n"
    with server.connect() as connection:
        connection.sendall(head(b"expect: 100-continue\r\n" + wish, b"content-length: %d\r\n" % len(hidden)))
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(hidden + LAST)
        (status, _, body), (last, _, _) = read_replies(connection)
    assert (status, last) == (400, 200)
    assert isinstance(body, dict)
    assert body["error"]["type"] == "invalid_json"


def test_many_in_one_piece_are_answered_in_order(server: LiveServer) -> None:
    wished = head(WEBSOCKET, b"content-length: %d\r\n" % len(BODY)) + BODY
    with server.connect() as connection:
        connection.sendall(wished * 300 + head(H2C, b"", b"GET", b"/health/live") * 700 + LAST)
        replies = read_replies(connection)
    assert [status for status, _, _ in replies] == [200] * 1001
    assert replies[299][2]["items"][0]["item_id"] == "c"  # type: ignore[index]


def test_one_that_ends_its_connection_has_the_last_answer(server: LiveServer) -> None:
    with server.connect() as connection:
        wish = WEBSOCKET.replace(b"upgrade\r\n", b"upgrade, close\r\n", 1)
        connection.sendall(head(wish, b"content-length: %d\r\n" % len(BODY)) + BODY + LAST)
        ((status, headers, _),) = read_replies(connection)
    assert (status, headers["connection"]) == (200, "close")


def test_a_body_that_breaks_its_framing_is_refused(server: LiveServer) -> None:
    with server.connect() as connection:
        connection.sendall(head(H2C, b"transfer-encoding: chunked\r\n") + b"zz\r\n" + BODY)
        ((status, headers, body),) = read_replies(connection)
    assert isinstance(body, dict)
    assert (status, headers["connection"], body["error"]["type"]) == (400, "close", "invalid_http")
