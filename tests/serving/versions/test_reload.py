# SPDX-License-Identifier: Apache-2.0
"""Reloads over real HTTP, with versions whose scores tell them apart: each load makes version n, n x 10 better."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from jgr.config import UserError
from jgr.serving.decoders.serve import Engine
from jgr.serving.engine.metrics import Metrics
from jgr.serving.policies.batching import make_profiles
from tests.serving.fakes import PATIENCE_S, FakeExecutor, LiveServer, Reply, make_config, make_engine

BODY = {"history": ["a"], "top_k": 1}
RELOAD = "/v1/models/jgr/reload"
ADMIN = {"authorization": "Bearer 4dm1n"}


class Versions:
    """Loads version 1, 2, ...; waits while it is held, raises what it is told to."""

    def __init__(self) -> None:
        self.executors: list[FakeExecutor] = []
        self.errors: list[Exception] = []
        self.hold_warm_up = False
        self.open = threading.Event()
        self.open.set()
        self._entered = threading.Semaphore(0)

    def __call__(self, metrics: Metrics) -> Engine:
        self._entered.release()
        assert self.open.wait(PATIENCE_S)
        if self.errors:
            raise self.errors.pop()
        config, number = make_config(), len(self.executors) + 1
        self.executors.append(FakeExecutor(make_profiles(config.profiles), bias=10.0 * number))
        if self.hold_warm_up:
            self.executors[-1].hold()
        return make_engine(config, self.executors[-1], metrics=metrics, revision=str(number))

    def wait_entered(self) -> None:
        assert self._entered.acquire(timeout=PATIENCE_S)


def reloading_server(versions: Callable[[Metrics], Engine], *settings: str) -> LiveServer:
    return LiveServer("server.admin_key=4dm1n", *settings, load=versions)


def reload(server: LiveServer) -> Reply:
    return server.call(RELOAD, method="POST", **ADMIN)


def wait_until(server: LiveServer, outcome: str) -> dict[str, Any]:
    """The model's entry once its reload has that outcome; each question lets the server's loop turn."""
    for _ in range(100_000):
        model: dict[str, Any] = server.model()
        if model["reload"] == outcome:
            return model
    raise AssertionError(f"the reload is {model['reload']}: {model['reload_error']}")


def told(reply: Reply) -> tuple[str, float]:
    """The version an answer names, and its score."""
    return reply.json["model"], reply.json["items"][0]["score"]


def test_a_request_ends_with_the_version_that_accepted_it_and_batches_do_not_mix() -> None:
    versions = Versions()
    with reloading_server(versions) as server:
        server.executor.hold()
        running = server.send("/v1/recommend", BODY)
        server.executor.wait_entered()
        queued = [server.send("/v1/recommend", BODY) for _ in range(2)]
        server.wait_for("jgr_queue_depth", 2)
        assert reload(server).status == 202
        while server.model()["version"] == "jgr":
            pass
        assert server.model()["reload"] == "running", "the old version still has requests"
        assert server.metric("jgr_queue_depth") == 2
        reply = server.call("/v1/recommend", BODY)
        assert told(reply) == ("jgr@1", 10.0)
        assert "connection" not in reply.headers, "the drain of a version is not the server's"
        server.executor.release()
        assert [told(pending.reply()) for pending in (running, *queued)] == [("jgr", 0.0)] * 3
        wait_until(server, "done")
        assert (server.executor.batches, versions.executors[0].batches) == ([1, 2], [1])


def test_a_reload_is_told_by_models_and_metrics() -> None:
    with reloading_server(Versions()) as server:
        reply = reload(server)
        assert (reply.status, reply.headers["location"]) == (202, "/v1/models/jgr")
        assert (reply.json["reload"], reply.json["state"]) == ("running", "ready")
        model = wait_until(server, "done")
        assert (model["id"], model["version"], model["reload_error"]) == ("jgr", "jgr@1", None)
        assert server.call(reply.headers["location"]).json == model
        assert server.metric('jgr_model_reloads_total{outcome="done"}') == 1
        text = server.call("/metrics").body.decode()
        assert [line for line in text.splitlines() if line.startswith("jgr_model_info{")] == [
            'jgr_model_info{model="jgr",version="jgr@1"} 1.0'
        ]
        assert text.count("jgr_catalog_info{") == 1
        for name in ("jgr", "jgr@1"):
            assert told(server.call("/v1/recommend", {**BODY, "model": name})) == ("jgr@1", 10.0)
            assert server.call(f"/v1/models/{name}").status == 200
        gone = server.call("/v1/recommend", {**BODY, "model": "jgr@0"})
        assert (gone.status, gone.error["field"]) == (404, "model")
        assert "now 'jgr@1'" in gone.error["message"]


@pytest.mark.usefixtures("without_collector")
def test_an_old_version_is_freed() -> None:
    versions = Versions()
    with reloading_server(versions) as server:
        # Its deadline would keep a timer of the old version for ten minutes.
        server.executor.hold()
        leaver = server.send("/v1/recommend", {**BODY, "deadline_ms": 600_000})
        server.executor.wait_entered()
        leaver.abandon()
        server.wait_for("jgr_cancelled_total", 1)
        server.executor.release()
        assert told(server.call("/v1/recommend", BODY)) == ("jgr", 0.0)
        old = weakref.ref(server.engine)
        del server.engine
        reload(server)
        wait_until(server, "done")
        for _ in range(1000):  # its thread is about to end
            if old() is None:
                break
            server.call("/health/live")
        assert old() is None
        assert told(server.call("/v1/recommend", BODY)) == ("jgr@1", 10.0)


def test_a_second_reload_while_one_runs_is_a_conflict() -> None:
    versions = Versions()
    with reloading_server(versions) as server:
        versions.open.clear()
        assert reload(server).status == 202
        versions.wait_entered()
        second = reload(server)
        assert (second.status, second.error["type"]) == (409, "conflict")
        assert "is running" in second.error["message"]
        assert told(server.call("/v1/recommend", BODY)) == ("jgr", 0.0)
        versions.open.set()
        wait_until(server, "done")
        assert reload(server).status == 202
        assert wait_until(server, "done")["version"] == "jgr@2"


def test_an_old_version_that_fails_when_it_ends_holds_up_no_other_change(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with reloading_server(Versions()) as server:

        async def fails(timeout_s: float | None) -> bool:
            raise ValueError("an entry is pinned")

        monkeypatch.setattr(server.engine, "drain", fails)
        reload(server)
        assert wait_until(server, "done")["version"] == "jgr@1"
        assert "did not end as it should" in caplog.text and "an entry is pinned" in caplog.text
        reload(server)
        while server.model()["version"] != "jgr@2":
            pass
        assert told(server.call("/v1/recommend", BODY)) == ("jgr@2", 20.0)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (UserError("model.path: it is\ndamaged"), "model.path: it is damaged"),
        (MemoryError("no room"), "MemoryError: no room"),
        (RuntimeError("x" * 10_000), "RuntimeError: " + "x" * 483 + "..."),
    ],
)
@pytest.mark.parametrize("stage", ["load", "warm-up"])
def test_a_reload_that_fails_leaves_the_old_version_and_says_why(
    stage: str, error: Exception, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    versions = Versions()

    def load(metrics: Metrics) -> Engine:
        engine = versions(metrics)
        if stage == "warm-up" and len(versions.executors) == 1:
            versions.executors[0].errors.append(error)
        return engine

    with reloading_server(load) as server:
        if stage == "load":
            versions.errors.append(error)
        reload(server)
        model = wait_until(server, "failed")
        assert (model["version"], model["state"], model["reload_error"]) == ("jgr", "ready", words)
        assert "jgr goes on" in caplog.text
        assert told(server.call("/v1/recommend", BODY)) == ("jgr", 0.0)
        assert server.metric('jgr_model_reloads_total{outcome="failed"}') == 1
        reload(server)
        assert wait_until(server, "done")["reload_error"] is None
        assert told(server.call("/v1/recommend", BODY))[0] != "jgr"


def test_the_admin_key_opens_reloads_and_no_other_key_does() -> None:
    versions = Versions()
    with reloading_server(versions, "server.api_key=s3cret") as server:
        for headers in ({}, {"authorization": "Bearer s3cret"}, {"authorization": "4dm1n"}):
            for path in (RELOAD, "/v1/models/other/reload"):
                reply = server.call(path, method="POST", **headers)
                known = headers.get("authorization") == "Bearer s3cret"
                refusal = (403, "forbidden") if known else (401, "unauthorized")
                assert (reply.status, reply.error["type"]) == refusal
                wanted = "takes an admin's key" if known else "<admin key>"
                assert wanted in reply.error["message"] and "4dm1n" not in reply.error["message"]
        assert server.call("/v1/models", **ADMIN).status == 403, "nor is it an API key"
        assert server.call(RELOAD, **ADMIN).status == 403, "GET is not a reload"
        assert not versions.executors
        for body in (b'{"path": "/tmp"}', b"[]", b"x"):
            reply = server.call(RELOAD, body, **ADMIN)
            assert (reply.status, reply.error["type"]) == (422, "invalid_request")
        assert server.call(RELOAD, b" " * (1 << 21), **ADMIN).status == 413
        reply = server.call("/v1/models/other/reload", method="POST", **ADMIN)
        assert (reply.status, reply.error["type"]) == (404, "not_found")
        assert server.call(RELOAD, b"{}", **ADMIN).status == 202


@pytest.mark.parametrize("end", ["", "%0A", "%0D", "%0A%0A", "/", "%00"])
def test_no_spelling_of_a_path_escapes_the_admin_key(server: LiveServer, end: str) -> None:
    """Starlette's own patterns end in a $, which matches in front of a last line feed."""
    paths = ("catalogs", "catalogs/rollback", "catalogs/0123456789abcdef/activate", "models/jgr/reload")
    for path in paths:
        assert server.call(f"/v1/{path}{end}", b"x", method="POST").status == 403, path


