# SPDX-License-Identifier: Apache-2.0
"""Traces of requests for OpenTelemetry, sent to a collector by OTLP over HTTP.

The one idea: nothing is recorded while a request is on its way. Its ticket has the times anyway; once the answer is
encoded, the spans are made of them, all here. So a server without `server.traces` never imports opentelemetry, and one
that traces pays after the device's work. Spans wait for their sending in a queue of bounded size, which drops what is
too much.

A request's span has these below it, where the request came so far:

    accept      until the request was read, translated and accepted
    queue       until its first run was planned
    plan        until a thread began with that run
    pack        until that run was handed to the device
    device      until its last run had come back
    translate   until the answer was encoded

A request joins the trace that its `traceparent` names, and is recorded if that says so; others by chance
(`server.trace_ratio`). The answer's `traceresponse` names the request's own span.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from jgr import __version__
from jgr.config import ConfigError, ServerConfig
from jgr.serving.api import ModelInfo
from jgr.serving.policies.jobs import Profile, Start

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

    from jgr.serving.engine.ticket import Ticket

STAGES = ("accept", "queue", "plan", "pack", "device", "translate")
PATH = "v1/traces"
"""Where an OTLP endpoint takes traces."""
SEND_TIMEOUT_S = 5.0
_QUOTING = ("opentelemetry.trace.span", "opentelemetry.trace.propagation.tracecontext")
"""Loggers that would write what is wrong with a client's header, whole and for each request."""

Headers = Iterable[tuple[bytes, bytes]]


def require_opentelemetry(config: ServerConfig) -> None:
    """Raise ConfigError where traces are asked for and the extra is not installed."""
    if config.traces:
        try:
            import opentelemetry.exporter.otlp.proto.http.trace_exporter
            import opentelemetry.sdk.trace  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                f"server.traces: needs OpenTelemetry ({error}); install it by: pip install 'jgr[otel]'"
            ) from None


def tracing(
    config: ServerConfig, clock: Callable[[], int], place: Mapping[str, str] | None = None
) -> Tracing | None:
    """The traces that are configured; None: none are. place: see Tracing. ConfigError where the extra is missing."""
    require_opentelemetry(config)
    return Tracing(config, clock, place=place) if config.traces else None


class Tracing:
    """Makes the spans of requests and sends them from a thread of its own. clock: of the tickets' times, in ns.

    exporter: takes the spans in place of the configured endpoint. place: attributes of the resource that tell which
    process of a fleet this is.
    """

    def __init__(
        self,
        config: ServerConfig,
        clock: Callable[[], int],
        exporter: SpanExporter | None = None,
        place: Mapping[str, str] | None = None,
    ) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        for name in _QUOTING:
            logging.getLogger(name).setLevel(logging.ERROR)
        if exporter is None:
            endpoint = f"{config.traces.rstrip('/')}/{PATH}"
            exporter = OTLPSpanExporter(endpoint=endpoint, timeout=SEND_TIMEOUT_S)
        self.provider: TracerProvider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(config.trace_ratio)),
            resource=Resource.create(
                {"service.name": "jgr", "service.version": __version__, **(place or {})}
            ),
            shutdown_on_exit=False,
        )
        self.provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self.provider.get_tracer("jgr", __version__)
        self._extract = TraceContextTextMapPropagator().extract
        self._clock = clock

    def begin(self, arrival_ns: int, headers: Headers, path: str) -> Trace:
        """A request has come. path: the endpoint's, as metrics name it."""
        return Trace(self, arrival_ns, headers, path)

    def passed_on(self, name: str, headers: Headers) -> PassedOn:
        """A request with these headers goes on to another process from now on."""
        return PassedOn(self, name, headers)

    def open(
        self, name: str, arrival_ns: int, offset_ns: int, headers: Headers, outgoing: bool = False
    ) -> Span:
        """The span of a request, that has come or is passed on."""
        from opentelemetry.trace import SpanKind

        given: dict[str, list[str]] = {"traceparent": [], "tracestate": []}
        for key, value in headers:
            if (found := given.get(key.decode("latin-1"))) is not None:
                found.append(value.decode("latin-1"))
        if len(given["traceparent"]) != 1:
            given.clear()  # of two parents, neither can be believed
        kind = SpanKind.CLIENT if outgoing else SpanKind.SERVER
        return self._tracer.start_span(name, self._extract(given), kind, start_time=arrival_ns + offset_ns)

    def close(self) -> None:
        """Send what is left, for a few seconds at most, and end the thread."""
        self.provider.shutdown()


