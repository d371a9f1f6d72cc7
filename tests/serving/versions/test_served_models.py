# SPDX-License-Identifier: Apache-2.0
"""Several models in one server, over real HTTP: "jgr" beside "ranker", which only ranks, over another catalog.

Scores of "ranker" are 100 better, and each of its reloads makes them 10 better still, so that answers tell who made
them. Its catalog has the semantic ids of fakes.CATALOG; the items' names are in capitals.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

import jgr
from jgr.catalog.catalog import Catalog
from jgr.config import CatalogConfig, ConfigError
from jgr.evaluation.client import RemoteServer
from jgr.prompt.tokens import PromptBuilder, semantic_id_tokenizer
from jgr.serving.decoders.serve import decoder_engine
from jgr.serving.engine.engine import Engine, Rebuild
from jgr.serving.engine.metrics import Metrics
from jgr.serving.errors import RequestError
from jgr.serving.policies.batching import make_profiles
from jgr.serving.versions.deployment import Deployment
from jgr.serving.versions.served_models import Models
from tests.serving.fakes import (
    CATALOG,
    ITEMS,
    PATIENCE_S,
    TREE,
    FakeExecutor,
    LiveServer,
    Reply,
    make_config,
    make_engine,
)
from tests.serving.versions.test_reload import ADMIN, Versions

SYMBOLS = [[names[code] for names, code in zip(CATALOG.symbols, row, strict=True)] for row in CATALOG.codes]
CAPITALS = Catalog.build([item.upper() for item in ITEMS], SYMBOLS, [{"title": item} for item in ITEMS])
RECOMMEND = {"history": ["a"], "top_k": 1}
RANK = {"history": ["a"], "candidates": ["b", "c"]}
RANK_CAPITALS = {"history": ["A"], "candidates": ["B", "C"], "model": "ranker"}


class Ranker:
    """Makes the engines of the model "ranker"; its reloads wait while they are held."""

    def __init__(self, *settings: str, hold: bool = False) -> None:
        self.config = make_config("model.name=ranker", *settings)
        self.executors: list[FakeExecutor] = []
        self.open = threading.Event()
        self.open.set()
        self._entered = threading.Semaphore(0)
        self.deployment = Deployment(self._engine(Metrics(), CAPITALS, hold), self.config.catalog, self.load)

    def load(self, metrics: Metrics) -> Engine:
        self._entered.release()
        assert self.open.wait(PATIENCE_S)
        return self._engine(metrics, CAPITALS)

    def wait_entered(self) -> None:
        assert self._entered.acquire(timeout=PATIENCE_S)

    def _engine(self, metrics: Metrics, catalog: Catalog, hold: bool = False) -> Engine:
        profiles = tuple(p for p in make_profiles(self.config.profiles) if p.kind == "rank")
        executor = FakeExecutor(profiles, bias=100.0 + 10.0 * len(self.executors))
        if hold:
            executor.hold()
        revision = str(len(self.executors))
        self.executors.append(executor)
        prompts = PromptBuilder(self.config.prompt, semantic_id_tokenizer(CATALOG), catalog)
        return decoder_engine(
            "ranker",
            catalog,
            TREE,
            prompts,
            executor,
            self.config,
            metrics=metrics,
            revision=revision,
            rebuild=Rebuild(lambda catalog: None, partial(self._engine, metrics)),
        )


def two(ranker: Ranker, *settings: str, **listener: Any) -> LiveServer:
    return LiveServer("server.admin_key=4dm1n", *settings, more=[ranker.deployment], **listener)


def post(server: LiveServer, path: str, body: bytes | None = None) -> Reply:
    return server.call(path, body, method="POST", **ADMIN)


def entry(server: LiveServer, name: str) -> dict[str, Any]:
    found: dict[str, Any] = server.call(f"/v1/models/{name}").json
    return found


def told(reply: Reply) -> list[Any]:
    assert reply.status == 200, reply.body
    answer = reply.json
    return [
        answer["model"],
        answer["catalog_version"],
        answer["items"][0]["item_id"],
        answer["items"][0]["score"],
    ]


@pytest.fixture(scope="module")
def server() -> Any:
    with two(Ranker("server.max_history=5000", "profiles.candidates=6")) as server:
        yield server


def test_a_request_names_its_model_or_takes_the_first(server: LiveServer) -> None:
    # See fakes.py: leaf 2 is the best of [a], and a candidate's score is minus its leaf: b 1, c 2.
    assert told(server.call("/v1/recommend", RECOMMEND)) == ["jgr", CATALOG.version, "c", 0.0]
    assert told(server.call("/v1/rank", RANK)) == ["jgr", CATALOG.version, "b", -1.0]
    ranked = ["ranker@0", CAPITALS.version, "B", 99.0]
    assert told(server.call("/v1/rank", RANK_CAPITALS)) == ranked
    assert told(server.call("/v1/rank", {**RANK_CAPITALS, "model": "ranker@0"})) == ranked
    reply = server.call("/v1/rank", {**RANK, "model": "ranker"})
    assert (reply.status, reply.error["field"]) == (422, "candidates[0]"), "b is not in its catalog"


def test_what_a_model_is_not_or_does_not_do_is_refused_by_name(server: LiveServer) -> None:
    reply = server.call("/v1/rank", {**RANK, "model": "ranker@1"})
    assert (reply.status, reply.error["field"]) == (404, "model")
    words = "there is no model 'ranker@1'; there is 'jgr', now 'jgr'; there is 'ranker', now 'ranker@0'"
    assert reply.error["message"] == words
    reply = server.call("/v1/recommend", {**RECOMMEND, "model": "ranker"})
    assert (reply.status, reply.error["field"]) == (422, "model")
    assert reply.error["message"] == "model 'ranker' does not serve recommend; 'jgr' can be asked"


def test_without_a_name_the_first_that_serves_the_kind_is_asked() -> None:
    ranker, other = Ranker(), make_engine(make_config())
    models = Models([ranker.deployment, Deployment(other, CatalogConfig())])
    assert models.engine(None, "rank") is ranker.deployment.engine
    assert models.engine(None, "recommend") is other
    with pytest.raises(RequestError, match="no model of this server serves recommend") as refusal:
        Models([Ranker().deployment]).engine(None, "recommend")
    assert (refusal.value.type, refusal.value.field) == ("invalid_request", "model")


def test_every_list_of_models_forgets_its_choice_when_the_engine_changes() -> None:
    async def scenario() -> None:
        ranker = Ranker()
        lists = [Models([ranker.deployment]) for _ in range(2)]
        await lists[0].start(lambda done, total, label: None)
        before = [models.engine(None, "rank") for models in lists]
        assert before == [ranker.deployment.engine] * 2 and all(models.chosen for models in lists)
        ranker.deployment.reload()
        await ranker.deployment.settled()
        assert ranker.deployment.engine not in before and not any(models.chosen for models in lists)
        await lists[0].drain(PATIENCE_S)

    asyncio.run(scenario())


def test_two_models_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.name: there are two of 'ranker'"):
        Models([Ranker().deployment, Ranker().deployment])


def test_models_are_listed_in_the_configured_order(server: LiveServer) -> None:
    listed = server.call("/v1/models").json["data"]
    assert [(m["id"], m["state"], m["max_beam_width"], m["max_candidates"]) for m in listed] == [
        ("jgr", "ready", 5, 4),
        ("ranker", "ready", 0, 6),
    ]
    assert listed == [entry(server, "jgr"), entry(server, "ranker@0")]


def test_what_is_of_one_catalog_names_its_model(server: LiveServer) -> None:
    assert server.call("/v1/items/B?model=ranker").json["catalog_version"] == CAPITALS.version
    assert server.call("/v1/items/b?model=jgr").json["catalog_version"] == CATALOG.version
    assert server.call("/v1/items/b?model=ranker").status == 404
    assert server.call("/v1/items/b?model=none").error["field"] == "model"
    calls = [server.call("/v1/items/b"), server.call("/v1/catalogs"), post(server, "/v1/catalogs", b"x")]
    calls += [post(server, f"/v1/catalogs/{part}") for part in ("rollback", f"{CATALOG.version}/activate")]
    for reply in calls:
        assert (reply.status, reply.error["field"]) == (422, "model")
        assert "add ?model= with one of 'jgr', 'ranker'" in reply.error["message"]


def test_an_evaluation_asks_the_model_that_it_names_or_the_one_of_its_catalog(server: LiveServer) -> None:
    with jgr.Client(server.listener.url) as client:
        assert RemoteServer(client, CATALOG, "ranker").info.id == "jgr"
        remote = RemoteServer(client, CAPITALS)
        ((best, other),) = remote.rank_all([{key: RANK_CAPITALS[key] for key in ("history", "candidates")}])
    assert (best.item_id, best.score, other.item_id, other.score) == ("B", 99.0, "C", 98.0)


def test_the_description_has_the_widest_limits_and_the_model(server: LiveServer) -> None:
    description = server.call("/openapi.json").json
    schema = description["components"]["schemas"]["RankRequest"]["properties"]
    assert (schema["candidates"]["maxItems"], schema["history"]["maxItems"]) == (6, 5000)
    named = {
        (method, path)
        for path, methods in description["paths"].items()
        for method, operation in methods.items()
        if any((p["name"], p["in"]) == ("model", "query") for p in operation["parameters"])
    }
    assert named == {
        ("get", "/v1/items"),
        ("get", "/v1/items/{item_id}"),
        ("get", "/v1/catalogs"),
        ("post", "/v1/catalogs"),
        ("post", "/v1/catalogs/rollback"),
        ("post", "/v1/catalogs/{version}/activate"),
        ("delete", "/v1/catalogs/{version}/activate"),
    }


def test_a_user_is_erased_in_every_model(monkeypatch: pytest.MonkeyPatch) -> None:
    ranker = Ranker()
    with two(ranker) as server:
        for engine, entries in ((server.engine, 2), (ranker.deployment.engine, 3)):
            monkeypatch.setattr(engine, "forget", lambda *whose, of=entries: {("u", ""): of}[whose])
        assert server.call("/v1/users/u/cache", method="DELETE").json == {"entries": 5}


def test_series_of_a_model_carry_its_name() -> None:
    with two(Ranker()) as server:
        server.call("/v1/rank", RANK)
        server.call("/v1/rank", RANK_CAPITALS)
        server.call("/v1/rank", {**RANK_CAPITALS, "history": ["A", "nothing"]})
        text = server.call("/metrics").body.decode()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    expected = {
        'jgr_requests_total{endpoint="/v1/rank",status="200"}': 3,
        'jgr_compilations_total{phase="request"}': 0,
        'jgr_batch_size_count{kind="rank",model="jgr"}': 1,
        'jgr_batch_size_count{kind="rank",model="ranker"}': 2,
        'jgr_stage_seconds_count{kind="rank",model="ranker",stage="total"}': 2,
        'jgr_unknown_items_total{model="jgr"}': 0,
        'jgr_unknown_items_total{model="ranker"}': 1,
        'jgr_queue_depth{model="ranker"}': 0,
        'jgr_model_info{model="jgr",version="jgr"}': 1,
        'jgr_model_info{model="ranker",version="ranker@0"}': 1,
        f'jgr_catalog_info{{model="ranker",version="{CAPITALS.version}"}}': 1,
    }
    assert {name: float(values[name]) for name in expected} == expected
    of_all = {name.partition("{")[0] for name in values if name.startswith("jgr_") and "model=" not in name}
    assert of_all == {"jgr_requests_total", "jgr_refused_total", "jgr_compilations_total"}
    families = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(families) == len(set(families)), "a family is told once"


def test_one_model_is_reloaded_while_the_others_stay() -> None:
    ranker = Ranker()
    with two(ranker) as server:
        ranker.open.clear()
        reply = post(server, "/v1/models/ranker/reload")
        assert (reply.status, reply.headers["location"]) == (202, "/v1/models/ranker")
        ranker.wait_entered()
        assert post(server, "/v1/models/ranker/reload").status == 409
        assert (entry(server, "jgr")["reload"], entry(server, "ranker")["reload"]) == ("never", "running")
        assert told(server.call("/v1/rank", RANK)) == ["jgr", CATALOG.version, "b", -1.0]
        assert told(server.call("/v1/rank", RANK_CAPITALS)) == ["ranker@0", CAPITALS.version, "B", 99.0]
        by_version = {**RANK_CAPITALS, "model": "ranker@0"}
        assert server.call("/v1/rank", by_version).status == 200
        ranker.open.set()
        while entry(server, "ranker")["reload"] == "running":
            pass
        assert told(server.call("/v1/rank", RANK_CAPITALS)) == ["ranker@1", CAPITALS.version, "B", 109.0]
        assert server.call("/v1/rank", by_version).status == 404, "that version is gone"
        assert post(server, "/v1/models/jgr/reload").status == 409, "it came from no folder"
        assert server.metric('jgr_model_reloads_total{model="ranker",outcome="done"}') == 1
        assert server.metric('jgr_model_reloads_total{model="jgr",outcome="done"}') == 0


def test_a_catalog_belongs_to_one_model() -> None:
    with two(Ranker()) as server:
        body = b'{"item_id": "new", "semantic_id": ["<x0>", "<y0>"]}'
        assert post(server, "/v1/catalogs?model=jgr", body).status == 409
        version = post(server, "/v1/catalogs?model=ranker", body).json["version"]
        listed = [server.call(f"/v1/catalogs?model={name}").json["data"] for name in ("jgr", "ranker")]
        assert [[entry["version"] for entry in data] for data in listed] == [
            [CATALOG.version],
            [CAPITALS.version, version],
        ]
        assert post(server, f"/v1/catalogs/{version}/activate?model=jgr").status == 404
        reply = post(server, f"/v1/catalogs/{version}/activate?model=ranker")
        assert (reply.status, reply.headers["location"]) == (202, "/v1/catalogs?model=ranker")
        while server.call(reply.headers["location"]).json["activation"] == "running":
            pass
        assert entry(server, "ranker")["catalog_version"] == version
        assert entry(server, "jgr")["catalog_version"] == CATALOG.version
        assert server.call("/v1/items/new?model=ranker").json["catalog_version"] == version
        assert server.metric('jgr_catalog_items{model="ranker"}') == 1
        assert server.metric('jgr_catalog_items{model="jgr"}') == 6


def test_the_server_is_ready_when_every_model_is() -> None:
    ranker = Ranker(hold=True)
    server = two(ranker)
    server._hold = True  # it does not wait to be ready
    with server:
        ranker.executors[0].wait_entered()
        assert server.call("/health/ready").error["message"] == "the server is starting"
        assert [model["state"] for model in server.call("/v1/models").json["data"]] == ["ready", "starting"]
        assert server.call("/v1/recommend", RECOMMEND).status == 200, "a model serves once it is compiled"
        assert server.call("/v1/rank", RANK_CAPITALS).status == 503
        assert not server.ready.is_set()
        ranker.executors[0].release()
        assert server.ready.wait(PATIENCE_S)
        assert server.call("/health/ready").status == 200


def test_a_warm_up_that_fails_ends_the_start_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    ranker = Ranker()
    ranker.executors[0].errors.append(RuntimeError("no room"))
    server = two(ranker)
    server._hold = True
    with server:
        assert server.join() == 1
    assert "the warm-up of model ranker failed" in caplog.text
    assert not server.ready.is_set()


def test_a_model_that_was_drained_before_its_turn_is_not_started() -> None:
    held, ranker = FakeExecutor(make_profiles(make_config().profiles)), Ranker()
    held.hold()
    models = Models([Deployment(make_engine(make_config(), held), CatalogConfig()), ranker.deployment])

    async def play() -> None:
        start = asyncio.create_task(models.start(lambda done, total, label: None))
        await asyncio.to_thread(held.wait_entered)
        assert await models.drain(PATIENCE_S)
        held.release()
        await asyncio.wait_for(start, PATIENCE_S)

    asyncio.run(play())
    assert models.status == "draining"
    assert models.join(PATIENCE_S)


def test_a_stop_finishes_the_requests_of_every_model() -> None:
    ranker = Ranker()
    with two(ranker) as server:
        server.executor.hold()
        ranker.executors[0].hold()
        running = [server.send("/v1/rank", body) for body in (RANK, RANK_CAPITALS)]
        server.executor.wait_entered()
        ranker.executors[0].wait_entered()  # its warm-up
        ranker.executors[0].wait_entered()
        server.stop()
        while server.call("/health/ready").status == 200:
            pass
        late = server.call("/v1/rank", RANK_CAPITALS)
        assert (late.status, late.headers["connection"]) == (503, "close")
        server.executor.release()
        ranker.executors[0].release()
        assert [told(pending.reply())[0] for pending in running] == ["jgr", "ranker@0"]
        assert server.join() == 0


def test_sighup_reloads_one_model_after_the_other(caplog: pytest.LogCaptureFixture) -> None:
    """The server runs in the main thread, where signals arrive, and its client in another."""
    versions, ranker = Versions(), Ranker()
    nowhere = Deployment(make_engine(make_config("model.name=null")), CatalogConfig())
    server = LiveServer(load=versions, more=[nowhere, ranker.deployment])

    def client() -> list[tuple[str, str]]:
        try:
            assert server.ready.wait(PATIENCE_S)
            versions.open.clear()
            os.kill(os.getpid(), signal.SIGHUP)
            versions.wait_entered()
            assert entry(server, "ranker")["reload"] == "never", "it waits for the first"
            versions.open.set()
            while entry(server, "ranker")["reload"] != "done":
                pass
            return [(model["version"], model["reload"]) for model in server.call("/v1/models").json["data"]]
        finally:
            versions.open.set()
            server.stop()

    with ThreadPoolExecutor(1) as pool:
        played = pool.submit(client)
        assert server.listener.serve_until_stopped() == 0
        assert played.result() == [("jgr@1", "done"), ("null", "never"), ("ranker@1", "done")]
    assert server.listener.models.join(PATIENCE_S)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.startswith("SIGHUP has no effect on model 'null': ")
