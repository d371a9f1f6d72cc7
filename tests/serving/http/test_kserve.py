# SPDX-License-Identifier: Apache-2.0
"""KServe's protocol over HTTP as bytes on the wire: metadata, JSON and binary tensors, and what is refused.

Scores are those of fakes.py: a 0, b -1, c -2, d -3, 7 -4; recommend after [a] begins with c, d, 7.
"""

from __future__ import annotations

import json
import random
import re
import struct
from pathlib import Path
from typing import Any

import pytest

from jgr import __version__
from jgr.serving.http.kserve_inputs import INPUTS
from jgr.serving.policies.batching import make_profiles
from tests.serving.fakes import LiveServer, Reply, make_config

HEADER = "inference-header-content-length"
INFER = "/v2/models/rank/infer"
HISTORY = {"name": "history", "datatype": "BYTES", "shape": [1], "data": ["a"]}
CANDIDATES = {"name": "candidates", "datatype": "BYTES", "shape": [3], "data": ["d", "a", "c"]}
RANK = {"inputs": [HISTORY, CANDIDATES]}


def one(name: str, datatype: str, value: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": [1], "data": [value]}


def outputs(reply: Reply) -> dict[str, list[Any]]:
    assert reply.status == 200, reply.body
    return {output["name"]: output["data"] for output in reply.json["outputs"]}


def texts(*values: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(value)) + value for value in values)


