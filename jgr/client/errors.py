# SPDX-License-Identifier: Apache-2.0
"""Why a request got no answer, as exceptions: a class for each thing that a caller may want to do about it.

`jgr.Error`, the base of all, is also that of a folder or a configuration that cannot be used.
"""

from __future__ import annotations

from jgr.fields import UserError
from jgr.serving.errors import ErrorType

Error = UserError


class RequestFailed(Error):
    """The base class. type: the error's stable name, as in HTTP answers. field: the part of the request at fault.

    request_id: the id that the server's log has, where it is known. retry_after: seconds to wait before another try,
    where that may help. index: the place of the history at fault, where there are several. sent: False where no
    connection was made, so nobody has seen the request. by_proxy: whether somebody on the way answered for the server.
    """

    def __init__(
        self,
        message: str,
        type: ErrorType = "internal",
        *,
        field: str | None = None,
        request_id: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.type: ErrorType = type
        self.field = field
        self.request_id = request_id
        self.retry_after = retry_after
        self.index: int | None = None
        self.sent, self.by_proxy = True, False

    def __str__(self) -> str:
        return self.message if self.index is None else f"histories[{self.index}]: {self.message}"


class InvalidRequest(RequestFailed):
    """The request cannot be answered as it is; `field` names what to change."""


class Unauthorized(RequestFailed):
    """The key is missing or wrong, or is one that may not do this."""


class NotFound(RequestFailed):
    """There is no such model, or no such address."""


class Overloaded(RequestFailed):
    """Too many requests are waiting, or the key's quota is used up; try again after `retry_after` seconds."""


class DeadlineExceeded(RequestFailed):
    """The request's deadline passed before there was an answer."""


class Unavailable(RequestFailed):
    """Nobody answers: the engine is closed, or the server is starting, stopping or out of reach."""


class InternalError(RequestFailed):
    """The model or the server failed; its log says more."""


_CLASSES: dict[ErrorType, type[RequestFailed]] = {
    "unauthorized": Unauthorized,
    "forbidden": Unauthorized,
    "not_found": NotFound,
    "overloaded": Overloaded,
    "quota_exceeded": Overloaded,
    "deadline_exceeded": DeadlineExceeded,
    "unavailable": Unavailable,
    "internal": InternalError,
}


def failure(
    type: ErrorType,
    message: str,
    field: str | None = None,
    request_id: str | None = None,
    retry_after: float | None = None,
) -> RequestFailed:
    """Make the exception of an error type. Types without a class of their own become InvalidRequest."""
    found = _CLASSES.get(type, InvalidRequest)
    return found(message, type, field=field, request_id=request_id, retry_after=retry_after)
