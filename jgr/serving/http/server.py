# SPDX-License-Identifier: Apache-2.0
"""The HTTP interface of the served models. It only translates between HTTP and engines.

The one idea: two endpoints are hot and all others are not. `/v1/recommend` and `/v1/rank` are plain ASGI:
one read, one decode into a typed struct, one encode, no middleware. The others use Starlette.

Every answer carries X-Request-Id; the body of every refusal is a `jgr.serving.api.ErrorAnswer`. A body larger
than the limit is never kept in memory, chunked or not. The work of a client that goes away is cancelled.
Calls that change the server itself (a reload, a catalog) need an admin's key; without such a key all are refused.
Who asks is known before anything of a body is read (`jgr.serving.http.keys`); a key's calls are bounded by its quota.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import getrandbits
from urllib.parse import quote

import msgspec
from prometheus_client import Counter
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from jgr.config import ServerConfig
from jgr.serving.api import CatalogItem, Erased, Health, ModelList, RankRequest, RecommendRequest
from jgr.serving.engine import metrics
from jgr.serving.engine.engine import AnyEngine, ClientGone
from jgr.serving.engine.tracing import Trace, Tracing, tracing
from jgr.serving.errors import STATUS, ErrorAnswer, ErrorBody, ErrorType, RequestError, invalid, quoted
from jgr.serving.http import openapi
from jgr.serving.http.decoding import UNREADABLE, refusal
from jgr.serving.http.keys import ANYBODY, TENANT, Caller, Keys, tenant
from jgr.serving.policies.jobs import Kind
from jgr.serving.prefill import Asked, Prefill, PrefillRequest
from jgr.serving.versions.held_catalogs import Catalogs
from jgr.serving.versions.served_models import Models

UPLOAD_PATH = "/v1/catalogs"
CLIENT_GONE = 499
"""The status that the request counter shows if the client left before its answer; it is never sent."""
DISCARD_BODIES = 8
"""Too large a body is read and discarded up to this many times the limit, so that the client gets the 413."""

Headers = list[tuple[bytes, bytes]]
Hot = tuple[Kind, msgspec.json.Decoder[RecommendRequest] | msgspec.json.Decoder[RankRequest]]
"""A hot endpoint: the kind of its requests, and what decodes a body."""

_log = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode
_REQUEST_ID = re.compile(rb"[\x20-\x7e]{1,128}")
_OPEN_PATHS = frozenset(operation.path for operation in openapi.OPERATIONS if operation.open)
_ADMIN_PATHS = ("/v1/catalogs", "/v1/models/")
"""A POST to any path with one of these prefixes needs an admin's key, so that no spelling of a path escapes it."""
_USERS_PATH = "/v1/users/"
_USER = re.compile(r"[^\x00-\x1f\x7f]{0,256}")
_ERROR_HEADERS: dict[ErrorType, Headers] = {
    "unauthorized": [(b"www-authenticate", b"Bearer")],
    "method_not_allowed": [(b"allow", b"POST")],
    "body_too_large": [(b"connection", b"close")],
}
_TRY_AGAIN: tuple[ErrorType, ...] = ("overloaded", "quota_exceeded")


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


@dataclass(frozen=True, eq=False)
class _Call:
    """One call for a model's work. trace: None: it is not traced."""

    receive: Receive
    departure: Departure
    request_id: str
    arrival_ns: int
    caller: Caller
    trace: Trace | None


