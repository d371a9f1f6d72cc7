# SPDX-License-Identifier: Apache-2.0
"""Queues, deadlines, clients that leave, executors that break, starts and ends: over real HTTP.

Nothing sleeps: the executor is held where a request must be caught on its way.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from typing import Any

import pytest

from jgr.serving.engine.turns import LEAST
from jgr.serving.http.server import App, Departure
from jgr.serving.policies.batching import make_profiles
from jgr.serving.policies.jobs import Profile
from jgr.serving.policies.soundness import MOST_FAILED
from jgr.serving.versions.deployment import Deployment
from jgr.serving.versions.served_models import Models
from tests.serving.fakes import PATIENCE_S, FakeExecutor, LiveServer, make_config, make_engine

BODY = {"history": ["a"], "top_k": 1}
RANK = {"history": ["a"], "candidates": ["b"]}


def test_a_full_queue_answers_429_with_retry_after() -> None:
    with LiveServer("batching.max_queue=2") as server:
        server.executor.hold()
        running = server.send("/v1/recommend", BODY)
        server.executor.wait_entered()
        queued = [server.send("/v1/recommend", BODY), server.send("/v1/rank", RANK)]
        server.wait_for("jgr_queue_depth", 2)
        for path, body in (("/v1/recommend", BODY), ("/v1/rank", RANK)):
            reply = server.call(path, body)
            assert (reply.status, reply.error["type"]) == (429, "overloaded")
            assert int(reply.headers["retry-after"]) >= 1
        server.executor.release()
        assert [pending.reply().status for pending in (running, *queued)] == [200, 200, 200]
        assert server.call("/v1/recommend", BODY).status == 200


WIDTHS = ("profiles.widths=1,4", "beam.width=4", "profiles.candidates=1,4")


def costs(**settings: float) -> dict[Profile, float]:
    """Seconds of a run by kind and width, as in recommend_4."""
    config = make_config(*WIDTHS)
    return {p: settings[f"{p.kind}_{p.width}"] for p in make_profiles(config.profiles)}


SLOW = costs(recommend_1=0.02, recommend_4=50.0, rank_1=0.02, rank_4=50.0)


def test_a_deadline_that_cannot_be_met_is_refused_at_once_and_told_when_it_could_be() -> None:
    with LiveServer(*WIDTHS, costs=SLOW) as server:
        tried = server.call("/v1/recommend", {**BODY, "deadline_ms": 1000})
        assert tried.status == 200, "an idle server tries what it predicts to be late"
        refused = server.call("/v1/recommend", {**BODY, "deadline_ms": 1000})
        assert (refused.status, refused.error["type"]) == (429, "overloaded")
        predicted_ms: Any = refused.error["predicted_ms"]
        assert 10_000 < predicted_ms < 51_000, "nearly as measured, though one run was faster"
        assert int(refused.headers["retry-after"]) == math.ceil(predicted_ms / 1e3) - 1
        assert server.call("/v1/recommend", {**BODY, "deadline_ms": 60_000}).status == 200
        assert server.call("/v1/recommend", BODY).status == 200, "who names none is not asked"
        assert server.metric('jgr_rejected_total{reason="too_late"}') == 1


@pytest.mark.parametrize(
    ("path", "body", "used"),
    [
        ("/v1/recommend", {"history": ["a"], "top_k": 3, "min_beam_width": 1}, ("beam_width", 1)),
        (
            "/v1/rank",
            {"history": ["a"], "candidates": ["c", "b", "d"], "min_candidates": 1},
            ("candidates", 1),
        ),
    ],
)
def test_less_is_computed_before_a_request_is_refused_where_it_allows_it(
    path: str, body: dict[str, Any], used: tuple[str, int]
) -> None:
    name, size = used
    with LiveServer(*WIDTHS, costs=SLOW) as server:
        assert server.call(path, {**body, "deadline_ms": 1000}).status == 200
        reply = server.call(path, {**body, "deadline_ms": 1000})
        assert reply.status == 200 and reply.json["usage"][name] == size
        assert len(reply.json["items"]) == 1
        if name == "candidates":
            assert reply.json["items"][0]["item_id"] == "c", "the first ones are kept"
        whole = server.call(path, body)
        assert whole.json["usage"][name] > size, "without a deadline nothing is left out"
        least = "min_beam_width" if name == "beam_width" else "min_candidates"
        assert server.call(path, {**body, least: 2, "deadline_ms": 1000}).status == 429
        assert server.call(path, {**body, least: 0}).status == 422


def test_batch_requests_wait_for_the_others() -> None:
    with LiveServer("batching.max_queue=2") as server:
        server.executor.hold()
        running = server.send("/v1/recommend", BODY)
        server.executor.wait_entered()
        batch = [server.send("/v1/rank", {**RANK, "priority": "batch"}) for _ in range(2)]
        server.wait_for("jgr_queue_depth", 2)
        assert server.call("/v1/rank", {**RANK, "priority": "batch"}).status == 429
        interactive = server.send("/v1/recommend", {**BODY, "history": ["c"]})
        server.wait_for("jgr_queue_depth", 3)
        server.executor.release()
        assert [each.reply().status for each in (running, interactive, *batch)] == [200] * 4
        assert server.executor.batches == [1, 1, 2], "who came last went first"
        assert server.call("/v1/rank", {**RANK, "priority": "soon"}).error["field"] == "priority"


def test_requests_that_wait_travel_together() -> None:
    with LiveServer() as server:
        server.executor.hold()
        running = server.send("/v1/recommend", BODY)
        server.executor.wait_entered()
        queued = [server.send("/v1/recommend", {**BODY, "history": [item]}) for item in ("a", "b", "c")]
        server.wait_for("jgr_queue_depth", 3)
        server.executor.release()
        assert running.reply().status == 200
        # Leaves (1 + 3 + 7 + 2) mod 5 = 3 and (1 + 4 + 6 + 2) mod 5 = 3 lead to d.
        assert [p.reply().json["items"][0]["item_id"] for p in queued] == ["c", "d", "d"]
        assert server.executor.batches == [1, 3]


def test_a_deadline_ends_queued_and_running_work_with_504() -> None:
    with LiveServer("batching.order=edf") as server:
        server.executor.hold()
        running = server.send("/v1/recommend", {**BODY, "deadline_ms": 200})
        server.executor.wait_entered()
        patient = server.send("/v1/rank", RANK)
        queued = server.call("/v1/rank", {**RANK, "deadline_ms": 1})
        assert (queued.status, queued.error["type"]) == (504, "deadline_exceeded")
        assert running.reply().status == 504
        assert server.metric("jgr_deadline_expired_total") == 2
        server.executor.release()
        assert patient.reply().status == 200
        assert server.executor.batches == [1, 1], "the expired job never ran"
        assert server.call("/v1/rank", {**RANK, "deadline_ms": 60_000}).status == 200


def test_a_request_that_its_server_gives_up_is_cancelled() -> None:
    """As an ASGI server does that stops without waiting any longer: the application's task is cancelled."""
    config = make_config()
    executor = FakeExecutor(make_profiles(config.profiles))
    engine = make_engine(config, executor)

    async def receive() -> Any:
        return bodies.pop() if bodies else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        raise AssertionError("there is no answer")

    async def scenario() -> None:
        await engine.start()
        executor.wait_entered()
        executor.hold()
        application = App(Models([Deployment(engine, config.catalog)]), config.server)
        scope = {"type": "http", "method": "POST", "path": "/v1/recommend", "headers": []}
        task = asyncio.ensure_future(application(scope, receive, send))
        while not engine._tickets:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() and not engine._tickets
        engine.check()
        executor.release()
        assert await engine.drain(PATIENCE_S)

    bodies = [{"type": "http.request", "body": json.dumps(BODY).encode(), "more_body": False}]
    asyncio.run(scenario())


