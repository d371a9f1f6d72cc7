# SPDX-License-Identifier: Apache-2.0
"""Makes `/openapi.json` and `/docs` from the types that validate requests.

The one idea: nothing about a field is written here. Names, types, bounds and descriptions come from the
structs in `jgr.serving.api`; only the limits that the configuration sets are added. The page needs no script.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import msgspec

from jgr import __version__
from jgr.serving import api, prefill
from jgr.serving.errors import STATUS, ErrorAnswer, ErrorType

_REF = "#/components/schemas/"


@dataclass(frozen=True)
class Operation:
    """One endpoint.

    answer, request: the struct of the body, or the media type of a body that is not JSON. open: no key is needed.
    admin: an admin's key is needed. of_model: the query parameter `model` may name the model. of_tenant: `tenant` may
    name the key whose users are meant.
    """

    method: str
    path: str
    summary: str
    answer: type[msgspec.Struct] | str
    request: type[msgspec.Struct] | str | None = None
    errors: tuple[ErrorType, ...] = ()
    open: bool = False
    admin: bool = False
    of_model: bool = False
    of_tenant: bool = False
    status: int = 200


_HOT: tuple[ErrorType, ...] = (
    "invalid_json",
    "body_too_large",
    "not_found",
    "invalid_request",
    "overloaded",
    "internal",
    "unavailable",
    "deadline_exceeded",
)

_KEY_ERRORS: tuple[ErrorType, ...] = ("unauthorized", "quota_exceeded")
_CHANGE: tuple[ErrorType, ...] = (
    "forbidden",
    "not_found",
    "conflict",
    "body_too_large",
    "invalid_request",
    "unavailable",
)

OPERATIONS = (
    Operation(
        "post", "/v1/recommend", "Generate items for a history", api.Answer, api.RecommendRequest, _HOT
    ),
    Operation("post", "/v1/rank", "Score given candidates for a history", api.Answer, api.RankRequest, _HOT),
    Operation(
        "post",
        "/v1/users/{user_id}/prefill",
        "Compute and keep the part of a user who is about to be ranked",
        prefill.Prefilled,
        prefill.PrefillRequest,
        _HOT,
    ),
    Operation("get", "/v1/models", "List the models that are served, with their limits", api.ModelList),
    Operation(
        "get",
        "/v1/models/{name}",
        "Describe one model, with its limits",
        api.ModelInfo,
        errors=("not_found",),
    ),
    Operation(
        "post",
        "/v1/models/{name}/reload",
        "Read the model's folder again and serve what is there now, without a pause",
        api.ModelInfo,
        errors=_CHANGE,
        admin=True,
        status=202,
    ),
    Operation(
        "post",
        "/v1/models/{name}/rollback",
        "Serve the version of the model before this one again, without a pause",
        api.ModelInfo,
        errors=_CHANGE,
        admin=True,
        status=202,
    ),
    Operation(
        "get",
        "/v1/catalogs",
        "List the catalogs that the server holds, and say which one is served",
        api.CatalogList,
        errors=("not_found", "invalid_request"),
        of_model=True,
    ),
    Operation(
        "post",
        "/v1/catalogs",
        "Upload a catalog, one line of JSON for each item, to be activated later",
        api.CatalogInfo,
        "application/x-ndjson",
        errors=_CHANGE,
        admin=True,
        of_model=True,
        status=201,
    ),
    Operation(
        "post",
        "/v1/catalogs/{version}/activate",
        "Serve an uploaded catalog, without a pause",
        api.CatalogInfo,
        errors=_CHANGE,
        admin=True,
        of_model=True,
        status=202,
    ),
    Operation(
        "post",
        "/v1/catalogs/rollback",
        "Serve the catalog before the active one, without a pause",
        api.CatalogInfo,
        errors=_CHANGE,
        admin=True,
        of_model=True,
        status=202,
    ),
    Operation(
        "delete",
        "/v1/users/{user_id}/cache",
        "Erase all cache entries of a user",
        api.Erased,
        errors=("forbidden", "not_found", "invalid_request"),
        of_tenant=True,
    ),
    Operation(
        "get",
        "/v1/items/{item_id}",
        "Look up one item of the catalog",
        api.CatalogItem,
        errors=("not_found", "invalid_request"),
        of_model=True,
    ),
    Operation("get", "/health/live", "Tell whether the process answers", api.Health, open=True),
    Operation(
        "get",
        "/health/ready",
        "Tell whether requests are served",
        api.Health,
        errors=("unavailable",),
        open=True,
    ),
    Operation("get", "/metrics", "Read the metrics, in the format of Prometheus", "text/plain"),
    Operation("get", "/openapi.json", "Describe this API as an OpenAPI document", "application/json"),
    Operation("get", "/docs", "Describe this API as a page to read", "text/html"),
)


def document(infos: Sequence[api.ModelInfo], keyed: bool) -> dict[str, Any]:
    """The OpenAPI 3.1 document of a server that serves the models `infos`.

    A limit that differs between the models is the largest of theirs. keyed: whether clients need an API key.
    """
    types: list[Any] = [op.request for op in OPERATIONS if not isinstance(op.request, str | None)]
    types += [op.answer for op in OPERATIONS if not isinstance(op.answer, str)]
    _, schemas = msgspec.json.schema_components([*types, ErrorAnswer], ref_template=_REF + "{name}")
    for request in ("RecommendRequest", "RankRequest", "PrefillRequest"):
        schemas[request]["properties"]["history"]["maxItems"] = max(info.max_history for info in infos)
    most = max(info.max_candidates for info in infos)
    schemas["RankRequest"]["properties"]["candidates"]["maxItems"] = most
    filters = schemas["Filters"]["properties"]
    for items in (filters["exclude"], filters["deny"], *filters["allow"]["anyOf"]):
        if items.get("type") == "array":
            items["maxItems"] = max(info.max_filter_items for info in infos)
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, keyed)
    bearer = {"type": "http", "scheme": "bearer"}
    schemes = {"key": bearer, "admin_key": bearer} if keyed else {"admin_key": bearer}
    components: dict[str, Any] = {"schemas": schemas, "securitySchemes": schemes}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "jgr",
            "version": __version__,
            "description": "Recommends items and ranks candidates for a user's history.",
        },
        "paths": paths,
        "components": components,
    }


def _operation(operation: Operation, keyed: bool) -> dict[str, Any]:
    parameters: list[dict[str, Any]] = [
        {
            "name": "X-Request-Id",
            "in": "header",
            "description": "An id for the request, of up to 128 printable ASCII characters. The answer repeats it; "
            "without one the server makes one up.",
            "schema": {"type": "string", "maxLength": 128},
        }
    ]
    if operation.of_model:
        parameters.insert(
            0,
            {
                "name": "model",
                "in": "query",
                "description": "Name of the model whose catalog is meant. Required where there are several.",
                "schema": {"type": "string"},
            },
        )
    if operation.of_tenant:
        parameters.insert(
            0,
            {
                "name": "tenant",
                "in": "query",
                "description": "Name of the key whose user is meant; for an admin's key alone, which needs it. Other "
                "keys erase what they keep.",
                "schema": {"type": "string"},
            },
        )
    for name in re.findall(r"{(\w+)}", operation.path):
        parameters.insert(0, {"name": name, "in": "path", "required": True, "schema": {"type": "string"}})
    secured = operation.admin or (keyed and not operation.open)
    errors = (*operation.errors, *_KEY_ERRORS) if secured else operation.errors
    by_status: dict[str, list[str]] = {}
    for error in sorted(set(errors)):
        by_status.setdefault(str(STATUS[error]), []).append(error)
    entry: dict[str, Any] = {
        "summary": operation.summary,
        "parameters": parameters,
        "responses": {
            str(operation.status): {"description": "The answer.", "content": _content(operation.answer)},
            **{
                status: {"description": " or ".join(types), "content": _content(ErrorAnswer)}
                for status, types in by_status.items()
            },
        },
    }
    if operation.request:
        entry["requestBody"] = {"required": True, "content": _content(operation.request)}
    if secured:
        entry["security"] = [{"admin_key" if operation.admin else "key": []}]
    return entry


def _content(kind: type[msgspec.Struct] | str) -> dict[str, Any]:
    if isinstance(kind, str):
        return {kind: {}}
    return {"application/json": {"schema": {"$ref": _REF + kind.__name__}}}


_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>jgr API</title><style>
body { font: 15px/1.5 sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; width: 100% }
td, th { border: 1px solid #ccc; padding: .3em .6em; text-align: left; vertical-align: top }
</style></head><body>"""