def binary(*inputs: tuple[str, str, list[int], bytes], **more: Any) -> tuple[bytes, dict[str, str]]:
    """A body with binary tensors, and its headers."""
    described = [
        {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": len(data)}}
        for name, datatype, shape, data in inputs
    ]
    head = json.dumps({"inputs": described, **more}).encode()
    return head + b"".join(data for *_, data in inputs), {HEADER: str(len(head))}


def told(reply: Reply) -> tuple[int, str, str | None]:
    """Status, type and field of a refusal, after a check of its shape."""
    body = reply.json
    assert {"error", "type", "request_id"} <= body.keys() <= {"error", "type", "request_id", "field"}
    assert isinstance(body["error"], str) and body["request_id"] == reply.headers["x-request-id"]
    return reply.status, body["type"], body.get("field")


def test_a_refusal_for_a_deadline_says_when_the_answer_would_have_come() -> None:
    costs = dict.fromkeys(make_profiles(make_config().profiles), 50.0)
    with LiveServer(costs=costs) as server:
        soon = {**RANK, "parameters": {"timeout": 1_000_000}}
        assert server.call(INFER, soon).status == 200, "an idle server tries what it predicts to be late"
        refused = server.call(INFER, soon)
        assert (refused.status, refused.json["type"]) == (429, "overloaded")
        assert 10_000 < refused.json["predicted_ms"] < 51_000


def test_the_server_and_its_models_describe_themselves(server: LiveServer) -> None:
    about = server.call("/v2").json
    assert about == {"name": "jgr", "version": __version__, "extensions": ["binary_tensor_data"]}
    assert server.call("/v2/health/live").json == {"live": True}
    assert server.call("/v2/health/ready").json == {"ready": True}
    for name in ("recommend", "rank"):
        found = server.call(f"/v2/models/{name}").json
        assert (found["name"], found["versions"], found["platform"]) == (name, ["jgr"], "jgr")
        assert found["inputs"][0] == {"name": "history", "datatype": "BYTES", "shape": [-1]}
        assert {"name": "top_k", "datatype": "INT32", "shape": [1]} in found["inputs"]
        assert found["outputs"][:2] == [
            {"name": "item_ids", "datatype": "BYTES", "shape": [-1]},
            {"name": "scores", "datatype": "FP32", "shape": [-1]},
        ]
        assert server.call(f"/v2/models/{name}/ready").json == {"name": name, "ready": True}
        assert server.call(f"/v2/models/{name}/versions/jgr/ready").json == {"name": name, "ready": True}
        assert server.call(f"/v2/models/{name}/versions/jgr").json == found


def test_tensors_in_json_are_answered_in_json(server: LiveServer) -> None:
    reply = server.call(INFER, {**RANK, "id": "mine"})
    assert reply.headers["content-type"] == "application/json" and HEADER not in reply.headers
    assert reply.json == {
        "model_name": "rank",
        "model_version": "jgr",
        "id": "mine",
        "parameters": {
            "catalog_version": server.engine.catalog.version,
            "prompt_tokens": 4,
            "cached_tokens": 0,
        },
        "outputs": [
            {"name": "item_ids", "datatype": "BYTES", "shape": [3], "data": ["a", "c", "d"]},
            {"name": "scores", "datatype": "FP32", "shape": [3], "data": [0.0, -2.0, -3.0]},
        ],
    }
    body = {"inputs": [HISTORY, one("top_k", "INT32", 3)]}
    found = outputs(server.call("/v2/models/recommend/infer", body))
    assert found == {"item_ids": ["c", "d", "7"], "scores": [0.0, -1.0, -2.0]}
    assert outputs(server.call("/v2/models/recommend/versions/jgr/infer", body)) == found


def test_a_batch_dimension_and_ids_that_are_integers_are_taken(server: LiveServer) -> None:
    nested = {**CANDIDATES, "shape": [1, 3], "data": [["d", "a", "c"]]}
    assert outputs(server.call(INFER, {"inputs": [HISTORY, nested]}))["item_ids"] == ["a", "c", "d"]
    number = {"name": "candidates", "datatype": "INT64", "shape": [1], "data": [7]}
    assert outputs(server.call(INFER, {"inputs": [HISTORY, number]})) == {"item_ids": ["7"], "scores": [-4.0]}


def test_every_input_means_the_field_of_its_name(server: LiveServer) -> None:
    inputs = [
        HISTORY,
        one("user_id", "BYTES", "u1"),
        one("top_k", "INT64", 2),
        one("beam_width", "UINT8", 5),
        one("min_beam_width", "INT32", 5),
        one("exclude_history", "BOOL", True),
        {"name": "deny", "datatype": "BYTES", "shape": [2], "data": ["c", "7"]},
        {"name": "exclude", "datatype": "BYTES", "shape": [1], "data": ["b2"]},
        one("deadline_ms", "FP64", 60_000.0),
        one("priority", "BYTES", "batch"),
    ]
    assert outputs(server.call("/v2/models/recommend/infer", {"inputs": inputs}))["item_ids"] == ["d", "b"]
    allowed = {"name": "allow", "datatype": "BYTES", "shape": [1], "data": ["b2"]}
    body = {"inputs": [HISTORY, one("top_k", "INT32", 1), allowed]}
    assert outputs(server.call("/v2/models/recommend/infer", body))["item_ids"] == ["b2"]
    refused = server.call("/v2/models/rank/infer", {"inputs": [HISTORY, CANDIDATES, one("time", "INT64", 5)]})
    assert told(refused) == (422, "invalid_request", "time")


def test_metadata_comes_where_it_is_asked_for(server: LiveServer) -> None:
    wanted = [{"name": "metadata"}, {"name": "item_ids"}]
    reply = server.call(INFER, {**RANK, "outputs": wanted})
    assert [output["name"] for output in reply.json["outputs"]] == ["metadata", "item_ids"]
    assert json.loads(outputs(reply)["metadata"][0]) == {"title": "title of a"}


def test_tensors_in_bytes_are_read_and_written(server: LiveServer) -> None:
    body, headers = binary(
        ("history", "BYTES", [1], texts(b"a")),
        ("candidates", "BYTES", [3], texts(b"d", b"a", b"c")),
        ("top_k", "INT32", [1], struct.pack("<i", 2)),
        ("exclude_history", "BOOL", [1], b"\x00"),
        ("deadline_ms", "FP32", [1], struct.pack("<f", 60_000)),
        parameters={"binary_data_output": True},
    )
    reply = server.call(INFER, body, **headers)
    assert reply.status == 200 and reply.headers["content-type"] == "application/octet-stream"
    size = int(reply.headers[HEADER])
    head, data = json.loads(reply.body[:size]), reply.body[size:]
    assert [output["parameters"]["binary_data_size"] for output in head["outputs"]] == [10, 8]
    assert data == texts(b"a", b"c") + struct.pack("<2f", 0.0, -2.0)
    body, headers = binary(
        ("history", "BYTES", [1], texts(b"a")),
        ("candidates", "BYTES", [1], texts(b"c")),
        outputs=[{"name": "scores", "parameters": {"binary_data": True}}, {"name": "item_ids"}],
    )
    reply = server.call(INFER, body, **headers)
    size = int(reply.headers[HEADER])
    assert json.loads(reply.body[:size])["outputs"][1]["data"] == ["c"]
    assert reply.body[size:] == struct.pack("<f", -2.0)


@pytest.mark.parametrize(
    ("inputs", "field", "words"),
    [
        ([HISTORY], "candidates", "candidates is required"),
        ([HISTORY, {**CANDIDATES, "shape": [2]}], "candidates", "has 3 elements"),
        ([HISTORY, {**CANDIDATES, "shape": []}], "candidates", "has 3 elements"),
        ([HISTORY, {**CANDIDATES, "shape": [3, 1]}], "candidates", "several requests; one has [3] or [1, 3]"),
        ([HISTORY, {**CANDIDATES, "shape": [-3]}], "inputs[1].shape[0]", "must be a whole number, 0 or more"),
        ([HISTORY, {**CANDIDATES, "shape": [1] * 9}], "inputs[1].shape", "length 8 or less"),
        ([HISTORY, {**CANDIDATES, "data": ["d", 1, "c"]}], "candidates", "candidates[1]: an element of BYTES"),
        ([HISTORY, {**CANDIDATES, "data": ["d", [["a"]], "c"], "datatype": "FP32"}], "candidates", "cannot be a list"),
        ([HISTORY, {**CANDIDATES, "data": [["d", "a", "c"]]}], "candidates", "candidates[0]: an element of BYTES"),
        ([HISTORY, {**CANDIDATES, "shape": [1, 3], "data": [["d"], ["a"], ["c"]]}], "candidates", "not nested as"),
        ([HISTORY, {**CANDIDATES, "data": {"d": 1}}], "candidates", "candidates: must be a list, not an object"),
        ([HISTORY, {**CANDIDATES, "data": ["d", "a", {}]}], "candidates", "candidates[2]: an element of BYTES"),
        ([HISTORY, {**CANDIDATES, "shape": [5]}], "candidates", "candidates has 5 items; the limit is 4"),
        ([{**HISTORY, "shape": [4097]}, CANDIDATES], "history", "history has 4097 items; the limit is 4096"),
        ([HISTORY, CANDIDATES, {**one("top_k", "INT32", 1), "shape": [0]}], "top_k", "one element, not 0"),
        ([HISTORY, one("candidates", "FP32", 0.5)], "candidates", "must be BYTES, not FP32"),
        ([HISTORY, one("candidates", "BOOL", True)], "candidates", "must be BYTES, not BOOL"),
        ([HISTORY, one("candidates", "INT32", True)], "candidates", "cannot be a bool"),
        ([HISTORY, one("candidates", "STRING", "a")], "inputs[1].datatype", "must be 'BOOL', 'BYTES', "),
        ([HISTORY, one("candidates", "BYTES", "zzz")], "candidates[0]", "not in the catalog"),
        ([HISTORY, CANDIDATES, CANDIDATES], "inputs", "there are two called 'candidates'"),
        ([HISTORY, CANDIDATES, one("beam_width", "INT32", 1)], "inputs", "rank has no input 'beam_width'"),
        ([HISTORY, CANDIDATES, one("../x\n", "INT32", 1)], "inputs[2].name", "that matches"),
        ([HISTORY, CANDIDATES, one("top_k", "INT32", 0)], "top_k", "1 or more"),
        ([HISTORY, CANDIDATES, {**one("top_k", "INT32", 0), "shape": [2], "data": [1, 1]}], "top_k", "one element"),
        ([HISTORY, CANDIDATES, one("context", "BYTES", "{")], "context", "is not JSON"),
        ([HISTORY, CANDIDATES, one("context", "BYTES", "[" * 5000)], "context", "context: must be an object"),
        ([HISTORY, CANDIDATES, one("context", "BYTES", '{"a":[]}')], "context", "context: must be a whole number"),
        ([HISTORY, CANDIDATES, {"name": "top_k", "datatype": "INT32", "shape": [1]}], "top_k", "neither data nor"),
        ([HISTORY, CANDIDATES, one("deadline_ms", "FP64", 10**400)], "deadline_ms", "deadline_ms[0]: is beyond what"),
        ([HISTORY, CANDIDATES, one("deadline_ms", "INT64", 10**400)], "deadline_ms", "an element of INT64 can hold"),
        ([HISTORY, CANDIDATES, one("top_k", "INT32", 2**31)], "top_k", "top_k[0]: is beyond what"),
        ([HISTORY, CANDIDATES, one("top_k", "UINT8", -1)], "top_k", "top_k[0]: is beyond what"),
        (
            [HISTORY, CANDIDATES, {**one("top_k", "INT32", 1), "parameters": {"binary_data_size": 4}}],
            "top_k",
            "in place",
        ),
        ([], "inputs", "length 1 or more"),
    ],
)  # fmt: skip
def test_tensors_that_cannot_be_are_refused(
    server: LiveServer, inputs: list[Any], field: str, words: str
) -> None:
    reply = server.call(INFER, {"inputs": inputs})
    assert told(reply) == (422, "invalid_request", field)
    assert words in reply.json["error"]


@pytest.mark.parametrize("shape", [[3], [1, 3]])
def test_text_in_json_that_is_not_utf8_is_refused(server: LiveServer, shape: list[int]) -> None:
    """What is wrong within a tensor is found when its elements are read, after the body."""
    data: Any = ["d", "@", "c"] if shape == [3] else [["d", "@", "c"]]
    body = json.dumps({"inputs": [HISTORY, {**CANDIDATES, "shape": shape, "data": data}]})
    reply = server.call(INFER, body.encode().replace(b"@", b"\xfd"))
    assert told(reply) == (422, "invalid_request", "candidates") and "not UTF-8" in reply.json["error"]


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"parameters": {"timeout": -1}}, "parameters.timeout"),
        ({"parameters": {"timeout": "1"}}, "parameters.timeout"),
        ({"parameters": {"priority": 1.5}}, "parameters.priority"),
        ({"parameters": {"binary_data_output": 1}}, "parameters.binary_data_output"),
        ({"outputs": [{"name": "logits"}]}, "outputs[0].name"),
        ({"outputs": [{"name": "scores"}, {"name": "scores"}]}, "outputs[1].name"),
        ({"outputs": [{"name": "scores", "parameters": {"classification": 3}}]}, "outputs[0].parameters"),
        ({"outputs": [{"name": "scores", "parameters": {"binary_data": "x"}}]}, "outputs[0].parameters.binary_data"),
        ({"parameters": {"x": [[]]}}, "parameters"),
        ({"id": "x" * 257}, "id"),
        ({"extra": 1}, "extra"),
    ],
)  # fmt: skip
def test_what_a_request_says_besides_is_checked(server: LiveServer, more: dict[str, Any], field: str) -> None:
    assert told(server.call(INFER, {**RANK, **more})) == (422, "invalid_request", field)


