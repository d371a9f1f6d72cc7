# SPDX-License-Identifier: Apache-2.0
"""`/v1/rerank` and `/v1/score`: other shapes of the same rank request, with its scores, limits and errors.

The server of fakes.py scores an item by minus its leaf: a 0, b and b2 -1, c -2, d -3, 7 -4.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from jgr.serving.errors import RequestError
from jgr.serving.http import rerank
from tests.serving.fakes import LiveServer, Reply

HISTORY = ["a", "b"]
DOCUMENTS = ["d", "a", 7]
RERANK = {"query": HISTORY, "documents": DOCUMENTS}
SCORE = {"queries": HISTORY, "items": DOCUMENTS}


def told(reply: Reply) -> tuple[int, str, str | None]:
    return reply.status, reply.error["type"], reply.error.get("field")


def scores(reply: Reply) -> list[tuple[int, float]]:
    return [(result["index"], result["relevance_score"]) for result in reply.json["results"]]


def test_rerank_orders_documents_by_the_scores_of_rank(server: LiveServer) -> None:
    ranked = server.call("/v1/rank", {"history": HISTORY, "candidates": DOCUMENTS}).json
    reply = server.call("/v1/rerank", {**RERANK, "model": "jgr"}, x_request_id="mine")
    assert reply.status == 200
    assert reply.json == {
        "id": "mine",
        "model": "jgr",
        "results": [
            {"index": 1, "relevance_score": 0.0, "document": {"text": "a"}},
            {"index": 0, "relevance_score": -3.0, "document": {"text": "d"}},
            {"index": 2, "relevance_score": -4.0, "document": {"text": "7"}},
        ],
        "usage": {
            "prompt_tokens": ranked["usage"]["prompt_tokens"],
            "total_tokens": ranked["usage"]["prompt_tokens"],
            "cached_tokens": 0,
        },
    }
    assert [item["score"] for item in ranked["items"]] == [score for _, score in scores(reply)]


@pytest.mark.parametrize(
    ("top_n", "indices"),
    [(1, [1]), (2, [1, 0]), (3, [1, 0, 2]), (9, [1, 0, 2]), (0, [1, 0, 2]), (None, [1, 0, 2])],
)
def test_top_n_is_how_many_come_and_never_too_many(
    server: LiveServer, top_n: int | None, indices: list[int]
) -> None:
    reply = server.call("/v1/rerank", {**RERANK, "top_n": top_n})
    assert [index for index, _ in scores(reply)] == indices


def test_a_document_that_comes_twice_is_scored_once_and_told_twice(server: LiveServer) -> None:
    body = {"query": HISTORY, "documents": ["d", "7", 7, "d"]}
    reply = server.call("/v1/rerank", body)
    assert scores(reply) == [(0, -3.0), (3, -3.0), (1, -4.0), (2, -4.0)]
    assert scores(server.call("/v1/rerank", {**body, "top_n": 3})) == [(0, -3.0), (3, -3.0), (1, -4.0)]
    scored = server.call("/v1/score", {"text_1": HISTORY, "text_2": body["documents"]}).json["data"]
    assert [(one["index"], one["score"]) for one in scored] == [(0, -3), (1, -4), (2, -4), (3, -3)]


def test_documents_are_told_as_wished(server: LiveServer) -> None:
    (plain,) = server.call("/v1/rerank", {**RERANK, "top_n": 1, "return_documents": False}).json["results"]
    assert plain == {"index": 1, "relevance_score": 0.0}
    (full,) = server.call("/v1/rerank", {**RERANK, "top_n": 1, "include_metadata": True}).json["results"]
    assert full["document"] == {"text": "a", "metadata": {"title": "title of a"}}


def test_a_query_may_name_the_user(server: LiveServer) -> None:
    named = {"history": HISTORY, "user_id": "u1"}
    assert scores(server.call("/v1/rerank", {**RERANK, "query": named})) == [(1, 0.0), (0, -3.0), (2, -4.0)]
    assert server.call("/v1/score", {**SCORE, "queries": named}).status == 200


@pytest.mark.parametrize("pair", [("queries", "items"), ("queries", "documents"), ("text_1", "text_2")])
def test_score_tells_each_item_in_the_requests_order(server: LiveServer, pair: tuple[str, str]) -> None:
    user, items = pair
    reply = server.call("/v1/score", {user: HISTORY, items: DOCUMENTS}, x_request_id="mine")
    assert reply.status == 200
    answer = reply.json
    assert answer.pop("created") > 1_700_000_000
    assert answer.pop("usage")["total_tokens"] > 0
    assert answer == {
        "id": "mine",
        "object": "list",
        "model": "jgr",
        "data": [
            {"index": 0, "object": "score", "score": -3.0},
            {"index": 1, "object": "score", "score": 0.0},
            {"index": 2, "object": "score", "score": -4.0},
        ],
    }
    (one,) = server.call("/v1/score", {user: HISTORY, items: "c"}).json["data"]
    assert (one["index"], one["score"]) == (0, -2.0)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/rerank", {**RERANK, "documents": ["a", "blue shoes for the beach"]}, "documents[1]"),
        ("/v1/rerank", {**RERANK, "documents": ["a", "a", "blue shoes"]}, "documents[2]"),
        ("/v1/rerank", {**RERANK, "documents": ["a", {"text": "blue shoes"}]}, "documents[1]"),
        ("/v1/rerank", {**RERANK, "query": "what goes with blue shoes?"}, "query"),
        ("/v1/score", {**SCORE, "items": ["blue shoes", "a"]}, "items[0]"),
        ("/v1/score", {"text_1": HISTORY, "text_2": "blue shoes"}, "text_2[0]"),
        ("/v1/score", {"text_1": "shoes", "text_2": "a"}, "text_1"),
        ("/v1/score", {"queries": HISTORY, "documents": [["a"]]}, "documents[0]"),
    ],
)  # fmt: skip
def test_a_text_is_refused_where_ids_belong(server: LiveServer, path: str, body: Any, field: str) -> None:
    reply = server.call(path, body)
    assert told(reply) == (400, "not_an_item_id", field)
    assert reply.error["message"].startswith(field)
    assert "no model of this server reads text" in reply.error["message"]


@pytest.mark.parametrize(
    ("path", "body", "field", "words"),
    [
        ("/v1/rerank", {**RERANK, "query": []}, "query", "length 1 or more"),
        ("/v1/rerank", {**RERANK, "documents": []}, "documents", "length 1 or more"),
        ("/v1/rerank", {"query": HISTORY}, "documents", "documents is required"),
        ("/v1/rerank", {**RERANK, "top_n": -1}, "top_n", "must be a whole number, 0 or more"),
        ("/v1/rerank", {**RERANK, "topn": 1}, "topn", "the nearest is 'top_n'"),
        ("/v1/rerank", {**RERANK, "documents": ["a", "b", "b2", "c", "d"]}, "documents", "documents has 5 items"),
        ("/v1/rerank", {**RERANK, "documents": ["a"] * 5}, "documents", "documents has 5 items; the limit is 4"),
        ("/v1/score", {**SCORE, "items": ["a", "b"] * 3}, "items", "items has 6 items; the limit is 4"),
        ("/v1/score", {"text_1": HISTORY, "text_2": [7] * 5}, "text_2", "text_2 has 5 items"),
        ("/v1/rerank", {**RERANK, "query": ["x", "y"]}, "query", "query: no item of the history"),
        ("/v1/rerank", {**RERANK, "query": {"history": ["x"]}}, "query.history", "query.history: no item"),
        ("/v1/rerank", {**RERANK, "query": {"history": HISTORY, "user_id": "\n"}}, "query.user_id", "that matches"),
        ("/v1/rerank", {**RERANK, "query": {"history": HISTORY, "time": 5}}, "query.time", "no use for it"),
        ("/v1/rerank", {**RERANK, "query": {"history": HISTORY, "context": {"a": 1}}}, "query.context", "no use for"),
        ("/v1/score", {"queries": HISTORY}, "queries", "there is queries"),
        ("/v1/score", {"items": DOCUMENTS}, "items", "there is items"),
        ("/v1/score", {}, "queries", "there is none of them"),
        ("/v1/score", {"queries": HISTORY, "text_2": DOCUMENTS}, "text_2", "queries, text_2"),
        ("/v1/score", {**SCORE, "documents": DOCUMENTS}, "documents", "queries, items, documents"),
        ("/v1/score", {**SCORE, "deadline_ms": 0}, "deadline_ms", "must be a number, more than 0.0"),
    ],
)  # fmt: skip
def test_errors_name_the_bodys_own_fields(
    server: LiveServer, path: str, body: Any, field: str, words: str
) -> None:
    reply = server.call(path, body)
    assert told(reply) == (422, "invalid_request", field)
    assert words in reply.error["message"]


class Counted(list[str | int]):
    """Documents that count how many of them are looked at."""

    looked_at = 0

    def __iter__(self) -> Iterator[str | int]:
        for each in super().__iter__():
            self.looked_at += 1
            yield each


def test_none_of_too_many_documents_is_looked_at() -> None:
    """Each would take a step of the event loop's thread, and a body has room for hundreds of thousands."""
    given = rerank.RerankRequest(query=["a"], documents=["a"])
    documents = Counted(range(5))
    with pytest.raises(RequestError, match="documents has 5 items; the limit is 4"):
        rerank._Asked(given, "query", "documents", ["a"], documents, lambda model: 4)
    assert documents.looked_at == 0
    rerank._Asked(given, "query", "documents", ["a"], documents, lambda model: 5)
    assert documents.looked_at == 5


