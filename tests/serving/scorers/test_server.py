# SPDX-License-Identifier: Apache-2.0
"""HSTU and the STU behind the whole server: scores are those of the models, whatever the split, the executor, the order
and the company, cached or not, and nothing compiles after warm-up (FLAME-15.1 and 15.5, MODEL-13)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as some
import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

import jgr
from jgr.catalog.catalog import Catalog, load_catalog, save_catalog
from jgr.config import ConfigError, UserError, override
from jgr.data.interactions import Examples, Ragged
from jgr.evaluation.client import RemoteServer
from jgr.evaluation.served import Query
from jgr.models import scorers
from jgr.models.scorers import Candidates, ScorerConfig, Users
from jgr.serving.scorers.translation import best_first
from jgr.serving.versions.loading import load_any
from tests.serving.scorer_fakes import (
    CATALOG,
    DAY,
    HSTU,
    ITEMS,
    MONDAY,
    STU,
    ScorerServer,
    draw,
    make_folder,
)

TOLERANCE = 1e-4
WEEK = 7 * DAY


@pytest.fixture(scope="module")
def hstu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScorerServer]:
    """Every part computes the user."""
    folder = tmp_path_factory.mktemp("hstu") / "model"
    with ScorerServer(make_folder(folder, HSTU, "executors.share_user=part")) as server:
        yield server


@pytest.fixture(scope="module")
def stu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScorerServer]:
    """Users are kept: room for three."""
    folder = tmp_path_factory.mktemp("stu") / "model"
    settings = (
        "executors.share_user=cache", "cache.device_mb=0.02", "executors.streams=4", "server.explain=true"
    )  # fmt: skip
    with ScorerServer(make_folder(folder, STU, *settings)) as server:
        yield server


def asked(seed: int, candidates: int, actions: bool = False, **given: Any) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    events = int(rng.integers(1, 10))
    times = MONDAY + np.sort(rng.integers(0, 5 * DAY, events))
    body: dict[str, Any] = {
        "history": [ITEMS[row] for row in rng.choice(len(ITEMS), events, replace=False)],
        "history_times": times.tolist(),
        "time": int(times[-1] + rng.integers(0, DAY)),
        "candidates": [ITEMS[row] for row in rng.choice(len(ITEMS), candidates, replace=False)],
        "user_id": f"u{seed}",
    }
    if actions:
        body["history_actions"] = rng.integers(0, 8, events).tolist()
        body["context"] = {"slot0": int(rng.integers(0, 4))}
    return body | given


def directly(cfg: ScorerConfig, body: dict[str, Any]) -> npt.NDArray[np.float32]:
    """[60, P]: the model's own scores of every item, with `read` and `score` called for all at once."""
    model, size = scorers.scorer(cfg), cfg.max_items
    origin = body["history_times"][-size:][0] // WEEK * WEEK
    users = {"rows": np.full((1, size), -1), "actions": np.zeros((1, size)), "times": np.zeros((1, size))}
    given = {
        "rows": [ITEMS.index(item) for item in body["history"]],
        "actions": body.get("history_actions", [0] * len(body["history"])),
        "times": [time - origin for time in body["history_times"]],
    }
    for name, values in given.items():
        users[name][0, : len(values[-size:])] = values[-size:]
    arrays = {name: jnp.asarray(x, jnp.int32) for name, x in users.items()}
    context = jnp.array([[body.get("context", {}).get("slot0", -1), -1]], jnp.int32)
    now = jnp.array([body["time"] - origin], jnp.int32)
    rows = jnp.arange(len(ITEMS), dtype=jnp.int32)[None]

    @jax.jit
    def scores(params: Any, users: Users) -> jax.Array:
        return model.score(params, cfg, model.read(params, cfg, users), Candidates(rows, {}))

    if cfg not in _SCORES:
        _SCORES[cfg] = partial(scores, draw(cfg))
    found = _SCORES[cfg](Users(**arrays, now=now, context=context, scenario=jnp.zeros(1, jnp.int32)))
    return np.asarray(found[0])


