# SPDX-License-Identifier: Apache-2.0
"""A real model is replaced twice under load: no request fails, and every answer is the one of the version it names."""

from __future__ import annotations

import http.client
import itertools
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jgr.config import Config, UserError, override
from jgr.models.model_files import ModelFiles
from jgr.serving.decoders.loading import load_engine
from jgr.serving.engine.compilation import CompilationCounter, preparing
from jgr.serving.http.listener import Listener
from jgr.serving.versions.deployment import Deployment
from tests.serving.tiny_model import N_ITEMS, as_lines, make_folder, shuffled_catalog

pytestmark = pytest.mark.usefixtures("without_collector")

CLIENTS = 2
PATIENCE_S = 300.0
ADMIN = {"Authorization": "Bearer 4dm1n"}


class Switchable:
    """Two model folders, and a server that reads whichever the link `now` names.

    beside: the name of another model that it serves, from the second folder.
    """

    def __init__(self, folder: Path, *settings: str, beside: str | None = None) -> None:
        self.folder = folder
        make_folder(folder / "a", seed=1, layers=1)
        config = make_folder(folder / "b", seed=2, layers=1)
        self.point_to("a")
        self.config: Config = override(
            config,
            f"model.path={folder / 'now'}",
            "server.admin_key=4dm1n",
            "profiles.batch=4",
            "profiles.tokens=32",
            "profiles.widths=8",
            "profiles.candidates=4",
            *settings,
        )
        more = []
        if beside is not None:
            config = override(self.config, f"model.name={beside}", f"model.path={folder / 'b'}")
            more.append(Deployment(load_engine(config), config.catalog))
        ready = threading.Event()
        self._listener = Listener(
            load_engine(self.config),
            self.config,
            load=partial(load_engine, self.config),
            more=more,
            on_ready=lambda url: ready.set(),
        )
        self._thread = threading.Thread(target=self._listener.serve_until_stopped, daemon=True)
        self._thread.start()
        assert ready.wait(PATIENCE_S)
        self._connection = self.connect()

    def stop(self) -> None:
        self._connection.close()
        self._listener.stop()
        self._thread.join()
        assert self._listener.exit_code == 0
        assert self._listener.models.join(PATIENCE_S)

    def point_to(self, name: str) -> None:
        aside = self.folder / "next"
        aside.symlink_to(self.folder / name)
        aside.rename(self.folder / "now")

    def connect(self) -> http.client.HTTPConnection:
        port = int(self._listener.url.rpartition(":")[2])
        return http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)

    def call(self, path: str, body: Any = None) -> Any:
        return ask(self._connection, path, body)

    @contextmanager
    def load(self, requests: Sequence[tuple[str, Any]]) -> Iterator[list[list[tuple[int, Any]]]]:
        """Clients that ask the requests in turn until the block ends, each with an answer before it begins.

        What each was told, in order: (which request, its answer); the last was asked after the block.
        """
        told: list[list[tuple[int, Any]]] = [[] for _ in range(CLIENTS)]
        stop = threading.Event()

        def client(answers: list[tuple[int, Any]]) -> None:
            connection = self.connect()
            for at in itertools.cycle(range(len(requests))):
                last = stop.is_set()  # seen before it asks
                answers.append((at, ask(connection, *requests[at])))
                if last:
                    break
            connection.close()

        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(client, answers) for answers in told]
            try:
                while not all(told):
                    self.call("/health/live")
                yield told
            finally:
                stop.set()
            for ended in clients:
                ended.result()

    def admin(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, Any]:
        """Status and answer of a request with the admin key."""
        self._connection.request(method, path, body, ADMIN | headers)
        response = self._connection.getresponse()
        return response.status, json.loads(response.read())

    def reload(self) -> dict[str, Any]:
        """Reload, and wait until that is over. The model's entry."""
        status, answer = self.admin("POST", "/v1/models/tiny/reload")
        assert status == 202, answer
        model: dict[str, Any] = {"reload": "running"}
        while model["reload"] == "running":
            model = self.call("/v1/models/tiny")
        return model

    def compilations(self, phase: str) -> float:
        self._connection.request("GET", "/metrics")
        lines = self._connection.getresponse().read().decode().splitlines()
        start = f'jgr_compilations_total{{phase="{phase}"}} '
        return float(next(line for line in lines if line.startswith(start)).removeprefix(start))


def ask(connection: http.client.HTTPConnection, path: str, body: Any = None) -> Any:
    """The answer to a request, which must succeed at once."""
    connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
    response = connection.getresponse()
    text = response.read()
    assert response.status == 200, text
    return json.loads(text)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Switchable]:
    server = Switchable(tmp_path_factory.mktemp("models"), beside="steady")
    yield server
    server.stop()


