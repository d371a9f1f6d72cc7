# SPDX-License-Identifier: Apache-2.0
"""The endpoints that are not hot, by Starlette: models, catalogs, users, items, KServe, health, metrics, docs."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any, Protocol, TypeVar
from urllib.parse import parse_qsl, quote, unquote_to_bytes

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Receive, Scope

from jgr.config import ServerConfig
from jgr.serving.api import Erased, Health, ModelList, Request
from jgr.serving.engine import metrics
from jgr.serving.engine.engine import AnyEngine
from jgr.serving.engine.ticket import ClientGone
from jgr.serving.errors import RequestError, invalid, quoted
from jgr.serving.explanations import ExplainRank, ExplainRecommend
from jgr.serving.http import docs_page, kserve, openapi, ui_page
from jgr.serving.http.decoding import UNREADABLE, decode, refusal
from jgr.serving.http.items import asked, asked_ids, catalog_item, find_items, items_of
from jgr.serving.http.keys import TENANT, Caller, Keys, tenant
from jgr.serving.http.operations import opened
from jgr.serving.http.refusals import refuse
from jgr.serving.policies.jobs import Kind
from jgr.serving.prefill import Asked, Prefill, PrefillRequest
from jgr.serving.versions.held_catalogs import Catalogs
from jgr.serving.versions.served_models import Models

UPLOAD_PATH = "/v1/catalogs"
CHANGES = {"/reload": "DELETE, POST", "/rollback": "POST"}
"""Ends of a model's path that change it, with the methods that they take."""
ADMIN_PATHS = ("/v1/catalogs", "/v1/models/")
"""A POST or DELETE to any path with one of these prefixes needs an admin's key, so that no spelling of a path escapes
it."""
ADMIN_METHODS = ("POST", "DELETE")
USERS_PATH = "/v1/users/"
PARAMETERS = ("model", "tenant", "item_id", "query", "limit")
"""All that a query may name."""
EXPLAIN_RECOMMEND, EXPLAIN_RANK = "/v1/explain/recommend", "/v1/explain/rank"

T = TypeVar("T")

_encode = msgspec.json.Encoder().encode
_USER = re.compile(r"[^\x00-\x1f\x7f]{0,256}")


class Way(Protocol):
    """How a request gets its body, and an engine's answer; `App` is one."""

    async def read_body(self, receive: Receive) -> bytes: ...

    async def answer_to(
        self, scope: Scope, engine: AnyEngine, request: Asked, encode: Callable[[Any], T]
    ) -> T: ...