_SCORES: dict[ScorerConfig, Any] = {}


def by_item(answer: Any) -> dict[str, float]:
    return {item["item_id"]: item["score"] for item in answer["items"]}


def test_hstus_scores_are_the_models(hstu: ScorerServer) -> None:
    for seed in range(6):
        body = asked(seed, 1 + 9 * seed)
        answer, expected = hstu.rank(**body), directly(HSTU, body)
        found = by_item(answer)
        assert sorted(found) == sorted(body["candidates"])
        for item, score in found.items():
            assert score == pytest.approx(expected[ITEMS.index(item), 0], abs=TOLERANCE)
        assert list(found.values()) == sorted(found.values(), reverse=True)
        assert "scores" not in answer["items"][0] and "normalize" not in answer
        assert "feature_missing" not in answer["usage"]
        assert answer["usage"]["layout"] == "single_user_multi_item"


def test_the_stus_scores_are_the_models_by_task_and_cached_ones_too(stu: ScorerServer) -> None:
    for seed in range(6):
        body = asked(seed, 1 + 9 * seed, actions=True)
        first, again, expected = stu.rank(**body), stu.rank(**body), directly(STU, body)
        for answer in (first, again):
            for item in answer["items"]:
                score = expected[ITEMS.index(item["item_id"])]
                assert list(item["scores"]) == ["click", "like"]
                np.testing.assert_allclose(list(item["scores"].values()), score, atol=TOLERANCE)
                assert item["score"] == item["scores"]["click"]
        assert first["usage"]["cached_tokens"] == again["usage"]["computed_tokens"] == 0
        assert again["usage"]["cached_tokens"] == min(6, len(body["history"])) + 2
    weighed = stu.rank(**body, task_weights={"click": -1.0, "like": 0.25}, top_k=5)
    order = np.argsort(-(expected @ np.array([-1.0, 0.25], np.float32)), kind="stable")
    kept = [ITEMS[row] for row in order if ITEMS[row] in body["candidates"]][:5]
    assert [item["item_id"] for item in weighed["items"]] == kept


