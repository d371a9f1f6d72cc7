# SPDX-License-Identifier: Apache-2.0
"""Thousands of seeded requests, out of the server's own document and broken in every way, against real servers.

What is drawn is in benchmarks/hostile_requests.py and hostile_tensors.py, which the long runs (benchmarks/hostile.py,
hostile_doors.py) draw from too.
"""

from __future__ import annotations

import json
import logging
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import grpc
import pytest

from benchmarks.hostile_requests import Call, Document, raw
from benchmarks.hostile_tensors import Value, broken_body, broken_message, infer, of_message
from benchmarks.hostile_world import GOOD, RECOMMEND, Client, apart, drawn_call, http_of, scores, send_raw
from jgr.serving.http.kserve_grpc import SERVICE
from tests.serving.fakes import LiveServer
from tests.serving.versions.test_shared_memory import Two

REQUESTS, RAW, RELOADS, TENSORS = 3_000, 500, 3, 400
CODES = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED", "RESOURCE_EXHAUSTED"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    """A decoder that caches, and a scorer that keeps users."""
    server = Two(tmp_path_factory.mktemp("two"), "server.explain=true", "profiles.batch=1", "train.layers=1")
    yield server
    server.stop()


def port_of(server: Two) -> int:
    return int(server.listener.url.rpartition(":")[2])


@pytest.fixture
def client(served: Two) -> Iterator[Client]:
    with closing(Client(port_of(served))) as client:
        yield client


def fuzz(
    client: Client, seed: int, number: int, good: Mapping[str, Sequence[dict[str, Any]]]
) -> Counter[int]:
    """Ask so many requests, and hold each answer against the document; how often each status came."""
    rng, document, seen = random.Random(seed), Document(client.get("/openapi.json")), Counter[int]()
    reloads = 0
    for at in range(number):
        call = drawn_call(document, rng, good)
        if call.template.endswith("/reload") and reloads == RELOADS:
            continue
        status, headers, body = client.ask(call)
        said = f"request {at} of seed {seed}: {call}: {status} {body[:300]!r}"
        kind = headers.get("content-type", "")
        assert document.faults(call.method, call.template, status, kind, body) == [], said
        late = any(word in (call.body or b"") for word in (b"deadline_ms", b"timeout"))
        assert status < 500 or (status == 504 and late), said
        assert (
            headers["x-request-id"] == call.headers.get("X-Request-Id", "")
            or len(headers["x-request-id"]) == 32
        )
        if status >= 400:
            told = json.loads(body)
            told = told if call.template.startswith("/v2") else told["error"]
            assert told["request_id"] == headers["x-request-id"], said
        reloads += status == 202
        seen[status] += 1
    return seen


def test_whatever_bytes_come_the_next_request_is_answered_right(
    served: Two, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    rng, port = random.Random(0), port_of(served)
    expected = client.good_scores()
    good = http_of("/v1/recommend", RECOMMEND)
    before = scores(client.post("/v1/recommend", RECOMMEND))
    statuses = Counter[bytes]()
    with caplog.at_level(logging.ERROR):
        for _ in range(RAW):
            data = raw(good, rng)
            answered = send_raw(port, data, rng)
            assert not answered or answered.startswith(b"HTTP/1.1 "), (data[:500], answered[:500])
            assert b"HTTP/1.1 5" not in answered, (data[:500], answered[:500])
            statuses[answered[9:12]] += 1
            assert apart(scores(client.post("/v1/recommend", RECOMMEND)), before) <= 1e-4, data[:500]
    assert {b"200", b"400", b"431", b""} <= statuses.keys()
    assert apart(client.good_scores(), expected) <= 1e-4
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_answers_are_those_that_the_document_has(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        seen = fuzz(client, 1, REQUESTS, GOOD)
    # A drawn upload is seldom a whole catalog (201); tests of catalogs upload those.
    assert {200, 202, 400, 401, 404, 409, 422} <= seen.keys(), seen
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_answers_of_a_server_with_keys_are_those_that_the_document_has(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recommend = ({"history": ["a"], "top_k": 2},)
    rank = ({"history": ["a", 7], "candidates": ["b", "c"], "user_id": 3},)
    good: dict[str, Sequence[dict[str, Any]]] = {
        "/v1/recommend": recommend,
        "/v1/rank": rank,
        "/v1/explain/recommend": recommend,
        "/v1/explain/rank": rank,
        "/v1/rerank": ({"query": ["a", 7], "documents": ["b", "c", "b"], "top_n": 1},),
        "/v1/score": ({"text_1": {"history": ["a"]}, "text_2": ["b", 7]},),
        "/v2/models/{name}/infer": (
            {"inputs": [
                {"name": "history", "datatype": "BYTES", "shape": [1], "data": ["a"]},
                {"name": "candidates", "datatype": "BYTES", "shape": [2], "data": ["b", "c"]},
            ], "outputs": [{"name": "scores", "parameters": {"binary_data": True}}]},
        ),
    }  # fmt: skip
    settings = ("server.api_key=cl13nt-k3y", "server.admin_key=4dm1n", "server.max_body_bytes=4096")
    with LiveServer(*settings) as server, caplog.at_level(logging.ERROR):
        with closing(Client(server.port, {"Authorization": "Bearer cl13nt-k3y"})) as client:
            seen = fuzz(client, 2, REQUESTS, good)
    assert {200, 400, 401, 404, 409, 413, 422} <= seen.keys(), seen
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_tensors_and_messages_are_refused_well_and_leave_the_scores_as_they_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rng, codes, statuses = random.Random(3), Counter[str](), Counter[int]()
    history, top_k = Value("history", "BYTES", ["a"]), Value("top_k", "INT32", [1])
    asked = (history, Value("candidates", "BYTES", ["b", "c"]), Value("deadline_ms", "FP64", [60_000.0]))
    bodies = {"rank": asked, "recommend": (history, top_k)}
    good = [infer(kind, values, "", raw) for kind, values in bodies.items() for raw in (True, False)]
    with LiveServer("server.grpc_port=0") as server, caplog.at_level(logging.ERROR):
        assert server.listener.grpc is not None
        address = f"127.0.0.1:{server.listener.grpc.port}"
        with closing(Client(server.port)) as client, grpc.insecure_channel(address) as channel:
            document = Document(client.get("/openapi.json"))
            for at in range(TENSORS):
                kind = rng.choice(list(bodies))
                body, headers = broken_body(bodies[kind], rng)
                template = "/v2/models/{name}/infer"
                call = Call("POST", template.replace("{name}", kind), template, body, headers)
                status, told, answer = client.ask(call)
                assert document.faults("POST", template, status, told["content-type"], answer) == [], (
                    at,
                    call,
                )
                late = b"deadline_ms" in body or b"timeout" in body
                assert status < 500 or (status == 504 and late), (at, call, answer)
                statuses[status] += 1
                message = broken_message(good, rng)
                method = channel.unary_unary(f"/{SERVICE}/{message.method}")
                failed = method.future(message.data, metadata=message.metadata).exception(60)
                code = "OK" if failed is None else failed.code().name
                late = any(word in message.data for word in (b"deadline_ms", b"timeout")) or bool(
                    message.metadata
                )
                assert code in CODES or (code == "DEADLINE_EXCEEDED" and late), (at, message, failed)
                codes[code] += 1
            assert scores(client.post("/v1/rank", {"history": ["a"], "candidates": ["b", "c"]})) == {
                "b": -1,
                "c": -2,
            }
            answer = channel.unary_unary(f"/{SERVICE}/ModelInfer")(good[1].SerializeToString())
            assert of_message(answer) == {"b": -1, "c": -2}
    assert {200, 400, 422} <= statuses.keys() and CODES - {"RESOURCE_EXHAUSTED"} <= codes.keys(), (
        statuses,
        codes,
    )
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_user_whose_name_no_request_may_have_is_not_found_as_the_document_says() -> None:
    with LiveServer() as server:
        path = "/v1/users/{user_id}/cache"
        reply = server.call("/v1/users/%0A/cache", method="DELETE")
        assert reply.status == 404
        document = Document(server.call("/openapi.json").json)
        assert document.faults("DELETE", path, 404, reply.headers["content-type"], reply.body) == []
        assert document.faults("DELETE", path, 409, reply.headers["content-type"], reply.body) != []
        assert document.faults("DELETE", path, 200, reply.headers["content-type"], reply.body) != []
