# SPDX-License-Identifier: Apache-2.0
"""An open-loop load client: requests are sent at their times, whether or not earlier ones were answered.

The one idea: latency counts from the time a request was *scheduled*, so that a server that stalls is charged for
everything that should have been sent meanwhile (no coordinated omission). A request that finds all connections busy
waits, and its wait counts; `lateness` shows how much of the latency is the client's own.

A schedule is plain data, made from a rate or read from a trace file, and bounded in length; times are seconds from
the start of the run.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Protocol
from urllib.parse import urlsplit

import msgspec
import numpy as np
from msgspec import Meta

from jgr.config import UserError
from jgr.files import read_lines
from jgr.serving.engine.contract import Progress
from jgr.serving.policies.jobs import Kind

N_USERS = 1000
"""How many distinct requests a schedule with a rate has; each stands for one user, who asks again and again."""
FIRST_TIME_S = 1_700_000_000
"""The time of the first item in a history with times, in seconds."""
MAX_HEAD_BYTES = 1 << 16
MAX_BODY_BYTES = 1 << 26
MAX_TRACE_MS = 24 * 3600 * 1000


class LoadError(UserError):
    """A load that cannot be made: a bad trace, too many requests, or no server at the address."""


class Request(NamedTuple):
    """A POST of a JSON body."""

    path: str
    body: bytes


class Arrival(NamedTuple):
    """A request, and when it is to be sent, in seconds from the start."""

    at_s: float
    request: Request


class Result(NamedTuple):
    """How and when a request ended. verdict: the HTTP status as text, or "timeout", "disconnected", "bad_response"."""

    verdict: str
    due_s: float
    sent_s: float
    end_s: float


def arrival_times(
    process: Literal["poisson", "constant"], rate: float, duration_s: float, rng: np.random.Generator
) -> list[float]:
    """The times of requests in [0, duration_s), ascending: every 1 / rate seconds, or a Poisson process."""
    expected = rate * duration_s
    if process == "constant":
        return [i / rate for i in range(math.ceil(expected))]
    # Given their number, the arrivals of a Poisson process are independent and uniform.
    times: list[float] = np.sort(rng.uniform(0.0, duration_s, rng.poisson(expected))).tolist()
    return times


def make_requests(
    kind: Kind,
    item_ids: Sequence[str],
    *,
    history_length: int,
    candidates: int,
    top_k: int,
    rng: np.random.Generator,
    timed: bool = False,
) -> list[Request]:
    """Make a request for each of N_USERS users: a history drawn with repeats; for rank, distinct candidates.

    timed: add times: the history's items are an hour apart, and the request comes an hour after the last one.
    """
    if kind == "rank" and candidates > len(item_ids):
        raise LoadError(f"{candidates} candidates were asked for; the catalog has {len(item_ids)} items")
    requests = []
    for user in range(N_USERS):
        rows = rng.integers(0, len(item_ids), history_length)
        fields: dict[str, Any] = {
            "user_id": f"user-{user}",
            "history": [item_ids[row] for row in rows],
            "top_k": top_k,
        }
        if kind == "rank":
            fields["candidates"] = [
                item_ids[row] for row in rng.choice(len(item_ids), candidates, replace=False)
            ]
        if timed:
            fields["history_times"] = [FIRST_TIME_S + 3600 * at for at in range(history_length)]
            fields["time"] = FIRST_TIME_S + 3600 * history_length
        requests.append(Request(f"/v1/{kind}", msgspec.json.encode(fields)))
    return requests


def schedule(times: Sequence[float], requests: Sequence[Request], rng: np.random.Generator) -> list[Arrival]:
    """Draw a request at random for each time."""
    drawn = rng.integers(0, len(requests), len(times)).tolist()
    return [Arrival(at_s, requests[i]) for at_s, i in zip(times, drawn, strict=True)]


class _TraceLine(msgspec.Struct, forbid_unknown_fields=True):
    at_ms: Annotated[float, Meta(ge=0, le=MAX_TRACE_MS)]
    path: Annotated[str, Meta(pattern=r"\A/[!-~]*\Z")]
    body: msgspec.Raw


def read_trace(path: Path, *, duration_s: float | None, max_requests: int) -> list[Arrival]:
    """Read JSON lines of {at_ms, path, body}, in any order; those due at duration_s or later are left out.

    Raises LoadError, naming the line that cannot be used, or if more than max_requests remain.
    """
    decode = msgspec.json.Decoder(_TraceLine).decode
    arrivals = []
    for number, text in read_lines(path, LoadError):
        try:
            line = decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise LoadError(f"{path}:{number}: {error}") from None
        if duration_s is None or line.at_ms < duration_s * 1e3:
            arrivals.append(Arrival(line.at_ms / 1e3, Request(line.path, bytes(line.body))))
        if len(arrivals) > max_requests:
            raise LoadError(f"{path}: holds more than {max_requests} requests")
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


class Connection(Protocol):
    """A connection that carries one request at a time. usable: whether it can carry another."""

    @property
    def usable(self) -> bool: ...
    async def post(self, request: Request) -> int:
        """Send a request; returns the status. Raises OSError or EOFError if the connection breaks, ValueError if the
        answer is not valid HTTP."""

    def close(self) -> None: ...


async def drive(
    arrivals: Sequence[Arrival],
    connect: Callable[[], Awaitable[Connection]],
    *,
    max_connections: int,
    timeout_s: float,
    progress: Progress,
) -> list[Result]:
    """Send every request at its time, and wait for all answers. Returns the results, those that end first first.

    timeout_s: how long a request may take from when it was sent. Connections are opened when needed, and kept.
    """
    loop = asyncio.get_running_loop()
    slots = asyncio.Semaphore(max_connections)
    idle: list[Connection] = []
    results: list[Result] = []
    start_s = loop.time()

    async def exchange(request: Request) -> str:
        connection: Connection | None = None
        try:
            async with asyncio.timeout(timeout_s):
                while idle and connection is None:
                    if idle[-1].usable:
                        connection = idle.pop()
                    else:
                        idle.pop().close()
                connection = connection or await connect()
                status = await connection.post(request)
            idle.append(connection)
            return str(status)
        except Exception as error:
            if connection is not None:
                connection.close()
            return _verdict(error)

    async def answer(arrival: Arrival) -> None:
        async with slots:
            sent_s = loop.time() - start_s
            verdict = await exchange(arrival.request)
            end_s = loop.time() - start_s
        results.append(Result(verdict, arrival.at_s, sent_s, end_s))
        progress(len(results), len(arrivals), "")

    try:
        async with asyncio.TaskGroup() as group:
            for arrival in arrivals:
                wait_s = start_s + arrival.at_s - loop.time()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                group.create_task(answer(arrival))
    finally:
        for connection in idle:
            connection.close()
    return results


def _verdict(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, OSError | EOFError):
        return "disconnected"
    if isinstance(error, ValueError):
        return "bad_response"
    raise error


@dataclass(frozen=True)
class Target:
    """The address of a server. api_key: the key to send; empty: none."""

    host: str
    port: int
    api_key: str = ""

    @property
    def is_loopback(self) -> bool:
        """Whether the host is certainly this machine: a loopback address or localhost. No other name is looked up."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def parse_url(url: str, api_key: str = "") -> Target:
    """Parse an http:// URL without a path. Raises LoadError, which says what is wrong with any other."""
    try:
        parts = urlsplit(url)
        port = parts.port or 80
    except ValueError as error:
        raise LoadError(f"{url!r} is not a URL: {error}") from None
    if parts.scheme != "http" or not parts.hostname or parts.path.strip("/") or parts.query or parts.username:
        raise LoadError(f"the URL must look like http://127.0.0.1:8000, not {url!r}")
    if not re.fullmatch(r"[!-~]*", api_key):
        raise LoadError("the API key must be printable ASCII without spaces")
    return Target(parts.hostname, port, api_key)