@pytest.mark.parametrize(("path", "body"), [("/v1/rerank", RERANK), ("/v1/score", SCORE)])
def test_a_model_that_is_not_there_is_told_before_too_many_documents(
    server: LiveServer, path: str, body: Any
) -> None:
    items = "documents" if path == "/v1/rerank" else "items"
    reply = server.call(path, {**body, items: ["a"] * 5, "model": "none"})
    assert told(reply) == (404, "not_found", "model")


@pytest.mark.parametrize("path", ["/v1/rerank", "/v1/score"])
def test_what_is_no_body_and_what_no_model_serves_is_refused_as_elsewhere(
    server: LiveServer, path: str
) -> None:
    body = RERANK if path == "/v1/rerank" else SCORE
    assert told(server.call(path, b"{")) == (400, "invalid_json", None)
    assert told(server.call(path, {**body, "model": "none"})) == (404, "not_found", "model")
    assert told(server.call(path, method="GET")) == (405, "method_not_allowed", None)
    assert told(server.call(path, b" " * (1 << 20) + b"{}")) == (413, "body_too_large", None)


@pytest.mark.parametrize(("path", "body"), [("/v1/rerank", RERANK), ("/v1/score", SCORE)])
def test_keys_deadlines_cancelling_and_metrics_are_those_of_rank(path: str, body: Any) -> None:
    settings = ("server.api_key=s3cret", "server.open_metrics=true", "batching.order=edf")
    with LiveServer(*settings) as server:
        key = {"authorization": "Bearer s3cret"}
        assert told(server.call(path, body)) == (401, "unauthorized", None)
        server.executor.hold()
        running = server.send(path, body, **key)
        server.executor.wait_entered()
        assert told(server.call(path, {**body, "deadline_ms": 1}, **key)) == (504, "deadline_exceeded", None)
        queued = server.send(path, body, **key)
        server.wait_for("jgr_queue_depth", 1)
        queued.abandon()
        server.wait_for("jgr_cancelled_total", 1)
        server.executor.release()
        assert running.reply().status == 200
        for status, count in ((200, 1), (401, 1), (499, 1), (504, 1)):
            assert server.metric(f'jgr_requests_total{{endpoint="{path}",status="{status}"}}') == count
        assert server.metric('jgr_stage_seconds_count{kind="rank",stage="total"}') == 1
        assert server.executor.batches == [1], "what was abandoned never ran"


def test_a_request_with_a_priority_and_a_deadline_is_answered(server: LiveServer) -> None:
    reply = server.call(
        "/v1/rerank", json.dumps({**RERANK, "priority": "batch", "deadline_ms": 60_000}).encode()
    )
    assert reply.status == 200