def page(description: Mapping[str, Any]) -> str:
    """Render an OpenAPI document as one self-contained HTML page."""
    parts = [_HEAD, f"<h1>jgr {escape(description['info']['version'])}</h1>"]
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2>")
            takes = f" Takes {_body(operation['requestBody'])}." if "requestBody" in operation else ""
            replies = operation["responses"].items()
            answers = ", ".join(f"{status} {_reply(status, reply)}" for status, reply in replies)
            parts.append(f"<p>{escape(operation['summary'])}.{takes} Answers {answers}.</p>")
    for name, schema in description["components"]["schemas"].items():
        parts.append(f'<h3 id="{escape(name)}">{escape(name)}</h3><p>{escape(schema["description"])}</p>')
        parts.append("<table><tr><th>field</th><th>type</th><th>default</th><th>meaning</th></tr>")
        for field, entry in schema["properties"].items():
            default = json.dumps(entry["default"]) if "default" in entry else "absent"
            cells = (
                f"<code>{escape(field)}</code>",
                _type(entry),
                "required" if field in schema.get("required", ()) else default,
                escape(entry["description"]),
            )
            parts.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
        parts.append("</table>")
    return "\n".join([*parts, "</body></html>"])


def _schema(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a request body or response; {} if its media type has none."""
    (media,) = content["content"].values()
    schema: Mapping[str, Any] = media.get("schema", {})
    return schema


def _reply(status: str, reply: Mapping[str, Any]) -> str:
    if not status.startswith("2"):
        return escape(reply["description"])
    return _body(reply)


def _body(content: Mapping[str, Any]) -> str:
    return _type(_schema(content)) if _schema(content) else escape(next(iter(content["content"])))


def _type(schema: Mapping[str, Any]) -> str:
    """Describe a schema in a few words of HTML, with its bounds; a struct is a link to its table."""
    if "$ref" in schema:
        name = escape(schema["$ref"].removeprefix(_REF))
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(_type(option) for option in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(escape(json.dumps(value)) for value in schema["enum"])
    kind = escape(schema["type"])
    if kind == "array":
        kind = f"list of ({_type(schema['items'])})"
    bounds = [f"{words} {schema[key]}" for key, words in _BOUNDS.items() if key in schema]
    return ", ".join([kind, *bounds])


_BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "maxLength": "characters at most",
    "minItems": "items at least",
    "maxItems": "items at most",
}
