# SPDX-License-Identifier: Apache-2.0
"""The HTTP client against a server that gives up connections, and one that is no jgr server."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from jgr.evaluation.client import Client, RemoteServer, ServerError
from tests.serving.fakes import CATALOG, PATIENCE_S

ANSWER = b'HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n{"data": [7]}'


@pytest.fixture
def url() -> Iterator[str]:
    """A server that answers one request on each connection and then closes it without a word."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(PATIENCE_S)

        def serve() -> None:
            for _ in range(2):
                connection, _ = listening.accept()
                with connection:
                    connection.settimeout(PATIENCE_S)
                    connection.recv(1 << 16)
                    connection.sendall(ANSWER)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread.join(PATIENCE_S)


def test_a_connection_that_was_closed_is_opened_again(url: str) -> None:
    with Client(url) as client:
        assert client.get("/a") == client.post("/b", {}) == {"data": [7]}


def test_another_kind_of_server_is_named(url: str) -> None:
    with Client(url) as client, pytest.raises(ServerError, match="not the answer of a jgr server"):
        RemoteServer(client, CATALOG)
    with Client(url) as client:
        client.get("/a")


def test_nobody_at_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with (
        Client(f"http://127.0.0.1:{port}") as client,
        pytest.raises(ServerError, match=f":{port}/a: .*refused"),
    ):
        client.get("/a")
