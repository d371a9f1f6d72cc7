# SPDX-License-Identifier: Apache-2.0
"""The bodies of refusals: an ErrorAnswer, and below /v2 what KServe's clients read, whose `error` is a text."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from jgr.serving.errors import STATUS, ErrorAnswer, ErrorBody, ErrorType, RequestError, quoted

KSERVE = "/v2"
"""What the paths of KServe's protocol begin with."""
TRY_AGAIN: tuple[ErrorType, ...] = ("overloaded", "quota_exceeded", "unavailable")
"""Errors after which a client is told when to ask again."""

_encode = msgspec.json.Encoder().encode
B = TypeVar("B", "KServeError", ErrorBody)


class KServeError(Struct, kw_only=True):
    """The body of every answer below /v2 that is an error. KServe's protocol has `error` alone."""

    error: Annotated[str, Meta(description="What is wrong, for people to read.")]
    type: Annotated[ErrorType, Meta(description="The error's stable name, which fixes the HTTP status.")]
    request_id: Annotated[str, Meta(description="The request's id, which the header X-Request-Id has too.")]
    field: Annotated[
        str | UnsetType, Meta(description="Tensor or field at fault; absent if there is none.")
    ] = UNSET
    predicted_ms: Annotated[
        float | UnsetType,
        Meta(description="Milliseconds that the answer might have taken, where that is why it was refused."),
    ] = UNSET


def is_kserve(path: str) -> bool:
    return path == KSERVE or path.startswith(KSERVE + "/")


def error_body(error: RequestError, request_id: str, path: str = "") -> bytes:
    """Encode an error as JSON. path: of the request, which decides the shape."""
    if is_kserve(path):
        told = KServeError(error=error.message, type=error.type, request_id=request_id)
        return _encode(_with_details(told, error))
    body = ErrorBody(type=error.type, message=error.message, request_id=request_id)
    return _encode(ErrorAnswer(error=_with_details(body, error)))


def _with_details(body: B, error: RequestError) -> B:
    """The body with what only some errors have."""
    if error.field is not None:
        body.field = error.field
    if error.predicted_ms is not None:
        body.predicted_ms = error.predicted_ms
    return body


async def refuse(request: HttpRequest, error: Exception) -> Response:
    """Turn an error, Starlette's or ours, into a response whose body is that of `error_body`."""
    headers: dict[str, str] = {}
    path: str = request.scope["path"]
    if isinstance(error, HTTPException) and error.status_code == 405:
        allowed = (error.headers or {})["Allow"].split(", ")
        headers["Allow"] = taken = ", ".join(sorted(allowed))
        error = RequestError(
            "method_not_allowed", f"{quoted(path)} does not take {request.method}; it takes {taken}"
        )
    elif isinstance(error, HTTPException):
        error = RequestError("not_found", f"there is no {quoted(path)}")
    elif not isinstance(error, RequestError):
        error = RequestError("internal", "the server failed; see its log")
    if error.type in TRY_AGAIN:
        headers["Retry-After"] = str(error.retry_after_s)
    return Response(
        error_body(error, request.scope["jgr.request_id"], path),
        STATUS[error.type],
        headers,
        "application/json",
    )
