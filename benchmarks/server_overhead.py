# SPDX-License-Identifier: Apache-2.0
"""What serving itself costs: the whole HTTP server and engine around an executor that computes nothing.

The server runs in its own process on one core, the client on another. Requests carry a history of 256 items; `rank`
adds 100 candidates, both ask for the best 10 items. All of the path is there: HTTP parsing, validation, item ids to
rows, the prompt's tokens, the batcher, the hop to the worker thread and back, item ids and JSON of the answer.

The client is a closed loop over keep-alive connections on one epoll, with requests rendered beforehand; it checks
each answer's status and number of items. Its share of its core is in the rows: below 1, it was not the limit.

With --against the server of another checkout, on the same core, takes turns with this one's; its rows name its commit.

    python -m benchmarks.server_overhead [--quick] [--against=FOLDER]
"""

from __future__ import annotations

import functools
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from urllib.parse import urlsplit

import numpy as np
from absl import flags

from benchmarks import harness
from benchmarks.harness import Benchmark, Claim, Measured, Quiet, Row

HISTORY, CANDIDATES, TOP_K = 256, 100, 10
N_ITEMS = 10_000
DISTINCT_REQUESTS = 64
PATIENCE_S = 10.0

SETTINGS = (
    f"prompt.max_items={HISTORY}",
    "profiles.batch=1,16",
    "profiles.tokens=1024",
    "profiles.widths=32",
    "profiles.candidates=128",
    f"batching.max_tokens={16 * (1024 + 128)}",
    "server.port=0",
)
HERE = Path(__file__).resolve().parents[1]

Address = tuple[str, int]


class WrongAnswer(Exception):
    """The server answered with another status or number of items than was asked for."""


def render_requests(kind: str, rng: np.random.Generator) -> list[bytes]:
    """HTTP/1.1 requests with random histories and candidates."""
    requests = []
    for _ in range(DISTINCT_REQUESTS):
        fields: dict[str, Any] = {
            "history": list(map(str, rng.integers(0, N_ITEMS, HISTORY))),
            "top_k": TOP_K,
        }
        if kind == "rank":
            fields["candidates"] = list(map(str, rng.choice(N_ITEMS, CANDIDATES, replace=False)))
        body = json.dumps(fields, separators=(",", ":")).encode()
        head = f"POST /v1/{kind} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        requests.append(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return requests


def response_length(received: bytes | bytearray) -> int | None:
    """The length of the HTTP response at the start of `received`; None while its head is incomplete."""
    end = received.find(b"\r\n\r\n")
    if end < 0:
        return None
    at = received.lower().index(b"content-length:", 0, end) + len(b"content-length:")
    return end + 4 + int(received[at : received.index(b"\r\n", at)])


def check_answer(response: bytes | bytearray, n_items: int) -> None:
    """Raise WrongAnswer unless `response` is a 200 with n_items items."""
    if not response.startswith(b"HTTP/1.1 200 ") or response.count(b'"item_id":') != n_items:
        raise WrongAnswer(bytes(response[:1000]).decode(errors="replace"))


class Run(NamedTuple):
    """A run. latencies_ms: one an answer, in order of arrival. elapsed_s: its length. client_cpu: share of a core."""

    latencies_ms: list[float]
    elapsed_s: float
    client_cpu: float


@dataclass(eq=False)
class _Link:
    """One connection. request: the index of the request that is under way."""

    sock: socket.socket
    received: bytearray
    request: int
    sent_s: float


