# SPDX-License-Identifier: Apache-2.0
"""The HTTP interface of the served models. It only translates between HTTP and engines.

The one idea: few endpoints are hot and all others are not. `/v1/recommend` and `/v1/rank`, and the other shapes of
rank, are plain ASGI: one read, one decode into a typed struct, one encode, no middleware. The others use Starlette
(`jgr.serving.http.cold`). All that make work for a model go one way, `App.answer`, and so does gRPC.

Every answer carries X-Request-Id; the body of every refusal is that of `jgr.serving.http.refusals`. A body larger
than the limit is never kept in memory, chunked or not, and what all bodies hold that come in parts is bounded. The work
of a client that goes away is cancelled.
Calls that change the server itself (a reload, a catalog) need an admin's key; without such a key all are refused.
Who asks is known before anything of a body is read (`jgr.serving.http.keys`); a key's calls are bounded by its quota.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from random import getrandbits
from typing import Any, NamedTuple, TypeVar

import msgspec
from prometheus_client import Counter
from starlette.types import Message, Receive, Scope, Send

from jgr.config import ServerConfig
from jgr.serving.api import Answer, RankRequest, RecommendRequest
from jgr.serving.engine.engine import AnyEngine
from jgr.serving.engine.ticket import ClientGone
from jgr.serving.engine.tracing import Trace, Tracing, tracing
from jgr.serving.errors import STATUS, ErrorType, RequestError, invalid, quoted
from jgr.serving.explanations import ExplainRank, ExplainRecommend
from jgr.serving.http.access import log_access
from jgr.serving.http.bodies import Bodies
from jgr.serving.http.bounds import REQUEST_ID
from jgr.serving.http.cold import (
    ADMIN_METHODS,
    ADMIN_PATHS,
    EXPLAIN_RANK,
    EXPLAIN_RECOMMEND,
    USERS_PATH,
    Cold,
)
from jgr.serving.http.decoding import UNREADABLE, refusal
from jgr.serving.http.keys import ANYBODY, Caller, Keys
from jgr.serving.http.operations import open_paths
from jgr.serving.http.refusals import KSERVE, TRY_AGAIN, error_body
from jgr.serving.http.rerank import Translate, rerank, score
from jgr.serving.http.reranked import reranked
from jgr.serving.policies.jobs import Kind
from jgr.serving.policies.quotas import Places
from jgr.serving.prefill import Asked
from jgr.serving.versions.served_models import Models

CLIENT_GONE = 499
"""The status that the request counter shows if the client left before its answer; it is never sent."""

Headers = list[tuple[bytes, bytes]]
T = TypeVar("T")

_log = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode
_ERROR_HEADERS: dict[ErrorType, Headers] = {
    "unauthorized": [(b"www-authenticate", b"Bearer")],
    "method_not_allowed": [(b"allow", b"POST")],
    "body_too_large": [(b"connection", b"close")],
}


class Hot(NamedTuple):
    """A hot endpoint: the kind of its requests, and what decodes a body.

    translate: what decodes it in place of the decoder, where the body is another's shape of the request.
    """

    kind: Kind
    decoder: msgspec.json.Decoder[RecommendRequest] | msgspec.json.Decoder[RankRequest]
    translate: Translate | None = None


class Departure:
    """Whether the client that waits for the answer to one request has left, and what is cancelled then."""

    def __init__(self) -> None:
        self.happened = False
        self._cancel: Callable[[], object] | None = None

    def cancels(self, work: Callable[[], object] | None) -> None:
        """What to call when the client leaves, in place of what was told before; None: nothing."""
        self._cancel = work

    def happen(self) -> None:
        """The connection is lost."""
        self.happened = True
        if self._cancel is not None:
            self._cancel()


class Visit:
    """One connection, and the places of keys that it holds: one of each key that it has asked with."""

    def __init__(self) -> None:
        self._held: set[Places] = set()
        self._ended = False

    def admits(self, places: Places) -> bool:
        """Whether the connection has one of these places from now on, or needs none, since it is lost."""
        if self._ended or places in self._held:
            return True
        if not places.enter():
            return False
        self._held.add(places)
        return True

    def end(self) -> None:
        """The connection is lost."""
        self._ended = True
        while self._held:
            self._held.pop().leave()


@dataclass(frozen=True, eq=False)
class Call:
    """One call for a model's work. trace: None: it is not traced."""

    departure: Departure
    request_id: str
    arrival_ns: int
    caller: Caller
    trace: Trace | None = None


