# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the load client: its server answers what the client sends, and its claims are its rows' figures."""

from __future__ import annotations

import asyncio
import os

import numpy as np
import pytest

from benchmarks import load_client as bench
from benchmarks.load_client import SATURATING, STEADY, Sent
from jgr.traffic.http_client import Target
from jgr.traffic.mixes import RequestClass, make_mix
from jgr.traffic.schedule import Mix, Request
from tests.serving.fakes import LiveServer


def test_the_server_answers_every_request_of_the_client() -> None:
    ids = [str(item) for item in range(30)]
    mix = make_mix([RequestClass(name="c", history_length=20)], ids, np.random.default_rng(0))
    with bench.server(min(os.sched_getaffinity(0))) as target:
        sent = bench.send(target, mix, 100.0, 0.5)
    assert sent.requests_per_s > 0 and sent.cpu_us > 0
    assert 0 <= sent.lateness_p50_ms <= sent.lateness_p99_ms


def test_a_request_may_come_in_pieces() -> None:
    async def main() -> bytes:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(bench._Answering, "127.0.0.1", 0)
        async with server:
            host, port = server.sockets[0].getsockname()
            reader, writer = await asyncio.open_connection(host, port)
            wire = Target(host, port).render(Request("/v1/recommend", b"{}" * 50))
            for at in range(0, len(wire), 40):
                writer.write(wire[at : at + 40])
                await writer.drain()
            answer = await reader.readexactly(len(bench.ANSWER))
            writer.close()
            await writer.wait_closed()
        return answer

    assert asyncio.run(main()) == bench.ANSWER


def test_a_run_with_another_answer_is_no_figure() -> None:
    mix = Mix([Request("/v1/nowhere", b"{}")], np.ones(1))
    with LiveServer() as server, pytest.raises(RuntimeError, match="404"):
        bench.send(Target("127.0.0.1", server.port), mix, 100.0, 0.1)


def test_claims_are_medians() -> None:
    rows = [
        bench._row(STEADY, [Sent(2000.0, 40.0, late, 1.0) for late in (0.1, 0.3, 0.2)]),
        bench._row(SATURATING, [Sent(rate, 20.0, 900.0, 999.0) for rate in (9e3, 12e3, 30e3)]),
    ]
    assert [(claim.value, claim.holds) for claim in bench.claims(rows)] == [(12_000.0, True), (0.2, True)]
