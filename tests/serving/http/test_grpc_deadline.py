# SPDX-License-Identifier: Apache-2.0
"""A gRPC call's deadline, as a request's deadline_ms, counts from the arrival of the call."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from jgr.config import ServerConfig
from jgr.serving.http.kserve_grpc import GrpcServer, message_class
from tests.serving.http.test_triton_clients import rank_message


class Call:
    """What gRPC gives a handler. The clock goes on while the message is read, and the call's time runs out."""

    def __init__(self, deadline_s: float | None) -> None:
        self.now_s, self._deadline_s = 100.0, None if deadline_s is None else 100.0 + deadline_s

    def time_remaining(self) -> float | None:
        return None if self._deadline_s is None else self._deadline_s - self.now_s

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def read(self) -> bytes:
        self.now_s += 3.0
        return rank_message().SerializeToString()

    def set_trailing_metadata(self, metadata: Any) -> None:
        assert metadata


@pytest.mark.parametrize(("deadline_s", "left_ms"), [(10.0, 10_000.0), (None, None)])
def test_a_message_that_comes_late_takes_nothing_from_the_deadline_twice(
    deadline_s: float | None, left_ms: float | None
) -> None:
    call, asked = Call(deadline_s), []
    app: Any = SimpleNamespace(
        models=None,
        clock=lambda: round(call.now_s * 1e9),
        keys=SimpleNamespace(client=None),
        traces=None,
        access=None,
        admit=lambda find, key, arrival_ns: None,
        count=lambda endpoint, status: asked.append(status),
    )

    async def infer(given: Any, call: Any, left_ms: float | None) -> Any:
        asked.append((call.arrival_ns, left_ms))
        return message_class("ModelInferResponse")()

    server = GrpcServer(app, ServerConfig(), connections=1, read_timeout_s=1.0)
    asyncio.run(server._handler("ModelInfer", infer).stream_unary(None, call))
    assert asked == [(100_000_000_000, left_ms), 200]