class HttpConnection:
    """A connection by HTTP/1.1 with keep-alive. Answers must have a Content-Length."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: Target) -> None:
        self._reader, self._writer = reader, writer
        self._open = True
        host = f"[{target.host}]" if ":" in target.host else target.host
        self._headers = f"Host: {host}:{target.port}\r\nContent-Type: application/json\r\n"
        if target.api_key:
            self._headers += f"Authorization: Bearer {target.api_key}\r\n"

    @classmethod
    async def open(cls, target: Target) -> HttpConnection:
        """Connect to a server. Raises OSError if none answers."""
        streams = await asyncio.open_connection(target.host, target.port, limit=MAX_HEAD_BYTES)
        return cls(*streams, target)

    @property
    def usable(self) -> bool:
        return self._open and not self._reader.at_eof()

    async def post(self, request: Request) -> int:
        head = f"POST {request.path} HTTP/1.1\r\n{self._headers}Content-Length: {len(request.body)}\r\n\r\n"
        self._writer.write(head.encode() + request.body)
        try:
            status_line, *lines = (await self._reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
        except asyncio.LimitOverrunError as error:
            raise ValueError("the head of the answer is too long") from error
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
        status = re.fullmatch(rb"HTTP/1\.[01] (\d{3})(?: .*)?", status_line)
        length = headers.get(b"content-length", b"")
        if not status or not length.isdigit() or int(length) > MAX_BODY_BYTES:
            raise ValueError(f"not an HTTP answer of known length: {status_line[:80]!r}")
        await self._reader.readexactly(int(length))
        self._open = headers.get(b"connection", b"").lower() != b"close"
        return int(status[1])

    def close(self) -> None:
        self._writer.close()


def run(
    arrivals: Sequence[Arrival],
    target: Target,
    *,
    max_connections: int,
    timeout_s: float,
    progress: Progress,
) -> list[Result]:
    """Run `drive` against a server, on a new event loop. Raises LoadError if the server cannot be reached at all."""

    async def main() -> list[Result]:
        try:
            async with asyncio.timeout(timeout_s):
                (await HttpConnection.open(target)).close()
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise LoadError(f"nobody answers at {target.host} port {target.port}: {reason}") from None

        def connect() -> Awaitable[HttpConnection]:
            return HttpConnection.open(target)

        return await drive(
            arrivals, connect, max_connections=max_connections, timeout_s=timeout_s, progress=progress
        )

    return asyncio.run(main())


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float] | None:
    """p50, p90, p99 (the least value that this share does not exceed) and max, in ms; None if there are no values."""
    if not seconds:
        return None
    ranked = sorted(seconds)
    ranks = {f"p{p}": ranked[math.ceil(len(ranked) * p / 100) - 1] for p in (50, 90, 99)}
    return {name: round(value * 1e3, 3) for name, value in {**ranks, "max": ranked[-1]}.items()}


def summarize(results: Sequence[Result], slo_ms: float) -> dict[str, Any]:
    """The report of a run, as JSON values. results: at least one.

    latency_ms covers the answers with status 200. goodput is the number of these that came within slo_ms, divided by
    elapsed_s, the time from the start until the last request ended.
    """
    statuses = Counter(r.verdict for r in results if r.verdict.isdigit())
    failures = Counter(r.verdict for r in results if not r.verdict.isdigit())
    latencies_s = [r.end_s - r.due_s for r in results if r.verdict == "200"]
    in_time = sum(latency_s * 1e3 <= slo_ms for latency_s in latencies_s)
    elapsed_s = max(r.end_s for r in results)
    return {
        "sent": len(results),
        "answered": dict(sorted(statuses.items())),
        "failed": dict(sorted(failures.items())),
        "elapsed_s": round(elapsed_s, 3),
        "slo_ms": slo_ms,
        "in_time": in_time,
        "goodput_per_s": round(in_time / elapsed_s, 3),
        "latency_ms": percentiles_ms(latencies_s),
        "lateness_ms": percentiles_ms([max(0.0, r.sent_s - r.due_s) for r in results]),
    }
