# SPDX-License-Identifier: Apache-2.0
"""What stands before Ray's proxy, over an application that only notes what comes to it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any
from unittest.mock import Mock

import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from jgr.serving.cluster.doors import MOST_READ, doors
from jgr.serving.cluster.relay import Answered, Asked, ask, reply
from jgr.serving.cluster.ways import ARRIVED
from jgr.serving.http.bounds import MAX_HEAD_BYTES, MAX_HEADER_FIELDS, READ_TIMEOUT_S


def asked(*headers: tuple[bytes, bytes]) -> tuple[Answered, list[Any]]:
    """The answer to a request with these headers, and those of them that come through."""
    passed: list[Any] = []

    async def behind(scope: Scope, receive: Receive, send: Send) -> None:
        passed.extend(scope["headers"])
        await reply(send, Answered(200, [], b""))

    (door,) = doors()
    answered = asyncio.run(ask(door.cls(behind), Asked("GET", "/v1/models", b"", list(headers), b"")))
    return answered, passed


def test_a_proxy_does_not_wait_for_jax() -> None:
    code = "import sys, jgr.serving.cluster.doors; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "jgr.serving.cluster.doors" in loaded and loaded & {"jax", "jaxlib"} == set()


def test_a_head_that_is_too_large_goes_no_further() -> None:
    size = MAX_HEAD_BYTES - len("/v1/models") - len("x") - 4
    assert asked((b"x", b"a" * size))[0].status == 200
    refused, passed = asked((b"x", b"a" * (size + 1)))
    assert (refused.status, passed) == (431, [])
    error = json.loads(refused.body)["error"]
    assert error["type"] == "head_too_large" and str(MAX_HEAD_BYTES) in error["message"]
    assert dict(refused.headers)[b"x-request-id"].decode() == error["request_id"]


def test_a_head_with_too_many_headers_goes_no_further() -> None:
    assert asked(*[(b"a", b"")] * MAX_HEADER_FIELDS)[0].status == 200
    refused, passed = asked(*[(b"a", b"")] * (MAX_HEADER_FIELDS + 1))
    assert (refused.status, passed) == (431, [])


def test_no_more_headers_are_kept_than_may_be() -> None:
    doors()
    found: list[Any] = []

    async def behind(scope: Scope, receive: Receive, send: Send) -> None:
        found.extend(scope["headers"])

    config = uvicorn.Config(behind, log_config=None, lifespan="off")
    config.load()

    async def read() -> None:
        transport = Mock(**{"is_closing.return_value": False, "get_extra_info.return_value": None})
        protocol = config.http_protocol_class(config=config, server_state=ServerState(), app_state={})
        protocol.connection_made(transport)
        protocol.data_received(b"GET / HTTP/1.1\r\n" + b"a:\r\n" * 16_000 + b"\r\n")
        await asyncio.gather(*protocol.tasks)

    asyncio.run(read())
    assert len(found) == MAX_HEADER_FIELDS + 1


def test_a_head_that_does_not_end_is_not_read_on() -> None:
    """uvicorn finds the protocol where Ray leaves the choice to it."""
    doors()
    config = uvicorn.Config(lambda: None, factory=True, log_config=None)
    config.load()

    async def read_on(parts: int) -> tuple[int, bytes]:
        """How many parts were read, and what was answered."""
        transport = Mock(**{"is_closing.return_value": False, "get_extra_info.return_value": None})
        protocol = config.http_protocol_class(config=config, server_state=ServerState(), app_state={})
        protocol.connection_made(transport)
        protocol.data_received(b"GET / HTTP/1.1\r\nx: ")
        for number in range(parts):
            protocol.data_received(b"a" * (1 << 16))
            if transport.close.called:
                return number + 1, b"".join(call.args[0] for call in transport.write.call_args_list)
        return parts, b""

    read, answer = asyncio.run(read_on(1000))
    assert read == MOST_READ >> 16
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert asyncio.run(read_on(read - 1)) == (read - 1, b"")


def test_a_connection_whose_body_does_not_end_is_closed_a_while_after_the_answer() -> None:
    doors()

    async def refusing(scope: Scope, receive: Receive, send: Send) -> None:
        await reply(send, Answered(401, [(b"content-length", b"0")], b""))

    config = uvicorn.Config(refusing, log_config=None, lifespan="off")
    config.load()

    async def closed_after(body: bytes) -> float | None:
        """When the connection would be closed after its answer; None: not for this."""
        transport = Mock(**{"is_closing.return_value": False, "get_extra_info.return_value": None})
        protocol = config.http_protocol_class(config=config, server_state=ServerState(), app_state={})
        protocol.connection_made(transport)
        protocol.loop = Mock(wraps=protocol.loop)
        protocol.data_received(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n" + body)
        while not transport.write.called:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        told = [call.args for call in protocol.loop.call_later.call_args_list]
        hangs_up = [args for args in told if args[1] == protocol._hang_up]
        if not hangs_up:
            return None
        after_s, call, cycle = hangs_up[0]
        call(cycle)
        assert transport.close.called
        transport.close.reset_mock()
        protocol.data_received(b"a" * 3)  # all of it is there in the end
        call(cycle)
        assert not transport.close.called
        return float(after_s)

    assert asyncio.run(closed_after(b"a")) == READ_TIMEOUT_S
    assert asyncio.run(closed_after(b"aaaa")) is None


def test_headers_that_ray_fails_at_or_is_steered_by_are_left_out() -> None:
    kept = [(b"authorization", b"Bearer \xff"), (b"x-request-id", b"mine 1")]
    left_out = [
        (b"x-request-id", b"mine 0"),
        (b"x-request-id", b"a\tb\xff"),
        (b"x-request-id", b"a" * 129),
        (b"x-session-id", b"\xff"),
        (b"serve-multiplexed-model-id", b"m"),
        (b"serve_multiplexed_model_id", b"m"),
        (b"x-request-timeout-seconds", b"0"),
        (b"x-request-disconnect-disabled", b"?1"),
        (b"x-request-disconnect-disabled", b"\xff"),
    ]
    *came, (name, _) = asked(*left_out, *kept)[1]
    assert (came, name) == (kept, ARRIVED)