class Cold:
    """The endpoints, with their routes in `application`. All is called on the event loop."""

    def __init__(self, models: Models, config: ServerConfig, keys: Keys, way: Way) -> None:
        self._models, self._keys, self._way = models, keys, way
        self._base_path = config.base_path
        self._catalogs = {deployment.name: Catalogs(deployment) for deployment in models.deployments}
        self._hints = msgspec.json.Decoder(PrefillRequest)
        self._searching = asyncio.Lock()
        self._explains = config.explain
        self._explained_recommend = msgspec.json.Decoder(ExplainRecommend)
        self._explained_rank = msgspec.json.Decoder(ExplainRank)
        self._description = _encode(
            openapi.document(models.infos, not keys.open, opened(config), config.base_path)
        )
        version = "/versions/{version:path}"
        self.application = Starlette(
            routes=[
                Route("/v1/models", self._list_models),
                Route("/v1/models/{name:path}/reload", self._reload, methods=["POST", "DELETE"]),
                Route("/v1/models/{name:path}/rollback", self._roll_back_model, methods=["POST"]),
                Route("/v1/models/{name:path}", self._model),
                Route(UPLOAD_PATH, self._list_or_upload, methods=["GET", "POST"]),
                Route("/v1/catalogs/rollback", self._roll_back, methods=["POST"]),
                Route("/v1/catalogs/{version}/activate", self._activate, methods=["POST", "DELETE"]),
                Route("/v1/users/{user_id:path}/cache", self._forget, methods=["DELETE"]),
                Route("/v1/users/{user_id:path}/prefill", self._prefill, methods=["POST"]),
                Route(EXPLAIN_RECOMMEND, self._explain_recommend, methods=["POST"]),
                Route(EXPLAIN_RANK, self._explain_rank, methods=["POST"]),
                Route("/v1/items", self._find_items),
                Route("/v1/items/{item_id:path}", self._item),
                Route("/v2", self._kserve_server),
                Route("/v2/health/live", self._kserve_live),
                Route("/v2/health/ready", self._kserve_ready),
                *(
                    Route(f"/v2/models/{{name}}{of}{end}", endpoint, methods=methods)
                    for of in (version, "")
                    for end, endpoint, methods in (
                        ("/infer", self._infer, ["POST"]),
                        ("/ready", self._kserve_model_ready, ["GET"]),
                        ("", self._kserve_model, ["GET"]),
                    )
                ),
                Route("/health/live", self._live),
                Route("/health/ready", self._ready),
                Route("/metrics", self._render_metrics),
                Route("/openapi.json", self._openapi),
                Route("/", self._lead_to_the_page),
                *docs_page.ROUTES,
                *ui_page.ROUTES,
            ],
            exception_handlers={HTTPException: refuse, RequestError: refuse, Exception: refuse},
        )
        self.application.router.redirect_slashes = False

    def endpoint(self, scope: Scope) -> str:
        """What a request is counted under: the path of its route as the metrics write it, "other" where there is none.

        One that was refused before it came here has no route in its scope.
        """
        route: Any = scope.get("route")
        if route is None:
            route = max(self.application.routes, key=lambda one: one.matches(scope)[0].value)
            if route.matches(scope)[0] is Match.NONE:
                return "other"
        return str(route.path).replace(":path", "")

    async def _lead_to_the_page(self, request: HttpRequest) -> Response:
        """Who opens the address that the start printed in a browser is shown the page."""
        return Response(status_code=302, headers={"Location": f"{self._base_path}/ui"})

    async def _list_models(self, request: HttpRequest) -> Response:
        return _json(ModelList(data=self._models.infos))

    async def _model(self, request: HttpRequest) -> Response:
        name: str = request.path_params["name"]
        try:
            return _json(self._models.find(name).info)
        except RequestError:
            for end, methods in CHANGES.items():
                if name.endswith(end):  # a model's name may have slashes, so that this is no route of its own
                    raise HTTPException(405, headers={"Allow": methods}) from None
            raise

    async def _reload(self, request: HttpRequest) -> Response:
        # One route for both methods, as of `_list_or_upload`.
        body, cancels = await self._way.read_body(request.receive), request.method == "DELETE"
        if body.strip() not in (b"", b"{}"):
            what = "its end takes none" if cancels else "it reads the folder of model.path again"
            raise RequestError("invalid_request", f"a reload takes no body: {what}")
        model = self._models.find(request.path_params["name"])
        if cancels:
            model.cancel("model")
        else:
            model.reload()
        return self._accepted(model.info, f"/v1/models/{quote(model.name)}")

    async def _roll_back_model(self, request: HttpRequest) -> Response:
        if (await self._way.read_body(request.receive)).strip() not in (b"", b"{}"):
            raise RequestError("invalid_request", "a rollback takes no body")
        model = self._models.find(request.path_params["name"])
        await model.rollback()
        return self._accepted(model.info, f"/v1/models/{quote(model.name)}")

    def _accepted(self, info: msgspec.Struct, told_at: str) -> Response:
        """What was begun. told_at: the path that tells how it goes on."""
        return _json(info, 202, {"Location": self._base_path + told_at})

    def _catalogs_of(self, request: HttpRequest) -> Catalogs:
        return self._catalogs[self._models.choose(_parameters(request).get("model")).name]

    async def _list_or_upload(self, request: HttpRequest) -> Response:
        # One route, since a refusal of another method names those of the first route of a path alone.
        if request.method != "POST":
            return _json(self._catalogs_of(request).listing())
        try:
            return _json(await self._catalogs_of(request).upload(request.stream()), 201)
        except ClientDisconnect:
            raise ClientGone from None

    async def _activate(self, request: HttpRequest) -> Response:
        catalogs, version = self._catalogs_of(request), request.path_params["version"]
        info = catalogs.cancel(version) if request.method == "DELETE" else catalogs.activate(version)
        return self._accepted(info, _listed_at(request))

    async def _roll_back(self, request: HttpRequest) -> Response:
        return self._accepted(self._catalogs_of(request).rollback(), _listed_at(request))

    async def _prefill(self, request: HttpRequest) -> Response:
        body, user = await self._way.read_body(request.receive), _named_user(request)
        try:
            given = self._hints.decode(body)
        except UNREADABLE as error:
            wrong = refusal(error, body, PrefillRequest)
            if wrong.field == "user_id":
                wrong = invalid("user_id", "user_id stands in the path alone: /v1/users/{user_id}/prefill")
            raise wrong from None
        hint = Prefill(user_id=user, **msgspec.structs.asdict(given))
        answer = await self._way.answer_to(request.scope, self._models.hinted(given.model), hint, _encode)
        return Response(answer, media_type="application/json")

    async def _explain_recommend(self, request: HttpRequest) -> Response:
        body = await self._body_to_explain(request)
        return await self._explain(request, "recommend", decode(self._explained_recommend, body))

    async def _explain_rank(self, request: HttpRequest) -> Response:
        body = await self._body_to_explain(request)
        return await self._explain(request, "rank", decode(self._explained_rank, body))

    async def _body_to_explain(self, request: HttpRequest) -> bytes:
        body = await self._way.read_body(request.receive)
        if not self._explains:
            raise RequestError(
                "not_found", "this server explains nothing; start it with --set server.explain=true"
            )
        return body

    async def _explain(self, request: HttpRequest, kind: Kind, given: Request) -> Response:
        answer = await self._way.answer_to(
            request.scope, self._models.engine(given.model, kind), given, _encode
        )
        return Response(answer, media_type="application/json")

    async def _forget(self, request: HttpRequest) -> Response:
        whose = self._tenant_of(request)
        erased = self._models.forget(_named_user(request), whose)
        named = _parameters(request).get("tenant")
        # A key that is gone may have left some; they are erased by its name like others.
        if named and whose and not erased and named not in self._keys.clients:
            raise RequestError(
                "not_found",
                f"tenant: no client's key is called {quoted(named)}, and nothing that one kept of the user is left",
                "tenant",
            )
        return _json(Erased(entries=erased))

    def _tenant_of(self, request: HttpRequest) -> str:
        """Whose entries are meant: the caller's own, or those of the tenant that an admin names."""
        caller: Caller = request.scope["jgr.caller"]
        named = _parameters(request).get("tenant")
        if named is None:
            if caller.role == "admin" and not self._keys.open:
                raise invalid(
                    "tenant", "tenant: add ?tenant= with the name of the key whose entries are meant"
                )
            return caller.tenant
        if caller.role != "admin":
            raise RequestError("forbidden", "only an admin's key erases what another key keeps", "tenant")
        if not TENANT.fullmatch(named):
            raise invalid("tenant", f"tenant: {quoted(named)} is no key's name")
        return "" if self._keys.open else tenant(named)

    async def _item(self, request: HttpRequest) -> Response:
        catalog = self._models.choose(_parameters(request).get("model")).engine.catalog
        item_id = request.path_params["item_id"]
        row = catalog.row(item_id) if _is_text(request) else None
        if row is None:
            raise RequestError("not_found", f"item {quoted(item_id)} is not in the catalog", "item_id")
        return _json(catalog_item(catalog, row))

    async def _find_items(self, request: HttpRequest) -> Response:
        parameters = _parameters(request)
        ids, (query, limit) = asked_ids(parameters), asked(parameters)
        catalog = self._models.choose(parameters.get("model")).engine.catalog
        if ids:
            return _json(items_of(catalog, ids))
        departure = request.scope["jgr.departure"]
        return _json(await find_items(catalog, query, limit, self._searching, lambda: departure.happened))

    async def _kserve_server(self, request: HttpRequest) -> Response:
        return _json(kserve.server_metadata())

    async def _kserve_live(self, request: HttpRequest) -> Response:
        self._require_sound()
        return _json(kserve.Live(live=True))

    async def _kserve_ready(self, request: HttpRequest) -> Response:
        self._require_ready()
        return _json(kserve.Ready(ready=True))

    async def _kserve_model(self, request: HttpRequest) -> Response:
        named = request.path_params["name"], request.path_params.get("version", "")
        return _json(kserve.model_metadata(self._models, *named))

    async def _kserve_model_ready(self, request: HttpRequest) -> Response:
        name = request.path_params["name"]
        kserve.require_ready(self._models, name, request.path_params.get("version", ""))
        return _json(kserve.ModelReady(name=name, ready=True))

    async def _infer(self, request: HttpRequest) -> Response:
        name, version = request.path_params["name"], request.path_params.get("version", "")
        kind = kserve.kind_of(name)
        body = await self._way.read_body(request.receive)
        given = kserve.read_http(
            body, request.headers.get(kserve.JSON_BYTES), kserve.room(self._models, kind)
        )
        asked = kserve.asked(kind, version, given)
        del given, body
        answer = await self._way.answer_to(
            request.scope, self._models.engine(asked.request.model, kind), asked.request, asked.encode_http
        )
        headers = {} if answer.json_bytes is None else {kserve.JSON_BYTES: str(answer.json_bytes)}
        return Response(answer.body, 200, headers, answer.media_type)

    async def _live(self, request: HttpRequest) -> Response:
        self._require_sound()
        return _json(Health(status="live"))

    async def _ready(self, request: HttpRequest) -> Response:
        self._require_ready()
        return _json(Health(status="ready"))

    def _require_sound(self) -> None:
        """A device that is broken does not mend itself, so who watches is to start the process anew."""
        if broken := self._models.broken:
            raise RequestError("unavailable", f"the server is {broken}")

    def _require_ready(self) -> None:
        if waiting := self._models.waiting:
            raise RequestError("unavailable", f"the server is {waiting}")

    async def _render_metrics(self, request: HttpRequest) -> Response:
        return Response(self._models.render_metrics(), media_type=metrics.CONTENT_TYPE)

    async def _openapi(self, request: HttpRequest) -> Response:
        return Response(self._description, media_type="application/json")


