# SPDX-License-Identifier: Apache-2.0
"""The closed-loop client against the real server, and that it would notice a wrong answer."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from benchmarks import server_overhead as bench


def _body(request: bytes) -> dict[str, list[str]]:
    head, _, body = request.partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head.split(b"\r\n")
    parsed: dict[str, list[str]] = json.loads(body)
    return parsed


def test_requests_have_the_stated_sizes() -> None:
    requests = bench.render_requests("rank", np.random.default_rng(0))
    assert len(set(requests)) == bench.DISTINCT_REQUESTS
    for request in requests:
        body = _body(request)
        assert request.startswith(b"POST /v1/rank HTTP/1.1\r\n")
        assert (len(body["history"]), len(set(body["candidates"])), body["top_k"]) == (256, 100, 10)
    assert "candidates" not in _body(bench.render_requests("recommend", np.random.default_rng(0))[0])


def test_response_length_is_that_of_head_and_body() -> None:
    response = b"HTTP/1.1 200 OK\r\nA: b\r\ncontent-LENGTH: 3\r\n\r\nabc"
    assert bench.response_length(response) == len(response)
    assert bench.response_length(response + b"HTTP/1.1") == len(response)
    assert bench.response_length(response[:-4]) is None


def test_wrong_answers_are_noticed() -> None:
    good = b'HTTP/1.1 200 OK\r\n\r\n{"items":[{"item_id":"1"},{"item_id":"2"}]}'
    bench.check_answer(good, 2)
    for bad in (good.replace(b"200", b"429"), good.replace(b',{"item_id":"2"}', b"")):
        with pytest.raises(bench.WrongAnswer):
            bench.check_answer(bad, 2)


def test_the_client_and_the_null_server_agree() -> None:
    rng = np.random.default_rng(0)
    with bench.server(max(os.sched_getaffinity(0))) as address:
        for kind, connections in (("rank", 3), ("recommend", 1)):
            run = bench.closed_loop(address, bench.render_requests(kind, rng), connections, 0.05)
            assert len(run.latencies_ms) >= 1
            assert min(run.latencies_ms) > 0
        refused = [bench.render_requests("rank", rng)[0].replace(b'"top_k"', b'"top_q"')]
        with pytest.raises(bench.WrongAnswer, match="unknown field"):
            bench.closed_loop(address, refused, 1, 0.05)
