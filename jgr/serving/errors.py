# SPDX-License-Identifier: Apache-2.0
"""How a refusal looks: the error's type, which fixes the HTTP status, and what the body says."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

ErrorType = Literal[
    "invalid_http",
    "invalid_json",
    "not_an_item_id",
    "unauthorized",
    "forbidden",
    "not_found",
    "method_not_allowed",
    "conflict",
    "body_too_large",
    "invalid_request",
    "quota_exceeded",
    "overloaded",
    "head_too_large",
    "internal",
    "unavailable",
    "deadline_exceeded",
]

STATUS: dict[ErrorType, int] = {
    "invalid_http": 400,
    "invalid_json": 400,
    "not_an_item_id": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "not_found": 404,
    "method_not_allowed": 405,
    "conflict": 409,
    "body_too_large": 413,
    "invalid_request": 422,
    "quota_exceeded": 429,
    "overloaded": 429,
    "head_too_large": 431,
    "internal": 500,
    "unavailable": 503,
    "deadline_exceeded": 504,
}

RETRY_AFTER_S = 1
"""How many seconds a server asks its clients to wait, where it does not know better."""
MAX_QUOTED_CHARS = 80


class ErrorBody(Struct, kw_only=True):
    """Why a request was refused."""

    type: Annotated[ErrorType, Meta(description="The error's stable name, which fixes the HTTP status.")]
    message: Annotated[str, Meta(description="What is wrong, for people to read.")]
    request_id: Annotated[str, Meta(description="The request's id, which the header X-Request-Id has too.")]
    field: Annotated[
        str | UnsetType, Meta(description="Field at fault, such as history[3]; absent if there is none.")
    ] = UNSET
    predicted_ms: Annotated[
        float | UnsetType,
        Meta(
            description="Milliseconds that the answer might have taken, with what predictions are wrong by; only where "
            "that is beyond the request's deadline, or would have made others late, as the message says."
        ),
    ] = UNSET


class ErrorAnswer(Struct, kw_only=True):
    """The body of every answer that is an error."""

    error: Annotated[ErrorBody, Meta(description="Why the request was refused.")]


class RequestError(Exception):
    """Raised for a request that is refused. type decides the HTTP status; field names the part at fault.

    predicted_ms: how long the answer might have taken, where that is why. retry_after_s: when it is worth another try.
    """

    def __init__(
        self,
        type: ErrorType,
        message: str,
        field: str | None = None,
        *,
        predicted_ms: float | None = None,
        retry_after_s: int = RETRY_AFTER_S,
    ) -> None:
        super().__init__(type, message)  # both, so that it can go from one process to another
        self.type: ErrorType = type
        self.message = message
        self.field = field
        self.predicted_ms = predicted_ms
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.message


def invalid(field: str, message: str) -> RequestError:
    """Make the error for a well-formed request whose `field` cannot be served."""
    return RequestError("invalid_request", message, field)


def quoted(text: str) -> str:
    """Quote a caller's text for a message: shortened, and on one line."""
    return repr(text if len(text) <= MAX_QUOTED_CHARS else text[: MAX_QUOTED_CHARS - 3] + "...")
