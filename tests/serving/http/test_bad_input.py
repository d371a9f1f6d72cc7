# SPDX-License-Identifier: Apache-2.0
"""Whatever a client sends, it gets a clear 4xx that names the field, and the next request is answered."""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Iterator
from typing import Any

import pytest

from jgr.serving.http import decoding
from tests.serving.fakes import LiveServer, Reply

RECOMMEND = {"history": ["a"], "top_k": 2}
RANK = {"history": ["a"], "candidates": ["b"]}


@pytest.fixture
def healthy(server: LiveServer) -> Iterator[LiveServer]:
    """The shared server, which must still answer after the test."""
    yield server
    assert [i["item_id"] for i in server.call("/v1/recommend", RECOMMEND).json["items"]] == ["c", "d"]
    assert server.engine.status == "ready"


def refused(reply: Reply, status: int, field: str | None, *words: str) -> None:
    assert reply.status == status, reply.body
    assert reply.error.get("field") == field
    for word in words:
        assert word in reply.error["message"]


# (body over a valid one, field named, words in the message)
FIELD_ERRORS: dict[str, tuple[str, dict[str, Any], str, tuple[str, ...]]] = {
    "empty history": ("recommend", {"history": []}, "history", ("must be a list of length 1 or more",)),
    "empty history, rank": ("rank", {"history": []}, "history", ("must be a list of length 1 or more",)),
    "history all unknown": ("recommend", {"history": ["x", "y"]}, "history", ("no item",)),
    "over-long history": ("recommend", {"history": ["a"] * 4097}, "history", ("4097 items", "4096")),
    "no candidates": ("rank", {"candidates": []}, "candidates", ("must be a list of length 1 or more",)),
    "duplicate candidate": (
        "rank",
        {"candidates": ["b", "a", "b"]},
        "candidates[2]",
        ("candidates[0]", "'b'"),
    ),
    "duplicate once as int": ("rank", {"candidates": ["7", 7]}, "candidates[1]", ("candidates[0]",)),
    "unknown candidate": (
        "rank",
        {"candidates": ["b", "no"]},
        "candidates[1]",
        ("'no'", "not in the catalog"),
    ),
    "too many candidates": ("rank", {"candidates": list("abcd7")}, "candidates", ("5 items", "limit is 4")),
    "the whole catalog beyond the limit": (
        "rank",
        {"candidates": "all"},
        "candidates",
        ("all items of the catalog", "limit is 4"),
    ),
    "candidates by another word": (
        "rank",
        {"candidates": "every"},
        "candidates",
        ("candidates: must be 'all' or a list, not 'every'",),
    ),
    "candidates by a long word": (
        "rank",
        {"candidates": "x" * 999},
        "candidates",
        ("a list, not 'xxx", "x...'"),
    ),
    "candidates null": ("rank", {"candidates": None}, "candidates", ("must be 'all' or a list, not null",)),
    "priority by another word": (
        "recommend",
        {"priority": "high"},
        "priority",
        ("priority: must be 'batch' or 'interactive', not 'high'",),
    ),
    "priority a number": (
        "rank",
        {"priority": 1},
        "priority",
        ("'batch' or 'interactive', not a whole number",),
    ),
    "layout by another word": (
        "rank",
        {"layout": "x"},
        "layout",
        ("must be 'causal', 'item_prefix', 'user_prefix' or null, not 'x'",),
    ),
    "top_k zero": ("recommend", {"top_k": 0}, "top_k", ("must be a whole number, 1 or more",)),
    "top_k negative": ("rank", {"top_k": -1}, "top_k", ("must be a whole number, 1 or more",)),
    "top_k beyond the beam": ("recommend", {"top_k": 6}, "top_k", ("beam_width, here 5",)),
    "top_k beyond a given beam": ("recommend", {"top_k": 3, "beam_width": 2}, "top_k", ("here 2",)),
    "top_k beyond the candidates": ("rank", {"top_k": 2}, "top_k", ("only 1 candidates",)),
    "top_k huge": ("recommend", {"top_k": 10**30}, "top_k", ("at most beam_width",)),
    "beam_width zero": ("recommend", {"beam_width": 0}, "beam_width", ("must be a whole number, 1 or more",)),
    "beam_width too large": ("recommend", {"beam_width": 6}, "beam_width", ("is 6", "largest served is 5")),
    "deadline zero": ("recommend", {"deadline_ms": 0}, "deadline_ms", ("must be a number, more than 0.0",)),
    "deadline negative": ("rank", {"deadline_ms": -1.5}, "deadline_ms", ("must be a number, more than 0.0",)),
    "deadline too late": (
        "rank",
        {"deadline_ms": 10**9},
        "deadline_ms",
        ("must be a number, 600000.0 or less",),
    ),
    "deadline NaN": ("recommend", {"deadline_ms": float("nan")}, "deadline_ms", ("finite", "NaN")),
    "deadline Infinity": ("rank", {"deadline_ms": float("inf")}, "deadline_ms", ("finite",)),
    "deadline -Infinity": ("rank", {"deadline_ms": float("-inf")}, "deadline_ms", ("finite",)),
    "NaN in a filter": ("recommend", {"filters": {"deny": [float("nan")]}}, "filters.deny[0]", ("finite",)),
    "NaN in history": ("recommend", {"history": ["a", float("nan")]}, "history[1]", ("finite",)),
    "history a string": ("recommend", {"history": "a"}, "history", ("must be a list, not text",)),
    "history null": ("recommend", {"history": None}, "history", ("must be a list, not null",)),
    "history of floats": (
        "recommend",
        {"history": ["a", 7.0]},
        "history[1]",
        ("must be a whole number or text, not a decimal number",),
    ),
    "history of booleans": ("recommend", {"history": [True]}, "history[0]", ("not true or false",)),
    "history of nulls": ("recommend", {"history": ["a", "a", None]}, "history[2]", ("not null",)),
    "history of lists": ("recommend", {"history": [["a"]]}, "history[0]", ("not a list",)),
    "candidates of objects": (
        "rank",
        {"candidates": [{}]},
        "candidates[0]",
        ("must be a whole number or text, not an object",),
    ),
    "top_k a string": ("recommend", {"top_k": "3"}, "top_k", ("top_k: must be a whole number, not text",)),
    "top_k a float": (
        "recommend",
        {"top_k": 3.5},
        "top_k",
        ("must be a whole number, not a decimal number",),
    ),
    "top_k a boolean": (
        "recommend",
        {"top_k": True},
        "top_k",
        ("must be a whole number, not true or false",),
    ),
    "exclude_history a number": (
        "recommend",
        {"exclude_history": 1},
        "exclude_history",
        ("must be true or false, not a whole number",),
    ),
    "user_id a list": (
        "recommend",
        {"user_id": []},
        "user_id",
        ("must be a whole number, text or null, not a list",),
    ),
    "user_id too long": (
        "recommend",
        {"user_id": "u" * 257},
        "user_id",
        ("must be text of length 256 or less",),
    ),
    "user_id too large": ("recommend", {"user_id": 10**300}, "user_id", ()),
    "user_id with a line feed": ("rank", {"user_id": "u\n"}, "user_id", ()),
    "unknown field": ("recommend", {"topk": 3}, "topk", ("unknown field 'topk'", "nearest is 'top_k'")),
    "field of the other kind": ("rank", {"beam_width": 3}, "beam_width", ("unknown field",)),
    "times of no timed model": (
        "rank",
        {"history_times": [1]},
        "history_times",
        ("'jgr' has no use for it",),
    ),
    "time of no timed model": ("rank", {"time": 1}, "time", ("no use",)),
    "actions of no such model": ("rank", {"history_actions": [1]}, "history_actions", ("no use",)),
    "context of no such model": ("rank", {"context": {"slot0": 1}}, "context", ("no use",)),
    "scenario of no such model": ("rank", {"scenario": 1}, "scenario", ("no use",)),
    "task of no such model": ("rank", {"task_weights": {"like": 1}}, "task_weights", ("no use",)),
    "negative slot": ("rank", {"context": {"slot0": -1}}, "context", ("must be a whole number, 0 or more",)),
    "negative time": (
        "rank",
        {"history_times": [-1]},
        "history_times[0]",
        ("must be a whole number, 0 or more",),
    ),
    "text for a weight": (
        "rank",
        {"task_weights": {"like": "x"}},
        "task_weights",
        ("must be a number, not text",),
    ),
}