def test_a_line_feed_behind_a_path_is_another_path(server: LiveServer) -> None:
    assert server.call("/v1/users/u/cache", method="DELETE").status == 200
    assert server.call("/v1/users/u/cache%0A", method="DELETE").status == 404


def test_without_an_admin_key_reloads_are_forbidden(server: LiveServer) -> None:
    for headers in ({}, ADMIN, {"authorization": "Bearer "}):
        reply = server.call(RELOAD, method="POST", **headers)
        assert (reply.status, reply.error["type"]) == (403, "forbidden")
        assert "server.admin_key" in reply.error["message"]


def test_a_model_without_a_folder_cannot_be_reloaded() -> None:
    with LiveServer("server.admin_key=4dm1n") as server:
        reply = reload(server)
        assert (reply.status, reply.error["type"]) == (409, "conflict")
        assert "not loaded from a folder" in reply.error["message"]


def test_a_key_for_both_is_refused() -> None:
    with pytest.raises(UserError, match=r"server.admin_key must not be server.api_key"):
        make_config("server.api_key=k", "server.admin_key=k")


def test_no_reload_before_the_first_version_is_ready() -> None:
    with LiveServer("server.admin_key=4dm1n", hold=True, load=Versions()) as server:
        assert server.model()["state"] == "starting"
        assert server.model()["loaded_at"] is None
        assert reload(server).status == 503


