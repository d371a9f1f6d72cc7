# SPDX-License-Identifier: Apache-2.0
"""Traces of requests, as a collector gets them: over real HTTP, in OTLP, read by OpenTelemetry's own messages."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service

from jgr.config import Config, ConfigError, override
from jgr.serving.engine import tracing
from tests.serving.fakes import LiveServer, Reply

STAGES = ["accept", "queue", "plan", "pack", "device", "translate"]
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
RANK = {"history": ["a"], "candidates": ["c", "d"]}


class Collector:
    """Takes traces as an OpenTelemetry collector does. spans: all that came."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers["content-length"]))
                assert self.path == "/v1/traces"
                for group in service.ExportTraceServiceRequest.FromString(content).resource_spans:
                    collector.resources.append(attributes(group.resource))
                    for scope in group.scope_spans:
                        collector.spans += scope.spans
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def roots(self) -> list[Any]:
        return [span for span in self.spans if span.name not in STAGES]

    def below(self, root: Any) -> list[Any]:
        found = [span for span in self.spans if span.parent_span_id == root.span_id]
        return sorted(found, key=lambda span: STAGES.index(span.name))


def attributes(of: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in of.attributes}


def told(reply: Reply) -> tuple[str, str, bool]:
    """The trace, the span and whether it is recorded, as an answer tells them."""
    version, trace, span, flags = reply.headers["traceresponse"].split("-")
    assert (version, len(trace), len(span), len(flags)) == ("00", 32, 16, 2)
    return trace, span, bool(int(flags, 16) & 1)


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.stop()


def test_a_request_is_a_span_with_its_stages_below(collector: Collector) -> None:
    start_ns = time.time_ns()
    with LiveServer(f"server.traces={collector.url}/") as server:
        reply = server.call("/v1/rank", RANK, x_request_id="mine")
        model = server.model()
    assert reply.status == 200
    (root,) = collector.roots()  # what is no request for a model is not traced
    assert (root.name, root.parent_span_id, root.status.code) == ("/v1/rank", b"", 0)
    assert told(reply) == (root.trace_id.hex(), root.span_id.hex(), True)
    usage = reply.json["usage"]
    assert attributes(root) == {
        "http.request.method": "POST",
        "http.route": "/v1/rank",
        "http.response.status_code": 200,
        "jgr.request_id": "mine",
        "jgr.model": model["version"],
        "jgr.catalog_version": model["catalog_version"],
        "jgr.kind": "rank",
        "jgr.tokens": usage["prompt_tokens"],
        "jgr.cached_tokens": 0,
        "jgr.computed_tokens": usage["prompt_tokens"],
        "jgr.batch_size": 1,
        "jgr.shape": "rank 1x8+0 width 4",
    }
    stages = collector.below(root)
    assert [span.name for span in stages] == STAGES
    assert {span.trace_id for span in stages} == {root.trace_id}
    times = [root.start_time_unix_nano, *(span.end_time_unix_nano for span in stages)]
    assert [span.start_time_unix_nano for span in stages] == times[:-1], "each begins where the last one ends"
    assert times == sorted(times)
    assert start_ns <= times[0] and times[-1] <= root.end_time_unix_nano <= time.time_ns()
    assert collector.resources[0]["service.name"] == "jgr"


@pytest.mark.parametrize("ratio", [0, 1])
def test_a_request_joins_the_trace_that_it_names_if_that_is_recorded(
    collector: Collector, ratio: int
) -> None:
    malformed = (
        "",
        "00-1-2-01",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}",
    )
    with LiveServer(f"server.traces={collector.url}", f"server.trace_ratio={ratio}") as server:
        sampled = server.call("/v1/rank", RANK, traceparent=f"00-{TRACE}-{PARENT}-01", tracestate="a=1,b=2")
        unsampled = server.call("/v1/rank", RANK, traceparent=f"00-{TRACE}-{PARENT}-00")
        others = [server.call("/v1/rank", RANK, traceparent=value) for value in malformed]
        others.append(server.call("/v1/rank", RANK))
    assert (told(sampled)[0], told(sampled)[2]) == (TRACE, True)
    assert (told(unsampled)[0], told(unsampled)[2]) == (TRACE, False)
    for reply in others:
        assert reply.status == 200
        assert told(reply)[0] != TRACE and told(reply)[2] == bool(ratio)
    roots = collector.roots()
    joined = [root for root in roots if root.trace_id.hex() == TRACE]
    assert [(root.parent_span_id.hex(), root.trace_state) for root in joined] == [(PARENT, "a=1,b=2")]
    assert len(roots) == 1 + len(others) * ratio