def _user_of(request: HttpRequest) -> str:
    """The user that the path names. Raises RequestError for a name that no body could have."""
    user: str = request.path_params["user_id"]
    if not (_USER.fullmatch(user) and _is_text(request)):
        raise invalid(
            "user_id", "user_id: must have at most 256 characters of UTF-8, and no control characters"
        )
    return user


def _named_user(request: HttpRequest) -> str:
    """See _user_of; RequestError for an empty name too, which nothing is kept for."""
    if not (user := _user_of(request)):
        raise invalid("user_id", "user_id: is empty, which means nobody; the path is /v1/users/{user_id}/...")
    return user


def _parameters(request: HttpRequest) -> QueryParams:
    """The query's parameters. Raises RequestError, which names one of PARAMETERS that is not UTF-8."""
    query = request.scope["query_string"].decode("latin-1")
    found = QueryParams(parse_qsl(query, keep_blank_values=True, errors="surrogateescape"))
    for name in PARAMETERS:
        if any("\udc80" <= char <= "\udcff" for value in found.getlist(name) for char in value):
            raise invalid(name, f"{name}: must be UTF-8, percent-encoded")
    return found


def _is_text(request: HttpRequest) -> bool:
    """Whether the path is UTF-8. Where it is not, it has U+FFFD when it is decoded; but a name may have that too."""
    try:
        unquote_to_bytes(request.scope.get("raw_path") or b"").decode()
    except UnicodeDecodeError:
        return False
    return True


def _json(value: msgspec.Struct, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(_encode(value), status, headers, "application/json")


def _listed_at(request: HttpRequest) -> str:
    """Where an activation tells its progress: the list of catalogs."""
    query = request.url.query
    return f"{UPLOAD_PATH}?{query}" if query else UPLOAD_PATH
