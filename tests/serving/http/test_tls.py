# SPDX-License-Identifier: Apache-2.0
"""Connections to a server with TLS whose handshakes are not done: they count, and have their time."""

from __future__ import annotations

import os
import socket
import ssl
from contextlib import ExitStack
from pathlib import Path

import pytest

from jgr.serving.http import tls as tls_door
from tests.serving.certificates import make_pems, tls
from tests.serving.fakes import LiveServer
from tests.serving.http.test_connections import ended, spin
from tests.serving.http.test_http import read_replies

LIVE = b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_pems(tmp_path_factory.mktemp("pems"))


def greeted(server: LiveServer, pems: dict[str, Path]) -> ssl.SSLSocket:
    """A connection whose handshake is done."""
    context = ssl.create_default_context(cafile=str(pems["authority"]))
    return context.wrap_socket(server.connect(), server_hostname="127.0.0.1")


def answers(connection: socket.socket) -> bool:
    connection.sendall(LIVE)
    return connection.recv(65536).startswith(b"HTTP/1.1 200")


def greetings(server: LiveServer) -> int:
    """How many connections of the server have not done their handshake."""
    (door,) = server.listener.servers
    assert isinstance(door, tls_door.TlsDoor)
    return len(door.greetings)


def test_a_handshake_has_the_time_of_a_request(
    pems: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    with LiveServer(*tls(pems), read_timeout_s=0.2) as server:
        with server.connect() as silent, server.connect() as slow:
            slow.sendall(b"\x16\x03\x01\x02\x00\x01")  # a handshake begins so
            spin(lambda: ended(silent))
            spin(lambda: ended(slow))
        with greeted(server, pems) as connection:
            assert answers(connection)
    assert not caplog.records


def test_silent_connections_hold_no_more_than_the_limit(
    pems: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_door, "SPARE", 2)
    with LiveServer(*tls(pems), "server.max_connections=3") as server, ExitStack() as stack:
        files = len(os.listdir("/proc/self/fd"))
        flood = [stack.enter_context(server.connect()) for _ in range(100)]
        for beyond in flood[5:]:
            spin(lambda beyond=beyond: ended(beyond))  # type: ignore[misc]
        assert greetings(server) == 5
        held = len(os.listdir("/proc/self/fd")) - files - len(flood)
        assert held < 20, "this process has the clients' ends too"
        assert not any(map(ended, flood[:5]))
        flood[0].close()
        spin(lambda: greetings(server) == 4)
        with greeted(server, pems) as connection:
            assert answers(connection)
            metrics = server.listener.models.render_metrics()
        assert b'jgr_refused_total{reason="connections"} 95.0' in metrics
        stack.close()
        spin(lambda: greetings(server) == 0)


def test_one_connection_too_many_is_told_behind_its_handshake(pems: dict[str, Path]) -> None:
    with LiveServer(*tls(pems), "server.max_connections=2") as server, ExitStack() as stack:
        idle = [stack.enter_context(greeted(server, pems)) for _ in range(2)]
        assert all(map(answers, idle))
        with greeted(server, pems) as beyond:
            ((status, headers, body),) = read_replies(beyond)
        assert isinstance(body, dict)
        assert (status, body["error"]["type"], headers["connection"]) == (503, "unavailable", "close")


def test_a_stop_waits_for_no_handshake_and_for_no_client_that_does_not_read(
    pems: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    with (
        LiveServer(*tls(pems), close_timeout_s=0.1) as server,
        server.connect() as silent,
        greeted(server, pems) as connection,
    ):
        assert answers(connection)
        spin(lambda: greetings(server) == 1)
        server.stop()
        assert server.join() == 0
        assert ended(silent)
    assert not caplog.records
