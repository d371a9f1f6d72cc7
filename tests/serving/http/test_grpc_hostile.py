# SPDX-License-Identifier: Apache-2.0
"""What a gRPC client may do to the server: calls without an end, a key or a sense; and what is told of calls."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import grpc
import pytest

from benchmarks.hostile_frames import GOAWAY, HEADERS, INITIAL_WINDOW_SIZE, call, frames, opening
from jgr.serving.http import kserve_grpc
from jgr.serving.http.kserve_grpc import SERVICE, message_class
from tests.serving.fakes import PATIENCE_S, LiveServer
from tests.serving.http.test_tracing import STAGES, Collector, attributes
from tests.serving.http.test_triton_clients import METADATA, grpc_port, rank_message
from tests.serving.http.test_triton_clients import call as ask

RANK = rank_message().SerializeToString()
KEY = [(b"authorization", METADATA["authorization"].encode())]


@pytest.fixture(scope="module")
def served() -> Iterator[LiveServer]:
    """Three calls at a time, with a key; a message has half a second."""
    settings = ("server.grpc_port=0", "server.api_key=s3cret", "server.max_connections=3")
    with LiveServer(*settings, "server.open_metrics=true", read_timeout_s=0.5) as server:
        yield server


@pytest.fixture
def channel(served: LiveServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{grpc_port(served)}") as channel:
        yield channel


def connected(server: LiveServer, data: bytes) -> socket.socket:
    link = socket.create_connection(("127.0.0.1", grpc_port(server)), timeout=PATIENCE_S)
    link.sendall(data)
    return link


def answered(channel: grpc.Channel) -> None:
    """Ask until the good request is answered; each question lets the server's loop turn."""
    for _ in range(2_000):
        error = ask(channel, "ModelInfer", RANK, wait_for_ready=True).exception(PATIENCE_S)
        if error is None:
            return
        assert error.code().name in ("RESOURCE_EXHAUSTED", "UNAVAILABLE", "CANCELLED"), error
    raise AssertionError("never answered")


def refused(link: socket.socket) -> list[bytes]:
    """The last headers of each call that the server has ended, until it hangs up or three are there."""
    found = []
    for kind, _, _, content in frames(link):
        if kind == HEADERS:
            found.append(content)
        if kind == GOAWAY or len(found) == 3:
            break
    return found


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"message": b"abc", "declared": 100, "end": False}, b"did not arrive within 0.5 s"),
        ({"end": False}, b"did not arrive within 0.5 s"),
        ({}, b"the call has no message"),
    ],
)
def test_a_call_whose_message_does_not_come_is_not_waited_for(
    served: LiveServer, channel: grpc.Channel, how: dict[str, Any], words: bytes
) -> None:
    data = b"".join(call(stream, metadata=KEY, **how) for stream in (1, 3, 5))
    with closing(connected(served, opening() + data)) as link:
        assert all(words in content for content in refused(link))
        answered(channel)


def test_a_burst_of_calls_is_told_why_it_is_refused() -> None:
    settings = ("server.grpc_port=0", "server.api_key=s3cret")
    with LiveServer(*settings) as server, grpc.insecure_channel(f"127.0.0.1:{grpc_port(server)}") as channel:
        infer = channel.unary_unary(f"/{SERVICE}/ModelInfer")
        calls = [infer.future(RANK, PATIENCE_S, [("authorization", "Bearer wrong")]) for _ in range(3_000)]
        assert {call.exception().code().name for call in calls} == {"UNAUTHENTICATED"}


def test_the_key_is_asked_for_before_the_message(served: LiveServer) -> None:
    with closing(connected(served, opening() + b"".join(call(n, end=False) for n in (1, 3, 5)))) as link:
        assert all(b"needs the header" in content for content in refused(link))


def test_a_path_that_is_no_text_ends_nothing(
    served: LiveServer, channel: grpc.Channel, caplog: pytest.LogCaptureFixture
) -> None:
    port = grpc_port(served)
    for _ in range(3):
        answered(channel)
        with closing(connected(served, opening() + call(1, b"/\xff\xfe"))) as link:
            refused(link)
        answered(channel)
    assert grpc_port(served) == port
    assert "gRPC ended by itself, and is begun again" in caplog.text
    assert "Traceback" not in caplog.text