def closed_loop(address: Address, requests: Sequence[bytes], connections: int, seconds: float) -> Run:
    """Keep one request under way on each connection for `seconds`."""
    with ExitStack() as stack:
        poll = stack.enter_context(select.epoll())
        links = {}
        for number in range(connections):
            sock = stack.enter_context(socket.create_connection(address))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            poll.register(sock, select.EPOLLIN)
            links[sock.fileno()] = _Link(sock, bytearray(), number * len(requests) // connections, 0.0)
        return _exchange(poll, links, requests, seconds)


def _exchange(poll: select.epoll, links: dict[int, _Link], requests: Sequence[bytes], seconds: float) -> Run:
    clock, cpu_s, latencies = time.perf_counter, time.process_time(), []
    start = now = clock()
    for link in links.values():
        _send(link, requests, clock())
    while now - start < seconds:
        for fd, _ in poll.poll(PATIENCE_S) or _silent():
            link = links[fd]
            link.received += link.sock.recv(1 << 16) or _closed()
            length = response_length(link.received)
            if length is None or len(link.received) < length:
                continue
            now = clock()
            latencies.append((now - link.sent_s) * 1e3)
            check_answer(link.received, TOP_K)
            link.received.clear()
            _send(link, requests, clock())
    return Run(latencies, now - start, (time.process_time() - cpu_s) / (now - start))


def _send(link: _Link, requests: Sequence[bytes], now_s: float) -> None:
    link.request = (link.request + 1) % len(requests)
    link.sent_s = now_s
    link.sock.sendall(requests[link.request])


def _silent() -> NoReturn:
    raise WrongAnswer(f"no answer for {PATIENCE_S:g} s")


def _closed() -> NoReturn:
    raise WrongAnswer("the server closed the connection")


@contextmanager
def server(core: int, checkout: Path = HERE) -> Iterator[Address]:
    """Run a checkout's server in a process of its own, pinned to a core: its address. RuntimeError where it does not
    end well."""
    settings = [f"--set={setting}" for setting in SETTINGS]
    process = subprocess.Popen(
        [sys.executable, "-c", "from jgr.cli.main import run; run()", "serve", "--null", *settings],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        os.sched_setaffinity(process.pid, {core})
        assert process.stdout is not None
        url = urlsplit(process.stdout.readline().split()[-1])  # IndexError where the server failed to start
        assert url.hostname is not None and url.port is not None
        yield url.hostname, url.port
    finally:
        process.terminate()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    if process.returncode != 0:
        raise RuntimeError(f"the server ended with exit code {process.returncode}")


def measure(quick: bool, quiet: Quiet) -> Measured:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise harness.Missing("needs two cores, one for the server and one for the client")
    os.sched_setaffinity(0, {cores[0]})
    rng = np.random.default_rng(0)
    seconds, rounds = (1.0, 3) if quick else (3.0, 7)
    cases = [(kind, connections) for kind in ("rank", "recommend") for connections in (16, 1)]
    checkouts = [HERE, *(Path(other).resolve() for other in flags.FLAGS.against)]
    with ExitStack() as stack:
        requests = {kind: render_requests(kind, rng) for kind in ("rank", "recommend")}
        addresses = [stack.enter_context(server(cores[1], checkout)) for checkout in checkouts]
        variants = {
            f"{number} {case}": functools.partial(closed_loop, address, requests[case[0]], case[1], seconds)
            for case in cases
            for number, address in enumerate(addresses)
        }
        runs = harness.interleave(variants, rounds, quiet)
    os.sched_setaffinity(0, cores)
    rows = [
        {"commit": _commit(checkout), **_row(*case, runs[f"{number} {case}"])}
        for number, checkout in enumerate(checkouts)
        for case in cases
    ]
    return Measured(_claims(rows[: len(cases)]) + _ratios(rows[: len(cases)], rows[len(cases) :]), rows)


def _commit(checkout: Path) -> str:
    """The commit of a checkout, in 8 digits."""
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True, check=True
    )
    return done.stdout[:8]


def _ratios(rows: Sequence[Row], others: Sequence[Row]) -> list[Claim]:
    """This checkout over the other one, where there is one: the rate, and the median latency of one connection."""
    claims = []
    for row, other in zip(rows, others, strict=False):
        name = row["endpoint"].rpartition("/")[2]
        if row["connections"] == 1:
            ratio = row["p50_ms"]["median"] / other["p50_ms"]["median"]
            claims.append(Claim(f"{name}-p50-over-other-commit-1-connection", ratio, "x", "lower", 1.05))
        else:
            ratio = row["requests_per_s"]["median"] / other["requests_per_s"]["median"]
            claims.append(Claim(f"{name}-rate-over-other-commit-16-connections", ratio, "x", "higher", 0.95))
    return claims


def _row(kind: str, connections: int, runs: Sequence[Run]) -> Row:
    return {
        "endpoint": f"/v1/{kind}",
        "connections": connections,
        "history": HISTORY,
        "candidates": CANDIDATES if kind == "rank" else 0,
        "top_k": TOP_K,
        "requests_per_s": harness.spread(len(run.latencies_ms) / run.elapsed_s for run in runs),
        "p50_ms": harness.spread(float(np.percentile(run.latencies_ms, 50)) for run in runs),
        "p99_ms": harness.spread(float(np.percentile(run.latencies_ms, 99)) for run in runs),
        "client_cpu": harness.spread(run.client_cpu for run in runs),
    }


def _claims(rows: Sequence[Row]) -> list[Claim]:
    of = {(row["endpoint"], row["connections"]): row for row in rows}
    rate = of["/v1/rank", 16]["requests_per_s"]["median"]
    p50_ms = of["/v1/rank", 1]["p50_ms"]["median"]
    return [
        Claim("null-engine-rank-throughput-16-connections", rate, "requests/s", "higher", 4000.0),
        Claim("null-engine-rank-p50-overhead-1-connection", p50_ms, "ms", "lower", 0.5),
    ]


if __name__ == "__main__":
    flags.DEFINE_multi_string("against", [], "folder of another checkout to compare with")
    harness.main(
        Benchmark(
            name="server_overhead",
            measure=measure,
            packages=("numpy", "msgspec", "starlette", "uvicorn", "uvloop", "httptools"),
            sources=(Path(__file__),),
        )
    )