def test_the_default_deadline_is_for_requests_that_name_none() -> None:
    with LiveServer("server.default_deadline_ms=1", "batching.order=edf") as server:
        server.executor.hold()
        patient = server.send("/v1/rank", {**RANK, "deadline_ms": 60_000})
        server.executor.wait_entered()
        assert server.call("/v1/rank", RANK).status == 504
        server.executor.release()
        assert patient.reply().status == 200


def test_work_of_a_client_that_left_is_cancelled() -> None:
    with LiveServer() as server:
        server.executor.hold()
        running = server.send("/v1/recommend", BODY)
        server.executor.wait_entered()
        queued = server.send("/v1/recommend", BODY)
        server.wait_for("jgr_queue_depth", 1)
        queued.abandon()
        server.wait_for("jgr_cancelled_total", 1)
        assert server.metric("jgr_queue_depth") == 0
        running.abandon()
        server.wait_for("jgr_cancelled_total", 2)
        server.executor.release()
        assert server.call("/v1/recommend", BODY).status == 200
        assert server.executor.batches == [1, 1], "the queued job never ran"
        assert server.metric('jgr_requests_total{endpoint="/v1/recommend",status="499"}') == 2


def test_a_client_that_leaves_before_its_turn_costs_no_translation(monkeypatch: pytest.MonkeyPatch) -> None:
    config, translated, departure = make_config(), list[Any](), Departure()
    engine = make_engine(config)

    async def receive() -> Any:
        return {"type": "http.request", "body": json.dumps(BODY).encode(), "more_body": False}

    async def send(message: Any) -> None:
        raise AssertionError("there is nobody to answer")

    async def scenario() -> None:
        await engine.start()
        application = App(Models([Deployment(engine, config.catalog)]), config.server)
        scope = {"type": "http", "method": "POST", "path": "/v1/recommend", "headers": []}
        prepare = engine.served.prepare
        monkeypatch.setattr(engine.served, "prepare", lambda *of: translated.append(of) or prepare(*of))
        for _ in range(LEAST):  # others have this turn of the loop
            await engine._host.turns.take("undated")
        asyncio.get_running_loop().call_soon(departure.happen)
        await application({**scope, "jgr.departure": departure}, receive, send)
        assert await engine.drain(PATIENCE_S)

    asyncio.run(scenario())
    assert departure.happened and not translated