@pytest.mark.parametrize("name", FIELD_ERRORS)
def test_bad_fields_are_named(healthy: LiveServer, name: str) -> None:
    kind, changes, field, words = FIELD_ERRORS[name]
    body = {**(RECOMMEND if kind == "recommend" else RANK), **changes}
    reply = healthy.call(f"/v1/{kind}", body)
    refused(reply, 422, field, *words)
    assert reply.error["type"] == "invalid_request"


@pytest.mark.parametrize("field", ["history", "candidates"])
def test_missing_fields_are_named(healthy: LiveServer, field: str) -> None:
    body = {name: value for name, value in RANK.items() if name != field}
    refused(healthy.call("/v1/rank", body), 422, field, "required")


def test_a_long_body_is_not_searched_for_its_nan(
    healthy: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python would go through each value, on the event loop. Where the JSON breaks is told all the same."""
    looked_at = []
    search = decoding._path_to_non_finite
    monkeypatch.setattr(
        decoding, "_path_to_non_finite", lambda value: looked_at.append(value) or search(value)
    )
    beginning = b'{"history":["",' + b'"",' * 100_000 + b'""],"top_k":'
    reply = healthy.call("/v1/recommend", beginning + b"NaN}")
    refused(reply, 400, None, "not JSON", f"byte {len(beginning)}")
    assert reply.error["type"] == "invalid_json"
    assert not looked_at
    refused(healthy.call("/v1/recommend", b'{"history":["a"],"top_k":NaN}'), 422, "top_k", "finite")
    assert looked_at, "a short body is searched"


def test_numbers_out_of_range_are_named(healthy: LiveServer) -> None:
    refused(healthy.call("/v1/rank", b'{"history":["a"],"deadline_ms":1e999}'), 422, "deadline_ms", "range")
    refused(healthy.call("/v1/rank", b'{"history":[' + b"9" * 5000 + b"]}"), 422, "history[0]", "range")


def test_top_k_beyond_the_catalog() -> None:
    with LiveServer("profiles.widths=32", "beam.width=32") as server:
        refused(server.call("/v1/recommend", {"history": ["a"], "top_k": 7}), 422, "top_k", "has 6 items")
        assert len(server.call("/v1/recommend", {"history": ["a"], "top_k": 6}).json["items"]) == 6


def test_a_prompt_longer_than_every_profile() -> None:
    with LiveServer("profiles.tokens=6") as server:
        refused(server.call("/v1/recommend", {**RECOMMEND, "history": ["a"] * 3}), 422, "history", "8 tokens")
        assert server.call("/v1/recommend", {**RECOMMEND, "history": ["a"] * 2}).status == 200


def test_unknown_history_items_are_skipped_and_reported(healthy: LiveServer) -> None:
    unknown = ["x" * 200, *(f"no{i}" for i in range(11))]
    reply = healthy.call("/v1/recommend", {**RECOMMEND, "history": ["no", "a", *unknown]})
    assert reply.status == 200
    assert [i["item_id"] for i in reply.json["items"]] == ["c", "d"], "as if they had not been there"
    assert reply.json["usage"]["history_items"] == 1
    assert reply.json["usage"]["unknown_items"] == 13
    assert reply.json["usage"]["unknown_item_ids"] == ["no", "x" * 80, *(f"no{i}" for i in range(8))]


def test_unknown_history_items_are_rejected_where_the_flag_says_so() -> None:
    with LiveServer("server.unknown_items=reject") as server:
        for path, body in (("/v1/recommend", RECOMMEND), ("/v1/rank", RANK)):
            reply = server.call(path, {**body, "history": ["a", "no", "b"]})
            refused(reply, 422, "history[1]", "'no'", "not in the catalog")
            assert server.call(path, body).status == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"history": ["a"',
        b'{"history": ["a"]} extra',
        b"{'history': ['a']}",
        b'{"history": ["\xff"]}',
        b'{"history": ["\\ud800"]}',
        b"\x1f\x8b\x08\x00",
        b'{"history": NaN',
    ],
)
def test_broken_json(healthy: LiveServer, body: bytes) -> None:
    reply = healthy.call("/v1/recommend", body, method="POST")
    refused(reply, 400, None, "not JSON")
    assert reply.error["type"] == "invalid_json"


@pytest.mark.parametrize("body", [b"[]", b'"text"', b"null", b"3", b"[" * 100_000])
def test_json_that_is_no_object(healthy: LiveServer, body: bytes) -> None:
    refused(healthy.call("/v1/rank", body), 422, None, "the body: must be an object, not ")


def test_deeply_nested_values(healthy: LiveServer) -> None:
    refused(
        healthy.call("/v1/rank", b'{"history":' + b"[" * 100_000),
        422,
        "history[0]",
        "must be a whole number or text, not a list",
    )
    reply = healthy.call("/v1/rank", b'{"nonsense":' + b"[" * 100_000)
    assert reply.status in (400, 422)


def test_huge_body(healthy: LiveServer) -> None:
    body = json.dumps({"history": ["a"] * 300_000}).encode()
    assert len(body) > healthy.config.server.max_body_bytes
    reply = healthy.call("/v1/recommend", body)
    refused(reply, 413, None, "1048576 bytes")
    assert (reply.error["type"], reply.headers["connection"]) == ("body_too_large", "close")


def test_the_largest_body_is_read(healthy: LiveServer) -> None:
    padded = json.dumps(RECOMMEND).encode().ljust(healthy.config.server.max_body_bytes)
    assert healthy.call("/v1/recommend", padded).status == 200
    refused(healthy.call("/v1/recommend", padded + b" "), 413, None)


def read_all(connection: Any) -> bytes:
    received = b""
    while chunk := connection.recv(65536):
        received += chunk
    return received


def test_huge_chunked_body_is_refused_and_the_connection_closed(healthy: LiveServer) -> None:
    with healthy.connect() as connection:
        connection.sendall(b"POST /v1/rank HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(3):
            connection.sendall(b"80000\r\n" + b" " * 0x80000 + b"\r\n")
        connection.sendall(b"0\r\n\r\n")
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"\r\nconnection: close\r\n" in answer


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (b"transfer-encoding: chunked\r\n\r\n", b"80000\r\n" + b" " * 0x80000 + b"\r\n"),
        (b"x-long: ", b"x" * 0x80000),
        (b"", b"x-many: x\r\n" * 50_000),
    ],
    ids=["body", "header", "headers"],
)
def test_what_does_not_end_is_cut_off(healthy: LiveServer, start: bytes, piece: bytes) -> None:
    sent = 0
    with healthy.connect() as connection:
        connection.sendall(b"POST /v1/rank HTTP/1.1\r\nhost: x\r\n" + start)
        with contextlib.suppress(ConnectionError):
            while sent < 100 << 20:
                connection.sendall(piece)
                sent += len(piece)
    assert sent < 100 << 20


def test_a_chunked_body_is_as_good_as_another(healthy: LiveServer) -> None:
    body = json.dumps(RECOMMEND).encode()
    with healthy.connect() as connection:
        connection.sendall(b"POST /v1/recommend HTTP/1.1\r\nhost: x\r\nconnection: close\r\n")
        connection.sendall(b"transfer-encoding: chunked\r\n\r\n")
        for byte in body:
            connection.sendall(b"1\r\n" + bytes([byte]) + b"\r\n")
        connection.sendall(b"0\r\n\r\n")
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b'"item_id":"c"' in answer


@pytest.mark.parametrize("path", ["/v1/recommend", "/v2/models/recommend/infer", "/v1/rerank"])
def test_a_compressed_body_is_refused_by_the_name_of_its_header(healthy: LiveServer, path: str) -> None:
    body = gzip.compress(json.dumps(RECOMMEND).encode())
    reply = healthy.call(path, body, Content_Encoding="gzip")
    told = reply.json if path.startswith("/v2") else reply.json["error"]
    assert (reply.status, told["type"], told["field"]) == (422, "invalid_request", "Content-Encoding")
    assert healthy.call("/v1/recommend", RECOMMEND, Content_Encoding="identity").status == 200


def test_bytes_that_are_not_http(healthy: LiveServer) -> None:
    with healthy.connect() as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        assert read_all(connection).startswith(b"HTTP/1.1 400 ")


def test_texts_of_the_client_are_bounded_in_messages(healthy: LiveServer) -> None:
    reply = healthy.call("/v1/rank", {**RANK, "candidates": ["z" * 10_000]})
    refused(reply, 422, "candidates[0]", "zzz...")
    assert len(reply.body) < 500
    reply = healthy.call("/v1/rank", {**RANK, "f" * 10_000: 1})
    assert reply.status == 422
    assert len(reply.body) < 600, "with the names of all fields"
    reply = healthy.call("/v1/items/" + "z" * 10_000)
    assert len(reply.body) < 500


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("Expected `int`, got `str`", "must be a whole number, not text"),
        (
            "Expected `int | str | null`, got `float`",
            "must be a whole number, text or null, not a decimal number",
        ),
        ("Expected `float` < 1.0", "must be a number, less than 1.0"),
        ("Expected `array` of length 2", "must be a list of length 2"),
        ("Expected `str` matching regex '^a > 3$'", "must be text that matches '^a > 3$'"),
        ("Expected `datetime`, got `int`", "must be datetime, not a whole number"),
        ("Integer value out of range", "integer value out of range"),
    ],
)
def test_words_of_the_parser_are_said_in_those_of_the_api(said: str, told: str) -> None:
    assert decoding.in_words(said) == told


def test_a_field_that_is_missing_inside_another_is_named_whole(healthy: LiveServer) -> None:
    body = {"inputs": [{"name": "history", "shape": [1]}]}
    reply = healthy.call("/v2/models/rank/infer", body)
    assert reply.status == 422 and reply.json["field"] == "inputs[0].datatype"
    assert reply.json["error"] == "inputs[0].datatype is required"