def make_requests() -> list[tuple[str, dict[str, Any]]]:
    rng = np.random.default_rng(0)
    histories = [[f"B{row:03}" for row in rng.choice(N_ITEMS, length, replace=False)] for length in (1, 4, 9)]
    candidates = ["B005", "B050", "B017", "B003"]
    return [("/v1/recommend", {"history": history, "top_k": 8}) for history in histories] + [
        ("/v1/rank", {"history": history, "candidates": candidates}) for history in histories
    ]


REQUESTS = make_requests()


def scores(answer: Any) -> Any:
    return np.array([item["score"] for item in answer["items"]])


def device_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


def settles(server: Switchable, resident: int) -> bool:
    """Whether the device's memory is back at `resident`, once the old version's thread has ended."""
    for _ in range(1000):
        if device_bytes() == resident:
            return True
        server.call("/health/live")
    return False


def test_two_reloads_under_load(server: Switchable) -> None:
    resident, in_requests = device_bytes(), server.compilations("request")
    first = server.call("/v1/models/tiny")
    alone = {first["version"]: [server.call(*request) for request in REQUESTS]}
    with server.load(REQUESTS) as answers:
        server.point_to("b")
        second = server.reload()
        assert (second["reload"], second["reload_error"]) == ("done", None)
        alone[second["version"]] = [server.call(*request) for request in REQUESTS]
        server.point_to("a")
        third = server.reload()
    assert (first["id"], second["id"], third["version"]) == ("tiny", "tiny", first["version"])
    assert len(alone) == 2

    for told in answers:
        for at, answer in told:
            want = alone[answer["model"]][at]
            np.testing.assert_allclose(scores(answer), scores(want), atol=1e-5)
            assert [item["item_id"] for item in answer["items"]] == [
                item["item_id"] for item in want["items"]
            ]
        served = [version for version, _ in itertools.groupby(answer["model"] for _, answer in told)]
        assert served == [first["version"], second["version"], first["version"]]
    for one, other in zip(*alone.values(), strict=True):
        assert np.abs(scores(one) - scores(other)).max() > 0.1, "the versions can be told apart"

    assert settles(server, resident), "the memory of the old versions is free"
    assert server.compilations("request") == in_requests


def test_a_model_and_its_catalog_change_under_load_of_another(server: Switchable) -> None:
    catalog, resident = shuffled_catalog(), device_bytes()
    of_steady = [(path, {**body, "model": "steady"}) for path, body in REQUESTS]
    server.point_to("a")
    first, alone = server.reload(), [server.call(*request) for request in of_steady]
    in_requests = server.compilations("request")
    with server.load(of_steady) as answers:
        server.point_to("b")
        second = server.reload()
        assert server.admin("POST", "/v1/catalogs?model=tiny", as_lines(catalog))[0] == 201
        change = f"/v1/catalogs/{catalog.version}/activate"
        assert server.admin("POST", f"{change}?model=steady")[0] == 404
        assert server.admin("POST", f"{change}?model=tiny")[0] == 202
        while server.call("/v1/catalogs?model=tiny")["activation"] == "running":
            pass
        changed = [server.call(*request) for request in REQUESTS]
        assert server.admin("POST", "/v1/catalogs/rollback?model=tiny")[0] == 202
        while (listed := server.call("/v1/catalogs?model=tiny"))["activation"] == "running":
            pass
    assert listed["activation"] == "done"
    assert server.compilations("request") == in_requests

    steady = server.call("/v1/models/steady")
    assert {answer["model"] for told in answers for _, answer in told} == {steady["version"]}
    for told in answers:
        for at, answer in told:
            assert answer["catalog_version"] == steady["catalog_version"] == first["catalog_version"]
            np.testing.assert_allclose(scores(answer), scores(alone[at]), atol=1e-5)
            assert [i["item_id"] for i in answer["items"]] == [i["item_id"] for i in alone[at]["items"]]
    assert {answer["model"] for answer in changed} == {second["version"]} != {first["version"]}
    assert {answer["catalog_version"] for answer in changed} == {catalog.version}
    assert np.abs(scores(changed[0]) - scores(alone[0])).max() > 0.1, "the catalogs can be told apart"
    server.reload()  # an engine over another catalog shares arrays of the engine before it
    weights = server._listener.models.deployments[0].engine.memory["weights"]
    assert settles(server, resident - weights), "both models are of folder b, whose weights are there once"
    server.point_to("a")
    server.reload()
    assert settles(server, resident)


def cut_weights(folder: Path) -> None:
    for path in (folder / "params").rglob("*"):
        if path.is_file() and path.name not in ("_METADATA", "_CHECKPOINT_METADATA"):
            path.write_bytes(b"")