@pytest.mark.parametrize(
    "state", ["a" * 8000, "a=b," * 15_000, "A=\x9b2J", ",".join(f"k{i}=v" for i in range(99))]
)
def test_what_is_no_state_is_left_out_and_not_written_to_the_log(
    collector: Collector, caplog: pytest.LogCaptureFixture, state: str
) -> None:
    with LiveServer(f"server.traces={collector.url}") as server:
        before = len(caplog.records)
        reply = server.call("/v1/rank", RANK, traceparent=f"00-{TRACE}-{PARENT}-01", tracestate=state)
        assert reply.status == 200 and told(reply)[0] == TRACE
        assert not caplog.records[before:]
    assert [root.trace_state for root in collector.roots()] == [""]


def test_two_parents_are_none(collector: Collector) -> None:
    parent = f"traceparent: 00-{TRACE}-{PARENT}-01\r\n"
    with LiveServer(f"server.traces={collector.url}") as server, server.connect() as connection:
        body = b'{"history": ["a"], "candidates": ["c"]}'
        head = f"POST /v1/rank HTTP/1.1\r\nhost: x\r\n{parent}{parent}connection: close\r\n"
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        with connection.makefile("rb") as answer:
            assert b"200" in answer.readline()
            answer.read()
    (root,) = collector.roots()
    assert root.trace_id.hex() != TRACE and not root.parent_span_id


def test_what_was_refused_or_broke_is_told_as_far_as_it_came(collector: Collector) -> None:
    with LiveServer(f"server.traces={collector.url}", "server.explain=true") as server:
        server.executor.errors.append(RuntimeError("broken"))
        replies = [
            server.call("/v1/rank", RANK),
            server.call("/v1/rank", {"history": []}),
            server.call("/v1/users/u/prefill", {"history": ["a"]}),
            server.call("/v1/recommend", RANK | {"candidates": None}),
            server.call("/v1/rank", None),
            server.call("/v1/explain/rank", RANK),
            server.call("/v1/users/u/cache", method="DELETE"),
        ]
    found = [
        (root.name, attributes(root)["http.response.status_code"], root.status.code)
        for root in collector.roots()
    ]
    assert found == [
        ("/v1/rank", 500, 2),
        ("/v1/rank", 422, 0),
        ("/v1/users/{user_id}/prefill", 200, 0),
        ("/v1/recommend", 422, 0),
        ("/v1/rank", 405, 0),
        ("/v1/explain/rank", 200, 0),
    ]
    stages = [[span.name for span in collector.below(root)] for root in collector.roots()]
    assert stages == [["accept", "queue"], [], ["accept"], [], [], STAGES]
    assert ["traceresponse" in reply.headers for reply in replies] == [True] * 6 + [False]


def test_a_client_that_leaves_ends_its_span(collector: Collector) -> None:
    with LiveServer(f"server.traces={collector.url}") as server:
        server.executor.hold()
        pending = server.send("/v1/rank", RANK)
        server.executor.wait_entered()
        pending.abandon()
        server.wait_for("jgr_cancelled_total", 1)
        server.executor.release()
    (root,) = collector.roots()
    assert attributes(root)["http.response.status_code"] == 499


def test_a_collector_that_is_not_there_costs_no_answer(collector: Collector) -> None:
    with LiveServer("server.traces=http://127.0.0.1:9") as server:  # nobody listens to `discard`
        assert server.call("/v1/rank", RANK).status == 200


def test_without_the_extra_the_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    config = override(Config(), "server.traces=http://127.0.0.1:4318")
    with pytest.raises(ConfigError, match=r"server\.traces: .*pip install 'jgr\[otel\]'"):
        tracing.tracing(config.server, time.monotonic_ns)
    assert tracing.tracing(Config().server, time.monotonic_ns) is None


@pytest.mark.parametrize(
    "setting",
    [
        "traces=127.0.0.1:4318",
        "traces=ftp://x",
        "traces=http://user:secret@x",
        "traces=http://x?y",
        "trace_ratio=1.1",
    ],
)
def test_settings_that_cannot_be_are_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=rf"server\.{setting.partition('=')[0]} must be"):
        override(Config(), f"server.{setting}")


def test_a_server_without_traces_never_loads_opentelemetry() -> None:
    code = f"""
import sys
from tests.serving.fakes import LiveServer
with LiveServer() as server:
    reply = server.call("/v1/rank", {RANK!r}, traceparent="00-{TRACE}-{PARENT}-01")
assert reply.status == 200 and "traceresponse" not in reply.headers
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
