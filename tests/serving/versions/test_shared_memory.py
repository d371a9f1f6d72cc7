# SPDX-License-Identifier: Apache-2.0
"""A decoder and a scorer of one server, over HTTP, in one pool: what a reload keeps, a loss costs, metrics tell."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import pytest

from jgr.cache.memory import Memory, caches
from jgr.catalog.catalog import load_catalog
from jgr.catalog.prefix_tree import PrefixTree
from jgr.config import ConfigError, override
from jgr.models import checkpoint, decoder, manifest, params
from jgr.serving.engine.engine import Engine
from jgr.serving.http.listener import Listener
from jgr.serving.versions.deployment import Deployment
from jgr.serving.versions.loading import own_settings
from jgr.serving.versions.sources import configurations, load_all, make_engine
from tests.serving.decoders.test_cached_server import ids, make_config, scores
from tests.serving.fakes import PATIENCE_S, Pending
from tests.serving.scorer_fakes import ITEMS, MONDAY, STU, make_folder

ADMIN = {"authorization": "Bearer 4dm1n"}
USER = {"history": ITEMS[:4], "history_times": [MONDAY + at for at in range(4)], "history_actions": [1] * 4}
ASKED: dict[str, Any] = {
    "model": "tiny", "time": MONDAY + 9, "candidates": ITEMS[5:9], "context": {"slot0": 1}, **USER,
}  # fmt: skip


class Two:
    """The models "jgr", a decoder, and "tiny", a scorer."""

    def __init__(self, folder: Path, *more: str) -> None:
        """more: settings of both."""
        self.folder = folder / "decoder"
        settings = ("server.admin_key=4dm1n", "cache.shadow=0", "cache.share=3", *more)
        first = make_config(self.folder, *settings)
        second = make_folder(folder / "stu", STU, "executors.share_user=cache", "server.port=0", *more)
        self.configs = {config.model.name: config for config in (first, second)}
        self.memory = Memory.of(first, second)
        (engine, load), (other, reload) = (
            make_engine(config, False, self.memory) for config in (first, second)
        )
        ready = threading.Event()
        self.deployments = [Deployment(other, second.catalog, reload)]
        self.listener = Listener(
            engine, first, load=load, more=self.deployments, on_ready=lambda url: ready.set()
        )
        self.deployments.insert(0, self.listener.models.deployments[0])
        self._thread = threading.Thread(target=self.listener.serve_until_stopped, daemon=True)
        self._thread.start()
        assert ready.wait(PATIENCE_S)

    def stop(self) -> None:
        self.listener.stop()
        self._thread.join()
        assert self.listener.models.join(PATIENCE_S)
        self.listener.models.check()
        self.memory.check()
        assert self.memory.pages.free == self.memory.pages.count, "what drained gave its pages back"

    def call(self, path: str, body: Any = None, method: str = "POST") -> Any:
        port = int(self.listener.url.rpartition(":")[2])
        reply = Pending(port, method, path, body, ADMIN).reply()
        assert reply.status < 300, reply.body
        return reply.json

    def reload(self) -> None:
        self.call("/v1/models/jgr/reload")
        while self.call("/v1/models/jgr", method="GET")["reload"] == "running":
            pass
        assert self.call("/v1/models/jgr", method="GET")["reload"] == "done"

    def metrics(self, family: str) -> dict[str, float]:
        port = int(self.listener.url.rpartition(":")[2])
        lines = Pending(port, "GET", "/metrics", None, {}).reply().body.decode().splitlines()
        return {
            line.split(" ")[0]: float(line.split(" ")[1]) for line in lines if line.startswith(family + "{")
        }


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    server = Two(tmp_path_factory.mktemp("two"))
    yield server
    server.stop()


def rank(server: Two, user: str) -> Any:
    body = {"model": "jgr", "user_id": user, "history": ids(*range(12)), "candidates": ids(20, 21, 22)}
    return server.call("/v1/rank", body)


def score(server: Two, user: str) -> Any:
    return server.call("/v1/rank", {**ASKED, "user_id": user})


def cached(*answers: Any) -> list[int]:
    return [answer["usage"]["cached_tokens"] for answer in answers]


def test_a_reload_keeps_entries_of_the_same_weights_and_another_revision_gives_the_pages_back(
    server: Two, caplog: pytest.LogCaptureFixture
) -> None:
    cold, cold_user = rank(server, "a"), score(server, "a")
    assert cached(cold, cold_user) == [0, 0]
    server.reload()
    warm = rank(server, "a")
    assert warm["usage"]["cached_tokens"] == 13
    assert scores(warm) == pytest.approx(scores(cold), abs=1e-4)

    cfg, weights = checkpoint.load(server.folder, "float32")
    tokenizer, catalog = ((server.folder / name).read_bytes() for name in ("tokenizer.json", "catalog.jsonl"))

    def write_beside(folder: Path) -> None:
        (folder / "tokenizer.json").write_bytes(tokenizer)
        (folder / "catalog.jsonl").write_bytes(catalog)

    server.folder.rename(server.folder.with_name("old"))
    checkpoint.save(server.folder, cfg, jax.tree.map(lambda x: 1.5 * x, weights), write_beside)
    before = server.metrics("jgr_cache_pages")['jgr_cache_pages{holder="user",model="jgr"}']
    server.reload()
    pages = server.metrics("jgr_cache_pages")
    assert before > 0 == pages['jgr_cache_pages{holder="user",model="jgr"}']
    other = rank(server, "a")
    assert other["usage"]["cached_tokens"] == 0 and other["model"] != cold["model"]
    assert scores(other) != pytest.approx(scores(cold), abs=1e-3)
    assert cached(score(server, "a")) == [6], "nobody else has lost anything"


def test_a_lost_pool_is_lost_for_all_models_and_answers_stay_right(server: Two) -> None:
    cold, cold_user = rank(server, "b"), score(server, "b")
    assert cached(rank(server, "b"), score(server, "b")) == [13, 6]
    server.memory.pool.lose(server.memory.pool.epoch, ArithmeticError("the device is gone"))
    again, user = rank(server, "b"), score(server, "b")
    assert cached(again, user) == [0, 0]
    assert scores(again) == pytest.approx(scores(cold), abs=1e-4)
    assert scores(user) == pytest.approx(scores(cold_user), abs=1e-4)
    assert rank(server, "b")["usage"]["cached_tokens"] == 13


def test_a_setting_of_the_other_family_takes_no_part_of_the_pool(server: Two) -> None:
    for config in server.configs.values():
        both = override(config, "cache.policy=user", "executors.share_user=cache")
        neither = override(config, "cache.policy=none", "executors.share_user=request", "executors.growth=0")
        scorer = config.model.name == "tiny"
        own = replace(both, cache=neither.cache) if scorer else replace(both, executors=neither.executors)
        assert own_settings(both) == own and caches(own)
        other = replace(neither, cache=both.cache) if scorer else replace(neither, executors=both.executors)
        assert not caches(own_settings(other))


def test_a_load_that_fails_gives_back_what_it_opened(
    server: Two, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for config in server.configs.values():
        held = len(server.memory._held)
        monkeypatch.setattr(Engine, "__init__", Mock(side_effect=MemoryError))
        alone = override(config, "model.name=alone")
        memory = Memory.of(alone)
        with pytest.raises(MemoryError):
            make_engine(alone, False, memory)
        memory.check()
        assert not memory._held and len(server.memory._held) == held


def test_memory_is_told_by_part_and_pages_by_who_holds_them(server: Two) -> None:
    rank(server, "c")
    score(server, "c")
    told = server.metrics("jgr_memory_bytes")
    pool = [told[f'jgr_memory_bytes{{model="{model}",part="pool"}}'] for model in ("jgr", "tiny")]
    assert sum(pool) == server.memory.pool.nbytes and pool[0] / pool[1] == pytest.approx(3, rel=0.01)
    cfg, _ = checkpoint.load(server.folder, "float32")
    weights = told['jgr_memory_bytes{model="jgr",part="weights"}']
    assert isinstance(cfg, decoder.DecoderConfig) and weights == 4 * params.count(decoder.spec(cfg))
    tree = PrefixTree.build(load_catalog(server.folder / "catalog.jsonl").codes)
    assert told['jgr_memory_bytes{model="jgr",part="items"}'] == tree.nbytes
    pages = server.metrics("jgr_cache_pages")
    for model in ("jgr", "tiny"):
        assert sum(n for name, n in pages.items() if f'model="{model}"' in name) == server.memory.pages.count
    others = pages['jgr_cache_pages{holder="others",model="jgr"}']
    assert others == pages['jgr_cache_pages{holder="user",model="tiny"}'] > 0


def test_a_reload_that_keeps_an_activated_catalog_keeps_no_pages_of_the_folders_own(tmp_path: Path) -> None:
    server = Two(tmp_path)
    try:
        names = [f"<a_{(n + 7) % 30}>" for n in range(30)]
        lines = [{"item_id": f"i{n}", "semantic_id": [name]} for n, name in enumerate(names)]
        version = server.call("/v1/catalogs?model=jgr", "\n".join(map(json.dumps, lines)).encode())["version"]
        server.call(f"/v1/catalogs/{version}/activate?model=jgr", b"")
        while server.call("/v1/catalogs?model=jgr", method="GET")["activation"] == "running":
            pass
        rank(server, "a")
        server.reload()
        assert server.call("/v1/models/jgr", method="GET")["catalog_version"] == version
        assert cached(rank(server, "a"))[0] > 0
    finally:
        server.stop()  # which asks for all pages


def test_a_reload_to_a_model_that_wants_a_cache_where_there_was_none_says_so(tmp_path: Path) -> None:
    """The folder says what is cached, and a reload reads it again."""
    config = make_config(tmp_path / "m", "server.admin_key=4dm1n")
    catalog = load_catalog(tmp_path / "m" / "catalog.jsonl")
    without = replace(config, cache=replace(config.cache, policy="none"))
    manifest.write(tmp_path / "m", without, catalog)
    (loaded,) = load_all(
        [str(tmp_path / "m")], (), configurations((), ("model.compilation_cache=",), [str(tmp_path / "m")])
    )
    assert loaded.load is not None
    manifest.write(tmp_path / "m", config, catalog)
    with pytest.raises(
        ConfigError, match=r"^cache\.policy: model '.*' wants a cache by now, and had none when"
    ):
        loaded.load(loaded.engine.metrics)
    beside_another = Memory(1.0, shares={"other": 1.0})
    with pytest.raises(ConfigError, match="model 'm' wants a cache by now"):
        beside_another.limit("m")


@pytest.mark.parametrize("change", [{"policy": "hotness"}, {"window_s": 7.0}])
def test_a_reload_may_change_what_is_cached(tmp_path: Path, change: dict[str, Any]) -> None:
    """The entries of both stand side by side until the one before has drained."""
    config = make_config(tmp_path / "m", "server.admin_key=4dm1n", "cache.policy=user")
    catalog = load_catalog(tmp_path / "m" / "catalog.jsonl")
    manifest.write(tmp_path / "m", config, catalog)
    (loaded,) = load_all(
        [str(tmp_path / "m")], (), configurations((), ("model.compilation_cache=",), [str(tmp_path / "m")])
    )
    assert loaded.load is not None
    manifest.write(tmp_path / "m", replace(config, cache=replace(config.cache, **change)), catalog)
    after = loaded.load(loaded.engine.metrics)
    memory = after.served.caching.memory
    for engine in (loaded.engine, after):
        engine.served.close(True)
    memory.check()
    assert memory.pages.free == memory.pages.count


def test_who_reads_entries_for_longer_than_their_engine_lives_holds_a_part_of_its_own(tmp_path: Path) -> None:
    config = make_config(tmp_path / "m", "server.admin_key=4dm1n")
    memory = Memory.of(config)
    engine, _ = make_engine(config, False, memory)
    caching = engine.served.caching
    part = caching.lease.again()
    caching.close()
    assert part.held is caching.lease.held and memory._held
    part.close()
    assert not memory._held
    memory.check()
