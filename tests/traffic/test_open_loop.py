# SPDX-License-Identifier: Apache-2.0
"""The open-loop client: times under a virtual clock, and runs over real sockets."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import numpy as np
import pytest

from jgr.traffic import open_loop as load
from jgr.traffic.http_client import (
    BAD_RESPONSE,
    DISCONNECTED,
    TIMEOUT,
    Connection,
    Done,
    HttpConnection,
    Target,
    Verdict,
)
from jgr.traffic.open_loop import Results
from jgr.traffic.schedule import LoadError, Request, Schedule
from tests.traffic.tcp_server import OK, tcp_server

T = TypeVar("T")
ANSWERED = Verdict("200")


def _quiet(done: int, total: int, label: str) -> None:
    pass


def _schedule(*at_s: float) -> Schedule:
    requests = [Request("/v1/recommend", b"{}")]
    return Schedule(np.array(at_s), np.zeros(len(at_s), np.int32), requests, max(at_s, default=0.0))


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer instead of waiting for it. For code without sockets."""

    def __init__(self) -> None:
        loop = self

        class Selector(selectors.SelectSelector):
            def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
                assert timeout is not None, "nothing is left to wait for"
                loop.now_s += timeout
                return super().select(0)

        self.now_s = 0.0
        super().__init__(Selector())

    def time(self) -> float:
        return self.now_s


def _virtually(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class FakeServer:
    """Serves each connection on its own: a request takes what `take_s` says for its number, then `answer` decides."""

    def __init__(
        self, take_s: Callable[[int], float], answer: Callable[[int], Verdict] = lambda number: ANSWERED
    ) -> None:
        self.take_s, self.answer = take_s, answer
        self.opened = self.closed = self.asked = 0

    async def connect(self) -> FakeConnection:
        self.opened += 1
        return FakeConnection(self)


class FakeConnection:
    def __init__(self, server: FakeServer) -> None:
        self.server = server
        self.usable = True
        self._timer: asyncio.TimerHandle | None = None

    def send(self, wire: bytes, done: Done) -> None:
        number = self.server.asked
        self.server.asked += 1
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self.server.take_s(number), self._answer, number, done)

    def _answer(self, number: int, done: Done) -> None:
        verdict = self.server.answer(number)
        if not verdict.status.isdigit():
            self.close()
        done(verdict)

    def close(self) -> None:
        if self.usable:
            self.usable = False
            self.server.closed += 1
            if self._timer is not None:
                self._timer.cancel()


def _drive(server: FakeServer, *at_s: float, connections: int = 100, timeout_s: float = 1e6) -> Results:
    return _virtually(
        load.drive(
            _schedule(*at_s),
            [b""],
            server.connect,
            max_connections=connections,
            timeout_s=timeout_s,
            progress=_quiet,
        )
    )


def _verdicts(results: Results) -> list[Verdict]:
    return [results.verdicts[number] for number in results.ended]


def test_requests_go_out_at_their_times_whether_or_not_answers_came() -> None:
    server = FakeServer(lambda number: 10.0)
    results = _drive(server, 0.0, 1.0, 2.5)
    assert _verdicts(results) == [ANSWERED] * 3
    for times in (results.due_s, results.began_s, results.sent_s):
        np.testing.assert_allclose(times, [0.0, 1.0, 2.5])
    np.testing.assert_allclose(results.end_s, [10.0, 11.0, 12.5])
    assert (server.opened, server.closed) == (3, 3)


def test_waiting_for_a_connection_counts_as_latency_and_not_as_lateness() -> None:
    # One connection and 10 s a request: the second and third wait for it, as those of a stalled server do.
    results = _drive(FakeServer(lambda number: 10.0), 0.0, 1.0, 2.0, connections=1)
    np.testing.assert_allclose(results.began_s, results.due_s)
    np.testing.assert_allclose(results.sent_s, [0.0, 10.0, 20.0])
    np.testing.assert_allclose(results.end_s - results.due_s, [10.0, 19.0, 28.0])


def test_connections_are_used_again() -> None:
    server = FakeServer(lambda number: 1.0)
    assert len(_drive(server, 0.0, 2.0, 4.0, 4.5)) == 4
    assert server.opened == 2


