# SPDX-License-Identifier: Apache-2.0
"""The open-loop client: schedules, times under a virtual clock, HTTP against a server of a few lines, the report."""

from __future__ import annotations

import asyncio
import contextlib
import json
import selectors
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jgr.traffic import open_loop as load
from jgr.traffic.open_loop import Arrival, HttpConnection, LoadError, Request, Result, Target

T = TypeVar("T")
REQUEST = Request("/v1/recommend", b"{}")


def _quiet(done: int, total: int, label: str) -> None:
    pass


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
        self, take_s: Callable[[int], float], answer: Callable[[int], int] = lambda number: 200
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

    async def post(self, request: Request) -> int:
        number = self.server.asked
        self.server.asked += 1
        await asyncio.sleep(self.server.take_s(number))
        return self.server.answer(number)

    def close(self) -> None:
        self.server.closed += 1


def _drive(server: FakeServer, *at_s: float, connections: int = 100, timeout_s: float = 1e6) -> list[Result]:
    arrivals = [Arrival(t, REQUEST) for t in at_s]
    return _virtually(
        load.drive(
            arrivals, server.connect, max_connections=connections, timeout_s=timeout_s, progress=_quiet
        )
    )


def test_requests_go_out_at_their_times_whether_or_not_answers_came() -> None:
    server = FakeServer(lambda number: 10.0)
    results = _drive(server, 0.0, 1.0, 2.5)
    assert [(r.verdict, r.due_s, r.sent_s) for r in results] == [
        ("200", 0.0, 0.0),
        ("200", 1.0, 1.0),
        ("200", 2.5, 2.5),
    ]
    assert [r.end_s for r in results] == [10.0, 11.0, 12.5]
    assert (server.opened, server.closed) == (3, 3)


def test_waiting_for_a_connection_counts_as_latency() -> None:
    # One connection and 10 s a request: the second and third wait for it, as those of a stalled server do.
    results = _drive(FakeServer(lambda number: 10.0), 0.0, 1.0, 2.0, connections=1)
    assert [(r.sent_s, r.end_s - r.due_s) for r in results] == [(0.0, 10.0), (10.0, 19.0), (20.0, 28.0)]


def test_connections_are_used_again() -> None:
    server = FakeServer(lambda number: 1.0)
    assert len(_drive(server, 0.0, 2.0, 4.0, 4.5)) == 4
    assert server.opened == 2


def test_failures_are_named_and_cost_their_connection() -> None:
    def answer(number: int) -> int:
        if number == 1:
            raise ConnectionResetError
        if number == 2:
            raise ValueError("not HTTP")
        if number == 3:
            raise asyncio.IncompleteReadError(b"", 5)
        return 503 if number == 4 else 200

    server = FakeServer(lambda number: 100.0 if number == 0 else 1.0, answer)
    results = _drive(server, 0.0, 20.0, 40.0, 60.0, 80.0, 99.0, timeout_s=5.0)
    assert [r.verdict for r in results] == [
        "timeout",
        "disconnected",
        "bad_response",
        "disconnected",
        "503",
        "200",
    ]
    assert results[0].end_s == 5.0
    assert (server.opened, server.closed) == (5, 5)


def test_a_defect_of_the_client_is_not_a_verdict() -> None:
    def answer(number: int) -> int:
        raise KeyError(number)

    with pytest.raises(ExceptionGroup) as caught:
        _drive(FakeServer(lambda number: 1.0, answer), 0.0)
    assert caught.group_contains(KeyError)


def test_constant_arrivals_are_evenly_spaced() -> None:
    rng = np.random.default_rng(0)
    assert load.arrival_times("constant", 4.0, 1.0, rng) == [0.0, 0.25, 0.5, 0.75]
    assert load.arrival_times("constant", 4.0, 1.1, rng) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert load.arrival_times("constant", 0.1, 1.0, rng) == [0.0]


@given(st.floats(0.0, 50.0), st.floats(1e-3, 20.0), st.integers(0, 2**32))
def test_poisson_arrivals_are_ordered_within_the_duration_and_repeat(
    rate: float, duration_s: float, seed: int
) -> None:
    times = load.arrival_times("poisson", rate, duration_s, np.random.default_rng(seed))
    assert times == sorted(times)
    assert all(0.0 <= t < duration_s for t in times)
    assert times == load.arrival_times("poisson", rate, duration_s, np.random.default_rng(seed))


def test_poisson_arrivals_have_the_rate_and_exponential_gaps() -> None:
    times = load.arrival_times("poisson", 100.0, 200.0, np.random.default_rng(0))
    gaps = np.diff(times)
    assert abs(len(times) - 20_000) < 4 * 20_000**0.5
    # Of an exponential distribution the standard deviation is the mean, and e^-1 of it lies above the mean.
    assert abs(gaps.std() / gaps.mean() - 1) < 0.03
    assert abs((gaps > gaps.mean()).mean() - np.exp(-1)) < 0.02