@pytest.mark.parametrize("stage", ["load", "warm-up"])
def test_a_stop_does_not_wait_for_a_reload(stage: str) -> None:
    versions = Versions()
    versions.hold_warm_up = stage == "warm-up"
    with reloading_server(versions) as server:
        if stage == "load":
            versions.open.clear()
        reload(server)
        versions.wait_entered()
        if stage == "warm-up":
            while not versions.executors:
                pass
            versions.executors[0].wait_entered()
        server.stop()
        assert server.join() == 0, "while the thread of the reload is still held"
        versions.open.set()
        for executor in versions.executors:
            executor.release()


def test_a_stop_while_the_old_version_drains_finishes_its_requests() -> None:
    with reloading_server(Versions()) as server:
        server.executor.hold()
        running = server.send("/v1/recommend", BODY)
        server.executor.wait_entered()
        reload(server)
        while server.model()["version"] == "jgr":
            pass
        server.stop()
        while server.call("/health/ready").status == 200:
            pass
        server.executor.release()
        assert told(running.reply()) == ("jgr", 0.0)
        assert server.join() == 0


def test_sighup_reloads_and_none_is_lost() -> None:
    """The server runs in the main thread, where signals arrive, and its client in another."""
    versions = Versions()
    server = LiveServer(load=versions)

    def client() -> dict[str, Any]:
        try:
            assert server.ready.wait(PATIENCE_S)
            versions.open.clear()
            os.kill(os.getpid(), signal.SIGHUP)
            versions.wait_entered()
            os.kill(os.getpid(), signal.SIGHUP)  # another reload follows the one that is running
            server.call("/health/live")
            versions.open.set()
            while server.model()["version"] != "jgr@2":
                pass
            return wait_until(server, "done")
        finally:
            versions.open.set()
            server.stop()

    with ThreadPoolExecutor(1) as pool:
        played = pool.submit(client)
        assert server.listener.serve_until_stopped() == 0
        assert played.result()["version"] == "jgr@2"
    assert server.listener.models.join(PATIENCE_S)