def test_a_client_that_leaves_a_line_that_stands_still_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config, departure = make_config(), Departure()
    engine, left = make_engine(config), list[str]()

    async def receive() -> Any:
        return {"type": "http.request", "body": json.dumps(BODY).encode(), "more_body": False}

    async def send(message: Any) -> None:
        raise AssertionError("there is nobody to answer")

    async def take(sort: str) -> None:
        asyncio.get_running_loop().call_soon(departure.happen)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            left.append(sort)

    async def scenario() -> None:
        await engine.start()
        application = App(Models([Deployment(engine, config.catalog)]), config.server)
        scope = {"type": "http", "method": "POST", "path": "/v1/recommend", "headers": []}
        monkeypatch.setattr(engine._host.turns, "take", take)
        await asyncio.wait_for(application({**scope, "jgr.departure": departure}, receive, send), PATIENCE_S)
        assert await engine.drain(PATIENCE_S)

    asyncio.run(scenario())
    assert left == ["undated"]


def test_an_executor_that_breaks_fails_its_batch_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    with LiveServer() as server:
        server.executor.hold()
        running = server.send("/v1/recommend", BODY)
        server.executor.wait_entered()
        doomed = [server.send("/v1/recommend", BODY, x_request_id=f"doomed-{i}") for i in range(2)]
        server.wait_for("jgr_queue_depth", 2)
        spared = server.send("/v1/rank", RANK)
        server.wait_for("jgr_queue_depth", 3)
        with caplog.at_level(logging.ERROR):
            server.executor.release()
            assert running.reply().status == 200
            assert spared.reply().status == 200
            assert [p.reply().status for p in doomed] == [200, 200]
            server.executor.errors.append(FloatingPointError("out of luck"))
            reply = server.call("/v1/recommend", BODY, x_request_id="doomed-2")
        assert (reply.status, reply.error["type"]) == (500, "internal")
        assert "luck" not in reply.error["message"]
        assert server.metric("jgr_executor_failures_total") == 1
        assert server.call("/v1/recommend", BODY).status == 200
    (record,) = caplog.records
    assert "doomed-2" in record.getMessage()
    assert record.exc_info and "out of luck" in str(record.exc_info[1])


HEALTH = ("/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready")


def told_by(server: LiveServer) -> tuple[list[int], set[str]]:
    """What health answers, and what is wrong."""
    told = [server.call(path) for path in HEALTH]
    return [each.status for each in told], {each.error["message"] for each in told[:2] if each.status != 200}


def test_a_server_whose_runs_all_fail_says_so_until_one_ends_well() -> None:
    with LiveServer("model.name=m") as server:
        for failed in range(MOST_FAILED):
            assert told_by(server) == ([200] * 4, set()), failed
            server.executor.errors.append(RuntimeError("the device fell off"))
            assert server.call("/v1/recommend", BODY).status == 500
        why = "the server is broken: model 'm': 5 runs in a row have failed"
        assert told_by(server) == ([503] * 4, {why})
        assert server.call("/v1/recommend", BODY).status == 200
        assert told_by(server) == ([200] * 4, set())