def test_requests_are_drawn_from_the_catalog() -> None:
    ids = [f"item-{i}" for i in range(30)]
    rng = np.random.default_rng(0)
    requests = load.make_requests("rank", ids, history_length=40, candidates=30, top_k=3, rng=rng)
    assert len(requests) == load.N_USERS
    for user, request in enumerate(requests[:20]):
        body = json.loads(request.body)
        assert request.path == "/v1/rank"
        assert (body["user_id"], body["top_k"]) == (f"user-{user}", 3)
        assert len(body["history"]) == 40
        assert set(body["history"]) <= set(ids)
        assert sorted(body["candidates"]) == sorted(ids)
    (timed, *_) = load.make_requests(
        "rank", ids, history_length=4, candidates=1, top_k=1, rng=rng, timed=True
    )
    body = json.loads(timed.body)
    assert np.diff([*body["history_times"], body["time"]]).tolist() == [3600] * 4
    (first, *_) = load.make_requests("recommend", ids, history_length=1, candidates=99, top_k=3, rng=rng)
    assert json.loads(first.body).keys() == {"user_id", "history", "top_k"}
    with pytest.raises(LoadError, match="31 candidates were asked for; the catalog has 30 items"):
        load.make_requests("rank", ids, history_length=1, candidates=31, top_k=3, rng=rng)


def test_a_schedule_uses_all_requests_and_keeps_the_times() -> None:
    requests = [Request("/", bytes([i])) for i in range(4)]
    arrivals = load.schedule([float(t) for t in range(100)], requests, np.random.default_rng(0))
    assert [a.at_s for a in arrivals] == list(range(100))
    assert {a.request for a in arrivals} == set(requests)


def _trace(folder: Path, *lines: str) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_a_trace_is_sorted_and_cut(tmp_path: Path) -> None:
    path = _trace(
        tmp_path,
        '{"at_ms": 1500, "path": "/v1/rank", "body": {"b": [1,  2]}}',
        '{"at_ms": 0.5, "path": "/v1/recommend", "body": {}}',
        '{"at_ms": 2000, "path": "/x", "body": null}',
    )
    expected = [
        Arrival(0.0005, Request("/v1/recommend", b"{}")),
        Arrival(1.5, Request("/v1/rank", b'{"b": [1,  2]}')),
        Arrival(2.0, Request("/x", b"null")),
    ]
    assert load.read_trace(path, duration_s=None, max_requests=3) == expected
    assert load.read_trace(path, duration_s=2.0, max_requests=2) == expected[:2]
    with pytest.raises(LoadError, match="holds more than 2 requests"):
        load.read_trace(path, duration_s=None, max_requests=2)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "truncated"),
        ("[]", "Expected `object`, got `array`"),
        ('{"at_ms": 1, "path": "/x"}', "missing required field `body`"),
        ('{"at_ms": -1, "path": "/x", "body": {}}', r"at `\$\.at_ms`"),
        ('{"at_ms": 1e300, "path": "/x", "body": {}}', r"at `\$\.at_ms`"),
        ('{"at_ms": "1", "path": "/x", "body": {}}', r"at `\$\.at_ms`"),
        ('{"at_ms": 1, "path": "x", "body": {}}', r"at `\$\.path`"),
        ('{"at_ms": 1, "path": "/x\\r\\nHost: y", "body": {}}', r"at `\$\.path`"),
        ('{"at_ms": 1, "path": "/x\\n", "body": {}}', r"at `\$\.path`"),
        ('{"at_ms": 1, "path": "/x", "body": {}, "user": 1}', "unknown field `user`"),
    ],
)
def test_a_bad_line_of_a_trace_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = _trace(tmp_path, '{"at_ms": 0, "path": "/x", "body": {}}', line)
    with pytest.raises(LoadError, match=rf"trace\.jsonl:2: .*{words}"):
        load.read_trace(path, duration_s=None, max_requests=10)


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://127.0.0.1:8000", Target("127.0.0.1", 8000)),
        ("http://localhost/", Target("localhost", 80)),
        ("http://[::1]:9", Target("::1", 9)),
    ],
)
def test_urls_of_this_machine(url: str, target: Target) -> None:
    assert load.parse_url(url) == target
    assert target.is_loopback


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:8000",
        "https://127.0.0.1",
        "http://",
        "http://x:y",
        "http://x/v1",
        "http://a@x",
        "http://x?y",
    ],
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(LoadError, match="URL"):
        load.parse_url(url)


@pytest.mark.parametrize("host", ["10.0.0.1", "example.org", "0.0.0.0", "localhost.example.org", "::2"])
def test_other_hosts_are_not_loopback(host: str) -> None:
    assert not Target(host, 80).is_loopback


def test_an_api_key_cannot_smuggle_headers() -> None:
    assert load.parse_url("http://localhost", "k3y").api_key == "k3y"
    with pytest.raises(LoadError, match="API key"):
        load.parse_url("http://localhost", "k\r\nHost: x")


