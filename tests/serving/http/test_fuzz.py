# SPDX-License-Identifier: Apache-2.0
"""Thousands of seeded requests, out of the server's own document and broken in every way, against real servers.

What is drawn is in benchmarks/hostile_requests.py, which the long run (benchmarks/hostile.py) draws from too.
"""

from __future__ import annotations

import http.client
import json
import logging
import random
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from types import MappingProxyType
from typing import Any

import pytest

from benchmarks.hostile_requests import Call, Document, filled, mutated, raw, rendered
from tests.serving.decoders.test_cached_server import ids
from tests.serving.fakes import PATIENCE_S, LiveServer
from tests.serving.scorer_fakes import ITEMS
from tests.serving.versions.test_shared_memory import ASKED, Two

ADMIN = "Bearer 4dm1n"
RECOMMEND: dict[str, Any] = {"history": ids(1, 2, 3), "top_k": 2, "user_id": "u", "model": "jgr"}
RANK: dict[str, Any] = {
    "history": ids(1, 2, 3), "candidates": ids(4, 5, 6), "top_k": 2, "user_id": "u", "model": "jgr",
    "explain": True, "deadline_ms": 60_000,
}  # fmt: skip
GOOD: dict[str, Sequence[dict[str, Any]]] = {
    "/v1/recommend": (
        RECOMMEND,
        {**RECOMMEND, "filters": {"deny": ids(7), "exclude": [8]}, "priority": "batch"},
    ),
    "/v1/rank": (
        RANK,
        {**RANK, "model": "tiny", "history": ITEMS[:3]},
        {**ASKED, "task_weights": {"like": 1}},
    ),
}
CATALOG = [{"item_id": f"i{n}", "semantic_id": [f"<a_{n}>"], "metadata": {"n": n}} for n in range(30)]
KNOWN = ("i1", "jgr", "jgr", "tiny", "u")
REQUESTS, RAW, RELOADS = 4_000, 1_000, 3


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    """A decoder that caches, and a scorer that keeps users."""
    server = Two(tmp_path_factory.mktemp("two"))
    yield server
    server.stop()


def port_of(server: Two) -> int:
    return int(server.listener.url.rpartition(":")[2])


class Client:
    """A keep-alive connection, made again where the server closes it."""

    def __init__(self, port: int, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        """headers: of what `get` and `post` send."""
        self._headers = headers
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)

    def ask(self, call: Call) -> tuple[int, dict[str, str], bytes]:
        self._connection.request(call.method, call.path, call.body, call.headers)
        with self._connection.getresponse() as response:
            headers = {name.lower(): value for name, value in response.getheaders()}
            return response.status, headers, response.read()

    def get(self, path: str) -> Any:
        return json.loads(self.ask(Call("GET", path, path, None, dict(self._headers)))[2])

    def post(self, path: str, body: Any) -> Any:
        status, _, answer = self.ask(Call("POST", path, path, json.dumps(body).encode(), dict(self._headers)))
        assert status == 200, answer
        return json.loads(answer)

    def close(self) -> None:
        self._connection.close()


@pytest.fixture
def client(served: Two) -> Iterator[Client]:
    with closing(Client(port_of(served))) as client:
        yield client


def draw(document: Document, rng: random.Random, good: dict[str, Sequence[dict[str, Any]]]) -> Call:
    """A request for an operation of the document: half of them for the hot ones."""
    method, template = rng.choice(document.operations)
    if rng.random() < 0.5:
        method, template = "POST", rng.choice(list(good))
    call = Call(method, filled(template, rng, KNOWN), template)
    schema = document.request(method, template)
    if schema is not None:
        how = rng.randrange(4)
        body = document.drawn(schema, rng) if how == 0 else rng.choice(good[rng.choice(list(good))])
        call.body = rendered(body if how < 2 else mutated(body, rng, list(RANK.values())), rng)
    elif template == "/v1/catalogs" and method == "POST":
        lines = rng.choice((CATALOG[:-1], CATALOG[::-1], mutated(CATALOG, rng)))
        call.body = b"\n".join(json.dumps(line).encode() for line in lines)
        call.body = call.body if rng.random() < 0.7 else rendered(lines, rng)
    elif rng.random() < 0.1:
        call.body = rendered(RANK, rng)
    if rng.random() < 0.5:
        call.headers["Authorization"] = rng.choice(
            (ADMIN, ADMIN, "Bearer cl13nt-k3y", "Bearer é", "Basic x", "")
        )
    if rng.random() < 0.3:
        call.headers["X-Request-Id"] = rng.choice(("r1", "r" * 200, "\xff", "a b"))
    return call