def test_a_timeout_beyond_every_float_is_a_long_one(server: LiveServer) -> None:
    reply = server.call(INFER, {**RANK, "parameters": {"timeout": 10**400}})
    assert outputs(reply)["item_ids"] == ["a", "c", "d"]


@pytest.mark.parametrize(
    ("body", "size", "field"),
    [
        (b"{}", "3", "Inference-Header-Content-Length"),
        (b"{}", "-1", "Inference-Header-Content-Length"),
        (b"{}", "\xb2", "Inference-Header-Content-Length"),
        (b"{}", "9" * 40, "Inference-Header-Content-Length"),
        (json.dumps(RANK).encode() + b"xx", str(len(json.dumps(RANK))), "inputs"),
    ],
)
def test_a_header_that_does_not_fit_the_body_is_refused(
    server: LiveServer, body: bytes, size: str, field: str
) -> None:
    assert told(server.call(INFER, body, **{HEADER: size})) == (422, "invalid_request", field)


@pytest.mark.parametrize(
    ("blob", "shape", "words"),
    [
        (b"\x01\x00\x00", [1], "its bytes end"),
        (struct.pack("<I", 9) + b"a", [1], "its bytes end"),
        (struct.pack("<I", 2**32 - 1), [1], "its bytes end"),
        (texts(b"\xff\xfe"), [1], "not UTF-8"),
        (texts(b"a", b"b"), [1], "more elements than its shape says, 1"),
        (b"", [1], "has 0 elements"),
    ],
)
def test_bytes_that_are_no_tensor_are_refused(
    server: LiveServer, blob: bytes, shape: list[int], words: str
) -> None:
    body, headers = binary(("history", "BYTES", [1], texts(b"a")), ("candidates", "BYTES", shape, blob))
    reply = server.call(INFER, body, **headers)
    assert (
        reply.status == 422 and words in reply.json["error"] and reply.json["field"].startswith("candidates")
    )
    body, headers = binary(("history", "INT32", [1], b"\x01\x00\x00"))
    assert "no whole number" in server.call(INFER, body, **headers).json["error"]
    body, headers = binary(
        ("history", "BYTES", [1], texts(b"a")),
        ("candidates", "BYTES", [1], texts(b"a")),
        ("deadline_ms", "FP64", [1], struct.pack("<d", float("nan"))),
    )
    assert told(server.call(INFER, body, **headers)) == (422, "invalid_request", "deadline_ms")