def foreign_catalog(folder: Path) -> None:
    line = {"item_id": "X", "semantic_id": ["<a_0>", "<b_99>", "<c_1>"], "metadata": {}}
    (folder / "catalog.jsonl").write_text(json.dumps(line) + "\n")


@pytest.mark.parametrize(
    ("breaks", "words"),
    [
        (shutil.rmtree, "no such model folder"),
        (cut_weights, "damaged checkpoint"),
        (foreign_catalog, "<b_99>"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
    ],
)
def test_a_folder_that_cannot_be_served_leaves_the_old_model(
    server: Switchable, breaks: Callable[[Path], Any], words: str
) -> None:
    before, resident = server.call("/v1/models/tiny"), device_bytes()
    shutil.copytree(server.folder / "b", server.folder / "broken")
    breaks(server.folder / "broken")
    server.point_to("broken")
    after = server.reload()
    shutil.rmtree(server.folder / "broken", ignore_errors=True)
    assert after["reload"] == "failed"
    assert words in after["reload_error"]
    assert (after["version"], after["state"]) == (before["version"], "ready")
    path, request = REQUESTS[0]
    assert server.call(path, {**request, "model": before["version"]})["model"] == before["version"]
    assert settles(server, resident)


def loops(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder.symlink_to(folder)
    return f"{folder}: no such model folder"


def vanishes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The folder is removed between the question what its `params` is and the list of what is in it."""
    shutil.copytree(folder.parent / "b", folder)

    def listed(path: Path, pattern: str) -> Iterator[Path]:
        shutil.rmtree(folder)
        return map(Path, os.scandir(path))

    monkeypatch.setattr(Path, "rglob", listed)
    return f"{folder.parent / 'now'}: cannot be read: No such file or directory"


@pytest.mark.parametrize("breaks", [loops, vanishes])
def test_a_folder_that_cannot_be_listed_is_told_in_a_line(
    server: Switchable,
    breaks: Callable[[Path, pytest.MonkeyPatch], str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    before, broken = server.call("/v1/models/tiny"), server.folder / breaks.__name__
    words = breaks(broken, monkeypatch)
    server.point_to(broken.name)
    after = server.reload()
    assert after["reload"] == "failed" and after["version"] == before["version"]
    assert words in after["reload_error"]
    assert [record.exc_info for record in caplog.records if record.levelno >= logging.WARNING] == [None]


def test_compilations_are_counted_by_phase_and_thread() -> None:
    counter = CompilationCounter()

    @jax.jit
    def program(x: Any) -> Any:
        return x * 3 + 1

    program(np.zeros(11))
    assert counter.counts == {"load": 0, "request": 1}
    with preparing(), ThreadPoolExecutor(1) as pool:
        program(np.zeros(12))
        assert counter.counts == {"load": 1, "request": 1}
        pool.submit(program, np.zeros(13)).result()
    assert counter.counts == {"load": 1, "request": 2}


def test_a_revision_is_the_content_of_the_files(tmp_path: Path) -> None:
    def revision(name: str, **files: str) -> str:
        folder = tmp_path / name
        (folder / "params" / "d").mkdir(parents=True)
        for path, text in {"config.json": "{}", "params/d/0": "weights", **files}.items():
            (folder / path).write_text(text)
        return ModelFiles(folder).revision()

    same = revision("a")
    assert revision("b") == same == revision("c", **{"catalog.jsonl": "its version is its own"})
    others = [
        revision("d", **{"config.json": "{ }"}),
        revision("e", **{"params/d/0": "weightS"}),
        revision("f", **{"params/d/1": ""}),
        revision("g", **{"tokenizer.json": "{}"}),
    ]
    assert len({same, *others}) == 5
    assert all(len(one) == 8 and int(one, 16) >= 0 for one in others)


@pytest.mark.parametrize("change", ["write", "remove", "replace"])
def test_a_model_that_changes_while_it_is_read_is_refused(tmp_path: Path, change: str) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_text("one")
    files = ModelFiles(tmp_path)
    if change == "write":
        weights.write_text("other")
    else:
        weights.rename(tmp_path / "old")
    if change == "replace":
        weights.write_text("two")
    with pytest.raises(UserError, match="changed while it was read"):
        files.revision()


def test_profiles_too_small_for_any_prompt_are_a_mistake_of_the_configuration(server: Switchable) -> None:
    server.point_to("a")
    with pytest.raises(UserError, match=r"profiles.tokens: the largest is 3, .* has at least 4 tokens"):
        load_engine(override(server.config, "profiles.tokens=2,3"))