class App:
    """The ASGI application that serves `models`. `jgr.serving.http.listener` runs it. Another ASGI server could, but
    work goes on for a client that leaves unless the scope has its Departure as "jgr.departure", and a key may have any
    number of connections unless the scope has each one's Visit as "jgr.visit".

    place: attributes of traces that tell which replica of a fleet this is. Raises ConfigError for keys that cannot be
    used.
    """

    def __init__(self, models: Models, config: ServerConfig, place: Mapping[str, str] | None = None) -> None:
        self.keys = Keys(config)
        self.models = models
        self.clock = models.deployments[0].engine.clock
        # The first model's registry holds the process's metrics too.
        self._requests = models.deployments[0].metrics.requests
        self._refused = models.deployments[0].metrics.refused
        self._counters: dict[tuple[str, int], Counter] = {}  # by endpoint, from a fixed set, and status
        self.bodies = Bodies(config.max_body_bytes, self._refused["bodies"].inc)
        self.access = log_access if config.access_log else None
        self.traces: Tracing | None = tracing(config, self.clock, place)
        rank = msgspec.json.Decoder(RankRequest)
        self._hot: dict[str, Hot] = {
            "/v1/recommend": Hot("recommend", msgspec.json.Decoder(RecommendRequest)),
            "/v1/rank": Hot("rank", rank),
            "/v1/rerank": Hot("rank", rank, rerank),
            "/v1/score": Hot("rank", rank, score),
        }
        self._open = open_paths(config)
        self._cold = Cold(models, config, self.keys, self)
        self._explaining = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._cold.application(scope, receive, send)
        arrival_ns = self.clock() - scope.get("jgr.waited_ns", 0)  # where it has come from another process
        departure = scope.setdefault("jgr.departure", Departure())
        path, key, request_id, coding = scope["path"], b"", "", b""
        for name, value in scope["headers"]:
            if name == b"authorization":
                key = value
            elif name == b"content-encoding":
                coding = value
            elif name == b"x-request-id" and REQUEST_ID.fullmatch(value):
                request_id = value.decode()
        reply = _Reply(send, request_id or f"{getrandbits(128):032x}", self.models, path)
        hot, trace = self._hot.get(path), None
        if self.traces is not None and (name := path if hot is not None else _traced(scope)):
            trace = reply.trace = self.traces.begin(arrival_ns, scope["headers"], name)
        try:
            caller = None if path in self._open else self._admit(scope, key, arrival_ns)
            if caller is not None and caller.places is not None and "jgr.visit" in scope:
                self._let_in(scope["jgr.visit"], caller, reply)
            if coding and coding.lower() != b"identity" and scope["method"] == "POST":
                raise invalid(
                    "Content-Encoding",
                    f"Content-Encoding: {quoted(coding.decode('latin-1'))} is not read; send the body as it is",
                )
            if hot is None or caller is None:
                if "\n" in path:  # the end of a route's pattern matches before a newline
                    raise RequestError("not_found", f"there is no {quoted(path)}")
                scope["jgr.request_id"], scope["jgr.caller"] = reply.request_id, caller
                scope["jgr.arrival_ns"], scope["jgr.trace"] = arrival_ns, trace
                await self._cold.application(scope, receive, reply.forward)
            else:
                call = Call(departure, reply.request_id, arrival_ns, caller, trace)
                body = await self._answer(scope["method"], path, hot, call, receive)
                await reply.send(200, body)
        except RequestError as error:
            await reply.refuse(error)
        except asyncio.CancelledError:
            if not self.models.draining:
                raise
            await reply.refuse(
                RequestError("unavailable", "the server stopped before it had the whole request")
            )
        except ClientGone:
            reply.status = CLIENT_GONE
        except Exception as error:
            _log.error("request %s failed", reply.request_id, exc_info=error)
            await reply.refuse(RequestError("internal", "the server failed; see its log"))
        finally:
            self.count(path if hot else self._cold.endpoint(scope), reply.status)
            if self.access is not None:
                took_ms = (self.clock() - arrival_ns) / 1e6
                self.access(scope, reply.status, reply.size, took_ms, reply.request_id)
            if trace is not None:
                trace.end(reply.status, reply.request_id)

    def count(self, endpoint: str, status: int) -> None:
        """One more request was answered. endpoint: one of a fixed set."""
        counter = self._counters.get((endpoint, status))
        if counter is None:
            counter = self._requests.labels(endpoint, str(status))
            self._counters[endpoint, status] = counter
        counter.inc()

    def may_upload(self, headers: Headers) -> bool:
        """Whether a request with these headers may take as long as a catalog takes."""
        given = [value for name, value in headers if name == b"authorization"]
        caller = self.keys.find(given[-1]) if given else None
        return caller is not None and caller.role == "admin"

    def _admit(self, scope: Scope, key: bytes, now_ns: int) -> Caller:
        find = who(self.keys, scope["method"], scope["path"])
        if self.keys.open and find == self.keys.client:
            return ANYBODY
        return self.admit(find, key, None if "jgr.charged" in scope else now_ns)

    def _let_in(self, visit: Visit, caller: Caller, reply: _Reply) -> None:
        """Raise RequestError, and close the connection, where its caller has as many as it may."""
        assert caller.places is not None
        if not visit.admits(caller.places):
            reply.closes = True
            self._refused["connections"].inc()
            most = caller.limits.connections
            raise RequestError(
                "quota_exceeded", f"the key {caller.name!r} may have {most} connections at a time; close one"
            )

    def admit(self, find: Callable[[bytes], Caller], key: bytes, now_ns: int | None) -> Caller:
        """Who asks, as `find` tells by the key. now_ns: None: another process has charged the key. Raises RequestError
        for a key that may not, or that may not ask so often."""
        try:
            caller = find(key)
            if caller.bucket is not None and now_ns is not None:
                caller.charge(now_ns)
        except RequestError as error:
            self._refused["quota" if error.type == "quota_exceeded" else "unauthorized"].inc()
            raise
        return caller

    async def _answer(self, method: str, path: str, hot: Hot, call: Call, receive: Receive) -> bytes:
        if method != "POST":
            raise RequestError("method_not_allowed", f"{path} takes POST")
        body = await self.read_body(receive)
        kind, decoder, translate = hot
        if translate is not None:
            return await self._translated(kind, translate, body, call)
        try:
            request = decoder.decode(body)
        except UNREADABLE as error:
            raise refusal(error, body, decoder.type) from None
        models = self.models
        engine = models.chosen.get((request.model, kind)) or models.engine(request.model, kind)
        try:
            if isinstance(request, RecommendRequest) and request.rerank is not None:
                return _encode(
                    await self._reranked(engine, request, partial(self._ranker, request.rerank), call)
                )
            return await self.answer(engine, request, call, _encode)
        finally:
            del engine  # see _computed

    async def _reranked(
        self, finder: AnyEngine, request: RecommendRequest, find_ranker: Callable[[], AnyEngine], call: Call
    ) -> Answer:
        """The answer to both requests of a call; a trace tells of the first. The second, for which the first was
        computed, is not refused for the caller's share, nor because the server is to end."""

        def ask(engine: AnyEngine, one: RecommendRequest | RankRequest) -> Awaitable[Answer]:
            of = call if isinstance(one, RecommendRequest) else replace(call, trace=None)
            return self._computed(engine, one, of, lambda answer: answer)

        try:
            self.models.require_open()
            queues = {engine.info.id: engine.max_queue for engine in (finder, find_ranker())}
            with self._share(call.caller, queues), self.models.reranking:
                return await reranked(ask, finder, find_ranker, request)
        finally:
            del finder  # see _computed

    def _ranker(self, name: str) -> AnyEngine:
        """The engine of a request's `rerank`. Raises RequestError, which names the field."""
        try:
            return self.models.engine(name, "rank")
        except RequestError as error:
            raise invalid("rerank", f"rerank: {error.message}") from None

    async def _translated(self, kind: Kind, translate: Translate, body: bytes, call: Call) -> bytes:
        """The answer to a body of another shape, in that shape; errors name its fields."""
        given = translate(body, lambda model: self.models.engine(model, kind).info.max_candidates)
        engine = self.models.engine(given.request.model, kind)
        try:
            return await self.answer(engine, given.request, call, given.encode)
        except RequestError as error:
            raise given.refused(error) from None
        finally:
            del engine  # see _computed

    async def answer_to(
        self, scope: Scope, engine: AnyEngine, request: Asked, encode: Callable[[Any], T]
    ) -> T:
        """The same as `answer`, for a request that Starlette has routed."""
        own = ("jgr.departure", "jgr.request_id", "jgr.arrival_ns", "jgr.caller", "jgr.trace")
        return await self.answer(engine, request, Call(*map(scope.__getitem__, own)), encode)

    async def answer(self, engine: AnyEngine, request: Asked, call: Call, encode: Callable[[Any], T]) -> T:
        """The engine's answer as `encode` makes it, within the caller's share of the queue. Raises RequestError, and
        ClientGone."""
        try:
            self.models.require_open()
            with self._share(call.caller, {engine.info.id: engine.max_queue}):
                return await self._computed(engine, request, call, encode)
        finally:
            del engine  # see _computed

    @contextlib.contextmanager
    def _share(self, caller: Caller, queues: Mapping[str, int]) -> Iterator[None]:
        """Within the caller's share of each queue. queues: how many each holds, by its name. Raises RequestError."""
        share, entered = caller.share, list[str]()
        if share is None:
            yield
            return
        try:
            for queue, most in queues.items():
                if not share.enter(queue, most):
                    self._refused["share"].inc()
                    raise RequestError(
                        "quota_exceeded",
                        f"the key {caller.name!r} has used up its share of the queue; try again later",
                    )
                entered.append(queue)
            yield
        finally:
            for queue in entered:
                share.leave(queue)

    async def _computed(self, engine: AnyEngine, request: Asked, call: Call, encode: Callable[[Any], T]) -> T:
        """The engine's answer, encoded; the work of a client that leaves is cancelled."""
        departure = call.departure
        read = await self._entered(engine, request, call)
        ticket = engine.submit(request, call.request_id, call.arrival_ns, call.caller.tenant, read)
        if call.trace is not None:
            call.trace.accepted(ticket, engine.info)
        departure.cancels(partial(engine.cancel, ticket))
        try:
            answer = await ticket.answer
            if isinstance(request, ExplainRecommend | ExplainRank):
                explain = partial(engine.served.explanation, ticket.task, answer)
                encoded = await self._explained(explain, encode, departure)
                del explain
            else:
                encoded = encode(answer)
            engine.encoded(ticket)
            return encoded
        except asyncio.CancelledError:
            engine.cancel(ticket)
            raise
        finally:
            departure.cancels(None)
            # An error's traceback holds this frame, and the ticket holds the error. Left alone, this cycle would keep
            # the engine and its device memory until the garbage collector runs.
            del engine, ticket

    async def _entered(self, engine: AnyEngine, request: Asked, call: Call) -> Any:
        """What `Engine.enter` gives. A client that leaves meanwhile gives up its place in the line: ClientGone."""
        task, departure = asyncio.current_task(), call.departure
        assert task is not None
        departure.cancels(task.cancel)
        try:
            if departure.happened:
                raise ClientGone
            read = await engine.enter(request, call.arrival_ns)
        except asyncio.CancelledError:
            if departure.happened and not task.uncancel():
                raise ClientGone from None
            raise
        finally:
            departure.cancels(None)
            del engine  # see _computed
        if departure.happened:
            raise ClientGone
        return read

    async def _explained(
        self, explain: Callable[[], Any], encode: Callable[[Any], T], departure: Departure
    ) -> T:
        """An explanation, encoded, in a turn of the event loop of its own: it takes milliseconds, and the answers of a
        batch come all at once."""
        async with self._explaining:
            await asyncio.sleep(0)
            if departure.happened:
                raise ClientGone
            return encode(explain())

    async def read_body(self, receive: Receive) -> bytes:
        """Read the whole body. Raises RequestError if it exceeds the limit, or all bodies theirs; ClientGone if the
        client leaves."""
        return await self.bodies.read(receive)