def test_other_names_paths_and_methods_are_refused_in_kserves_shape(server: LiveServer) -> None:
    assert told(server.call("/v2/models/shop/infer", RANK)) == (404, "not_found", "model_name")
    assert told(server.call("/v2/models/rank/versions/other/infer", RANK)) == (404, "not_found", "model")
    assert told(server.call("/v2/models/shop")) == (404, "not_found", "model_name")
    assert told(server.call("/v2/models/rank/versions/other/ready")) == (404, "not_found", "model")
    assert told(server.call("/v2/nowhere")) == (404, "not_found", None)
    assert told(server.call(INFER)) == (405, "method_not_allowed", None)
    assert told(server.call(INFER, b"{")) == (400, "invalid_json", None)
    assert told(server.call(INFER, b" " * (1 << 20) + b"{}")) == (413, "body_too_large", None)


def test_keys_deadlines_quotas_and_metrics_are_those_of_rank() -> None:
    settings = (
        "server.api_key=s3cret",
        "server.open_metrics=true",
        "batching.order=edf",
        "batching.max_queue=1",
    )
    with LiveServer(*settings) as server:
        key = {"authorization": "Bearer s3cret"}
        for path in ("/v2", "/v2/models/rank", "/v2/models/rank/ready"):
            assert told(server.call(path)) == (401, "unauthorized", None)
            assert server.call(path, **key).status == 200
        assert server.call("/v2/health/ready").status == 200
        assert told(server.call(INFER, RANK)) == (401, "unauthorized", None)
        server.executor.hold()
        running = server.send(INFER, RANK, **key)
        server.executor.wait_entered()
        late = {**RANK, "parameters": {"timeout": 1000}}
        assert told(server.call(INFER, late, **key)) == (504, "deadline_exceeded", None)
        queued = server.send(INFER, RANK, **key)
        server.wait_for("jgr_queue_depth", 1)
        full = server.call(INFER, RANK, **key)
        assert told(full) == (429, "overloaded", None) and full.headers["retry-after"] == "1"
        server.executor.release()
        assert running.reply().status == queued.reply().status == 200
        assert server.metric('jgr_requests_total{endpoint="/v2/models/{name}/infer",status="200"}') == 2