class Trace:
    """One request's way to its spans. ticket, info: set once the request is accepted, by which model."""

    def __init__(self, tracing: Tracing, arrival_ns: int, headers: Headers, path: str) -> None:
        self._tracing, self._arrival_ns, self._headers, self._path = tracing, arrival_ns, headers, path
        self._span: Span | None = None
        self._offset_ns = 0
        self.ticket: Ticket | None = None
        self.info: ModelInfo | None = None

    def accepted(self, ticket: Ticket, info: ModelInfo) -> None:
        self.ticket, self.info = ticket, info

    def header(self) -> bytes:
        """The value of `traceresponse` for the answer: https://w3c.github.io/trace-context/#traceresponse-header"""
        return _named(self._open())

    def end(self, status: int, request_id: str) -> None:
        """The answer, of this HTTP status, is with the client's connection."""
        from opentelemetry.trace import set_span_in_context
        from opentelemetry.trace.status import StatusCode

        span, ticket = self._open(), self.ticket
        self.ticket = None  # its future may hold an error whose traceback leads to here
        now_ns = self._tracing._clock()
        if span.is_recording():
            span.set_attributes(
                {
                    "http.request.method": "POST",
                    "http.route": self._path,
                    "http.response.status_code": status,
                    "jgr.request_id": request_id,
                }
            )
            if status >= 500:
                span.set_status(StatusCode.ERROR)
            if ticket is not None and self.info is not None:
                span.set_attributes(_attributes(ticket, self.info))
                tracer, below = self._tracing._tracer, set_span_in_context(span)
                times = _times(ticket)
                for stage, (start_ns, end_ns) in zip(STAGES, pairwise(times), strict=False):
                    child = tracer.start_span(stage, below, start_time=start_ns + self._offset_ns)
                    child.end(end_ns + self._offset_ns)
        span.end(now_ns + self._offset_ns)

    def _open(self) -> Span:
        if self._span is None:
            self._offset_ns = time.time_ns() - self._tracing._clock()
            self._span = self._tracing.open(self._path, self._arrival_ns, self._offset_ns, self._headers)
        return self._span


class PassedOn:
    """A request on its way to another process, whose spans are below this one's: `headers` go there in place of its
    own."""

    def __init__(self, tracing: Tracing, name: str, headers: Headers) -> None:
        self._clock = tracing._clock
        now_ns = self._clock()
        self._offset_ns = time.time_ns() - now_ns
        given = list(headers)
        self._span = tracing.open(name, now_ns, self._offset_ns, given, outgoing=True)
        self.headers = [header for header in given if header[0] != b"traceparent"]
        self.headers.append((b"traceparent", _named(self._span)))

    def end(self, attributes: Mapping[str, Any], status: int) -> None:
        """End the span. status: of the answer; 0: it was lost."""
        from opentelemetry.trace.status import StatusCode

        if self._span.is_recording():
            self._span.set_attributes({**attributes, "http.response.status_code": status})
            if not status or status >= 500:
                self._span.set_status(StatusCode.ERROR)
        self._span.end(self._clock() + self._offset_ns)


def _named(span: Span) -> bytes:
    """A span as `traceparent` and `traceresponse` name it."""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}".encode()


def _times(ticket: Ticket) -> list[int]:
    """When each of the stages began, and the last one ended, as far as the request came."""
    times = [ticket.arrival_ns, ticket.submitted_ns]
    for time_ns in (
        ticket.planned_ns,
        ticket.started_ns,
        ticket.launched_ns,
        ticket.ended_ns,
        ticket.encoded_ns,
    ):
        if not time_ns:
            break
        times.append(max(time_ns, times[-1]))
    return times


def _attributes(ticket: Ticket, info: ModelInfo) -> dict[str, Any]:
    task = ticket.task
    found: dict[str, Any] = {
        "jgr.model": info.version,
        "jgr.catalog_version": info.catalog_version,
        "jgr.kind": task.kind,
        "jgr.tokens": task.usage.prompt_tokens,
        "jgr.cached_tokens": task.usage.cached_tokens,
        "jgr.computed_tokens": task.usage.computed_tokens,
    }
    if ticket.start is not None:
        found["jgr.batch_size"] = len(ticket.start.work)
        found["jgr.shape"] = _shape(ticket.start)
    return found


def _shape(start: Start) -> str:
    """The compiled shape of a run, in words."""
    shape = start.shape
    if not isinstance(shape, Profile):
        return f"{shape} candidates" if shape else "user"
    return f"{shape.kind} {shape.batch}x{shape.tokens}+{shape.context} width {shape.width}"
