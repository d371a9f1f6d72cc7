# SPDX-License-Identifier: Apache-2.0
"""Ranking with candidates in the prompt and a cache, over real HTTP: what answers say, and that they are right."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jgr.catalog.catalog import Catalog, save_catalog
from jgr.config import Config, UserError, override
from jgr.models import checkpoint, decoder, decoder_costs, params
from jgr.models.generator_costs import Prefill
from jgr.prompt.tokens import semantic_id_tokenizer
from jgr.serving.decoders import cost_grid
from jgr.serving.decoders.loading import load_engine
from jgr.serving.decoders.paged_executor import DecoderExecutors
from jgr.serving.engine import cost_profile
from jgr.serving.http.listener import Listener
from jgr.serving.policies import jobs
from jgr.training.generator import decoder_config
from tests.serving.fakes import PATIENCE_S, Pending, Reply

N_ITEMS = 30


def make_config(folder: Path, *settings: str) -> Config:
    """A folder with random weights over items of one token each, served with a small cache."""
    catalog = Catalog.build(
        [f"i{n}" for n in range(N_ITEMS)], [[f"<a_{n}>"] for n in range(N_ITEMS)], [{}] * N_ITEMS
    )
    tokenizer = semantic_id_tokenizer(catalog)
    config = override(
        Config(),
        "model.compilation_cache=",
        f"model.path={folder}",
        "train.layers=2",
        "train.hidden=32",
        "prompt.max_items=12",
        "prompt.template=<bos>{history}<sid>",
        "rank.method=item_token",
        "rank.item=<sid>{sid}",
        "rank.item_span=4",
        "rank.requests=4",
        "rank.tokens=64",
        "rank.context=64",
        "rank.candidates=16",
        "profiles.widths=4",
        "beam.width=4",
        "cache.policy=hotness",
        "cache.device_mb=0.2",
        "cache.page_kb=2",
        "cache.item_share=0.125",
        "cache.cell_tokens=2",
        "profiles.batch=4",
        "cache.shadow=1",
        "server.port=0",
        *settings,
    )
    cfg = decoder_config(config.train, tokenizer.vocab_size, 64)
    drawn = jax.tree.map(lambda x: x * 3, params.initialize(decoder.spec(cfg), jax.random.key(0)))

    def write_beside(folder: Path) -> None:
        tokenizer.save(folder / "tokenizer.json")
        save_catalog(catalog, folder / "catalog.jsonl")

    checkpoint.save(folder, cfg, drawn, write_beside)
    return config


class Served:
    """A server over an engine, in a thread of this process."""

    def __init__(self, config: Config, kinds: Sequence[jobs.Kind] = jobs.KINDS) -> None:
        self.config, self.engine = config, load_engine(config, kinds=kinds)
        ready = threading.Event()
        self._listener = Listener(self.engine, config, on_ready=lambda url: ready.set())
        self.port = int(self._listener.url.rpartition(":")[2])
        self._thread = threading.Thread(target=self._listener.serve_until_stopped, daemon=True)
        self._thread.start()
        assert ready.wait(PATIENCE_S)

    def stop(self) -> None:
        self._listener.stop()
        self._thread.join()
        assert self._listener.exit_code == 0

    def call(self, path: str, body: Any = None, method: str | None = None) -> Reply:
        return Pending(self.port, method or ("GET" if body is None else "POST"), path, body, {}).reply()

    def rank(self, user: str, history: list[str], candidates: list[str], **more: Any) -> dict[str, Any]:
        body = {"user_id": user, "history": history, "candidates": candidates, "explain": True, **more}
        reply = self.call("/v1/rank", body)
        assert reply.status == 200, reply.body
        answer: dict[str, Any] = reply.json
        return answer

    def metrics(self, *names: str) -> list[float]:
        """Values of one moment."""
        lines = self.call("/metrics").body.decode().splitlines()
        return [
            float(next(x for x in lines if x.startswith(f"{name} ")).removeprefix(name)) for name in names
        ]

    def drifts(self, within: float) -> tuple[float, float]:
        """How many were at most so large, and how many there were."""
        few, every = self.metrics(f'jgr_shadow_drift_bucket{{le="{within}"}}', "jgr_shadow_drift_count")
        return few, every


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = Served(make_config(tmp_path_factory.mktemp("model"), "profiles.batch=1,4"))
    yield server
    server.stop()


def ids(*rows: int) -> list[str]:
    return [f"i{row}" for row in rows]


def scores(answer: Any) -> dict[str, float]:
    return {item["item_id"]: item["score"] for item in answer["items"]}


def test_an_answer_says_what_it_reused(server: Served) -> None:
    history, candidates = ids(*range(12)), ids(20, 21, 22)
    cold = server.rank("u", history, candidates)
    usage = cold["usage"]
    assert (usage["layout"], usage["cached_tokens"]) == ("user_prefix", 0), (
        "the history is longer than the items"
    )
    assert usage["prompt_tokens"] == usage["computed_tokens"] == 13 + 3 * 2 + 1
    assert cold["explain"][0] == {"segment": "user", "tokens": 13, "cached_tokens": 0, "kept": True}
    warm = server.rank("u", history, candidates[::-1])
    assert (warm["usage"]["cached_tokens"], warm["usage"]["computed_tokens"]) == (13, 7)
    assert [part.get("item_id") for part in warm["explain"]] == [None, *candidates[::-1]]
    assert scores(warm) == pytest.approx(scores(cold), abs=1e-4)

    forced = server.rank("u", history, candidates, layout="item_prefix")
    again = server.rank("v", history, candidates, layout="item_prefix")
    assert (forced["usage"]["layout"], again["usage"]["cached_tokens"]) == ("item_prefix", 6)
    assert scores(again) == pytest.approx(scores(forced), abs=1e-4)
    assert scores(forced) != pytest.approx(scores(cold), abs=1e-3), "another layout is another prompt"


def test_a_user_is_erased(server: Served) -> None:
    history = ids(*range(5, 17))
    server.rank("w/1", history, ids(1))
    assert server.rank("w/1", history, ids(1))["usage"]["cached_tokens"] == 13
    assert server.call("/v1/users/w%2F1/cache", method="DELETE").json == {"entries": 1}
    assert server.call("/v1/users/w%2F1/cache", method="DELETE").json == {"entries": 0}
    assert server.rank("w/1", history, ids(1))["usage"]["cached_tokens"] == 0


def test_recommend_reads_the_same_entry(server: Served) -> None:
    history = ids(*range(8, 20))
    body = {"user_id": "x", "history": history, "top_k": 4, "explain": True}
    cold = server.call("/v1/recommend", body).json
    server.rank("x", history, ids(1))
    warm = server.call("/v1/recommend", body).json
    assert (cold["usage"]["cached_tokens"], warm["usage"]["cached_tokens"]) == (0, 13)
    assert scores(warm) == pytest.approx(scores(cold), abs=1e-4)


def test_mixed_load_never_drifts(server: Served) -> None:
    """Every request that reused something is computed again while the server is idle."""
    rng = np.random.default_rng(3)

    def client(number: int) -> None:
        own = np.random.default_rng(number)
        for _ in range(30):
            user = int(own.integers(0, 8))
            history = ids(*np.random.default_rng(user).integers(0, N_ITEMS, own.integers(10, 13)))
            candidates = ids(*own.choice(N_ITEMS, own.integers(1, 12), replace=False))
            server.rank(f"user{user}", history, candidates)

    _, before = server.drifts(1e-4)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(client, rng.integers(0, 1000, 3).tolist()))
    within, after = server.drifts(1e-4)
    assert before < after == within
    compiled, evicted = server.metrics(
        'jgr_compilations_total{phase="request"}', 'jgr_cache_events_total{event="item_evicted"}'
    )
    assert compiled == 0 and evicted > 0
    pages = server.metrics(
        *(f'jgr_cache_pages{{holder="{kind}"}}' for kind in ("free", "user", "item", "others"))
    )
    caching = server.engine.served.caching
    assert caching is not None and sum(pages) == caching.meta.pages.count


def test_a_corrupted_page_raises_the_drift(server: Served) -> None:
    history, candidates = ids(*range(3, 15)), ids(20, 21)
    server.rank("y", history, candidates)
    paged = server.engine.served.executors.paged  # type: ignore[attr-defined]
    paged.pool.write(lambda array: array + (1 << 20), paged.pool.epoch)
    answer = server.rank("y", history, candidates)
    assert answer["usage"]["cached_tokens"] > 0
    within, count = next(
        (found for _ in range(1000) if (found := server.drifts(1e-3))[0] < found[1]), server.drifts(1e-3)
    )
    assert within < count


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"layout": "sideways"}, "layout"),
        ({"explain": 3}, "explain"),
        ({"candidates": ids(*range(17))}, "candidates"),
    ],
)
def test_bad_requests(server: Served, body: dict[str, Any], field: str) -> None:
    reply = server.call("/v1/rank", {"history": ids(1), "candidates": ids(2), **body})
    assert (reply.status, reply.error["field"]) == (422, field)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("rank.item={sid}<sid>", r"rank.item: must end with \{sid\}"),
        ("rank.instruction=", "rank.instruction"),
        ("rank.item=<none>{sid}", "rank.item"),
        ("cache.device_mb=0.00001", "cache.device_mb"),
        ("rank.tokens=8,4", "rank.tokens"),
        ("cache.cell_tokens=50", "cache.page_kb"),
    ],
)
def test_bad_settings(tmp_path: Path, setting: str, words: str) -> None:
    config = make_config(tmp_path)
    with pytest.raises(UserError, match=words):
        load_engine(override(config, setting))


@pytest.mark.parametrize("kinds", [("recommend",), ("rank",), jobs.KINDS])
def test_only_the_kinds_that_are_asked_for_have_programs(tmp_path: Path, kinds: Sequence[jobs.Kind]) -> None:
    engine = load_engine(make_config(tmp_path, "cache.policy=user"), kinds=kinds)
    assert {profile.kind for profile in engine.served.executors.profiles} == set(kinds)
    assert all(profile.packed for profile in engine.served.executors.profiles)
    assert engine.served.caching is not None and set(engine.served.caching.groupings) == set(kinds)


def test_packed_programs_are_profiled_by_what_is_new_and_cached(tmp_path: Path) -> None:
    config = make_config(tmp_path, "rank.tokens=32,64", "rank.context=64")
    executors = load_engine(config).served.executors
    assert isinstance(executors, DecoderExecutors) and executors.paged is not None
    before = executors.paged.profiles
    trials = cost_grid.trials(executors, lambda done, total, label: None, most=2)
    assert executors.paged.profiles == before
    ranks = [trial for trial in trials if trial.kind == "rank_packed"]
    cfg = executors.plain.model[0]
    for trial in ranks:
        new, cached, context = map(
            int, trial.label.replace(" of ", " after ").split(" width")[0].split(" after ")
        )
        counted = decoder_costs.cost(
            cfg, Prefill(new, context, new * cached + new * (new + 1) // 2, 16, cached + new)
        )
        assert trial.cost == counted
        (outcome,) = trial.collect(trial.launch())
        assert outcome.scores.shape == (1,)
    assert {trial.label.split()[0] for trial in ranks} == {"16"}
    assert {trial.label.split()[2] for trial in ranks} == {"0", "8", "16", "32", "64"}
    generated = [trial for trial in trials if trial.kind == "recommend_packed"]
    for trial in generated:
        outcomes = trial.collect(trial.launch())
        assert len(outcomes) == trial.requests == 4
        assert all(len(outcome.leaves) for outcome in outcomes)
    timed = cost_profile.measure(trials, rounds=1)
    model = cost_profile.fit(timed, cfg.family)
    assert set(model.kinds) == {"rank_packed", "recommend_packed"}


def test_another_catalog_shares_the_programs_the_pool_and_what_is_in_it(server: Served) -> None:
    catalog = Catalog.build(
        [f"j{n}" for n in range(N_ITEMS)], [[f"<a_{n}>"] for n in range(N_ITEMS)], [{}] * N_ITEMS
    )
    assert server.engine.rebuild is not None
    rebuilt = server.engine.rebuild.engine(catalog)
    ours, other = server.engine.served.executors, rebuilt.served.executors
    assert isinstance(ours, DecoderExecutors) and isinstance(other, DecoderExecutors)
    assert other.to_compile == 0
    assert ours.paged is not None and other.paged is not None and ours.paged.pool is other.paged.pool
    assert rebuilt.served.caching is not None and rebuilt.served.caching.meta is server.engine.meta
    rebuilt.served.caching.lease.close()


@pytest.mark.parametrize(("rule", "layout"), [("priced", "item_prefix"), ("published", "user_prefix")])
def test_the_published_rule_of_hotness_is_served(tmp_path: Path, rule: str, layout: str) -> None:
    """A cached user goes first by it, where more tokens of the items are cached too; scores do not depend on that."""
    served = Served(make_config(tmp_path / "model", f"cache.rule={rule}"))
    try:
        candidates = ids(20, 21, 22, 23, 24)
        served.rank("other", ids(3), candidates, layout="item_prefix")
        assert served.rank("u", ids(0, 1, 2), ids(20))["usage"]["layout"] == "user_prefix"
        answer = served.rank("u", ids(*range(12)), candidates)
        usage = answer["usage"]
        assert (usage["layout"], usage["cached_tokens"]) == (layout, 4 if layout == "user_prefix" else 10)
        whole = served.rank("v", ids(*range(12)), candidates, layout=layout)
        assert scores(answer) == pytest.approx(scores(whole), abs=1e-4)
    finally:
        served.stop()