def test_the_work_of_a_client_that_leaves_is_cancelled() -> None:
    with LiveServer() as server:
        server.executor.hold()
        running = server.send(INFER, RANK)
        server.executor.wait_entered()
        queued = server.send(INFER, RANK)
        server.wait_for("jgr_queue_depth", 1)
        queued.abandon()
        server.wait_for("jgr_cancelled_total", 1)
        server.executor.release()
        assert running.reply().status == 200
        assert server.executor.batches == [1]


def test_a_server_that_is_not_ready_says_so() -> None:
    with LiveServer(hold=True) as server:
        assert server.call("/v2/health/live").status == 200
        assert told(server.call("/v2/health/ready")) == (503, "unavailable", None)
        assert told(server.call("/v2/models/rank/ready")) == (503, "unavailable", None)
        assert told(server.call(INFER, RANK)) == (503, "unavailable", None)
        server.executor.release()
        assert server.ready.wait(30)
        assert server.call("/v2/models/rank/ready").status == 200


def test_whatever_bytes_come_no_tensor_breaks_the_server(
    server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(0)
    seen: set[int] = set()
    for _ in range(1_500):
        body, headers = binary(
            ("history", "BYTES", [2], texts(b"a", b"b")),
            ("candidates", "BYTES", [3], texts(b"d", b"a", b"c")),
            ("top_k", "INT32", [1], struct.pack("<i", rng.choice((1, 2, 0, -1, 2**31 - 1)))),
            (
                "deadline_ms",
                rng.choice(("FP64", "INT64")),
                [1],
                struct.pack("<d", rng.choice((6e4, -1.0, 1e300))),
            ),
        )
        broken = bytearray(body)
        for _ in range(rng.choice((0, 1, 1, 3))):
            at = (
                rng.randrange(len(broken))
                if rng.random() < 0.5
                else rng.randrange(int(headers[HEADER]), len(broken))
            )
            broken[at] = rng.randrange(256)
        if rng.random() < 0.2:
            broken = broken[: rng.randrange(len(broken))]
        if rng.random() < 0.2:
            headers = {HEADER: str(int(headers[HEADER]) + rng.randint(-3, 3))}
        reply = server.call(INFER, bytes(broken), **headers)
        assert reply.status in (200, 400, 422), (bytes(broken), reply.body)
        seen.add(reply.status)
    assert seen == {200, 400, 422}
    assert not caplog.records


def test_the_docs_have_every_input_with_its_type() -> None:
    page = (Path(__file__).parents[3] / "docs" / "serving.md").read_text()
    rows = re.findall(r"^\| (`\w+`.*?) \| (\w+ \[-?1\]).*\|$", page, re.MULTILINE)
    documented = {name: kind for names, kind in rows for name in re.findall(r"`(\w+)`", names)}
    given = {each.name: each for inputs in INPUTS.values() for each in inputs.values()}
    assert documented == {name: f"{of.datatype} [{1 if of.one else -1}]" for name, of in given.items()}