class _Reply:
    """Sends one response, with the headers that every response has. status: its HTTP status, 0 until it is sent. size:
    bytes of its body so far. closes: whether the connection is closed after it."""

    def __init__(self, send: Send, request_id: str, models: Models, path: str) -> None:
        self.request_id = request_id
        self.status = self.size = 0
        self.closes = False
        self.trace: Trace | None = None
        self._send = send
        self._models = models
        self._path = path

    async def send(self, status: int, body: bytes, extra: Headers | None = None) -> None:
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *(extra or ()),
        ]
        await self.forward({"type": "http.response.start", "status": status, "headers": headers})
        await self.forward({"type": "http.response.body", "body": body})

    async def refuse(self, error: RequestError) -> None:
        if not self.status:
            body = error_body(error, self.request_id, self._path)
            headers = list(_ERROR_HEADERS.get(error.type, ()))
            if error.type in TRY_AGAIN:
                headers.append((b"retry-after", b"%d" % error.retry_after_s))
            await self.send(STATUS[error.type], body, headers)

    async def forward(self, message: Message) -> None:
        """Send an inner application's message, with the common headers added to its head."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = message["headers"]
            headers.append((b"x-request-id", self.request_id.encode()))
            if self.trace is not None:
                headers.append((b"traceresponse", self.trace.header()))
            if self.closes or self._models.draining:
                headers.append((b"connection", b"close"))
        else:
            self.size += len(message.get("body", b""))
        await self._send(message)


def who(keys: Keys, method: str, path: str) -> Callable[[bytes], Caller]:
    """What tells who makes such a call by an Authorization header, and raises RequestError for who may not."""
    if method in ADMIN_METHODS and path.startswith(ADMIN_PATHS):
        return keys.admin
    return keys.either if method == "DELETE" and path.startswith(USERS_PATH) else keys.client


def _traced(scope: Scope) -> str | None:
    """The name in traces of a request that is not hot; None where it makes no work for a model."""
    path: str = scope["path"]
    if scope["method"] != "POST":
        return None
    if path.startswith(USERS_PATH) and path.endswith("/prefill"):
        return f"{USERS_PATH}{{user_id}}/prefill"
    if path in (EXPLAIN_RECOMMEND, EXPLAIN_RANK):
        return path
    if path.startswith(f"{KSERVE}/models/") and path.endswith("/infer"):
        return f"{KSERVE}/models/{{name}}/infer"
    return None