class App:
    """The ASGI application that serves `models`. `jgr.serving.http.listener` runs it. Another ASGI server could, but
    work goes on for a client that leaves unless the scope has its Departure as "jgr.departure".

    Raises ConfigError for keys that cannot be used.
    """

    def __init__(self, models: Models, config: ServerConfig) -> None:
        self.keys = Keys(config)
        self._models = models
        self._catalogs = {deployment.name: Catalogs(deployment) for deployment in models.deployments}
        self._clock = models.deployments[0].engine.clock
        # The first model's registry holds the process's metrics too.
        self._requests = models.deployments[0].metrics.requests
        self._refused = models.deployments[0].metrics.refused
        self._counters: dict[tuple[str, int], Counter] = {}  # by endpoint, from a fixed set, and status
        self._max_body = config.max_body_bytes
        self.traces: Tracing | None = tracing(config, self._clock)
        self._hints = msgspec.json.Decoder(PrefillRequest)
        self._hot: dict[str, Hot] = {
            "/v1/recommend": ("recommend", msgspec.json.Decoder(RecommendRequest)),
            "/v1/rank": ("rank", msgspec.json.Decoder(RankRequest)),
        }
        description = openapi.document(models.infos, keyed=not self.keys.open)
        self._description = _encode(description)
        self._page = openapi.page(description)
        self._cold = Starlette(
            routes=[
                Route("/v1/models", self._list_models),
                Route("/v1/models/{name:path}/reload", self._reload, methods=["POST"]),
                Route("/v1/models/{name:path}/rollback", self._roll_back_model, methods=["POST"]),
                Route("/v1/models/{name:path}", self._model),
                Route(UPLOAD_PATH, self._list_catalogs),
                Route(UPLOAD_PATH, self._upload_catalog, methods=["POST"]),
                Route("/v1/catalogs/rollback", self._roll_back, methods=["POST"]),
                Route("/v1/catalogs/{version}/activate", self._activate, methods=["POST"]),
                Route("/v1/users/{user_id:path}/cache", self._forget, methods=["DELETE"]),
                Route("/v1/users/{user_id:path}/prefill", self._prefill, methods=["POST"]),
                Route("/v1/items/{item_id:path}", self._item),
                Route("/health/live", self._live),
                Route("/health/ready", self._ready),
                Route("/metrics", self._render_metrics),
                Route("/openapi.json", self._openapi),
                Route("/docs", self._docs),
            ],
            exception_handlers={HTTPException: _refuse, RequestError: _refuse, Exception: _refuse},
        )
        self._cold.router.redirect_slashes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._cold(scope, receive, send)
        arrival_ns = self._clock()
        departure = scope.setdefault("jgr.departure", Departure())
        path, key, request_id = scope["path"], b"", ""
        for name, value in scope["headers"]:
            if name == b"authorization":
                key = value
            elif name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
                request_id = value.decode()
        reply = _Reply(send, request_id or f"{getrandbits(128):032x}", self._models)
        hot, trace = self._hot.get(path), None
        if self.traces is not None and (hot is not None or _is_hint(scope)):
            name = path if hot else f"{_USERS_PATH}{{user_id}}/prefill"
            trace = reply.trace = self.traces.begin(arrival_ns, scope["headers"], name)
        try:
            caller = None if path in _OPEN_PATHS else self._admit(scope, key, arrival_ns)
            if hot is None or caller is None:
                if "\n" in path:  # the end of a route's pattern matches before a newline
                    raise RequestError("not_found", f"there is no {quoted(path)}")
                scope["jgr.request_id"], scope["jgr.caller"] = reply.request_id, caller
                scope["jgr.arrival_ns"], scope["jgr.trace"] = arrival_ns, trace
                await self._cold(scope, receive, reply.forward)
            else:
                call = _Call(receive, departure, reply.request_id, arrival_ns, caller, trace)
                body = await self._answer(scope["method"], path, hot, call)
                await reply.send(200, body)
        except RequestError as error:
            await reply.refuse(error)
        except asyncio.CancelledError:
            if not self._models.draining:
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
            route = scope.get("route")
            endpoint = path if hot else route.path.replace(":path", "") if route else "other"
            counter = self._counters.get((endpoint, reply.status))
            if counter is None:
                counter = self._requests.labels(endpoint, str(reply.status))
                self._counters[endpoint, reply.status] = counter
            counter.inc()
            if trace is not None:
                trace.end(reply.status, reply.request_id)

    def may_upload(self, headers: Headers) -> bool:
        """Whether a request with these headers may take as long as a catalog takes."""
        given = [value for name, value in headers if name == b"authorization"]
        caller = self.keys.find(given[-1]) if given else None
        return caller is not None and caller.role == "admin"

    def _admit(self, scope: Scope, key: bytes, now_ns: int) -> Caller:
        """Who asks. Raises RequestError for a key that may not, or that may not ask so often."""
        try:
            if scope["method"] == "POST" and scope["path"].startswith(_ADMIN_PATHS):
                caller = self.keys.admin(key)
            elif scope["method"] == "DELETE" and scope["path"].startswith(_USERS_PATH):
                caller = self.keys.either(key)
            else:
                caller = ANYBODY if self.keys.open else self.keys.client(key)
            if caller.bucket is not None:
                caller.charge(now_ns)
        except RequestError as error:
            self._refused["quota" if error.type == "quota_exceeded" else "unauthorized"].inc()
            raise
        return caller

    async def _answer(self, method: str, path: str, hot: Hot, call: _Call) -> bytes:
        if method != "POST":
            raise RequestError("method_not_allowed", f"{path} takes POST")
        body = await self._read_body(call.receive)
        kind, decoder = hot
        try:
            request = decoder.decode(body)
        except UNREADABLE as error:
            raise refusal(error, body, decoder.type) from None
        models = self._models
        return await self._shared(
            models.chosen.get((request.model, kind)) or models.engine(request.model, kind), request, call
        )

    async def _shared(self, engine: AnyEngine, request: Asked, call: _Call) -> bytes:
        """The engine's answer, within the caller's share of the queue."""
        caller = call.caller
        share, queue = caller.share, engine.info.id
        if share is not None and not share.enter(queue, engine.max_queue):
            self._refused["share"].inc()
            raise RequestError(
                "quota_exceeded",
                f"the key {caller.name!r} has used up its share of the queue; try again later",
            )
        try:
            return await self._computed(engine, request, call)
        finally:
            if share is not None:
                share.leave(queue)
            del engine  # see _computed

    async def _computed(self, engine: AnyEngine, request: Asked, call: _Call) -> bytes:
        """The engine's answer, encoded; the work of a client that leaves is cancelled."""
        departure = call.departure
        await engine.enter(request, call.arrival_ns)
        if departure.happened:
            raise ClientGone
        ticket = engine.submit(request, call.request_id, call.arrival_ns, call.caller.tenant)
        if call.trace is not None:
            call.trace.accepted(ticket, engine.info)
        departure.cancels(partial(engine.cancel, ticket))
        try:
            body = _encode(await ticket.answer)
            engine.encoded(ticket)
            return body
        except asyncio.CancelledError:
            engine.cancel(ticket)
            raise
        finally:
            departure.cancels(None)
            # An error's traceback holds this frame, and the ticket holds the error. Left alone, this cycle would keep
            # the engine and its device memory until the garbage collector runs.
            del engine, ticket

    async def _read_body(self, receive: Receive) -> bytes:
        """Read the whole body. Raises RequestError if it exceeds the limit, ClientGone if the client leaves."""
        chunks: list[bytes] = []
        received, more = 0, True
        while more and received <= DISCARD_BODIES * self._max_body:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunks.append(message.get("body", b""))
            received += len(chunks[-1])
            more = message.get("more_body", False)
            if received > self._max_body:
                chunks.clear()
        if received > self._max_body:
            raise RequestError("body_too_large", f"the body may have at most {self._max_body} bytes")
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def _list_models(self, request: HttpRequest) -> Response:
        return _json(ModelList(data=self._models.infos))

    async def _model(self, request: HttpRequest) -> Response:
        return _json(self._models.find(request.path_params["name"]).info)

    async def _reload(self, request: HttpRequest) -> Response:
        body = await self._read_body(request.receive)
        if body.strip() not in (b"", b"{}"):
            raise RequestError(
                "invalid_request", "a reload takes no body: it reads the folder of model.path again"
            )
        model = self._models.find(request.path_params["name"])
        model.reload()
        return _json(model.info, 202, {"Location": f"/v1/models/{quote(model.name)}"})

    async def _roll_back_model(self, request: HttpRequest) -> Response:
        if (await self._read_body(request.receive)).strip() not in (b"", b"{}"):
            raise RequestError("invalid_request", "a rollback takes no body")
        model = self._models.find(request.path_params["name"])
        model.rollback()
        return _json(model.info, 202, {"Location": f"/v1/models/{quote(model.name)}"})

    def _catalogs_of(self, request: HttpRequest) -> Catalogs:
        return self._catalogs[self._models.choose(request.query_params.get("model")).name]

    async def _list_catalogs(self, request: HttpRequest) -> Response:
        return _json(self._catalogs_of(request).listing())

    async def _upload_catalog(self, request: HttpRequest) -> Response:
        try:
            return _json(await self._catalogs_of(request).upload(request.stream()), 201)
        except ClientDisconnect:
            raise ClientGone from None

    async def _activate(self, request: HttpRequest) -> Response:
        info = self._catalogs_of(request).activate(request.path_params["version"])
        return _json(info, 202, _listed_at(request))

    async def _roll_back(self, request: HttpRequest) -> Response:
        return _json(self._catalogs_of(request).rollback(), 202, _listed_at(request))

    async def _prefill(self, request: HttpRequest) -> Response:
        body, user = await self._read_body(request.receive), request.path_params["user_id"]
        try:
            given = self._hints.decode(body)
        except UNREADABLE as error:
            raise refusal(error, body, PrefillRequest) from None
        if not _USER.fullmatch(user):
            raise invalid("user_id", "user_id: must have at most 256 characters, and no control characters")
        hint = Prefill(user_id=user, **msgspec.structs.asdict(given))
        own = ("jgr.departure", "jgr.request_id", "jgr.arrival_ns", "jgr.caller", "jgr.trace")
        call = _Call(request.receive, *map(request.scope.__getitem__, own))
        answer = await self._shared(self._models.hinted(given.model), hint, call)
        return Response(answer, media_type="application/json")

    async def _forget(self, request: HttpRequest) -> Response:
        erased = self._models.forget(request.path_params["user_id"], self._tenant_of(request))
        return _json(Erased(entries=erased))

    def _tenant_of(self, request: HttpRequest) -> str:
        """Whose entries are meant: the caller's own, or those of the tenant that an admin names."""
        caller: Caller = request.scope["jgr.caller"]
        named = request.query_params.get("tenant")
        if named is None:
            if caller.role == "admin" and not self.keys.open:
                raise invalid(
                    "tenant", "tenant: add ?tenant= with the name of the key whose entries are meant"
                )
            return caller.tenant
        if caller.role != "admin":
            raise RequestError("forbidden", "only an admin's key erases what another key keeps", "tenant")
        if not TENANT.fullmatch(named):
            raise invalid("tenant", f"tenant: {quoted(named)} is no key's name")
        return "" if self.keys.open else tenant(named)

    async def _item(self, request: HttpRequest) -> Response:
        catalog = self._models.choose(request.query_params.get("model")).engine.catalog
        item_id = request.path_params["item_id"]
        row = catalog.row(item_id)
        if row is None:
            raise RequestError("not_found", f"item {quoted(item_id)} is not in the catalog", "item_id")
        codes = catalog.codes[row].tolist()
        return _json(
            CatalogItem(
                item_id=item_id,
                semantic_id=[names[code] for names, code in zip(catalog.symbols, codes, strict=True)],
                metadata=catalog.metadata[row],
                catalog_version=catalog.version,
            )
        )

    async def _live(self, request: HttpRequest) -> Response:
        return _json(Health(status="live"))

    async def _ready(self, request: HttpRequest) -> Response:
        if self._models.status != "ready":
            raise RequestError("unavailable", f"the server is {self._models.status}")
        return _json(Health(status="ready"))

    async def _render_metrics(self, request: HttpRequest) -> Response:
        return Response(self._models.render_metrics(), media_type=metrics.CONTENT_TYPE)

    async def _openapi(self, request: HttpRequest) -> Response:
        return Response(self._description, media_type="application/json")

    async def _docs(self, request: HttpRequest) -> Response:
        return Response(self._page, media_type="text/html")


