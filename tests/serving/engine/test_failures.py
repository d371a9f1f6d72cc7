# SPDX-License-Identifier: Apache-2.0
"""What the log and the requests are told of runs that failed."""

from __future__ import annotations

import pytest

from jgr.fields import UserError
from jgr.serving.engine.failures import QUIET_NS, Failures, answer, late
from tests.serving.fakes import LiveServer


def test_what_is_not_there_is_told_once_in_a_while_by_cause_and_faults_each_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_ns = [0]
    failures = Failures(lambda: now_ns[0])
    away = UserError("table items: the server is away")
    for request in range(5):
        failures.tell(away, f"r{request}")
    now_ns[0] = QUIET_NS
    failures.tell(away, "r5")
    for row in range(3):
        failures.tell(UserError(f"table items: wrong row {row}"), f"w{row}")
    for kind in "abcdefgh":
        failures.tell(UserError(kind), kind)
    failures.tell(ValueError("a fault"), "r6")
    assert [record.getMessage() for record in caplog.records] == [
        "what a run needs is not there: table items: the server is away; requests: r0",
        "what a run needs is not there: table items: the server is away; requests: r5; 4 runs before it failed as well",
        "what a run needs is not there: table items: wrong row 0; requests: w0",
        "what a run needs is not there: a; requests: a; 2 runs before it failed as well",
        *(f"what a run needs is not there: {kind}; requests: {kind}" for kind in "bcdef"),
        "the executor failed; requests: r6",
    ]
    assert [record.exc_info is not None for record in caplog.records] == [False] * 9 + [True]


def test_clients_are_told_whether_to_try_again() -> None:
    away, fault = answer(UserError("secret path")), answer(ValueError("secret path"))
    assert (away.type, away.retry_after_s) == ("unavailable", 1)
    assert fault.type == "internal"
    assert "secret" not in f"{away}{fault}"


def test_a_request_without_a_deadline_is_not_told_that_it_has_passed() -> None:
    assert late(5, 5).message == "the deadline has passed"
    assert late(6, 5).message == late(None, 5).message == "it has waited for too long"
    assert late(None, 5).type == "deadline_exceeded"


def test_codel_tells_a_request_without_a_deadline_that_it_waited() -> None:
    with LiveServer("batching.order=codel") as server:
        server.executor.hold()
        running = server.send("/v1/recommend", {"history": ["a"], "top_k": 1})
        server.executor.wait_entered()
        queued = server.call("/v1/rank", {"history": ["a"], "candidates": ["b"]})
        assert (queued.status, queued.error["message"]) == (504, "it has waited for too long")
        server.executor.release()
        assert running.reply().status == 200
