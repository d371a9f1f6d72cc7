# SPDX-License-Identifier: Apache-2.0
"""What bodies hold that are being received, all together: bounded, counted to the byte, and given back."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack
from http.client import HTTPResponse

import pytest

from jgr.serving.http import bodies, listener
from tests.serving.fakes import LiveServer, Reply
from tests.serving.http.test_connections import wait_until
from tests.serving.versions.test_reload import BODY

HEAD = b"POST /v1/recommend HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
SIZE = 5000


def begin(server: LiveServer, stack: ExitStack, sent: int, size: int = SIZE) -> socket.socket:
    """A connection that has sent so many bytes of a body of blanks."""
    connection = stack.enter_context(server.connect())
    connection.sendall(HEAD % size + b" " * sent)
    return connection


def answer(connection: socket.socket) -> Reply:
    with HTTPResponse(connection) as response:
        response.begin()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return Reply(response.status, headers, response.read())


def holds(server: LiveServer, size: int) -> None:
    wait_until(server, lambda: server.listener.app.bodies.held == size)


def test_unfinished_bodies_have_a_bound_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_BODIES_BYTES", 3000)
    refusals = 'jgr_refused_total{reason="bodies"}'
    with LiveServer() as server, ExitStack() as stack:
        first = begin(server, stack, 2000)
        holds(server, 2000)
        second = begin(server, stack, 900)
        holds(server, 2900)
        assert server.metric(refusals) == 0
        third = begin(server, stack, 200)
        refused = answer(third)
        assert (refused.status, refused.error["type"], refused.headers["retry-after"]) == (
            503,
            "unavailable",
            "1",
        )
        assert refused.error["message"] == "too much is being received in parts; try again later"
        assert (server.metric(refusals), server.listener.app.bodies.held) == (1, 2900)
        assert server.call("/v1/recommend", BODY).status == 200, "a body that comes whole needs no room"

        content = json.dumps(BODY).encode()
        first.sendall(content.rjust(SIZE - 2000))
        assert answer(first).status == 200
        holds(server, 900)
        third.sendall(
            b" " * (SIZE - 200) + HEAD % len(content) + content
        )  # the refused body's rest is not kept
        assert answer(third).status == 200
        second.close()
        holds(server, 0)


def test_of_a_body_beyond_its_limit_nothing_is_held() -> None:
    with LiveServer("server.max_body_bytes=1000") as server, ExitStack() as stack:
        large = begin(server, stack, 800)
        holds(server, 800)
        large.sendall(b" " * 400)
        holds(server, 0)
        large.sendall(b" " * (SIZE - 1200))
        assert answer(large).status == 413


def test_memory_is_given_back_once_after_a_flood_of_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    looked = 0
    look = listener.Listener._give_back_after_a_flood

    def counted(self: listener.Listener) -> None:
        nonlocal looked
        look(self)
        looked += 1

    monkeypatch.setattr(listener, "FLOOD_BYTES", 3000)
    monkeypatch.setattr(listener, "TICKS_A_SECOND", 1)
    monkeypatch.setattr(listener.Listener, "_give_back_after_a_flood", counted)
    with LiveServer() as server, ExitStack() as stack:
        monkeypatch.setattr(listener, "give_back", lambda: given.append(server.listener.app.bodies.held))

        def pass_by(looks: int) -> None:
            until = looked + looks
            wait_until(server, lambda: looked >= until)

        few = begin(server, stack, 2500)
        holds(server, 2500)
        few.close()
        holds(server, 0)
        pass_by(3)
        assert not given, "that was no flood"
        flood = [begin(server, stack, 2000) for _ in range(2)]
        holds(server, 4000)
        pass_by(3)
        assert not given, "it goes on"
        for connection in flood:
            connection.close()
        wait_until(server, lambda: bool(given))
        pass_by(3)
        assert given == [0]