def test_scores_do_not_depend_on_split_executor_order_or_company(
    hstu: ScorerServer, stu: ScorerServer
) -> None:
    for server, actions in ((hstu, False), (stu, True)):
        body = asked(7, 30, actions)
        whole = by_item(server.rank(**body))
        others = [
            body | {"candidates": body["candidates"][::-1]},
            *(body | {"candidates": body["candidates"][:count]} for count in (1, 3, 4, 5, 8, 9, 13, 20)),
            *(body | {"candidates": body["candidates"][at:]} for at in (7, 22, 29)),
            *(asked(seed, 5 + seed, actions) for seed in range(20, 32)),  # company only
        ]
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda body, server=server: server.rank(**body), others * 2))
        compared = 0
        for given, answer in zip(others * 2, answers, strict=True):
            if given["user_id"] == body["user_id"]:
                assert (
                    answer["usage"]["parts"] == -(-len(given["candidates"]) // 8)
                    or answer["usage"]["parts"] > 1
                )
                for item, score in by_item(answer).items():
                    assert score == pytest.approx(whole[item], abs=TOLERANCE)
                    compared += 1
        assert compared == 2 * (30 + 63 + 23 + 8 + 1)


def test_the_whole_catalog_is_ranked_by_one_word(hstu: ScorerServer, stu: ScorerServer) -> None:
    for server, cfg in ((hstu, HSTU), (stu, STU)):
        body = asked(3, 1) | {"candidates": ITEMS}
        expected = directly(cfg, body)[:, 0]
        answer = server.rank(**body | {"candidates": "all"})
        assert answer["items"] == server.rank(**body)["items"]
        assert answer["usage"]["candidates"] == len(answer["items"]) == len(ITEMS)
        for item, score in by_item(answer).items():
            assert score == pytest.approx(expected[ITEMS.index(item)], abs=TOLERANCE)
        few = server.rank(**body | {"candidates": "all", "exclude_history": True, "top_k": 5})
        left = [item for item in answer["items"] if item["item_id"] not in body["history"]]
        assert few["usage"]["candidates"] == len(left)
        assert [item["item_id"] for item in few["items"]] == [item["item_id"] for item in left[:5]]


def test_an_evaluation_ranks_the_whole_catalog(hstu: ScorerServer, stu: ScorerServer) -> None:
    bodies = [asked(seed, 1) for seed in range(12)]
    histories = Ragged.of([[ITEMS.index(item) for item in body["history"]] for body in bodies])
    times = np.concatenate([body["history_times"] for body in bodies])
    targets = np.zeros(len(bodies), np.int32)
    asked_at = np.array([body["time"] for body in bodies])
    examples = Examples(replace(histories, times=times), targets, np.arange(len(bodies)), asked_at)
    for server, cfg in ((hstu, HSTU), (stu, STU)):
        expected = np.stack([directly(cfg, body)[:, 0] for body in bodies])
        for exclude in (False, True):
            with jgr.Client(server.url) as client:
                remote = RemoteServer(client, CATALOG)
                found = remote.recommend_all(examples, Query(60, exclude_history=exclude))
            for row, scores, body in zip(found, expected, bodies, strict=True):
                seen = {ITEMS.index(item) for item in body["history"]} if exclude else set()
                kept = [item for item in row.tolist() if item >= 0]
                assert sorted(kept) == [item for item in range(len(ITEMS)) if item not in seen]
                assert (np.diff(scores[kept]) <= TOLERANCE).all()


@hypothesis.given(
    some.lists(some.integers(0, 4), min_size=1, max_size=30), some.integers(1, 30) | some.none()
)
def test_the_best_of_many_are_those_of_a_stable_sort(scores: list[int], k: int | None) -> None:
    array = np.array(scores, np.float32)
    assert best_first(array, k).tolist() == np.argsort(-array, kind="stable")[:k].tolist()


def test_nothing_compiles_after_warm_up_and_padding_is_counted(hstu: ScorerServer, stu: ScorerServer) -> None:
    series = 'jgr_compilations_total{phase="request"}'
    for server, actions in ((hstu, False), (stu, True)):
        before = server.metric(series)
        pairs = server.metric('jgr_pairs_total{of="candidates"}')
        for count in range(1, 25, 3):
            server.rank(**asked(count, count, actions))
        assert server.metric(series) == before
        assert server.metric('jgr_pairs_total{of="candidates"}') - pairs == sum(range(1, 25, 3))
        assert server.metric('jgr_pairs_total{of="padding"}') > 0
        parts = sum(server.metric(f'jgr_parts_total{{size="{size}"}}') for size in (4, 8))
        assert server.metric("jgr_executor_wait_seconds_count") >= parts > 0


def test_a_users_entries_are_erased_and_no_page_is_lost(stu: ScorerServer) -> None:
    """Short users share pages: one comes free only with the last of its users."""

    def entries() -> float:
        return stu.metric('jgr_cache_entries{kind="user"}')

    def pages() -> float:
        return sum(stu.metric(f'jgr_cache_pages{{holder="{holder}"}}') for holder in ("free", "user"))

    stu.rank(**asked(40, 3, True))
    kept, held = entries(), pages()
    assert kept > 0 and held > 0
    assert stu.call("/v1/users/u40/cache", method="DELETE") == (200, {"entries": 1})
    assert (entries(), pages()) == (kept - 1, held)
    assert stu.rank(**asked(40, 3, True))["usage"]["cached_tokens"] == 0
    erased = [stu.call(f"/v1/users/u{user}/cache", method="DELETE")[1]["entries"] for user in range(41)]
    assert erased[40] == 1 and (entries(), pages()) == (kept - sum(erased), held)


def test_an_explained_ranking_says_whether_the_user_was_kept(hstu: ScorerServer, stu: ScorerServer) -> None:
    body = asked(41, 12, True)
    for source in ("computed", "device"):
        status, found = stu.call("/v1/explain/rank", body)
        usage = found["answer"]["usage"]
        tokens, cached = usage["prompt_tokens"], usage["cached_tokens"]
        assert (status, cached) == (200, tokens if source == "device" else 0)
        assert found["spans"] == [
            {"kind": "user", "name": "history", "tokens": tokens, "cached_tokens": cached, "source": source}
        ]
        assert by_item(found["answer"]) == pytest.approx(by_item(stu.rank(**body)), abs=TOLERANCE)
    status, reply = stu.call("/v1/explain/recommend", {"history": ["B001"]})
    assert (status, reply["error"]["field"]) == (422, "model")
    status, reply = hstu.call("/v1/explain/rank", asked(41, 3))
    assert (status, reply["error"]["type"]) == (404, "not_found")


def test_refusals_name_the_field_over_http(hstu: ScorerServer, stu: ScorerServer) -> None:
    wrong: list[tuple[ScorerServer, dict[str, Any], str]] = [
        (hstu, {"history_actions": [1]}, "history_actions"),
        (hstu, {"context": {"slot0": 1}}, "context"),
        (hstu, {"task_weights": {"score": 1.0}}, "task_weights"),
        (hstu, {"scenario": 1}, "scenario"),
        (hstu, {"history_times": None}, "history_times"),
        (stu, {"context": {"slot0": 4}}, "context.slot0"),
        (stu, {"task_weights": {"share": 1.0}}, "task_weights.share"),
    ]
    for server, given, field in wrong:
        status, reply = server.call("/v1/rank", asked(1, 3) | given)
        assert (status, reply["error"]["field"]) == (422, field)
    status, reply = hstu.call("/v1/recommend", {"history": ["B001"]})
    assert (status, reply["error"]["field"]) == (422, "model")
    status, reply = stu.call("/v1/models")
    (info,) = reply["data"]
    assert (info["timed"], info["max_candidates"], info["max_beam_width"]) == (True, 10_000, 0)
    assert (info["tasks"], info["action_bits"], info["scenarios"]) == (["click", "like"], 3, 1)
    assert info["context"] == {"slot0": 4, "slot1": 2}


def test_a_folder_that_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    config = make_folder(tmp_path / "model", HSTU)
    reordered = Catalog.build(ITEMS[::-1], [(f"<a_{row}>",) for row in range(60)], [{}] * 60)
    save_catalog(reordered, tmp_path / "reordered.jsonl")
    refused = {
        f"catalog.path={tmp_path / 'reordered.jsonl'}": "was trained on other items",
        "model.dtype=bfloat16": "served in float32",
        f"catalog.path={tmp_path / 'nothing.jsonl'}": "nothing.jsonl",
    }
    for setting, words in refused.items():
        with pytest.raises(UserError, match=re.escape(words)):
            load_any(override(config, setting))
    small = override(config, "executors.share_user=cache", "cache.device_mb=0.00001")
    with pytest.raises(ConfigError, match=r"cache.device_mb: 1e-05 is less than a page"):
        load_any(small)
    fields = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "digests.json").unlink()  # which would name the changed file
    (tmp_path / "model" / "config.json").write_text(json.dumps({**fields, "layers": 3}))
    with pytest.raises(UserError, match="params"):
        load_any(config)


def test_another_catalog_of_the_same_items_shares_the_programs(tmp_path: Path) -> None:
    engine: Any = load_any(make_folder(tmp_path / "model", HSTU))
    titled = Catalog.build(ITEMS, CATALOG_SYMBOLS, [{"title": "new"}] * len(ITEMS))
    other: Any = engine.rebuild.engine(titled)
    assert other.served.executors.programs is engine.served.executors.programs
    assert other.catalog.metadata[0] == {"title": "new"}
    with pytest.raises(ConfigError, match="other items"):
        engine.rebuild.check(load_catalog(_reordered(tmp_path)))


CATALOG_SYMBOLS = [(f"<a_{row}>",) for row in range(len(ITEMS))]


def _reordered(folder: Path) -> Path:
    path = folder / "reordered.jsonl"
    save_catalog(Catalog.build(ITEMS[::-1], CATALOG_SYMBOLS, list(CATALOG.metadata)), path)
    return path
