# SPDX-License-Identifier: Apache-2.0
"""Changes that are cancelled, over real HTTP, each held at a known point: what serves goes on, and the next one can
begin."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jgr import stopping
from jgr.models import checkpoint, model_files, stored
from jgr.serving.engine.contract import Progress
from jgr.serving.versions import deployment
from tests.serving.fakes import PATIENCE_S, LiveServer, Reply
from tests.serving.versions.test_catalog_changes import (
    BODY_OF_UPLOAD,
    changing_server,
    conflicts,
    post,
    wait_listing,
)
from tests.serving.versions.test_reload import (
    ADMIN,
    BODY,
    RELOAD,
    Versions,
    reload,
    reloading_server,
    told,
    wait_until,
)
from tests.serving.versions.test_reload_model import Switchable, device_bytes, settles

CANCELLED = 'jgr_model_reloads_total{outcome="cancelled"}'


def cancel(server: LiveServer, path: str = RELOAD) -> Reply:
    return server.call(path, method="DELETE", **ADMIN)


def test_a_load_that_reads_is_cancelled_and_another_one_begins_at_once() -> None:
    versions = Versions()
    with reloading_server(versions) as server:
        versions.open.clear()
        assert reload(server).status == 202
        versions.wait_entered()
        for _ in range(2):  # it may be told again
            reply = cancel(server)
            assert (reply.status, reply.headers["location"]) == (202, "/v1/models/jgr")
            assert reply.json["reload"] == "running", "its thread has not ended"
        refused = reload(server)
        assert (refused.status, refused.error["type"]) == (409, "conflict")
        assert "is being cancelled while its files are being read" in refused.error["message"]
        versions.open.set()
        model = wait_until(server, "cancelled")
        assert (model["version"], model["state"], model["reload_error"]) == ("jgr", "ready", None)
        assert server.metric(CANCELLED) == 1
        assert not versions.executors[0].batches, "what was read is not served"
        assert told(server.call("/v1/recommend", BODY)) == ("jgr", 0.0)
        assert reload(server).status == 202
        assert wait_until(server, "done")["version"] == "jgr@2"


def test_a_load_that_hangs_is_given_up_and_closed_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    versions, closed = Versions(), threading.Event()
    held, number = threading.Event(), itertools.count()

    def load(metrics: Any) -> Any:
        first = next(number) == 0
        engine = versions(metrics)
        if first:
            close = engine.served.close

            def noting(idle: bool) -> None:
                close(idle)
                closed.set()

            engine.served.close = noting  # type: ignore[method-assign]
            assert held.wait(PATIENCE_S)
        return engine

    monkeypatch.setattr(deployment, "GRACE_S", 0.0)
    with reloading_server(load) as server:
        reload(server)
        versions.wait_entered()
        assert cancel(server).status == 202
        model = wait_until(server, "cancelled")
        assert model["reload_error"].startswith("its files are being read still")
        assert reload(server).status == 202
        assert wait_until(server, "done")["version"] == "jgr@2"
        assert not closed.is_set()
        held.set()
        assert closed.wait(PATIENCE_S)
        assert told(server.call("/v1/recommend", BODY)) == ("jgr@2", 20.0)


def test_a_warm_up_ends_after_the_program_that_it_is_at() -> None:
    versions, steps = Versions(), list[int]()

    def load(metrics: Any) -> Any:
        engine, executor = versions(metrics), versions.executors[-1]
        warm_up = executor.warm_up

        def noting(progress: Progress) -> None:
            def step(done: int, total: int, label: str) -> None:
                steps.append(done)
                progress(done, total, label)

            assert len(executor.profiles) > 1
            warm_up(step)

        executor.warm_up = noting  # type: ignore[method-assign]
        return engine

    versions.hold_warm_up = True
    with reloading_server(load) as server:
        reload(server)
        versions.wait_entered()
        while not versions.executors:
            pass
        versions.executors[0].wait_entered()
        assert cancel(server).status == 202
        versions.executors[0].release()
        wait_until(server, "cancelled")
        assert steps == [1], "it was told at the first one"
        versions.hold_warm_up = False
        reload(server)
        assert wait_until(server, "done")["version"] == "jgr@2"


def test_what_does_not_run_or_serves_already_is_not_cancelled() -> None:
    with reloading_server(Versions()) as server:
        reply = cancel(server)
        assert (reply.status, reply.error["type"]) == (409, "conflict")
        assert "is not running" in reply.error["message"]
        assert cancel(server, "/v1/models/other/reload").status == 404
        server.executor.hold()
        running = server.send("/v1/recommend", BODY)
        server.executor.wait_entered()
        reload(server)
        while server.model()["version"] == "jgr":
            pass
        reply = cancel(server)
        assert (reply.status, reply.error["type"]) == (409, "conflict")
        assert "the old version finishes its requests; roll it back" in reply.error["message"]
        server.executor.release()
        assert told(running.reply()) == ("jgr", 0.0)
        wait_until(server, "done")
        assert "the last one is done" in cancel(server).error["message"]


def test_only_an_admin_cancels_and_other_methods_are_told_so() -> None:
    with reloading_server(Versions(), "server.api_key=s3cret") as server:
        for path in (RELOAD, "/v1/catalogs/0/activate", RELOAD + "%0A", RELOAD + "/"):
            assert server.call(path, method="DELETE").status == 401
            assert server.call(path, method="DELETE", authorization="Bearer s3cret").status == 403
        reply = server.call(RELOAD, authorization="Bearer s3cret")
        assert (reply.status, reply.headers["allow"]) == (405, "DELETE, POST")
        assert cancel(server, "/v1/models/jgr/rollback").status == 405
        assert server.call(RELOAD, b"[]", method="DELETE", **ADMIN).status == 422
        assert cancel(server, "/v1/catalogs/0/activate").status == 404


def test_an_activation_is_cancelled_as_a_reload_is() -> None:
    server, rebuilds, _ = changing_server()
    with server:
        version = post(server, "/v1/catalogs", BODY_OF_UPLOAD).json["version"]
        rebuilds.wait_entered()
        path = f"/v1/catalogs/{version}/activate"
        assert conflicts(cancel(server, path), "is not running")
        rebuilds.open.clear()
        assert post(server, path).status == 202
        rebuilds.wait_entered()
        assert conflicts(cancel(server), "a reload of model 'jgr' is not running")
        active = server.engine.info.catalog_version
        assert conflicts(cancel(server, f"/v1/catalogs/{active}/activate"), f"{version!r} is being activated")
        assert cancel(server, path).status == 202
        rebuilds.open.set()
        states = {each["version"]: each["state"] for each in wait_listing(server, "cancelled")["data"]}
        assert states == {active: "active", version: "idle"}
        assert server.metric('jgr_catalog_activations_total{outcome="cancelled"}') == 1
        assert post(server, path).status == 202
        wait_listing(server, "done")


@pytest.fixture(scope="module")
def switchable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Switchable]:
    server = Switchable(tmp_path_factory.mktemp("models"))
    yield server
    server.stop()


class Gate:
    """A point that a load comes to, and waits at until it is open."""

    def __init__(self) -> None:
        self.open, self.passed = threading.Event(), 0
        self._entered = threading.Semaphore(0)

    def wait(self) -> None:
        self._entered.release()
        assert self.open.wait(PATIENCE_S)
        self.passed += 1

    def wait_entered(self) -> None:
        assert self._entered.acquire(timeout=PATIENCE_S)


@contextmanager
def held_at_hash() -> Iterator[Gate]:
    """Files are hashed in many small parts, of which each waits at the gate."""
    gate = Gate()

    class Held:
        def __init__(self, data: bytes = b"") -> None:
            self._digest = hashlib.sha256(data)

        def update(self, data: bytes | memoryview) -> None:
            if isinstance(data, memoryview):  # of a file
                gate.wait()
            self._digest.update(data)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._digest, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_files, "hashlib", SimpleNamespace(sha256=Held))
        patch.setattr(model_files, "HASHED_BYTES", 64)
        yield gate


@contextmanager
def held_with_weights() -> Iterator[Gate]:
    """A load waits when its weights are on the device."""
    gate, check = Gate(), checkpoint.check_finite

    def held(place: Path, params: Any) -> None:
        gate.wait()
        check(place, params)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "check_finite", held)
        yield gate


def ended(server: Switchable) -> dict[str, Any]:
    model: dict[str, Any] = {"reload": "running"}
    while model["reload"] == "running":
        model = server.call("/v1/models/tiny")
    return model


@pytest.mark.usefixtures("without_collector")
def test_what_a_cancelled_load_took_is_given_back(switchable: Switchable) -> None:
    first, resident = switchable.call("/v1/models/tiny")["version"], device_bytes()
    switchable.point_to("b")
    with held_with_weights() as gate:
        assert switchable.admin("POST", "/v1/models/tiny/reload")[0] == 202
        gate.wait_entered()
        assert device_bytes() > resident
        assert switchable.admin("DELETE", "/v1/models/tiny/reload")[0] == 202
        gate.open.set()
        model = ended(switchable)
        assert (model["reload"], model["version"]) == ("cancelled", first)
        assert settles(switchable, resident)
    switchable.point_to("a")


def cancelled_at_hash(server: Switchable, way: str) -> dict[str, Any]:
    with held_at_hash() as gate:
        assert server.admin("POST", f"/v1/models/tiny/{way}")[0] == 202
        gate.wait_entered()
        assert server.admin("DELETE", "/v1/models/tiny/reload")[0] == 202
        gate.open.set()
        model = ended(server)
        assert gate.passed <= model_files.HASHED_AT_ONCE
    assert model["reload"] == "cancelled"
    return model


def test_hashing_stops_at_its_next_part_of_a_file_of_a_reload_and_of_a_rollback(
    switchable: Switchable,
) -> None:
    switchable.point_to("a")
    first = switchable.reload()["version"]
    switchable.point_to("b")
    assert cancelled_at_hash(switchable, "reload")["version"] == first
    second = switchable.reload()["version"]
    assert second != first
    assert cancelled_at_hash(switchable, "rollback")["version"] == second
    assert switchable.admin("POST", "/v1/models/tiny/rollback")[0] == 202
    assert ended(switchable)["version"] == first


def test_a_read_that_never_comes_back_is_left_when_it_is_told_to_stop() -> None:
    """As of a disk that hangs: TensorStore's threads wait for that, and not the load's."""
    waited, told_to_stop = threading.Event(), threading.Event()

    class Never:
        def result(self, timeout: float) -> Any:
            waited.set()
            assert told_to_stop.wait(PATIENCE_S)
            raise TimeoutError

        def done(self) -> bool:
            return False

    with ThreadPoolExecutor(1) as pool, stopping.stoppable(told_to_stop.is_set):
        reading = pool.submit(stopping.carried(stored._result), Never())
        assert waited.wait(PATIENCE_S)
        told_to_stop.set()
        with pytest.raises(stopping.Stopped):
            reading.result()
