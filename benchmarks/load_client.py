# SPDX-License-Identifier: Apache-2.0
"""How much load one process of `jgr bench serve` can send, and how exactly: against a server that only answers.

The server, of a few lines on an event loop of its own core, answers every request with the same bytes; the client has
another core. Requests are recommend requests for 50 items, at Poisson arrivals. The client's CPU time for a request is
that of its process while requests are sent; its lateness is how long after its time it turned to a request.

    python -m benchmarks.load_client [--quick]
"""

from __future__ import annotations

import asyncio
import functools
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks import harness
from benchmarks.harness import Benchmark, Claim, Measured, Quiet, Row
from jgr.traffic import arrivals, open_loop
from jgr.traffic.http_client import Target
from jgr.traffic.measures import percentiles_ms
from jgr.traffic.mixes import RequestClass, make_mix
from jgr.traffic.schedule import Mix, draw

HISTORY, N_ITEMS = 50, 10_000
MAX_CONNECTIONS, TIMEOUT_S = 512, 30.0
STEADY, SATURATING = 2_000.0, 40_000.0
"""Rates: one that the client has no trouble with, one that it cannot send, which shows its limit."""
ANSWER = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 12\r\n\r\n{"items":[]}'


class Sent(NamedTuple):
    """One run: answers per second, the client's CPU time for one, and its lateness in the middle and at the tail."""

    requests_per_s: float
    cpu_us: float
    lateness_p50_ms: float
    lateness_p99_ms: float


class _Answering(asyncio.Protocol):
    """Answers each request once it is whole. Requests come one at a time."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._received, self._wanted = transport, bytearray(), 0

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._wanted and (end := self._received.find(b"\r\n\r\n")) >= 0:
            at = self._received.index(b"Content-Length: ") + len(b"Content-Length: ")
            self._wanted = end + 4 + int(self._received[at:end].split(b"\r\n")[0])
        if self._wanted and len(self._received) >= self._wanted:
            self._received.clear()
            self._wanted = 0
            self._transport.write(ANSWER)


def _serve(core: int, pipe: Connection) -> None:
    """The server's process: tells its port, and ends when the pipe does."""
    os.sched_setaffinity(0, {core})

    async def main() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(_Answering, "127.0.0.1", 0, backlog=1024)
        pipe.send(server.sockets[0].getsockname()[1])
        ended = asyncio.Event()
        loop.add_reader(pipe.fileno(), ended.set)
        await ended.wait()
        server.close()

    asyncio.run(main())


@contextmanager
def server(core: int) -> Iterator[Target]:
    """Run the server on a core: its address."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(core, theirs), daemon=True)
    process.start()
    theirs.close()
    with ours:
        yield Target("127.0.0.1", ours.recv())
    process.join()


def send(target: Target, mix: Mix, rate: float, seconds: float) -> Sent:
    """One run of the client."""
    rng = np.random.default_rng(0)
    schedule = draw(arrivals.poisson(rng, rate, seconds), seconds, mix, rng)
    begun_s = time.process_time()
    results = open_loop.run(
        schedule,
        target,
        max_connections=MAX_CONNECTIONS,
        timeout_s=TIMEOUT_S,
        progress=lambda done, total, label: None,
    )
    cpu_s = time.process_time() - begun_s
    if {verdict.status for verdict in results.verdicts} != {"200"}:
        raise RuntimeError(f"not every request was answered: {results.verdicts}")
    lateness = percentiles_ms((results.began_s - results.due_s).tolist())
    assert lateness is not None
    n = len(results)
    return Sent(n / float(results.end_s.max()), cpu_s / n * 1e6, lateness["p50"], lateness["p99"])


def measure(quick: bool, quiet: Quiet) -> Measured:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise harness.Missing("needs two cores, one for the server and one for the client")
    seconds, rounds = (2.0, 2) if quick else (5.0, 7)
    ids = [str(item) for item in range(N_ITEMS)]
    mix = make_mix([RequestClass(name="c", history_length=HISTORY)], ids, np.random.default_rng(0))
    os.sched_setaffinity(0, {cores[0]})
    try:
        with server(cores[1]) as target:
            variants = {
                f"{rate:g}": functools.partial(send, target, mix, rate, seconds)
                for rate in (STEADY, SATURATING)
            }
            runs = harness.interleave(variants, rounds, quiet)
    finally:
        os.sched_setaffinity(0, cores)
    rows = [_row(float(rate), sent) for rate, sent in runs.items()]
    return Measured(claims(rows), rows)


def _row(rate: float, runs: Sequence[Sent]) -> Row:
    figures = {name: harness.spread(getattr(run, name) for run in runs) for name in Sent._fields}
    return {"rate": rate, "history": HISTORY, **figures}


def claims(rows: Sequence[Row]) -> list[Claim]:
    of = {row["rate"]: row for row in rows}
    most = of[SATURATING]["requests_per_s"]["median"]
    late = of[STEADY]["lateness_p50_ms"]["median"]
    return [
        Claim("load-client-requests-of-one-process", most, "requests/s", "higher", 10_000.0),
        Claim("load-client-median-lateness-at-2000-per-s", late, "ms", "lower", 0.2),
    ]


if __name__ == "__main__":
    harness.main(
        Benchmark(
            name="load_client",
            measure=measure,
            packages=("numpy", "httptools"),
            sources=(Path(__file__),),
        )
    )
