# SPDX-License-Identifier: Apache-2.0
"""`rerank` of /v1/recommend: what one model finds comes in another one's order, as two calls would give it.

The first model of this server finds and ranks items by minus their leaf (fakes.py); the second by the leaf itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

import jgr
from jgr.serving.decoders.work import Outcome, Work
from jgr.serving.engine.engine import Engine
from jgr.serving.engine.metrics import Metrics
from jgr.serving.policies.batching import make_profiles
from jgr.serving.policies.jobs import Profile
from jgr.serving.versions.deployment import Deployment
from tests.serving.fakes import FakeExecutor, LiveServer, Pending, Reply, make_config, make_engine
from tests.serving.http.test_keys import ADA, BOB, bearer, entry, write
from tests.serving.versions.test_reload import ADMIN

HISTORY = ["a", "b"]


class Reversed(FakeExecutor):
    """Scores of the other sign."""

    def run(self, profile: Profile, works: Sequence[Work]) -> list[Outcome]:
        return [dataclasses.replace(found, scores=-found.scores) for found in super().run(profile, works)]


@pytest.fixture(scope="module")
def pair() -> Iterator[LiveServer]:
    with with_other() as server:
        yield server


def told(reply: Reply) -> tuple[int, str, str | None]:
    return reply.status, reply.error["type"], reply.error.get("field")


def found(reply: Reply) -> list[tuple[str, float, int]]:
    return [(item["item_id"], item["score"], item["rank"]) for item in reply.json["items"]]


@pytest.mark.parametrize(
    "fields", [{}, {"exclude_history": True}, {"beam_width": 3}, {"filters": {"deny": ["d"]}}]
)
def test_it_is_what_two_calls_give(pair: LiveServer, fields: dict[str, object]) -> None:
    body = {"history": HISTORY, "top_k": 3, **fields}
    width = int(str(fields.get("beam_width", 5)))
    most = min(width, pair.call("/v1/models/other").json["max_candidates"])
    first = pair.call("/v1/recommend", {**body, "top_k": most}).json
    ids = [item["item_id"] for item in first["items"]]
    ranked = pair.call("/v1/rank", {"history": HISTORY, "candidates": ids, "top_k": 3, "model": "other"})
    reply = pair.call(
        "/v1/recommend", {**body, "rerank": "other", "include_metadata": True}, x_request_id="mine"
    )
    assert found(reply) == found(ranked)
    assert found(reply) != found(pair.call("/v1/recommend", body))
    answer = reply.json
    assert (answer["id"], answer["model"], answer["reranked_by"]) == (
        "mine",
        first["model"],
        ranked.json["model"],
    )
    assert "normalize" not in answer
    assert answer["items"][0]["metadata"] == {"title": f"title of {answer['items'][0]['item_id']}"}
    assert answer["usage"]["candidates"] == len(ids)
    assert answer["usage"]["beam_width"] == width
    timing = answer["timing_ms"]
    assert timing["total"] + 1e-6 >= timing["queue"] + timing["prepare"] + timing["device"]


@pytest.mark.parametrize("least", [1, 2, 4, 9])
def test_a_beam_that_may_be_narrower_finds_and_ranks_as_much_where_there_is_time(
    pair: LiveServer, least: int
) -> None:
    body = {"history": HISTORY, "top_k": 1, "beam_width": 4, "rerank": "other"}
    allowed = pair.call("/v1/recommend", {**body, "min_beam_width": least})
    plain = pair.call("/v1/recommend", body)
    assert allowed.status == 200
    assert (found(allowed), allowed.json["usage"]) == (found(plain), plain.json["usage"])


def test_nothing_found_is_nothing_to_order(pair: LiveServer) -> None:
    body = {"history": HISTORY, "top_k": 1, "filters": {"allow": []}, "rerank": "other"}
    reply = pair.call("/v1/recommend", body)
    plain = pair.call("/v1/recommend", {**body, "rerank": None})
    assert (reply.status, reply.json.get("items")) == (plain.status, plain.json.get("items"))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"rerank": "none"}, (422, "invalid_request", "rerank")),
        ({"rerank": "other", "top_k": 3, "beam_width": 2}, (422, "invalid_request", "top_k")),
        ({"rerank": "other", "top_k": 5}, (422, "invalid_request", "rerank")),
        ({"rerank": 3}, (422, "invalid_request", "rerank")),
        ({"rerank": "x" * 257}, (422, "invalid_request", "rerank")),
        ({"rerank": "other", "history": 3}, (422, "invalid_request", "history")),
    ],
)
def test_what_is_refused_names_its_field(
    pair: LiveServer, fields: dict[str, object], expected: tuple[int, str, str]
) -> None:
    assert told(pair.call("/v1/recommend", {"history": HISTORY, "top_k": 1, **fields})) == expected


def test_a_deadline_holds_for_both_runs_together(pair: LiveServer) -> None:
    reply = pair.call(
        "/v1/recommend", {"history": HISTORY, "top_k": 1, "rerank": "other", "deadline_ms": 1e-3}
    )
    assert reply.status in (429, 504)


def test_a_reload_of_the_second_model_while_the_first_one_searches_is_noticed() -> None:
    config = make_config("model.name=other")

    def load(metrics: Metrics) -> Engine:
        executor = Reversed(make_profiles(config.profiles))
        return make_engine(config, executor, metrics=metrics, revision="1")

    other = make_engine(config, Reversed(make_profiles(config.profiles)))
    more = [Deployment(other, config.catalog, load)]
    with LiveServer("server.admin_key=4dm1n", more=more) as server:
        server.executor.hold()
        asking = server.send("/v1/recommend", {"history": HISTORY, "top_k": 3, "rerank": "other"})
        server.executor.wait_entered()
        assert server.call("/v1/models/other/reload", method="POST", **ADMIN).status == 202
        while server.call("/v1/models/other").json["reload"] != "done":
            pass
        server.executor.release()
        reply = asking.reply()
        assert (reply.status, reply.json["reranked_by"]) == (200, "other@1")


def finding(server: LiveServer, **headers: str) -> Pending:
    """A call whose first half runs, and stays so until the executor is released."""
    server.executor.hold()
    asking = server.send("/v1/recommend", {"history": HISTORY, "top_k": 3, "rerank": "other"}, **headers)
    server.executor.wait_entered()
    return asking


def with_other(*settings: str) -> LiveServer:
    config = make_config("model.name=other")
    other = make_engine(config, Reversed(make_profiles(config.profiles)))
    return LiveServer(*settings, more=[Deployment(other, config.catalog, None)])


def test_a_stop_finishes_both_halves_of_a_call_and_takes_no_other() -> None:
    with with_other() as server:
        asking = finding(server)
        server.stop()
        while (ready := server.call("/health/ready")).status == 200:
            pass
        assert ready.status == 503 and "draining" in ready.error["message"]
        ranking = {"history": HISTORY, "candidates": ["a"], "model": "other"}
        refused = [server.call("/v1/rank", ranking), server.call("/v1/recommend", {"history": HISTORY})]
        assert [(reply.status, reply.error["type"]) for reply in refused] == [(503, "unavailable")] * 2
        server.executor.release()
        assert asking.reply().status == 200
        assert server.join() == 0


def test_a_stop_waits_no_longer_than_it_may_for_the_first_half() -> None:
    with with_other("server.drain_timeout_s=0.05") as server:
        asking = finding(server)
        server.stop()
        reply = asking.reply()
        assert (reply.status, reply.error["type"]) == (503, "unavailable")


def test_a_share_is_used_up_before_the_first_half_or_by_neither(tmp_path: Path) -> None:
    keys = write(tmp_path / "keys", entry("ada", ADA, share=0.0001), entry("bob", BOB))
    with with_other(keys) as server:
        asking = finding(server, **bearer(ADA))
        batches = len(server.executor.batches)
        ranking = {"history": HISTORY, "candidates": ["a"], "model": "other"}
        refused = server.call("/v1/rank", ranking, **bearer(ADA))
        assert (refused.status, refused.error["type"]) == (429, "quota_exceeded")
        second = server.call("/v1/recommend", {"history": HISTORY, "rerank": "other"}, **bearer(ADA))
        assert (second.status, second.error["type"]) == (429, "quota_exceeded")
        server.executor.release()
        assert asking.reply().status == 200
        assert len(server.executor.batches) == batches, "the refused one was not computed"
        assert server.call("/v1/rank", ranking, **bearer(ADA)).status == 200


def test_a_client_asks_so_and_an_engine_alone_refuses(pair: LiveServer) -> None:
    with jgr.Client(f"http://127.0.0.1:{pair.port}") as client:
        answer = client.recommend(HISTORY, top_k=2, rerank="other")
        assert answer.reranked_by == "other"
        assert [item.score for item in answer.items] == sorted(
            (item.score for item in answer.items), reverse=True
        )
    refused = pair.call("/v1/explain/recommend", {"history": HISTORY, "top_k": 1, "rerank": "other"})
    assert refused.status in (400, 404)
    assert msgspec.json.decode(refused.body)["error"]["type"] in ("invalid_request", "not_found")
