# SPDX-License-Identifier: Apache-2.0
"""Attempts as the front counts and traces them, without Ray: what a router would choose is said by the test."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from jgr.config import Config, override
from jgr.serving.cluster.attempts import ATTEMPTS, Attempt, Attempts
from jgr.serving.cluster.hints import Hint
from jgr.serving.cluster.places import place
from jgr.serving.cluster.relay import Answered, Asked
from jgr.serving.cluster.sending import Send, Sending
from jgr.serving.cluster.series import Series
from jgr.serving.engine.journal import of_replica
from jgr.serving.engine.tracing import Tracing
from jgr.serving.errors import RequestError
from jgr.serving.policies.hedging import Hedging
from tests.serving.cluster.test_whole import values

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
ASKED = Asked(
    "POST", "/v1/rank", b"", [(b"traceparent", f"00-{TRACE}-{PARENT}-01".encode()), (b"a", b"b")], b""
)


class Traces:
    """A front's traces, whose spans stay here."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        config = override(Config(), "server.traces=http://127.0.0.1:1").server
        self.tracing = Tracing(config, lambda: 5, self.exporter, place("f", "host/ab"))

    def ended(self) -> list[ReadableSpan]:
        self.tracing.provider.force_flush()
        return list(self.exporter.get_finished_spans())


@pytest.fixture
def traces() -> Iterator[Traces]:
    traces = Traces()
    yield traces
    traces.tracing.close()


def chosen(status: int, sent: list[Asked]) -> Send:
    """A replica "r" that the router scores 1.5 takes the attempt."""

    async def send(hint: Hint, asked: Asked) -> Answered:
        attempt = ATTEMPTS[hint.attempt]
        attempt.node, attempt.score = "r", 1.5
        sent.append(asked)
        return Answered(status, [], b"")

    return send


def sent_by(sending: Sending, number: int = 0, asked: Asked = ASKED) -> Answered:
    """The answer to an attempt at a request, after so many others."""
    attempt = ATTEMPTS["test"] = Attempt(0, number)
    answered = asyncio.run(sending.answer(Hint(attempt="test"), asked))
    assert attempt.node == "r"
    return answered


def test_an_attempt_is_a_span_between_the_callers_and_the_replicas(traces: Traces) -> None:
    sent: list[Asked] = []
    sending = Sending(chosen(200, sent), Series("f"), "joint", traces.tracing)
    sent_by(sending, 1)
    (span,) = traces.ended()
    assert span.context is not None and span.parent is not None
    assert span.name == "route"
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    assert dict(span.attributes or {}) == {
        "jgr.replica": "r",
        "jgr.score": 1.5,
        "jgr.attempt": 1,
        "jgr.rule": "joint",
        "jgr.front": "f",
        "http.response.status_code": 200,
    }
    told = {"service.instance.id": "f", "host.name": "host", "jgr.node": "host/ab"}
    assert told.items() <= dict(span.resource.attributes).items()
    given = [value for name, value in sent[0].headers if name == b"traceparent"]
    assert given == [f"00-{TRACE}-{span.context.span_id:016x}-01".encode()], (
        "the replica's span is below this one"
    )
    assert (b"a", b"b") in sent[0].headers


def test_what_is_lost_is_an_error_and_what_makes_no_work_is_no_span(traces: Traces) -> None:
    async def lost(hint: Hint, asked: Asked) -> Answered:
        raise ConnectionError

    sending = Sending(lost, Series("f"), "joint", traces.tracing)
    with pytest.raises(ConnectionError):
        sent_by(sending)
    with pytest.raises(ConnectionError):
        sent_by(sending, asked=ASKED._replace(method="GET"))
    (span,) = traces.ended()
    assert not span.status.is_ok
    assert dict(span.attributes or {})["jgr.replica"] == ""


@pytest.mark.parametrize("lost", [False, True])
def test_who_has_booked_an_attempt_hears_of_its_end(lost: bool) -> None:
    heard: list[bool] = []

    async def booked(hint: Hint, asked: Asked) -> Answered:
        attempt = ATTEMPTS[hint.attempt]
        attempt.node, attempt.on_end = "r", lambda: heard.append(attempt.over)
        if lost:
            raise ConnectionError
        return Answered(200, [], b"")

    with pytest.raises(ConnectionError) if lost else nullcontext():
        sent_by(Sending(booked, Series("f"), "joint", None))
    assert heard == [True]


