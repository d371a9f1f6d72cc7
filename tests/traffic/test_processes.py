# SPDX-License-Identifier: Apache-2.0
"""Loads from several processes, against a live server."""

from __future__ import annotations

import os
import time
from typing import Any, cast

import numpy as np
import pytest

from jgr.traffic import processes
from jgr.traffic.http_client import Target
from jgr.traffic.open_loop import Results
from jgr.traffic.schedule import LoadError, Request, Schedule
from tests.serving.fakes import LiveServer

GOOD = Request("/v1/recommend", b'{"history": ["a"], "top_k": 1}')
BAD = Request("/v1/recommend", b'{"history": []}')
NOWHERE = Request("/v1/nowhere", b"{}")


def _run(schedule: Schedule, port: int, number: int, told: list[tuple[int, int]]) -> Results:
    return processes.run(
        schedule,
        Target("127.0.0.1", port),
        processes=number,
        max_connections=8,
        timeout_s=30.0,
        progress=lambda done, total, label: told.append((done, total)),
    )


def test_processes_send_what_one_would_send_and_their_results_are_in_order() -> None:
    at_s = np.arange(40) / 100
    which = np.random.default_rng(0).integers(0, 3, 40).astype(np.int32)
    schedule = Schedule(at_s, which, [GOOD, BAD, NOWHERE], 0.4)
    told: list[tuple[int, int]] = []
    with LiveServer() as server:
        results = _run(schedule, server.port, 3, told)
        assert (
            server.metric('jgr_requests_total{endpoint="/v1/recommend",status="200"}') == (which == 0).sum()
        )
    statuses = [results.verdicts[number].status for number in results.ended]
    assert statuses == [["200", "422", "404"][number] for number in which]
    assert {v.reason for v in results.verdicts} == {"", "invalid_request", "not_found"}
    np.testing.assert_array_equal(results.due_s, at_s)
    assert (results.began_s >= results.due_s).all()
    assert (results.end_s > results.sent_s).all()
    assert told[-1] == (40, 40)


def test_a_process_is_ready_when_its_requests_are_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it did after that would make the first requests late. `_client` runs in this process."""
    done: list[str] = []

    class Pipe:
        def send(self, message: tuple[str, Any]) -> None:
            done.append(message[0])

        def recv(self) -> float:
            return time.monotonic()

        def __enter__(self) -> None: ...
        def __exit__(self, *exception: object) -> None: ...

    def render(target: Target, request: Request) -> bytes:
        done.append("rendered")
        return rendered(target, request)

    rendered = Target.render
    monkeypatch.setattr(Target, "render", render)
    monkeypatch.setattr("signal.signal", lambda *given: None)
    schedule = Schedule(np.zeros(3), np.arange(3, dtype=np.int32), [GOOD, BAD, NOWHERE], 0.0)
    with LiveServer() as server:
        settings = {"max_connections": 3, "timeout_s": 30.0}
        processes._client(cast(Any, Pipe()), schedule, Target("127.0.0.1", server.port), settings)
    assert [what for what in done if what != "progress"] == ["rendered"] * 3 + ["ready", "results"]


def test_no_process_is_started_for_which_there_is_no_request() -> None:
    schedule = Schedule(np.zeros(1), np.zeros(1, np.int32), [GOOD], 0.0)
    with LiveServer() as server:
        assert len(_run(schedule, server.port, 5, [])) == 1


def test_a_server_that_is_not_there_is_told_by_its_processes() -> None:
    with LiveServer() as server:
        port = server.port
    schedule = Schedule(np.zeros(4), np.zeros(4, np.int32), [GOOD], 0.0)
    with pytest.raises(LoadError, match=f"nobody answers at 127.0.0.1 port {port}"):
        _run(schedule, port, 2, [])


def test_a_process_that_dies_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        processes, "_client", os._exit
    )  # its first argument is no exit code: it ends with an error
    schedule = Schedule(np.zeros(4), np.zeros(4, np.int32), [GOOD], 0.0)
    with pytest.raises(LoadError, match="ended before its time"):
        _run(schedule, 1, 2, [])