def test_a_key_with_bytes_that_are_no_text_is_not_in_the_log(
    served: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        metadata = [(b"authorization", b"Bearer s3cret\xff"), (b"x-request-id", b"s3cret\xff")]
        data = b"".join(call(n, metadata=metadata, message=RANK) for n in (1, 3, 5))
        with closing(connected(served, opening() + data)) as link:
            assert all(b"needs the header" in content for content in refused(link))
    assert "s3cret" not in caplog.text and "Traceback" not in caplog.text


def test_a_client_that_takes_no_answer_and_leaves_writes_no_traceback(
    served: LiveServer, channel: grpc.Channel, caplog: pytest.LogCaptureFixture
) -> None:
    counted = f'jgr_requests_total{{endpoint="/{SERVICE}/ModelInfer",status="200"}}'
    answered(channel)
    before = served.metric(counted)
    data = opening({INITIAL_WINDOW_SIZE: 0}) + call(1, metadata=KEY, message=RANK)
    with closing(connected(served, data)):
        served.wait_for(counted, before + 1)
    answered(channel)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_connections_are_bounded(served: LiveServer) -> None:
    with ExitStack() as stack:
        links = [stack.enter_context(connected(served, opening())) for _ in range(8)]
        open_ = 0
        for link in links:
            link.settimeout(5.0)
            try:
                open_ += bool(link.recv(1))
            except ConnectionResetError:
                pass
        assert open_ <= 3


def test_a_long_refusal_is_cut_where_clients_would_not_take_it(
    served: LiveServer, channel: grpc.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered(channel)
    monkeypatch.setattr(kserve_grpc, "MAX_MESSAGE_CHARS", 44)
    request = rank_message()
    priority = request.inputs.add(name="priority", datatype="BYTES", shape=[1])
    priority.contents.bytes_contents.append(b"x" * 50_000)
    error = ask(channel, "ModelInfer", request.SerializeToString()).exception(PATIENCE_S)
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == "priority: must be 'batch' or 'interactive', "


@pytest.mark.parametrize(("datatype", "value"), [("INT8", 200), ("UINT16", 70_000), ("INT8", -129)])
def test_a_number_is_of_its_datatype(channel: grpc.Channel, datatype: str, value: int) -> None:
    request = rank_message()
    top_k = request.inputs.add(name="top_k", datatype=datatype, shape=[1])
    (top_k.contents.uint_contents if datatype[0] == "U" else top_k.contents.int_contents).append(value)
    answered(channel)
    error = ask(channel, "ModelInfer", request.SerializeToString()).exception(PATIENCE_S)
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT and "top_k[0]: is beyond" in error.details()


def test_calls_are_traced_and_logged_as_requests_over_http_are(caplog: pytest.LogCaptureFixture) -> None:
    collector, endpoint = Collector(), f"/{SERVICE}/ModelInfer"
    settings = ("server.grpc_port=0", "server.access_log=true", "server.api_key=s3cret")
    try:
        with caplog.at_level(logging.INFO, "jgr.access"):
            with LiveServer(*settings, f"server.traces={collector.url}") as server:
                trace = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "x-request-id": "mine"}
                with grpc.insecure_channel(f"127.0.0.1:{grpc_port(server)}") as channel:
                    good = ask(channel, "ModelInfer", RANK, {**METADATA, **trace})
                    answer = good.result(PATIENCE_S)
                    failed = ask(channel, "ModelInfer", RANK, trace)
                    assert failed.exception(PATIENCE_S).code() == grpc.StatusCode.UNAUTHENTICATED
                    told = [dict(one.trailing_metadata())["traceresponse"] for one in (good, failed)]
                    ask(channel, "ServerLive", b"", {}).result(PATIENCE_S)
    finally:
        collector.stop()
    assert message_class("ModelInferResponse").FromString(answer).model_name == "rank"
    roots = {attributes(root)["http.response.status_code"]: root for root in collector.roots()}
    assert roots.keys() == {200, 401} and {root.name for root in roots.values()} == {endpoint}
    assert {root.trace_id.hex() for root in roots.values()} == {"a" * 32}
    assert [line.split("-")[2] for line in told] == [roots[200].span_id.hex(), roots[401].span_id.hex()]
    assert [span.name for span in collector.below(roots[200])] == STAGES
    assert attributes(roots[200])["jgr.request_id"] == "mine" and collector.below(roots[401]) == []
    lines = [record.__dict__ for record in caplog.records if record.name == "jgr.access"]
    assert [(line["method"], line["path"], line["status"], line["bytes"]) for line in lines] == [
        ("GRPC", endpoint, 200, len(answer)),
        ("GRPC", endpoint, 401, 0),
    ]
    assert {line["client"] for line in lines} == {"127.0.0.1"}
    assert "s3cret" not in caplog.text


def test_rate_share_and_role_of_a_key_are_the_same_over_both_protocols(tmp_path: Path) -> None:
    entries: list[dict[str, Any]] = [
        {"name": "slow", "key": "slow-0123456789abcd", "role": "client", "rate": 0.001, "burst": 2},
        {"name": "half", "key": "half-0123456789abcd", "role": "client", "share": 0.1},
        {"name": "ops", "key": "ops-0123456789abcde", "role": "admin"},
    ]
    (tmp_path / "keys.json").write_text(json.dumps({"keys": entries}))
    (tmp_path / "keys.json").chmod(0o600)
    slow, half, ops = ({"authorization": f"Bearer {entry['key']}"} for entry in entries)
    body = {"history": ["a"], "candidates": ["d"]}
    settings = (f"server.keys={tmp_path / 'keys.json'}", "server.grpc_port=0", "server.open_metrics=true")
    with LiveServer(*settings, "batching.max_queue=10") as server:
        with grpc.insecure_channel(f"127.0.0.1:{grpc_port(server)}") as channel:

            def refusal(key: dict[str, str]) -> tuple[str, str, bool]:
                failed = ask(channel, "ModelInfer", RANK, key)
                code = failed.exception(PATIENCE_S).code().name
                trailing = dict(failed.trailing_metadata())
                return code, trailing["jgr-error"], "retry-after" in trailing

            assert server.call("/v1/rank", body, **slow).status == 200
            assert ask(channel, "ModelInfer", RANK, slow).result(PATIENCE_S)
            assert refusal(slow) == ("RESOURCE_EXHAUSTED", "quota_exceeded", True)
            assert server.call("/v2/models/rank", **slow).status == 429
            assert refusal(ops) == ("PERMISSION_DENIED", "forbidden", False)
            for _ in range(2):  # the two that were answered
                server.executor.wait_entered()
            server.executor.hold()
            running = ask(channel, "ModelInfer", RANK, half)
            server.executor.wait_entered()
            assert server.call("/v1/rank", body, **half).error["type"] == "quota_exceeded"
            assert refusal(half) == ("RESOURCE_EXHAUSTED", "quota_exceeded", True)
            server.executor.release()
            assert running.result(PATIENCE_S)
            for reason, count in (("quota", 2), ("unauthorized", 1), ("share", 2)):
                assert server.metric(f'jgr_refused_total{{reason="{reason}"}}') == count