def attempts(send: Send, series: Series, multiple: float = 0, traces: Tracing | None = None) -> Attempts:
    """As the front has them. Where a multiple is given, a replica is silent too long at once."""
    sending = Sending(send, series, "joint", traces)
    series.become(["a", "b"])
    hedging = Hedging(multiple, least_ns=1, first_ns=1)
    return Attempts(sending.answer, (ConnectionError,), 2, hedging, series.nodes)


def test_attempts_are_counted_by_how_they_end() -> None:
    """Refused at once; lost and then refused; past the deadline."""
    series, tried = Series("f"), []

    async def lost_at_first(hint: Hint, asked: Asked) -> Answered:
        tried.append(hint)
        if len(tried) == 1:
            raise ConnectionError
        return await chosen(429, [])(hint, asked)

    async def never(hint: Hint, asked: Asked) -> Answered:
        await asyncio.Event().wait()
        raise AssertionError

    async def run() -> None:
        for send in (chosen(429, []), lost_at_first):
            assert (await attempts(send, series).answer(Hint(), ASKED, 0, None)).status == 429
        with pytest.raises(RequestError, match="deadline"):
            await attempts(never, series).answer(Hint(), ASKED, 0, 1)

    asyncio.run(run())
    found = values(series.text())
    for outcome, count in (("answered", 2), ("late", 1), ("lost", 1)):
        assert found["jgr_fleet_attempts_total", "front=f", f"outcome={outcome}"] == count
    assert found["jgr_fleet_retries_total", "front=f"] == 1


def test_both_attempts_of_a_request_whose_first_replica_is_silent_are_counted_and_traced(
    traces: Traces,
) -> None:
    series = Series("f")

    async def silent_at_first(hint: Hint, asked: Asked) -> Answered:
        attempt = ATTEMPTS[hint.attempt]
        attempt.node = "b" if hint.tried else "a"
        if not hint.tried:
            await asyncio.Event().wait()
        return Answered(200, [], b"")

    async def run() -> None:
        of = attempts(silent_at_first, series, 1, traces.tracing)
        assert (await of.answer(Hint(), ASKED, 0, None)).status == 200
        await asyncio.sleep(0)  # the first one is cancelled

    asyncio.run(run())
    found = values(series.text())
    for outcome, count in (("answered", 1), ("late", 1), ("lost", 0)):
        assert found["jgr_fleet_attempts_total", "front=f", f"outcome={outcome}"] == count
    assert found["jgr_fleet_retries_total", "front=f"] == 1
    told = sorted(
        (str(of["jgr.replica"]), of["jgr.attempt"], of["http.response.status_code"])
        for span in traces.ended()
        if (of := dict(span.attributes or {}))
    )
    assert told == [("a", 0, 0), ("b", 1, 200)]
    assert {span.parent.span_id for span in traces.ended() if span.parent} == {int(PARENT, 16)}


def test_routing_is_told_by_replica_as_long_as_that_is_there() -> None:
    now_s = 10.0
    series = Series("f", lambda: now_s)
    series.become(["a", "b"])
    now_s = 11.0
    series.heard("b")
    series.decided(3e-5)
    for name in ("a", "a", "b"):
        series.routed(name, "joint")
    for name, tokens in (("a", 7.0), ("gone", 9.0), ("a", 5.0)):
        series.flies(name, tokens)
    now_s = 14.0
    found = values(series.text())
    age = "jgr_fleet_report_age_seconds"
    assert (found[age, "front=f", "replica=a"], found[age, "front=f", "replica=b"]) == (4.0, 3.0)
    flying = "jgr_fleet_tokens_in_flight"
    assert (found[flying, "front=f", "replica=a"], found[flying, "front=f", "replica=b"]) == (5.0, 0.0)
    assert found["jgr_fleet_routed_total", "front=f", "replica=a", "rule=joint"] == 2
    assert found["jgr_fleet_decision_seconds_bucket", "front=f", "le=5e-05"] == 1
    assert found["jgr_fleet_decision_seconds_bucket", "front=f", "le=2e-05"] == 0
    series.become(["b", "c"])
    text = series.text()
    assert 'replica="a"' not in text, "a name that never comes back would be a series more for ever"
    assert values(text)["jgr_fleet_routed_total", "front=f", "replica=b", "rule=joint"] == 1


@pytest.mark.parametrize(
    ("path", "own"), [("/j/day.jsonl", "/j/day.r1.jsonl"), ("/j/day", "/j/day.r1"), ("", "")]
)
def test_each_replica_has_a_journal_of_its_own(path: str, own: str) -> None:
    assert of_replica(path, "r1") == own