def fuzz(client: Client, seed: int, number: int, good: dict[str, Sequence[dict[str, Any]]]) -> Counter[int]:
    """Ask so many requests, and hold each answer against the document; how often each status came."""
    rng, document, seen = random.Random(seed), Document(client.get("/openapi.json")), Counter[int]()
    reloads = 0
    for at in range(number):
        call = draw(document, rng, good)
        if call.template.endswith("/reload") and reloads == RELOADS:
            continue
        status, headers, body = client.ask(call)
        said = f"request {at} of seed {seed}: {call}: {status} {body[:300]!r}"
        kind = headers.get("content-type", "")
        assert document.faults(call.method, call.template, status, kind, body) == [], said
        assert status < 500 or (status == 504 and b"deadline_ms" in (call.body or b"")), said
        assert (
            headers["x-request-id"] == call.headers.get("X-Request-Id", "")
            or len(headers["x-request-id"]) == 32
        )
        if status >= 400:
            assert json.loads(body)["error"]["request_id"] == headers["x-request-id"], said
        reloads += status == 202
        seen[status] += 1
    return seen


def scores(client: Client) -> list[float]:
    answers = [
        client.post("/v1/recommend", RECOMMEND),
        client.post("/v1/rank", RANK),
        client.post("/v1/rank", ASKED),
    ]
    return [item["score"] for answer in answers for item in answer["items"]]


def half_closed(port: int, data: bytes, rng: random.Random) -> bytes:
    """Send bytes in a few pieces and then nothing more; or leave without a word. All that the server answered."""
    answered = b""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        try:
            for start in range(0, len(data), size := rng.choice((1 << 20, 1000, 1 + len(data) // 3))):
                connection.sendall(data[start : start + size])
            if rng.random() < 0.8:
                connection.shutdown(socket.SHUT_WR)
                while chunk := connection.recv(1 << 16):
                    answered += chunk
        except OSError:
            pass  # the server hung up first
    return answered


def test_whatever_bytes_come_the_next_request_is_answered_right(
    served: Two, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    rng, port = random.Random(0), port_of(served)
    expected = scores(client)
    body = json.dumps(RECOMMEND).encode()
    good = b"POST /v1/recommend HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    statuses = Counter[bytes]()
    with caplog.at_level(logging.ERROR):
        for _ in range(RAW):
            data = raw(good, rng)
            answered = half_closed(port, data, rng)
            assert not answered or answered.startswith(b"HTTP/1.1 "), (data[:500], answered[:500])
            assert b"HTTP/1.1 5" not in answered, (data[:500], answered[:500])
            statuses[answered[9:12]] += 1
            items = client.post("/v1/recommend", RECOMMEND)["items"]
            assert [item["score"] for item in items] == pytest.approx(expected[:2], abs=1e-4)
    assert {b"200", b"400", b"431", b""} <= statuses.keys()
    assert scores(client) == pytest.approx(expected, abs=1e-4)
    assert not caplog.records


def test_answers_are_those_that_the_document_has(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        seen = fuzz(client, 1, REQUESTS, GOOD)
    assert {200, 201, 202, 400, 401, 404, 409, 422} <= seen.keys(), seen
    assert not caplog.records


def test_answers_of_a_server_with_keys_are_those_that_the_document_has(
    caplog: pytest.LogCaptureFixture,
) -> None:
    good: dict[str, Sequence[dict[str, Any]]] = {
        "/v1/recommend": ({"history": ["a"], "top_k": 2},),
        "/v1/rank": ({"history": ["a", 7], "candidates": ["b", "c"], "user_id": 3},),
    }
    settings = ("server.api_key=cl13nt-k3y", "server.admin_key=4dm1n", "server.max_body_bytes=4096")
    with LiveServer(*settings) as server, caplog.at_level(logging.ERROR):
        with closing(Client(server.port, {"Authorization": "Bearer cl13nt-k3y"})) as client:
            seen = fuzz(client, 2, REQUESTS, good)
    assert {200, 400, 401, 404, 409, 413, 422} <= seen.keys(), seen
    assert not caplog.records