class _Reply:
    """Sends one response, with the headers that every response has. status: its HTTP status, 0 until it is sent."""

    def __init__(self, send: Send, request_id: str, models: Models) -> None:
        self.request_id = request_id
        self.status = 0
        self.trace: Trace | None = None
        self._send = send
        self._models = models

    async def send(self, status: int, body: bytes, extra: Headers | None = None) -> None:
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *(extra or ()),
        ]
        await self.forward({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    async def refuse(self, error: RequestError) -> None:
        if not self.status:
            body = error_body(error, self.request_id)
            headers = list(_ERROR_HEADERS.get(error.type, ()))
            if error.type in _TRY_AGAIN:
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
            if self._models.draining:
                headers.append((b"connection", b"close"))
        await self._send(message)


def _is_hint(scope: Scope) -> bool:
    path: str = scope["path"]
    return scope["method"] == "POST" and path.startswith(_USERS_PATH) and path.endswith("/prefill")


async def _refuse(request: HttpRequest, error: Exception) -> Response:
    """Turn an error, Starlette's or ours, into a response whose body is an ErrorAnswer."""
    headers: dict[str, str] = {}
    if isinstance(error, HTTPException) and error.status_code == 405:
        allowed = (error.headers or {})["Allow"].split(", ")
        headers["Allow"] = ", ".join(sorted(allowed))
        error = RequestError("method_not_allowed", f"{request.url.path} does not take {request.method}")
    elif isinstance(error, HTTPException):
        error = RequestError("not_found", f"there is no {quoted(request.url.path)}")
    elif not isinstance(error, RequestError):
        error = RequestError("internal", "the server failed; see its log")
    return Response(
        error_body(error, request.scope["jgr.request_id"]),
        STATUS[error.type],
        headers,
        "application/json",
    )


def error_body(error: RequestError, request_id: str) -> bytes:
    """Encode an error as the JSON of an ErrorAnswer."""
    body = ErrorBody(type=error.type, message=error.message, request_id=request_id)
    if error.field is not None:
        body.field = error.field
    if error.predicted_ms is not None:
        body.predicted_ms = error.predicted_ms
    return _encode(ErrorAnswer(error=body))


def _json(value: msgspec.Struct, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(_encode(value), status, headers, "application/json")


def _listed_at(request: HttpRequest) -> dict[str, str]:
    """The Location header of an activation: the list of catalogs, which tells its progress."""
    query = request.url.query
    return {"Location": f"{UPLOAD_PATH}?{query}" if query else UPLOAD_PATH}
