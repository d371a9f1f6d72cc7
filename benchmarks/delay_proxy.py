# SPDX-License-Identifier: Apache-2.0
"""A TCP proxy that makes a server on this machine as far away as one in another rack.

Each answer begins a random time after its request; the times are lognormal with a given median and 99th percentile. All
answers share a link of so many bytes per second (FLAME's workload; its network is inferred). The proxy runs in a
process of its own.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import NamedTuple, cast

import uvloop

Z99 = 2.3263
"""The 99th percentile of a standard normal variable."""


CLOCK_S = 1e-3
"""The resolution of the event loop's timers."""


class Network(NamedTuple):
    """median_ms, p99_ms: the time from a request to the beginning of its answer."""

    median_ms: float = 5.0
    p99_ms: float = 20.0
    bytes_per_s: float = 1.25e9


class Line:
    """What all connections share: the random numbers, and the time at which the link is free."""

    def __init__(self, network: Network, seed: int) -> None:
        self._mean = math.log(network.median_ms / 1e3)
        self._deviation = math.log(network.p99_ms / network.median_ms) / Z99
        self._bytes_per_s = network.bytes_per_s
        self._random = random.Random(seed)
        self._free_s = 0.0

    def latency_s(self) -> float:
        return self._random.lognormvariate(self._mean, self._deviation)

    def arrival_s(self, start_s: float, size: int) -> float:
        """When a piece of an answer has come that may start at start_s."""
        self._free_s = max(self._free_s, start_s) + size / self._bytes_per_s
        return self._free_s


class _Client(asyncio.Protocol):
    """A connection to us, and the one to the server that it stands for."""

    def __init__(self, line: Line, server: str) -> None:
        self._line, self._server = line, server
        self._loop = asyncio.get_running_loop()
        self._due_s = 0.0
        self._answered = True
        self._early: list[bytes] = []
        self._coming: deque[tuple[float, bytes]] = deque()
        self._upstream: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._connecting = self._loop.create_task(self._connect())

    async def _connect(self) -> None:
        transport, _ = await self._loop.create_unix_connection(lambda: _Server(self), self._server)
        self._upstream = transport
        transport.writelines(self._early)

    def data_received(self, data: bytes) -> None:
        if self._answered:  # a new request
            self._answered = False
            self._due_s = self._loop.time() + self._line.latency_s()
        if self._upstream is None:
            self._early.append(data)
        else:
            self._upstream.write(data)

    def answer(self, data: bytes) -> None:
        self._answered = True
        arrival_s = self._line.arrival_s(max(self._loop.time(), self._due_s), len(data))
        self._coming.append((arrival_s, data))
        if len(self._coming) == 1:
            self._loop.call_at(arrival_s, self._deliver)

    def _deliver(self) -> None:
        """Deliver what has come by now, in order, which timers for the same time would not keep."""
        while self._coming and self._coming[0][0] <= self._loop.time() + CLOCK_S:
            self._transport.write(self._coming.popleft()[1])
        if self._coming:
            self._loop.call_at(self._coming[0][0], self._deliver)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._upstream is not None:
            self._upstream.close()


class _Server(asyncio.Protocol):
    def __init__(self, client: _Client) -> None:
        self._client = client

    def data_received(self, data: bytes) -> None:
        self._client.answer(data)


async def _serve(server: str, network: Network, seed: int, ready: Connection) -> None:
    line = Line(network, seed)
    listener = await asyncio.get_running_loop().create_server(lambda: _Client(line, server), "127.0.0.1", 0)
    ready.send(listener.sockets[0].getsockname()[1])
    await listener.serve_forever()


def _run(server: str, network: Network, seed: int, core: int, ready: Connection) -> None:
    os.sched_setaffinity(0, {core})
    uvloop.run(_serve(server, network, seed, ready))


@contextmanager
def delay_proxy(server: str, network: Network, core: int, seed: int = 0) -> Iterator[int]:
    """Run a proxy for a server: its port on 127.0.0.1. server: the path of the server's Unix socket. core: its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(server, network, seed, core, theirs), daemon=True)
    process.start()
    try:
        theirs.close()
        yield ours.recv()  # EOFError where it failed to start
    finally:
        process.terminate()
        process.join()
