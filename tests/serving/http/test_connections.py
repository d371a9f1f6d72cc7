# SPDX-License-Identifier: Apache-2.0
"""Connections that bring too much, take too little, or are too many: over real sockets.

A deadline of the server is waited for by asking the server something until it has passed, a bounded number of times.
"""

from __future__ import annotations

import io
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from jgr.serving.http import listener
from tests.serving.fakes import PATIENCE_S, LiveServer
from tests.serving.http.test_http import CHUNKED, ROOT, read_replies, recommend
from tests.serving.http.test_process import JGR
from tests.serving.versions.test_catalog_changes import BODY_OF_UPLOAD, Rebuilds
from tests.serving.versions.test_reload import ADMIN, BODY, Versions

UPLOAD = b"POST /v1/catalogs HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n"
AS_ADMIN = b"authorization: Bearer 4dm1n\r\n"
GET_DOCS = b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n%b\r\n"


def wait_until(server: LiveServer, holds: Callable[[], bool]) -> None:
    for _ in range(50_000):
        if holds():
            return
        assert server.call("/health/live").status == 200
    raise AssertionError("it has not come to that")


def spin(holds: Callable[[], bool]) -> None:
    """Wait where the server has no room for a question."""
    until_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until_s, "it has not come to that"


def ends(server: LiveServer) -> list[Any]:
    """The server's ends of all connections: a copy, for its thread changes the set meanwhile."""
    return list(server.listener.server_state.connections)


def of(server: LiveServer, connection: socket.socket) -> list[Any]:
    """The server's end of a connection; empty where it has none."""
    return [one for one in ends(server) if one.client == connection.getsockname()]


def ended(connection: socket.socket) -> bool:
    """Whether the server has closed the connection, which has nothing else to read."""
    if not select.select([connection], [], [], 0)[0]:
        return False
    try:
        return connection.recv(65536) == b""
    except OSError:
        return True


def dribble(connection: socket.socket) -> bool:
    """Send a byte of a body. Whether the server has closed the connection."""
    try:
        connection.sendall(b" ")
    except OSError:
        return True
    return ended(connection)


@pytest.mark.parametrize(
    ("key", "status"), [(b"", 401), (b"authorization: Bearer wrong\r\n", 401), (AS_ADMIN, 409)]
)
def test_a_refused_upload_has_no_more_time_than_any_request(key: bytes, status: int) -> None:
    """With the admin's key this server refuses it as well, since its engine takes no other catalog."""
    with LiveServer("server.admin_key=4dm1n", read_timeout_s=0.1) as server, server.connect() as connection:
        connection.sendall(UPLOAD % (key, 1 << 20))
        assert connection.recv(65536).startswith(b"HTTP/1.1 %d" % status)
        wait_until(server, lambda: dribble(connection))


def uploading_server(**listener: Any) -> LiveServer:
    server = LiveServer("server.admin_key=4dm1n", load=Versions(), **listener)
    server.engine.rebuild = Rebuilds(server.engine.metrics).rebuild
    return server


def test_an_admins_upload_may_take_longer() -> None:
    with uploading_server(read_timeout_s=0.3) as server:
        with server.connect() as idle, server.connect() as connection:
            connection.sendall(UPLOAD % (AS_ADMIN + b"connection: close\r\n", len(BODY_OF_UPLOAD) + 50_000))
            sent = 0

            def outlives_idle() -> bool:
                nonlocal sent
                assert not dribble(connection)
                sent += 1
                return ended(idle)

            wait_until(server, outlives_idle)
            connection.sendall(b" " * (50_000 - sent) + BODY_OF_UPLOAD)
            ((status, _, body),) = read_replies(connection)
        assert status == 201, body