@asynccontextmanager
async def _tcp_server(answers: list[bytes], received: list[bytes]) -> AsyncIterator[Target]:
    """Answers the n-th request of a connection with answers[n], and closes the connection after the last one.

    Whoever connects must have closed its side before the block ends.
    """
    handlers: list[asyncio.Task[Any] | None] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.append(asyncio.current_task())
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            for answer in answers:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                received.append(head + await reader.readexactly(length))
                writer.write(answer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        yield Target(host, port, "k3y")
        await asyncio.gather(*filter(None, handlers))


def _post(answers: list[bytes], count: int) -> tuple[list[int], bool, list[bytes]]:
    """The statuses of `count` requests on one connection, whether it is still usable, and what the server got."""
    received: list[bytes] = []

    async def main() -> tuple[list[int], bool, list[bytes]]:
        async with _tcp_server(answers, received) as target:
            connection = await HttpConnection.open(target)
            try:
                statuses = [await connection.post(Request("/v1/rank", b'{"a":1}')) for _ in range(count)]
                return statuses, connection.usable, received
            finally:
                connection.close()

    return asyncio.run(main())


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nbody"


def test_requests_share_a_connection() -> None:
    statuses, usable, received = _post([OK, b"HTTP/1.1 429 \r\ncontent-length:0\r\n\r\n", OK], 2)
    assert (statuses, usable) == ([200, 429], True)
    head, _, body = received[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/rank HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"\r\nAuthorization: Bearer k3y" in head
    assert b"\r\nContent-Length: 7" in head
    assert body == b'{"a":1}'


def test_a_connection_that_will_be_closed_is_not_used_again() -> None:
    closing = b"HTTP/1.1 200 OK\r\nConnection: Close\r\nContent-Length: 0\r\n\r\n"
    assert _post([closing, OK], 1)[:2] == ([200], False)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", EOFError),
        (OK[:-1], EOFError),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", ValueError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", ValueError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n", ValueError),
        (b"SSH-2.0\r\n\r\n", ValueError),
        (b"x" * (load.MAX_HEAD_BYTES + 10) + b"\r\n\r\n", ValueError),
    ],
)
def test_broken_answers(answer: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        _post([answer], 1)


def test_a_run_drops_connections_that_the_server_closed() -> None:
    # Each connection answers once. The second request finds the first connection gone and opens another.
    async def main() -> list[Result]:
        received: list[bytes] = []
        async with _tcp_server([OK], received) as target:

            def connect() -> Awaitable[HttpConnection]:
                return HttpConnection.open(target)

            arrivals = [Arrival(0.0, REQUEST), Arrival(0.1, REQUEST)]
            return await load.drive(arrivals, connect, max_connections=1, timeout_s=30.0, progress=_quiet)

    assert [r.verdict for r in asyncio.run(main())] == ["200", "200"]


def test_a_server_that_is_not_there_is_an_error() -> None:
    async def free_port() -> int:
        async with _tcp_server([], []) as target:
            return target.port

    target = Target("127.0.0.1", asyncio.run(free_port()))
    with pytest.raises(LoadError, match=rf"nobody answers at 127\.0\.0\.1 port {target.port}: "):
        load.run([Arrival(0.0, REQUEST)], target, max_connections=1, timeout_s=30.0, progress=_quiet)


@given(st.lists(st.floats(0.0, 1e3), min_size=1, max_size=300))
def test_percentiles_are_those_of_numpy(seconds: list[float]) -> None:
    found = load.percentiles_ms(seconds)
    assert found is not None
    wanted = np.percentile(seconds, [50, 90, 99, 100], method="inverted_cdf") * 1e3
    assert list(found) == ["p50", "p90", "p99", "max"]
    np.testing.assert_allclose(list(found.values()), wanted, atol=5.1e-4)


def test_the_report_counts_goodput_from_the_scheduled_time() -> None:
    results = [
        Result("200", due_s=0.0, sent_s=0.0, end_s=0.1),
        Result("200", due_s=1.0, sent_s=1.08, end_s=1.1),
        Result("200", due_s=1.0, sent_s=1.2, end_s=1.21),  # quick once sent, but late
        Result("429", due_s=2.0, sent_s=2.0, end_s=2.001),
        Result("timeout", due_s=2.0, sent_s=2.0, end_s=4.0),
    ]
    assert load.summarize(results, slo_ms=101.0) == {
        "sent": 5,
        "answered": {"200": 3, "429": 1},
        "failed": {"timeout": 1},
        "elapsed_s": 4.0,
        "slo_ms": 101.0,
        "in_time": 2,
        "goodput_per_s": 0.5,
        "latency_ms": {"p50": 100.0, "p90": 210.0, "p99": 210.0, "max": 210.0},
        "lateness_ms": {"p50": 0.0, "p90": 200.0, "p99": 200.0, "max": 200.0},
    }
    refused = load.summarize(results[3:], slo_ms=100.0)
    assert (refused["in_time"], refused["latency_ms"]) == (0, None)