def test_a_burst_goes_out_at_once_over_as_many_connections_as_there_may_be() -> None:
    server = FakeServer(lambda number: 1.0)
    results = _drive(server, *[0.0] * 100, connections=50)
    assert server.opened == 50
    np.testing.assert_allclose(np.sort(results.end_s), [1.0] * 50 + [2.0] * 50)


def test_failures_are_named_and_cost_their_connection() -> None:
    answers = {1: DISCONNECTED, 2: BAD_RESPONSE, 3: Verdict("503", "unavailable")}
    server = FakeServer(lambda number: 100.0 if number == 0 else 1.0, lambda n: answers.get(n, ANSWERED))
    results = _drive(server, 0.0, 20.0, 40.0, 60.0, 80.0, timeout_s=5.0)
    assert _verdicts(results) == [
        TIMEOUT,
        DISCONNECTED,
        BAD_RESPONSE,
        Verdict("503", "unavailable"),
        ANSWERED,
    ]
    np.testing.assert_allclose(results.end_s, [5.0, 21.0, 41.0, 61.0, 81.0])
    assert (server.opened, server.closed) == (4, 4)


def test_a_timeout_frees_the_connection_for_those_that_wait() -> None:
    server = FakeServer(lambda number: 1.0 if number == 1 else 100.0)
    results = _drive(server, 0.0, 1.0, 2.0, connections=1, timeout_s=5.0)
    assert _verdicts(results) == [TIMEOUT, ANSWERED, TIMEOUT]
    np.testing.assert_allclose(results.end_s, [5.0, 6.0, 11.0])


def test_a_connection_that_is_refused_ends_a_request() -> None:
    async def connect() -> Connection:
        raise ConnectionRefusedError

    async def main() -> Results:
        return await load.drive(
            _schedule(0.0, 1.0), [b""], connect, max_connections=1, timeout_s=5.0, progress=_quiet
        )

    results = _virtually(main())
    assert _verdicts(results) == [DISCONNECTED, DISCONNECTED]
    np.testing.assert_allclose(results.end_s, [0.0, 1.0])


def test_a_defect_of_the_client_is_not_a_verdict() -> None:
    def answer(number: int) -> Verdict:
        raise KeyError(number)

    with pytest.raises(KeyError):
        _drive(FakeServer(lambda number: 1.0, answer), 0.0)


def test_nothing_to_send_is_no_run() -> None:
    assert len(_drive(FakeServer(lambda number: 1.0))) == 0


def test_progress_counts_to_the_end() -> None:
    told: list[tuple[int, int]] = []

    async def main() -> None:
        await load.drive(
            _schedule(0.0, 0.05, 3.0),
            [b""],
            FakeServer(lambda number: 1.0).connect,
            max_connections=9,
            timeout_s=9.0,
            progress=lambda done, total, label: told.append((done, total)),
        )

    _virtually(main())
    assert told[-1] == (3, 3)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_a_run_drops_connections_that_the_server_closed() -> None:
    # Each connection answers once. The second request finds the first connection gone and opens another.
    async def main() -> Results:
        received: list[bytes] = []
        async with tcp_server([OK], received) as target:

            def connect() -> Awaitable[HttpConnection]:
                return HttpConnection.open(target)

            schedule = _schedule(0.0, 0.1)
            wires = [target.render(schedule.requests[0])]
            return await load.drive(
                schedule, wires, connect, max_connections=1, timeout_s=30.0, progress=_quiet
            )

    with asyncio.Runner(loop_factory=load.new_loop) as runner:
        assert _verdicts(runner.run(main())) == [ANSWERED, ANSWERED]


def test_a_server_that_is_not_there_is_an_error() -> None:
    async def free_port() -> int:
        async with tcp_server([], []) as target:
            return target.port

    target = Target("127.0.0.1", asyncio.run(free_port()))
    with pytest.raises(
        LoadError,
        match=rf"nobody answers at 127\.0\.0\.1 port {target.port}: .*; does jgr serve run there\?$",
    ):
        load.run(_schedule(0.0), target, max_connections=1, timeout_s=30.0, progress=_quiet)
