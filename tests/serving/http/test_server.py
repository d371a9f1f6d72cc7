# SPDX-License-Identifier: Apache-2.0
"""What the endpoints answer, over real HTTP, against values worked out by hand (see fakes.py)."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

import pytest

from jgr import __version__
from tests.serving.fakes import CATALOG, LiveServer

VERSION = CATALOG.version


def ids(reply: Any) -> list[str]:
    return [item["item_id"] for item in reply.json["items"]]


def test_recommend_answers_items_best_first(server: LiveServer) -> None:
    reply = server.call("/v1/recommend", {"history": ["a"], "top_k": 5}, x_request_id="me-1")
    assert reply.status == 200
    answer = reply.json
    times = answer.pop("timing_ms")
    assert answer == {
        "id": "me-1",
        "model": "jgr",
        "catalog_version": VERSION,
        "normalize": "valid",
        "items": [
            {"item_id": "c", "score": 0.0, "rank": 1},
            {"item_id": "d", "score": -1.0, "rank": 2},
            {"item_id": "7", "score": -2.0, "rank": 3},
            {"item_id": "a", "score": -3.0, "rank": 4},
            {"item_id": "b", "score": -4.0, "rank": 5},
        ],
        "usage": {
            "prompt_tokens": 4,
            "cached_tokens": 0,
            "computed_tokens": 4,
            "layout": "causal",
            "history_items": 1,
            "unknown_items": 0,
            "unknown_item_ids": [],
            "beam_width": 5,
            "dead_beams": 0,
        },
    }
    assert times.keys() == {"queue", "prepare", "device", "total"}
    assert 0 <= times["queue"] + times["prepare"] + times["device"] <= times["total"]


def test_items_that_share_a_semantic_id_come_in_catalog_order(server: LiveServer) -> None:
    # 1 + (3 + 7) + (3 + 7) + 2 = 23, so the beams start at leaf 3.
    reply = server.call("/v1/recommend", {"history": ["b", "b2"], "top_k": 5})
    assert ids(reply) == ["d", "7", "a", "b", "b2"]
    assert [item["score"] for item in reply.json["items"]] == [0.0, -1.0, -2.0, -3.0, -3.0]


def test_exclude_history_hides_its_items_but_not_their_twins(server: LiveServer) -> None:
    # Leaf 2 (c) is excluded. Leaf 1 stays, since b2 is not in the history; b is dropped from it.
    body = {"history": ["b", "c"], "top_k": 5, "exclude_history": True}
    assert ids(server.call("/v1/recommend", body)) == ["d", "7", "a", "b2"]
    both = {"history": ["b", "b2", "c"], "top_k": 5, "exclude_history": True}
    assert sorted(ids(server.call("/v1/recommend", both))) == ["7", "a", "d"]


def test_a_narrower_beam_is_the_callers_choice(server: LiveServer) -> None:
    reply = server.call("/v1/recommend", {"history": ["a"], "top_k": 2, "beam_width": 2})
    assert ids(reply) == ["c", "d"]
    assert reply.json["usage"]["beam_width"] == 2


def test_only_the_last_items_of_a_history_are_in_the_prompt(server: LiveServer) -> None:
    reply = server.call("/v1/recommend", {"history": ["d", "d", "a", "c", "7"], "top_k": 1})
    assert reply.json["usage"] | {"beam_width": 0} == {
        "prompt_tokens": 8,
        "cached_tokens": 0,
        "computed_tokens": 8,
        "layout": "causal",
        "history_items": 3,
        "unknown_items": 0,
        "unknown_item_ids": [],
        "beam_width": 0,
        "dead_beams": 0,
    }


def test_integer_ids_are_read_as_decimal_text(server: LiveServer) -> None:
    as_text = server.call("/v1/recommend", {"history": ["7"], "top_k": 5, "user_id": "8"})
    as_int = server.call("/v1/recommend", {"history": [7], "top_k": 5, "user_id": 8})
    # 1 + 5 + 6 + 2 = 14
    assert ids(as_int) == ids(as_text) == ["7", "a", "b", "b2", "c"]


def test_metadata_comes_where_it_is_asked_for(server: LiveServer) -> None:
    for path, body in (
        ("/v1/recommend", {"history": ["a"], "top_k": 1}),
        ("/v1/rank", {"history": ["a"], "candidates": ["c"]}),
    ):
        (item,) = server.call(path, {**body, "include_metadata": True}).json["items"]
        assert item["metadata"] == {"title": "title of c"}
        (item,) = server.call(path, {**body, "include_metadata": False}).json["items"]
        assert "metadata" not in item


def test_rank_orders_candidates_and_keeps_the_callers_order_among_equals(server: LiveServer) -> None:
    reply = server.call("/v1/rank", {"history": ["a"], "candidates": [7, "b2", "a", "b"]})
    assert [(i["item_id"], i["score"], i["rank"]) for i in reply.json["items"]] == [
        ("a", 0.0, 1),
        ("b2", -1.0, 2),
        ("b", -1.0, 3),
        ("7", -4.0, 4),
    ]
    assert reply.json["usage"] == {
        "prompt_tokens": 4,
        "cached_tokens": 0,
        "computed_tokens": 4,
        "layout": "causal",
        "history_items": 1,
        "unknown_items": 0,
        "unknown_item_ids": [],
        "candidates": 4,
    }
    assert (reply.json["model"], reply.json["catalog_version"]) == ("jgr", VERSION)
    assert ids(server.call("/v1/rank", {"history": ["a"], "candidates": ["7", "c", "a"], "top_k": 2})) == [
        "a",
        "c",
    ]


def test_models_tells_the_limits(server: LiveServer) -> None:
    (model,) = server.call("/v1/models").json["data"]
    assert server.call("/v1/models/jgr").json == model
    datetime.strptime(model.pop("loaded_at"), "%Y-%m-%dT%H:%M:%SZ")
    assert re.fullmatch("[0-9a-f]{8}", model.pop("settings"))
    assert model == {
        "id": "jgr",
        "version": "jgr",
        "state": "ready",
        "reload": "never",
        "reload_error": None,
        "previous": None,
        "catalog_version": VERSION,
        "catalog_items": 6,
        "depth": 2,
        "normalize": "valid",
        "beam_width": 5,
        "max_beam_width": 5,
        "max_candidates": 4,
        "kernels": "xla",
        "quantize": "",
        "timed": False,
        "tasks": [],
        "scenarios": 1,
        "context": {},
        "action_bits": 0,
        "max_history": 4096,
        "max_filter_items": 4096,
        "segments": [],
        "max_history_in_prompt": 3,
    }


def test_a_request_may_name_the_model(server: LiveServer) -> None:
    body = {"history": ["a"], "top_k": 1}
    assert server.call("/v1/recommend", {**body, "model": "jgr"}).status == 200
    rank = server.call("/v1/rank", {"history": ["a"], "candidates": ["b"], "model": "other"})
    for reply in (
        server.call("/v1/recommend", {**body, "model": "jgr@0"}),
        rank,
        server.call("/v1/models/x"),
    ):
        assert (reply.status, reply.error["type"], reply.error["field"]) == (404, "not_found", "model")
        assert "there is 'jgr'" in reply.error["message"]


def test_items(server: LiveServer) -> None:
    assert server.call("/v1/items/b2").json == {
        "item_id": "b2",
        "semantic_id": ["<x0>", "<y1>"],
        "metadata": {"title": "title of b2"},
        "catalog_version": VERSION,
    }
    reply = server.call("/v1/items/no%2Fsuch")
    assert (reply.status, reply.error["type"], reply.error["field"]) == (404, "not_found", "item_id")
    assert "'no/such'" in reply.error["message"]


def test_health(server: LiveServer) -> None:
    assert server.call("/health/live").json == {"status": "live"}
    assert server.call("/health/ready").json == {"status": "ready"}


@pytest.mark.parametrize(
    ("method", "path", "status", "type", "allow"),
    [
        ("GET", "/v1/nothing", 404, "not_found", None),
        ("GET", "/v1/models/", 404, "not_found", None),
        ("GET", "/v1/rank", 405, "method_not_allowed", "POST"),
        ("PUT", "/v1/recommend", 405, "method_not_allowed", "POST"),
        ("POST", "/v1/models", 405, "method_not_allowed", "GET, HEAD"),
        ("DELETE", "/v1/models/jgr", 403, "forbidden", None),
        ("PUT", "/v1/models/jgr/reload", 405, "method_not_allowed", "DELETE, POST"),
        ("GET", "/v1/models/jgr/reload", 405, "method_not_allowed", "DELETE, POST"),
        ("GET", "/v1/models/jgr/rollback", 405, "method_not_allowed", "POST"),
        ("GET", "/v1/models/jgr/reloads", 404, "not_found", None),
        ("DELETE", "/v1/items/%00%1b" + "x" * 999, 405, "method_not_allowed", "GET, HEAD"),
    ],
)
def test_other_paths_and_methods_are_refused(
    server: LiveServer, method: str, path: str, status: int, type: str, allow: str | None
) -> None:
    reply = server.call(path, method=method)
    assert (reply.status, reply.error["type"], reply.headers.get("allow")) == (status, type, allow)
    assert reply.error["message"].isprintable() and len(reply.error["message"]) < 140


@pytest.mark.parametrize("path", ["/v1/recommend", "/v1/models", "/nowhere"])
def test_request_ids_come_back_if_printable_and_are_made_up_if_not(server: LiveServer, path: str) -> None:
    body = {"history": ["a"], "top_k": 1} if path == "/v1/recommend" else None
    good = '~ from "here" to there {1}'
    assert server.call(path, body, x_request_id=good).headers["x-request-id"] == good
    for bad in ("x" * 129, "", "caf\xe9"):
        made_up = server.call(path, body, x_request_id=bad).headers["x-request-id"]
        assert len(made_up) == 32
        int(made_up, 16)
    assert server.call(path, body).headers["x-request-id"] != server.call(path, body).headers["x-request-id"]


def test_api_key_guards_everything_but_health() -> None:
    body = {"history": ["a"], "top_k": 1}
    with LiveServer("server.api_key=s3cret") as server:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "s3cret"}):
            for path in ("/v1/recommend", "/v1/models", "/metrics", "/docs", "/openapi.json", "/nowhere"):
                reply = server.call(path, body if path == "/v1/recommend" else None, **headers)
                assert (reply.status, reply.error["type"]) == (401, "unauthorized"), path
                assert reply.headers["www-authenticate"] == "Bearer"
                assert "s3cret" not in reply.body.decode()
        assert server.call("/health/live").status == server.call("/health/ready").status == 200
        reply = server.call("/v1/recommend", body, authorization="Bearer s3cret")
        assert (reply.status, ids(reply)) == (200, ["c"])
        description = server.call("/openapi.json", authorization="bearer s3cret").json
        assert description["paths"]["/v1/rank"]["post"]["security"] == [{"key": []}]
        assert "security" not in description["paths"]["/health/ready"]["get"]
        assert description["paths"]["/v1/models/{name}/reload"]["post"]["security"] == [{"admin_key": []}]


def test_metrics_count_what_happened() -> None:
    with LiveServer() as server:
        server.call("/v1/recommend", {"history": ["a", "zzz"], "top_k": 1})
        server.call("/v1/recommend", {"history": ["a"], "top_k": 1, "beam_width": 3})
        server.call("/v1/rank", {"history": ["a"], "candidates": ["a", "b"]})
        server.call("/v1/rank", {"history": ["a"], "candidates": []})
        excluded = {"history": ["a", "c", "d"], "top_k": 1, "exclude_history": True}
        server.call("/v1/recommend", excluded)
        text = server.call("/metrics").body.decode()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    expected = {
        'jgr_requests_total{endpoint="/v1/recommend",status="200"}': 3,
        'jgr_requests_total{endpoint="/v1/rank",status="200"}': 1,
        'jgr_requests_total{endpoint="/v1/rank",status="422"}': 1,
        'jgr_batch_size_count{kind="recommend"}': 3,
        'jgr_batch_size_sum{kind="recommend"}': 3,
        'jgr_batch_size_bucket{kind="rank",le="1.0"}': 1,
        'jgr_batch_rows_total{kind="recommend"}': 3,
        # Prompts of 4, 4 and 8 tokens with 5, 3 and 5 beams; profiles of 1 x (8 + 5).
        'jgr_real_tokens_total{kind="recommend"}': 29,
        'jgr_padded_tokens_total{kind="recommend"}': 39,
        'jgr_real_tokens_total{kind="rank"}': 6,
        'jgr_padded_tokens_total{kind="rank"}': 12,
        'jgr_stage_seconds_count{kind="recommend",stage="total"}': 3,
        'jgr_stage_seconds_count{kind="rank",stage="device"}': 1,
        "jgr_dead_beams_total": 3,
        "jgr_unknown_items_total": 1,
        "jgr_queue_depth": 0,
        'jgr_compilations_total{phase="load"}': 0,
        'jgr_compilations_total{phase="request"}': 0,
        'jgr_model_reloads_total{outcome="done"}': 0,
        'jgr_model_reloads_total{outcome="failed"}': 0,
        'jgr_model_info{model="jgr",version="jgr"}': 1,
        "jgr_cancelled_total": 0,
        "jgr_deadline_expired_total": 0,
        "jgr_executor_failures_total": 0,
        "jgr_catalog_items": 6,
        f'jgr_catalog_info{{model="jgr",version="{VERSION}"}}': 1,
    }
    assert {name: float(values[name]) for name in expected} == expected
    assert {name.partition("_")[0] for name in values} == {"jgr", "process", "python"}
    assert not any("_created" in name for name in values)


def test_the_documentation_describes_every_field_of_every_answer(server: LiveServer) -> None:
    description = server.call("/openapi.json").json
    assert (description["openapi"], description["info"]["version"]) == ("3.1.0", __version__)
    history = description["components"]["schemas"]["RecommendRequest"]["properties"]["history"]
    assert (history["minItems"], history["maxItems"]) == (1, 4096)
    schemas = description["components"]["schemas"]
    candidates = schemas["RankRequest"]["properties"]["candidates"]
    assert candidates["maxItems"] == 4
    assert {"enum": ["all"]} in candidates["anyOf"]
    body = {"history": ["a"], "include_metadata": True}
    answers = {
        ("post", "/v1/recommend"): server.call("/v1/recommend", {**body, "top_k": 5}),
        ("post", "/v1/rank"): server.call("/v1/rank", {**body, "candidates": ["b"]}),
        ("get", "/v1/models"): server.call("/v1/models"),
        ("get", "/v1/models/{name}"): server.call("/v1/models/jgr"),
        ("get", "/v1/items"): server.call("/v1/items"),
        ("get", "/v1/items/{item_id}"): server.call("/v1/items/a"),
        ("get", "/health/live"): server.call("/health/live"),
        ("get", "/health/ready"): server.call("/health/ready"),
    }
    for (method, path), reply in answers.items():
        stated = description["paths"][path][method]["responses"]["200"]
        conform(reply.json, stated["content"]["application/json"]["schema"], schemas, path)
    stated = description["paths"]["/v1/rank"]["post"]["responses"]["422"]
    refusal = server.call("/v1/rank", {"history": []})
    conform(refusal.json, stated["content"]["application/json"]["schema"], schemas, "422")


KINDS: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": float,
    "array": list,
    "object": dict,
    "boolean": bool,
    "null": type(None),
}


def conform(value: Any, schema: dict[str, Any], schemas: dict[str, Any], where: str) -> None:
    """The part of JSON Schema that the description uses; besides, every field must be described."""
    if "$ref" in schema:
        conform(value, schemas[schema["$ref"].rpartition("/")[2]], schemas, where)
    elif "enum" in schema:
        assert value in schema["enum"], where
    elif "anyOf" in schema:
        named = [option for option in schema["anyOf"] if "$ref" in option]
        if named and isinstance(value, dict):
            conform(value, named[0], schemas, where)
        else:
            plain = [option for option in schema["anyOf"] if option not in named]
            assert type(value) in [KINDS[option["type"]] for option in plain], where
    else:
        assert type(value) is KINDS[schema["type"]], where
        assert "minimum" not in schema or value >= schema["minimum"], where
        for element in value if "items" in schema else ():
            conform(element, schema["items"], schemas, f"{where}[]")
        fields = schema.get("properties", {})
        if fields:
            assert set(schema.get("required", ())) <= value.keys() <= fields.keys(), where
        for name in fields.keys() & value.keys() if fields else ():
            assert fields[name]["description"], f"{where}.{name}"
            conform(value[name], fields[name], schemas, f"{where}.{name}")
