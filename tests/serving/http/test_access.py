# SPDX-License-Identifier: Apache-2.0
"""What a server says of itself: how far its start is, when it starts and ends, and of each request."""

from __future__ import annotations

import logging

import pytest

from tests.serving.fakes import PATIENCE_S, LiveServer

BODY = {"history": ["a"], "top_k": 1}


def test_readiness_says_how_many_shapes_are_compiled() -> None:
    with LiveServer(hold=True) as server:
        server.executor.wait_entered()
        first = server.call("/health/ready")
        assert (first.status, first.error["message"]) == (503, "the server is starting")
        server.engine.served.executors.progress(3, 12, "recommend 8x64")  # type: ignore[attr-defined]
        assert (
            server.call("/health/ready").error["message"]
            == "the server is starting: 3 of 12 shapes are compiled"
        )
        server.executor.release()


def test_a_server_says_in_one_line_each_that_it_starts_is_ready_is_told_to_stop_and_has_drained(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "jgr"), LiveServer() as server:
        url = server.listener.url
        server.stop()
        server.join()
    said = [record.getMessage() for record in caplog.records if record.name == "jgr.serving.http.listener"]
    assert len(said) == 4
    assert said[0] == f"listening on {url}; jgr is being compiled"
    assert said[1].startswith("ready after ") and said[3].startswith("drained after ")
    assert said[2] == "stopping: no more requests are taken, what was accepted is finished"


def test_each_request_gets_a_line_of_the_access_log_and_none_unless_that_is_set(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "jgr.access"):
        with LiveServer() as server:
            assert server.call("/v1/recommend", BODY).status == 200
        assert not [record for record in caplog.records if record.name == "jgr.access"]
        with LiveServer("server.access_log=true", "server.api_key=s3cret") as server:
            known = {"authorization": "Bearer s3cret", "x_request_id": "mine"}
            answer = server.call("/v1/recommend", BODY, **known)
            server.call("/v1/rank", BODY)
            server.call("/v1/items/a%0Ab?user=me", **known)
            server.call(f"/{'x' * 5000}", **known)
    lines = [record for record in caplog.records if record.name == "jgr.access"]
    assert [(line.__dict__["path"], line.__dict__["status"]) for line in lines] == [
        ("/v1/recommend", 200),
        ("/v1/rank", 401),
        ("/v1/items/a\nb", 404),
        (f"/{'x' * 1020}...", 404),
    ]
    assert lines[0].__dict__["request_id"] == "mine" and lines[0].__dict__["bytes"] == len(answer.body)
    assert 0 < lines[0].__dict__["took_ms"] < 60_000
    texts = [line.getMessage() for line in lines]
    assert texts[0].startswith("127.0.0.1 POST /v1/recommend 200, ")
    assert "'/v1/items/a\\nb'" in texts[2] and not any("\n" in text for text in texts)
    assert not any(secret in text for text in texts for secret in ("s3cret", "user=me"))


def test_probes_get_a_line_only_where_they_are_refused_or_fail(caplog: pytest.LogCaptureFixture) -> None:
    """Machines ask them every few seconds."""
    known = {"authorization": "Bearer s3cret"}
    probes = ("/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready", "/metrics")
    settings = ("server.access_log=true", "server.api_key=s3cret", "server.base_path=/shop")
    with caplog.at_level(logging.INFO, "jgr.access"), LiveServer(*settings, hold=True) as server:
        server.executor.wait_entered()
        assert server.call("/health/ready").status == 503
        server.executor.release()
        assert server.ready.wait(PATIENCE_S)
        assert [server.call(path, **known).status for path in probes] == [200] * 5
        assert server.call("/shop/health/live").status == 200
        assert server.call("/metrics").status == 401
        assert server.call("/health/live", {}).status == 405
        assert server.call("/v1/models", **known).status == 200
    lines = [record.__dict__ for record in caplog.records if record.name == "jgr.access"]
    assert [(line["path"], line["status"]) for line in lines] == [
        ("/health/ready", 503),
        ("/metrics", 401),
        ("/health/live", 405),
        ("/v1/models", 200),
    ]


def test_who_may_not_ask_is_counted_under_what_was_asked() -> None:
    """Once each, but a path that is none under "other"."""
    calls = [
        ("GET", "/v1/models", "/v1/models"),
        ("GET", "/v1/models/a/b", "/v1/models/{name}"),
        ("POST", "/v1/models/jgr/reload", "/v1/models/{name}/reload"),
        ("GET", "/v1/items/a", "/v1/items/{item_id}"),
        ("DELETE", "/v1/users/u/cache", "/v1/users/{user_id}/cache"),
        ("PUT", "/v1/models/jgr/rollback", "/v1/models/{name}/rollback"),
        ("POST", "/v1/recommend", "/v1/recommend"),
        ("GET", "/nothing", "other"),
    ]
    settings = ("server.api_key=s3cret", "server.admin_key=4dm1n", "server.open_metrics=true")
    with LiveServer(*settings) as server:
        for method, path, endpoint in calls:
            assert server.call(path, method=method).status == 401, path
            assert server.metric(f'jgr_requests_total{{endpoint="{endpoint}",status="401"}}') == 1
        known = {"authorization": "Bearer s3cret"}
        assert server.call("/v1/models/jgr/reload", method="POST", **known).status == 403
        forbidden = 'jgr_requests_total{endpoint="/v1/models/{name}/reload",status="403"}'
        assert server.metric(forbidden) == 1
