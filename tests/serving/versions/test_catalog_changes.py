# SPDX-License-Identifier: Apache-2.0
"""One change at a time: what happens where a catalog and a model are to be replaced at once, over real HTTP."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jgr.catalog.catalog import Catalog, load_catalog, save_catalog
from jgr.catalog.prefix_tree import PrefixTree
from jgr.config import UserError
from jgr.prompt.tokens import PromptBuilder, semantic_id_tokenizer
from jgr.serving.api import Filters, RecommendRequest
from jgr.serving.decoders.null import NullExecutor
from jgr.serving.decoders.serve import decoder_engine
from jgr.serving.decoders.work import RecommendOutcome
from jgr.serving.engine.engine import Engine, Rebuild
from jgr.serving.engine.metrics import Metrics
from jgr.serving.policies.batching import make_profiles
from tests.serving.fakes import CATALOG, PATIENCE_S, LiveServer, Reply, make_config
from tests.serving.versions.test_reload import ADMIN, BODY, Versions, reload, wait_until

BODY_OF_UPLOAD = b"""{"item_id": "a", "semantic_id": ["<x0>", "<y0>"]}
{"item_id": "new", "semantic_id": ["<x1>", "<y0>"]}
"""


class Rebuilds:
    """Makes engines without a model, for catalogs of semantic ids that `CATALOG` has; waits while it is held."""

    def __init__(self, metrics: Metrics) -> None:
        self.open = threading.Event()
        self.open.set()
        self.errors: list[Exception] = []
        self._metrics = metrics
        self._entered = threading.Semaphore(0)

    @property
    def rebuild(self) -> Rebuild:
        return Rebuild(self.check, self.engine)

    def check(self, catalog: Catalog) -> None:
        self._pass()

    def engine(self, catalog: Catalog) -> Engine:
        self._pass()
        config = make_config()
        tree = PrefixTree.build(catalog.codes)
        prompts = PromptBuilder(config.prompt, semantic_id_tokenizer(CATALOG), catalog)
        executor = NullExecutor(make_profiles(config.profiles), tree.n_leaves)
        return decoder_engine(
            "jgr", catalog, tree, prompts, executor, config, metrics=self._metrics, rebuild=self.rebuild
        )

    def wait_entered(self) -> None:
        assert self._entered.acquire(timeout=PATIENCE_S)

    def _pass(self) -> None:
        self._entered.release()
        assert self.open.wait(PATIENCE_S)
        if self.errors:
            raise self.errors.pop()


def changing_server() -> tuple[LiveServer, Rebuilds, Versions]:
    versions = Versions()
    server = LiveServer("server.admin_key=4dm1n", load=versions)
    rebuilds = Rebuilds(server.engine.metrics)
    server.engine.rebuild = rebuilds.rebuild
    return server, rebuilds, versions


def post(server: LiveServer, path: str, body: bytes | None = None) -> Reply:
    return server.call(path, body, method="POST", **ADMIN)


def wait_listing(server: LiveServer, outcome: str) -> Any:
    for _ in range(100_000):
        listing = server.call("/v1/catalogs").json
        if listing["activation"] == outcome:
            return listing
    raise AssertionError(f"the activation is {listing['activation']}")


def conflicts(reply: Reply, words: str) -> bool:
    return (reply.status, reply.error["type"]) == (409, "conflict") and words in reply.error["message"]


def test_a_reload_and_an_activation_exclude_each_other() -> None:
    server, rebuilds, versions = changing_server()
    with server:
        version = post(server, "/v1/catalogs", BODY_OF_UPLOAD).json["version"]
        rebuilds.wait_entered()
        activate = f"/v1/catalogs/{version}/activate"
        rebuilds.open.clear()
        assert post(server, activate).status == 202
        rebuilds.wait_entered()
        assert conflicts(reload(server), f"catalog '{version}' is being activated")
        assert conflicts(post(server, activate), "is being activated")
        assert not versions.executors and server.call("/v1/recommend", BODY).status == 200
        rebuilds.open.set()
        wait_listing(server, "done")
        assert server.call("/v1/items/new").json["catalog_version"] == version

        versions.open.clear()
        assert post(server, "/v1/catalogs/rollback").status == 202
        wait_listing(server, "done")
        assert reload(server).status == 202
        versions.wait_entered()
        assert conflicts(post(server, activate), "a reload of model 'jgr' is running")
        assert conflicts(post(server, "/v1/catalogs/rollback"), "a reload of model 'jgr' is running")
        versions.open.set()
        assert wait_until(server, "done")["catalog_version"] == CATALOG.version


def test_one_upload_at_a_time() -> None:
    server, rebuilds, _ = changing_server()
    with server:
        rebuilds.open.clear()
        first = server.send("/v1/catalogs", BODY_OF_UPLOAD, method="POST", **ADMIN)
        rebuilds.wait_entered()
        assert conflicts(post(server, "/v1/catalogs", BODY_OF_UPLOAD), "another catalog is being uploaded")
        rebuilds.open.set()
        assert first.reply().status == 201
        assert post(server, "/v1/catalogs", BODY_OF_UPLOAD).status == 201


def test_an_upload_that_cannot_be_written_is_a_503(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    server, _, _ = changing_server()
    with server:
        with monkeypatch.context() as patch:
            patch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
            reply = post(server, "/v1/catalogs", BODY_OF_UPLOAD)
        assert (reply.status, reply.error["type"]) == (503, "unavailable")
        assert reply.error["message"].endswith("No such file or directory")
        assert post(server, "/v1/catalogs", BODY_OF_UPLOAD).status == 201


def test_a_failed_activation_leaves_the_catalog_and_says_why() -> None:
    server, rebuilds, _ = changing_server()
    with server:
        version = post(server, "/v1/catalogs", BODY_OF_UPLOAD).json["version"]
        rebuilds.errors.append(UserError("it does not fit"))
        assert post(server, f"/v1/catalogs/{version}/activate").status == 202
        assert wait_listing(server, "failed")["activation_error"] == "it does not fit"
        answer = server.call("/v1/recommend", BODY).json
        assert answer["catalog_version"] == CATALOG.version
        assert server.metric('jgr_catalog_activations_total{outcome="failed"}') == 1
        assert post(server, f"/v1/catalogs/{version}/activate").status == 202
        assert wait_listing(server, "done")["activation_error"] is None


def test_a_mapped_catalog_answers_as_one_in_memory(tmp_path: Path) -> None:
    save_catalog(CATALOG, tmp_path / "c.catalog")
    mapped = load_catalog(tmp_path / "c.catalog")
    filters = Filters(exclude=["c"], allow=["a", "b", "b2", "c", "unknown"])
    request = RecommendRequest(history=["a", 7, "unknown"], filters=filters, top_k=5, include_metadata=True)
    answers = []
    for catalog in (CATALOG, mapped):
        translator = Rebuilds(Metrics()).engine(catalog).served.translator
        task = translator.prepare(request)
        leaves = np.arange(3, dtype=np.int32)
        outcome = RecommendOutcome(leaves, -leaves.astype(np.float32))
        answers.append((task.work.prompt.tolist(), task.usage, translator.items(task, outcome)))
    assert answers[0] == answers[1]
    assert [item.item_id for item in answers[0][2]][:3] == ["a", "b", "b2"]