def test_a_server_with_a_run_that_does_not_come_back_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with LiveServer("model.name=m") as server:
        server.executor.hold()
        running = server.send("/v1/recommend", BODY)
        server.executor.wait_entered()
        assert told_by(server) == ([200] * 4, set())
        ((began_ns, predicted_ns),) = server.engine._policy.flights
        assert predicted_ns == 0, "nothing was measured"
        with monkeypatch.context() as patch:
            patch.setattr(server.engine, "clock", lambda: began_ns + 90 * 10**9)
            why = "the server is broken: model 'm': a run has not come back for 90 s"
            assert told_by(server) == ([503] * 4, {why})
        server.executor.release()
        assert running.reply().status == 200
        assert told_by(server) == ([200] * 4, set())


def test_nothing_is_served_before_the_warm_up_has_ended() -> None:
    with LiveServer(hold=True) as server:
        server.executor.wait_entered()
        assert server.call("/health/live").status == 200
        for reply in (server.call("/health/ready"), server.call("/v1/recommend", BODY)):
            assert (reply.status, reply.error["type"]) == (503, "unavailable")
            assert "starting" in reply.error["message"]
        server.executor.release()
        assert server.ready.wait(PATIENCE_S)
        assert server.call("/health/ready").status == 200
        assert server.call("/v1/recommend", BODY).status == 200


def test_a_warm_up_that_fails_ends_the_server_with_1(caplog: pytest.LogCaptureFixture) -> None:
    with LiveServer(hold=True) as server:
        server.executor.errors.append(MemoryError("no room"))
        server.executor.release()
        assert server.join() == 1
    assert "no room" in caplog.text


def test_a_stop_during_warm_up_does_not_wait_for_it() -> None:
    with LiveServer("server.drain_timeout_s=0", hold=True) as server:
        server.executor.wait_entered()
        server.stop()
        assert server.join() == 0


def test_a_drain_finishes_what_was_accepted_and_refuses_the_rest() -> None:
    with LiveServer() as server:
        server.executor.hold()
        accepted = server.send("/v1/recommend", BODY)
        server.executor.wait_entered()
        queued = server.send("/v1/rank", RANK)
        server.wait_for("jgr_queue_depth", 1)
        server.stop()
        while (reply := server.call("/health/ready")).status == 200:
            pass
        assert (reply.status, reply.headers["connection"]) == (503, "close")
        assert "draining" in reply.error["message"] and int(reply.headers["retry-after"]) >= 1
        assert server.call("/health/live").status == 200
        reply = server.call("/v1/recommend", BODY)
        assert (reply.status, reply.error["type"]) == (503, "unavailable")
        assert reply.headers["connection"] == "close"
        server.executor.release()
        assert [accepted.reply().status, queued.reply().status] == [200, 200]
        assert server.join() == 0


def test_a_drain_gives_up_after_its_time(caplog: pytest.LogCaptureFixture) -> None:
    with LiveServer("server.drain_timeout_s=0.05") as server:
        server.executor.hold()
        running = server.send("/v1/recommend", BODY)
        server.executor.wait_entered()
        server.stop()
        reply = running.reply()
        assert (reply.status, reply.error["type"]) == (503, "unavailable")
        assert server.join() == 0
    assert "not everything was finished" in caplog.text


@pytest.mark.parametrize(
    "half",
    [b"", b"POST /v1/rank HT", b"POST /v1/rank HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{"],
    ids=["nothing", "half a head", "half a body"],
)
def test_a_client_that_is_too_slow_is_cut_off(half: bytes) -> None:
    with LiveServer(read_timeout_s=0.05) as server, server.connect() as connection:
        connection.sendall(half)
        assert connection.recv(1) == b""
        assert server.call("/v1/recommend", BODY).status == 200


def test_the_time_limit_is_on_reading_not_on_answering() -> None:
    with LiveServer(read_timeout_s=0.05) as server:
        server.executor.hold()
        slow = server.send("/v1/recommend", BODY)
        server.executor.wait_entered()
        with server.connect() as connection:
            assert connection.recv(1) == b"", "by now the limit has passed"
        server.executor.release()
        assert slow.reply().status == 200
