# SPDX-License-Identifier: Apache-2.0
"""Catalogs of a running server: uploaded, activated and rolled back under load, over real HTTP with a real model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jgr.catalog.catalog import Catalog, save_catalog
from jgr.models.beam import growth_class
from tests.serving.fakes import LiveServer
from tests.serving.tiny_model import as_lines, make_catalog
from tests.serving.versions.test_reload_model import REQUESTS, Switchable

LARGEST = 100_000


class Server(Switchable):
    """Changes of catalogs."""

    def upload(self, catalog: Catalog) -> str:
        status, info = self.admin("POST", "/v1/catalogs", as_lines(catalog))
        assert (status, info["version"]) == (201, catalog.version)
        return catalog.version

    def change(self, path: str) -> dict[str, Any]:
        """Activate or roll back, and wait until that is over: the list of catalogs."""
        status, info = self.admin("POST", path)
        assert status == 202, info
        while (listed := self.call("/v1/catalogs"))["activation"] == "running":
            pass
        return listed

    def states(self) -> dict[str, str]:
        return {entry["version"]: entry["state"] for entry in self.call("/v1/catalogs")["data"]}

    def programs(self) -> tuple[float, float]:
        return self.compilations("load"), self.compilations("request")


def items(codes: np.ndarray, name: str) -> Catalog:
    symbols = [[f"<{'abc'[level]}_{code}>" for level, code in enumerate(row)] for row in codes]
    return Catalog.build([f"{name}{i:03}" for i in range(len(codes))], symbols, [{}] * len(codes))


FIRST = make_catalog()
ASKED = {item for _, body in REQUESTS for item in body["history"]}
# As many items under other semantic ids; those of the requests' histories keep their names.
SECOND = Catalog.build(
    [item if item in ASKED else f"N{item}" for item in FIRST.item_ids],
    [
        [f"<{'abc'[level]}_{code}>" for level, code in enumerate(row)]
        for row in np.random.default_rng(5).integers(0, 5, (60, 3))
    ],
    [{} for _ in range(60)],
)
EVERY_ID = items(np.array(list(itertools.product(range(5), repeat=3))), "E")
BY_VERSION = {catalog.version: set(catalog.item_ids) for catalog in (FIRST, SECOND, EVERY_ID)}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("models"), f"catalog.max_upload_bytes={LARGEST}")
    yield server
    server.stop()


def recommendations(server: Server) -> list[Any]:
    return [[(i["item_id"], i["score"]) for i in server.call(*REQUESTS[at])["items"]] for at in range(3)]


def test_activation_and_rollback_under_load_compile_nothing(server: Server) -> None:
    assert server.states() == {FIRST.version: "active"}
    before, programs = recommendations(server), server.programs()
    with server.load(REQUESTS[:3]) as told:
        server.upload(SECOND)
        assert server.states() == {FIRST.version: "active", SECOND.version: "idle"}
        listed = server.change(f"/v1/catalogs/{SECOND.version}/activate")
        assert (listed["activation"], listed["activation_error"]) == ("done", None)
        assert server.states() == {FIRST.version: "previous", SECOND.version: "active"}
        after = recommendations(server)
        server.change("/v1/catalogs/rollback")
        assert server.states() == {FIRST.version: "active", SECOND.version: "previous"}

    assert recommendations(server) == before
    assert server.programs() == programs, "an activation within the growth class compiles nothing"
    for answers in told:
        for _, answer in answers:
            assert {item["item_id"] for item in answer["items"]} <= BY_VERSION[answer["catalog_version"]]
        versions = [version for version, _ in itertools.groupby(a["catalog_version"] for _, a in answers)]
        assert versions[0] == versions[-1] == FIRST.version
    assert {item for answer in after for item, _ in answer} & (set(SECOND.item_ids) - set(FIRST.item_ids))


@pytest.mark.slow
def test_answers_are_those_of_a_server_started_with_the_catalog(server: Server, tmp_path: Path) -> None:
    assert growth_class(len(EVERY_ID.item_ids)) > growth_class(len(FIRST.item_ids))
    load, request = server.programs()
    server.upload(EVERY_ID)
    server.change(f"/v1/catalogs/{EVERY_ID.version}/activate")
    grown_load, grown_request = server.programs()
    assert grown_load > load and grown_request == request, "an outgrown class is compiled before it serves"
    candidates = ["E000", "E101", "E050", "E124"]
    body = {"history": ["E003", "E099"], "candidates": candidates}
    swapped = [server.call("/v1/rank", body), server.call("/v1/recommend", {"history": ["E003"], "top_k": 8})]

    save_catalog(EVERY_ID, tmp_path / "every.jsonl")
    # While the grown programs are there, which it shares: their shapes are the same, and tables are arguments.
    started = Server(tmp_path, f"catalog.path={tmp_path / 'every.jsonl'}")
    alone = [started.call("/v1/rank", body), started.call("/v1/recommend", {"history": ["E003"], "top_k": 8})]
    started.stop()
    server.change("/v1/catalogs/rollback")
    for one, other in zip(swapped, alone, strict=True):
        assert one["items"] == other["items"]


def test_an_engine_without_a_model_has_one_catalog() -> None:
    with LiveServer("server.admin_key=4dm1n") as server:
        reply = server.call("/v1/catalogs", b"x", method="POST", authorization="Bearer 4dm1n")
        assert (reply.status, reply.error["type"]) == (409, "conflict")
        assert [entry["state"] for entry in server.call("/v1/catalogs").json["data"]] == ["active"]
        assert server.call("/v1/catalogs/rollback", method="POST", authorization="Bearer 4dm1n").status == 409


def test_a_reload_keeps_an_activated_catalog(server: Server) -> None:
    server.upload(SECOND)
    server.change(f"/v1/catalogs/{SECOND.version}/activate")
    assert server.reload()["reload"] == "done"
    assert server.states()[SECOND.version] == "active"
    server.change(f"/v1/catalogs/{FIRST.version}/activate")
    assert server.reload()["catalog_version"] == FIRST.version


@pytest.mark.parametrize("active", [False, True])
def test_a_reload_keeps_a_catalog_that_was_there_before_it_was_uploaded(tmp_path: Path, active: bool) -> None:
    server = Server(tmp_path)
    try:
        if not active:
            server.upload(SECOND)
            server.change(f"/v1/catalogs/{SECOND.version}/activate")
        server.upload(FIRST)
        uploaded = {entry["version"]: entry["uploaded_at"] for entry in server.call("/v1/catalogs")["data"]}
        assert uploaded[FIRST.version] is not None
        if not active:
            server.change(f"/v1/catalogs/{FIRST.version}/activate")
        for path in tmp_path.rglob("*catalog*.jsonl"):
            save_catalog(EVERY_ID, path)
        assert server.reload()["catalog_version"] == FIRST.version
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "the catalog cannot be served: the catalog is empty"),
        (b"{", "line 1: not JSON"),
        (as_lines(FIRST) + b'\n{"item_id": "X"}', "line 61: needs item_id and semantic_id"),
        (as_lines(FIRST) + b"\n" + as_lines(FIRST), "'B000' is already used"),
        (
            as_lines(FIRST).replace(b"B001", b"B\\n1"),
            "line 2: item_id must be 1 to 512 characters, and no control",
        ),
        (b'{"item_id": "X", "semantic_id": ["<a_0>", "<b_99>", "<c_1>"]}', "<b_99>"),
        (b'{"item_id": "X", "semantic_id": ["<a_0>"]}', "have 1 levels, the model's 3"),
        (
            b'{"item_id": "X", "semantic_id": ["<a_0>", "<b_0>", "<c_0>"], "metadata": {"segments": 3}}',
            "metadata.segments",
        ),
    ],
)
def test_a_catalog_that_cannot_be_served_is_refused_with_the_reason(
    server: Server, body: bytes, words: str
) -> None:
    before = server.states()
    status, answer = server.admin("POST", "/v1/catalogs", body)
    assert (status, answer["error"]["type"]) == (422, "invalid_request")
    assert words in answer["error"]["message"]
    assert "/" not in answer["error"]["message"], "no path of the server is told"
    assert server.states() == before


def test_an_upload_is_bounded(server: Server) -> None:
    status, answer = server.admin("POST", "/v1/catalogs", b"{}" * (LARGEST // 2 + 1))
    assert (status, answer["error"]["type"]) == (413, "body_too_large")


def test_what_else_is_refused(server: Server) -> None:
    active = next(version for version, state in server.states().items() if state == "active")
    for method, path, status, words in (
        ("POST", f"/v1/catalogs/{active}/activate", 409, "active already"),
        ("POST", "/v1/catalogs/0123456789abcdef/activate", 404, "there is no catalog"),
        ("DELETE", "/v1/catalogs", 405, "does not take DELETE; it takes GET, HEAD, POST"),
        ("GET", "/v1/catalogs/rollback", 405, "does not take GET; it takes POST"),
    ):
        got, answer = server.admin(method, path)
        assert got == status and words in answer["error"]["message"], answer
    for key in ({"Authorization": "Bearer wrong"}, {"Authorization": ""}):
        for path in ("/v1/catalogs", "/v1/catalogs/rollback", f"/v1/catalogs/{active}/activate"):
            assert server.admin("POST", path, b"", **key)[0] == 401


def test_the_oldest_idle_catalog_goes_first(server: Server) -> None:
    added = [server.upload(items(np.array([[0, 0, i]]), "X")) for i in range(5)]
    states = server.states()
    assert len(states) == server.config.catalog.max_versions
    assert "active" in states.values()
    kept = [version for version in added if version in states]
    assert kept == added[-len(kept) :] and kept
