# SPDX-License-Identifier: Apache-2.0
"""Makes `/openapi.json` from the types that validate requests.

The one idea: nothing about a field is written here. Names, types, bounds and descriptions come from the
structs in `jgr.serving.api`; only the limits that the configuration sets are added.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from jgr import __version__
from jgr.serving import api
from jgr.serving.errors import STATUS, ErrorAnswer, ErrorType
from jgr.serving.http import kserve
from jgr.serving.http.operations import BINARY, OPERATIONS, TAGS, Group, Operation
from jgr.serving.http.refusals import KServeError, is_kserve

HEALTH_ALONE: tuple[Group, ...] = ("health",)
_REF = "#/components/schemas/"
_KEY_ERRORS: tuple[ErrorType, ...] = ("unauthorized", "forbidden", "quota_exceeded")
_HISTORIES = (
    ("RecommendRequest", "history"), ("RankRequest", "history"), ("PrefillRequest", "history"), ("Query", "history"),
    ("RerankRequest", "query"), ("ScoreRequest", "queries"), ("ScoreRequest", "text_1"),
)  # fmt: skip
"""Fields, by their structs, that hold a history."""
_CANDIDATES = (
    ("RankRequest", "candidates"), ("RerankRequest", "documents"), ("ScoreRequest", "items"),
    ("ScoreRequest", "documents"), ("ScoreRequest", "text_2"),
)  # fmt: skip
"""Fields, by their structs, that hold candidates."""
_HEADERS: dict[str, dict[str, Any]] = {
    "X-Request-Id": {"description": "The request's id: its own, or one that the server made up."},
    "Location": {"description": "The path that tells how the change goes on."},
    "Retry-After": {
        "description": "Seconds after which to ask again.",
        "schema": {"type": "integer", "minimum": 1},
    },
    "WWW-Authenticate": {"description": "How to show a key.", "schema": {"enum": ["Bearer"]}},
}
"""Headers of answers that are always there, by the statuses of `_headers`."""
_FILTERS = (("Filters", "exclude"), ("Filters", "deny"), ("Filters", "allow"))


def document(
    infos: Sequence[api.ModelInfo],
    keyed: bool,
    opened: Collection[Group] = HEALTH_ALONE,
    base_path: str = "",
) -> dict[str, Any]:
    """The OpenAPI 3.1 document of a server that serves the models `infos`.

    A limit that differs between the models is the largest of theirs. keyed: whether clients need an API key. opened:
    what needs none all the same. base_path: what stands before all paths.
    """
    types: list[Any] = [op.request for op in OPERATIONS if not isinstance(op.request, str | None)]
    types += [op.answer for op in OPERATIONS if not isinstance(op.answer, str)]
    types += [ErrorAnswer, KServeError]
    _, schemas = msgspec.json.schema_components(types, ref_template=_REF + "{name}")
    limits = (
        (max(info.max_history for info in infos), _HISTORIES),
        (max(info.max_candidates for info in infos), _CANDIDATES),
        (max(info.max_filter_items for info in infos), _FILTERS),
    )
    for limit, fields in limits:
        for struct, name in fields:
            _limit(schemas[struct]["properties"][name], limit)
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, keyed, opened)
    bearer = {"type": "http", "scheme": "bearer"}
    schemes = {"key": bearer, "admin_key": bearer} if keyed else {"admin_key": bearer}
    headers = {
        name: {"required": True, "schema": {"type": "string"}, **one} for name, one in _HEADERS.items()
    }
    components: dict[str, Any] = {"schemas": schemas, "headers": headers, "securitySchemes": schemes}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "jgr",
            "version": __version__,
            "description": "Recommends items and ranks candidates for a user's history.",
        },
        "servers": [{"url": base_path or "/"}],
        "tags": [{"name": name, "description": text} for name, text in TAGS.items()],
        "paths": paths,
        "components": components,
    }


def _limit(schema: dict[str, Any], most: int) -> None:
    """State how long a list may be, wherever a field may be one."""
    if schema.get("type") == "array" or "anyOf" in schema:
        schema["maxItems"] = most
    for option in schema.get("anyOf", ()):
        _limit(option, most)


def _operation(operation: Operation, keyed: bool, opened: Collection[Group]) -> dict[str, Any]:
    parameters: list[dict[str, Any]] = [
        {
            "name": "X-Request-Id",
            "in": "header",
            "description": "An id for the request, of up to 128 printable ASCII characters, which the answer repeats. "
            "In place of any other text, or of none, the server makes one up.",
            "schema": {"type": "string"},
        }
    ]
    if operation.binary:
        parameters.append(
            {
                "name": kserve.JSON_BYTES,
                "in": "header",
                "description": "Number of the body's bytes that are JSON; the tensors' bytes follow. Without it, all.",
                "schema": {"type": "integer", "minimum": 0},
            }
        )
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
    parameters += [
        {"name": one.name, "in": "query", "description": one.description, "schema": dict(one.schema)}
        for one in operation.parameters
    ]
    for name in reversed(re.findall(r"{(\w+)}", operation.path)):
        parameters.insert(0, {"name": name, "in": "path", "required": True, "schema": {"type": "string"}})
    secured = operation.admin or (keyed and operation.group not in opened)
    errors = (*operation.errors, *_KEY_ERRORS) if secured else operation.errors
    by_status: dict[str, list[str]] = {}
    for error in sorted(set(errors)):
        by_status.setdefault(str(STATUS[error]), []).append(error)
    refusal = KServeError if is_kserve(operation.path) else ErrorAnswer
    entry: dict[str, Any] = {
        "operationId": operation.id,
        "tags": [operation.tag],
        "summary": operation.summary,
        "parameters": parameters,
        "responses": {
            str(operation.status): {
                "description": "The answer.",
                "headers": _headers(operation.status),
                "content": _content(operation.answer, operation.binary),
            },
            **{
                status: {
                    "description": " or ".join(types),
                    "headers": _headers(int(status)),
                    "content": _content(refusal),
                }
                for status, types in by_status.items()
            },
        },
    }
    if operation.request:
        content = _content(operation.request, operation.binary)
        for kind in content:
            content[kind] = content[kind] or {"schema": {"type": "string", "format": "binary"}}
        entry["requestBody"] = {"required": True, "content": content}
    if secured:
        entry["security"] = [{"admin_key" if operation.admin else "key": []}]
    return entry


def _headers(status: int) -> dict[str, Any]:
    """The headers that every answer with the status has."""
    more = {202: ("Location",), 401: ("WWW-Authenticate",), 429: ("Retry-After",), 503: ("Retry-After",)}
    return {
        name: {"$ref": f"#/components/headers/{name}"} for name in ("X-Request-Id", *more.get(status, ()))
    }


def _content(kind: type[msgspec.Struct] | str, binary: bool = False) -> dict[str, Any]:
    if isinstance(kind, str):
        return {kind: {}}
    content: dict[str, Any] = {"application/json": {"schema": {"$ref": _REF + kind.__name__}}}
    return {**content, BINARY: {}} if binary else content