def test_line_breaks_between_requests_do_not_keep_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser skips them, so nothing else would end what they have kept."""
    monkeypatch.setattr(listener, "KEEP_ALIVE_S", 0.3)
    with LiveServer() as server, server.connect() as connection:
        connection.sendall(b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        connection.sendall(b"\r\n")
        wait_until(server, lambda: ended(connection))


def test_a_line_break_before_a_request_changes_nothing() -> None:
    with LiveServer() as server, server.connect() as connection:
        for _ in range(2):
            connection.sendall(b"\r\n")
            connection.sendall(b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")


def test_a_client_that_does_not_read_its_answers_is_cut_off() -> None:
    with LiveServer("server.write_timeout_s=0.1") as server, server.connect() as connection:
        page = len(server.call("/openapi.json").body)
        connection.setblocking(False)
        connection.send(GET_DOCS % b"" * 1_000)
        unsent = []

        def is_gone() -> bool:
            unsent.extend(map(_unsent, ends(server)))
            return max(unsent) > 0 and not of(server, connection)

        wait_until(server, is_gone)
        assert max(unsent) < 65536 + 2 * page, "what waits is bounded"
        assert server.call("/v1/recommend", BODY).status == 200


def test_a_client_that_does_not_read_its_last_answer_is_cut_off() -> None:
    """The server has closed the connection, as far as it is concerned; with small buffers the answer does not fit."""
    with LiveServer("server.write_timeout_s=0.1") as server, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        (there,) = of(server, connection)
        with socket.socket(fileno=os.dup(there.transport.get_extra_info("socket").fileno())) as its_own:
            its_own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        connection.sendall(GET_DOCS % b"connection: close\r\n")
        wait_until(server, lambda: there.transport.is_closing())
        assert there.unsent > 0
        wait_until(server, lambda: not of(server, connection))


def test_a_client_that_reads_late_gets_everything() -> None:
    with LiveServer() as server, server.connect() as connection:
        page = server.call("/openapi.json").body
        connection.sendall(GET_DOCS % b"" * 199 + GET_DOCS % b"connection: close\r\n")

        wait_until(server, lambda: of(server, connection)[0]._waits_since_s is not None)
        data = b""
        while chunk := connection.recv(1 << 20):
            data += chunk
        assert data.count(b"HTTP/1.1 200 OK\r\n") == 200 and data.count(page) == 200


def test_a_connection_above_the_limit_is_told_to_come_later() -> None:
    with LiveServer("server.max_connections=3") as server, ExitStack() as stack:
        idle = [stack.enter_context(server.connect()) for _ in range(2)]
        assert server.call("/health/live").status == 200
        idle.append(stack.enter_context(server.connect()))
        with server.connect() as beyond:
            ((status, headers, body),) = read_replies(beyond)
        assert isinstance(body, dict)
        assert (status, body["error"]["type"], headers["connection"]) == (503, "unavailable", "close")
        assert int(headers["retry-after"]) >= 1
        idle.pop().close()
        connection = idle[0]
        connection.sendall(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        metrics = b"".join(iter(lambda: connection.recv(65536), b""))
        assert b'jgr_refused_total{reason="connections"} 1.0' in metrics


def test_a_flood_of_connections_holds_no_more_than_the_limit() -> None:
    with LiveServer("server.max_connections=20") as server:
        with ExitStack() as stack:
            flood = [stack.enter_context(server.connect()) for _ in range(400)]
            for connection in flood[20:]:
                assert connection.recv(65536).startswith(b"HTTP/1.1 503")
            spin(lambda: len(ends(server)) <= 20)  # the last ones are being closed
            flood[0].sendall(recommend("a"))
            assert flood[0].recv(12) == b"HTTP/1.1 200"
        spin(lambda: not ends(server))
        assert server.call("/v1/recommend", BODY).status == 200


@pytest.mark.parametrize(
    ("hard", "files", "more", "takes"),
    [(1000, 556, (), 300), (400, 400, (), 144), (400, 400, ("--set=server.grpc_port=0",), 72)],
)
def test_the_process_may_open_as_many_files_as_it_has_connections(
    hard: int, files: int, more: tuple[str, ...], takes: int
) -> None:
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (300, {hard})); {JGR}"
    command = [
        sys.executable,
        "-c",
        limited,
        "serve",
        "--null",
        "--port=0",
        "--set=server.max_connections=300",
        *more,
    ]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, text=True, stdout=pipe, stderr=pipe) as child:
        try:
            assert child.stdout is not None and child.stdout.readline().startswith("http://")
            limits = Path(f"/proc/{child.pid}/limits").read_text().splitlines()
            child.send_signal(signal.SIGTERM)
            assert child.wait(PATIENCE_S) == 0
            said = (child.stderr or io.StringIO()).read()
        finally:
            child.kill()
    (line,) = [line for line in limits if line.startswith("Max open files")]
    assert line.split()[3:5] == [str(files), str(hard)]
    assert (f"it takes {takes} connections, not 300" in said) is (takes < 300)
    assert said.count("WARNING") == (takes < 300)


@pytest.mark.parametrize("chunked", [True, False])
def test_a_stop_refuses_what_has_not_arrived_in_a_line(
    caplog: pytest.LogCaptureFixture, chunked: bool
) -> None:
    with uploading_server(close_timeout_s=0.1) as server, server.connect() as connection:
        connection.sendall(CHUNKED if chunked else UPLOAD % (AS_ADMIN, 1 << 20) + BODY_OF_UPLOAD)
        if not chunked:
            again = {"body": BODY_OF_UPLOAD, "method": "POST", **ADMIN}
            wait_until(server, lambda: server.call("/v1/catalogs", **again).status == 409)
        with caplog.at_level(logging.INFO):
            server.stop()
            ((status, headers, body),) = read_replies(connection)
        assert server.join() == 0
    assert isinstance(body, dict)
    assert (status, body["error"]["type"], headers["connection"]) == (503, "unavailable", "close")
    assert headers["content-type"] == "application/json"
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert told == ["requests that had not arrived in time got a 503: 1"]
    assert not any(record.exc_info for record in caplog.records)


@pytest.mark.parametrize("pieces", [1, 7])
def test_a_head_has_a_bounded_number_of_headers(monkeypatch: pytest.MonkeyPatch, pieces: int) -> None:
    taken = []
    take = HttpToolsProtocol.on_header

    def note(self: HttpToolsProtocol, name: bytes, value: bytes) -> None:
        taken.append(name)
        take(self, name, value)

    monkeypatch.setattr(HttpToolsProtocol, "on_header", note)
    begin = b"GET /health/live HTTP/1.1\r\nhost: x\r\n"
    with LiveServer() as server, server.connect() as connection:
        connection.sendall(begin + b"a:\r\n" * 255 + b"\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        assert len(taken) == 256
        taken.clear()
        head = begin + b"a:\r\n" * 16_000 + b"\r\n"
        size = -(-len(head) // pieces)
        for at in range(0, len(head), size):
            connection.sendall(head[at : at + size])
        ((status, headers, body),) = read_replies(connection)
        assert isinstance(body, dict)
        assert (status, body["error"]["type"], headers["connection"]) == (431, "head_too_large", "close")
        assert "at most 256 headers" in body["error"]["message"]
        assert len(taken) == 256


def test_what_is_not_http_is_answered_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Anybody who can connect would fill the log's disk."""
    with LiveServer() as server:
        for _ in range(3):
            with server.connect() as connection:
                connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
                ((status, _, body),) = read_replies(connection)
            assert isinstance(body, dict) and (status, body["error"]["type"]) == (400, "invalid_http")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_stop_does_not_wait_for_a_client_that_does_not_read(caplog: pytest.LogCaptureFixture) -> None:
    with LiveServer(close_timeout_s=0.1) as server, server.connect() as connection:
        connection.setblocking(False)
        connection.send(GET_DOCS % b"" * 1_000)
        wait_until(server, lambda: any(map(_unsent, ends(server))))
        server.stop()
        assert server.join() == 0
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def _unsent(connection: Any) -> int:
    unsent: int = connection.unsent
    return unsent


def test_a_refusals_body_says_as_much_as_any() -> None:
    with LiveServer("server.max_connections=1") as server, server.connect(), server.connect() as beyond:
        ((_, headers, body),) = read_replies(beyond)
        assert headers["x-request-id"] == json.loads(json.dumps(body))["error"]["request_id"]
