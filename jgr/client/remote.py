# SPDX-License-Identifier: Apache-2.0
"""`jgr.Client`: a running server behind the calls of `jgr.Engine`: blocking HTTP over a pool of urllib3's connections.

Requests are sent again by rules of our own and not by urllib3's: jgr's errors say when that is of use, and an answer
that breaks off counts too.
"""

from __future__ import annotations

import asyncio
import os
import re
import ssl
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import msgspec
from urllib3 import BaseHTTPResponse, HTTPConnectionPool, HTTPSConnectionPool, Timeout
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import (
    ClosedPoolError,
    ConnectTimeoutError,
    HTTPError,
    NewConnectionError,
    ProtocolError,
    TimeoutError,
)
from urllib3.response import HTTPResponse

from jgr.client.address import Address, parse_url, tls_context, unreached
from jgr.client.errors import (
    InternalError,
    InvalidRequest,
    NotFound,
    Overloaded,
    RequestFailed,
    Unavailable,
    failure,
)
from jgr.client.recommender import Kind, Recommender
from jgr.fields import UserError, one_line, printable
from jgr.serving.api import Answer, ModelInfo, ModelList
from jgr.serving.errors import STATUS, ErrorAnswer, ErrorType
from jgr.serving.prefill import Prefilled

MAX_ANSWER_BYTES = 1 << 26
KEPT_CONNECTIONS = 1024
"""More than that are closed when their answer is there."""
CONNECT_S = 2.0
"""So long a connection to one of several addresses may take before the next one is tried."""
CHANGES = ("/v1/catalogs", "/v1/models/")
"""Where a POST changes the server. It is sent to another address only where the first has not seen it."""
BETWEEN = (HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.BAD_GATEWAY, HTTPStatus.GATEWAY_TIMEOUT)
"""Statuses that are not the server's own where the body is not its own: a proxy has lost whom it asked."""
FIRST_WAIT_S = 0.1
MAX_TIMEOUT_S = 1e6
MAX_WAIT_S = 60.0
"""The longest wait before a retry. The wait doubles each time, where the server does not say how long it should be."""

T = TypeVar("T")
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
_first = threading.Lock()


class Client(Recommender):
    """A server, asked from any thread, and from a forked process too.

    It is asked directly, whatever proxy the environment names, and is not followed elsewhere: a key is for it alone.

    url: such as "http://127.0.0.1:8000" or "https://shop.example/jgr", with the path under which a gateway shows the
    server. Several are addresses of one service, such as a fleet's proxies: a request goes to the one that answered
    last, and where nobody is there or the connection breaks, under the same id to the next, each once. key: the
    server's API key, if it has one. model: the name of the model to ask; None: the first that serves what is asked.
    timeout_s: how long to wait for the next byte of an answer. retries: how often a request is sent again that found
    the server overloaded or unavailable, or that a proxy lost, after the time that the server names. connections: how
    many of several histories are asked for at a time. ca_file: a PEM file of the authorities that may sign the server's
    certificate; None: the system's.
    """

    def __init__(
        self,
        url: str | list[str] | tuple[str, ...],
        key: str | None = None,
        *,
        model: str | None = None,
        timeout_s: float = 60.0,
        retries: int = 0,
        connections: int = 16,
        ca_file: str | os.PathLike[str] | None = None,
    ) -> None:
        urls: list[str] = list(url) if isinstance(url, list | tuple) else [url]
        if not urls:
            raise UserError("url must be a URL, or several, not an empty list")
        addresses = [parse_url(each) for each in urls]
        _check_options(key, model, timeout_s, retries, connections)
        self._tls = tls_context(ca_file) if any(address.secure for address in addresses) else None
        self._headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {key}"} if key else {}
        )
        self._model, self._timeout_s = model, timeout_s
        self._retries, self._connections = retries, connections
        self._servers = [
            _Server(url.rstrip("/"), address, self._make_pool(address, len(urls) > 1))
            for url, address in zip(urls, addresses, strict=True)
        ]
        self._last = 0  # the place of the server that answered last
        self._process, self._closed = os.getpid(), False

    @property
    def info(self) -> ModelInfo:
        models = self.models()
        found = next((info for info in models if self._model in (None, info.id, info.version)), None)
        if found is None:
            names = ", ".join(info.id for info in models)
            raise NotFound(
                f"there is no model {self._model!r}; there are {names}", "not_found", field="model"
            )
        return found

    def models(self) -> list[ModelInfo]:
        """All models of the server."""
        return self.fetch("GET", "/v1/models", None, ModelList).data

    def close(self) -> None:
        self._closed = True
        for server in self._servers:
            server.pool.close()

    def fetch(self, method: str, path: str, body: bytes | None, type: type[T]) -> T:
        """Send any request, such as GET /v1/models, and read the JSON of its 200 as `type`.

        Raises RequestFailed otherwise.
        """
        request_id = os.urandom(16).hex()  # of every try
        for attempt in range(self._retries + 1):
            try:
                server, content = self._exchange_with_one(method, path, body, request_id)
                return decoder(type).decode(content)
            except RequestFailed as error:
                again = _may_repeat(method, path)
                repeats = isinstance(error, Overloaded) or (error.by_proxy and again)
                repeats |= isinstance(error, Unavailable) and (again or not error.sent)
                if attempt == self._retries or self._closed or not repeats:
                    raise
                doubled_s = FIRST_WAIT_S * 2.0 ** min(attempt, 10)  # beyond MAX_WAIT_S already
                wait_s = doubled_s if error.retry_after is None else error.retry_after
                time.sleep(min(wait_s, MAX_WAIT_S))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise InternalError(
                    f"{server.url}{path}: is not the answer of a jgr server: {error}"
                ) from None
        raise AssertionError("unreachable")

    def read(self, path: str) -> bytes:
        """The content of a GET that is answered 200, such as that of /metrics. Raises RequestFailed otherwise."""
        return self._exchange_with_one("GET", path, None, os.urandom(16).hex())[1]

    def _ask(self, kind: Kind, bodies: Sequence[bytes]) -> list[Any]:
        def one(at: int) -> Answer | Prefilled:
            body = bodies[at] if self._model is None else _named(bodies[at], self._model)
            try:
                if kind == "prefill":
                    return self.fetch("POST", *_of_user(body), Prefilled)
                return self.fetch("POST", f"/v1/{kind}", body, Answer)
            except RequestFailed as error:
                error.index = at if len(bodies) > 1 else None
                raise

        if len(bodies) == 1:
            return [one(0)]
        with ThreadPoolExecutor(min(self._connections, len(bodies))) as pool:
            answers = [pool.submit(one, at) for at in range(len(bodies))]
            try:
                return [answer.result() for answer in answers]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    async def _aask(self, kind: Kind, bodies: Sequence[bytes]) -> list[Any]:
        return await asyncio.to_thread(self._ask, kind, bodies)

    def _make_pool(self, at: Address, one_of_several: bool) -> HTTPConnectionPool:
        self._connect_s = min(self._timeout_s, CONNECT_S) if one_of_several else self._timeout_s
        settings: dict[str, Any] = {
            "timeout": Timeout(connect=self._connect_s, read=self._timeout_s),
            "maxsize": KEPT_CONNECTIONS,
            "headers": self._headers,
            "retries": False,
        }
        if not at.secure:
            plain = HTTPConnectionPool(at.host, at.port, **settings)
            plain.ConnectionCls = _Connection
            return plain
        pool = HTTPSConnectionPool(at.host, at.port, ssl_context=self._tls, **settings)
        pool.ConnectionCls = _TlsConnection
        return pool

    def _exchange_with_one(
        self, method: str, path: str, body: bytes | None, request_id: str
    ) -> tuple[_Server, bytes]:
        """The server that answers, and the content of its 200. Raises RequestFailed."""
        if self._process != os.getpid() and not self._closed:
            # The parent asks over these connections too, and each would read the other's answers.
            several = len(self._servers) > 1
            self._servers = [
                server._replace(pool=self._make_pool(server.address, several)) for server in self._servers
            ]
            self._process = os.getpid()
        first, servers = self._last, self._servers
        for at in (*range(first, len(servers)), *range(first)):
            try:
                content = self._exchange(servers[at], method, path, body, request_id)
            except Unavailable as error:
                last = at == (first - 1) % len(servers)
                if last or self._closed or not (_may_repeat(method, path) or not error.sent):
                    raise
            else:
                self._last = at
                return servers[at], content
        raise AssertionError("unreachable")

    def _exchange(
        self, server: _Server, method: str, path: str, body: bytes | None, request_id: str
    ) -> bytes:
        """The content of a 200, over a connection that was kept or a new one. Raises RequestFailed."""
        url = server.url
        try:
            response = self._send(server.pool, method, server.address.path + path, body, request_id)
            content = response.read(MAX_ANSWER_BYTES + 1, decode_content=False)
            if len(content) <= MAX_ANSWER_BYTES:
                response.read(1, decode_content=False)  # raises where the answer was cut off
        except ClosedPoolError:
            raise Unavailable("the client is closed", "unavailable") from None
        except HTTPError as error:
            failed = Unavailable(self._told(url, error), "unavailable")
            failed.sent = not isinstance(error, NewConnectionError | ConnectTimeoutError)
            raise failed from None
        except ValueError as error:  # http.client's, for a chunk of less than no bytes
            raise Unavailable(f"{url}: {one_line(error)}", "unavailable") from None
        if len(content) > MAX_ANSWER_BYTES:
            response.close()
            raise InternalError(f"{url}: the answer has more than {MAX_ANSWER_BYTES} bytes")
        if response.status != HTTPStatus.OK:
            raise _failure(url, response, content)
        return content

    def _send(
        self, pool: HTTPConnectionPool, method: str, path: str, body: bytes | None, request_id: str
    ) -> BaseHTTPResponse:
        headers = {**self._headers, "X-Request-Id": request_id}
        while True:  # each time with a kept connection less
            try:
                return pool.urlopen(
                    method, path, body, headers=headers, redirect=False, preload_content=False
                )
            except ProtocolError as error:
                if not isinstance(error.args[-1], _Ended) or not _may_repeat(method, path):
                    raise

    def _told(self, url: str, error: HTTPError) -> str:
        """What has happened, without the names of urllib3's objects."""
        inner = error.__cause__ or (error.args[-1] if error.args else error)
        if isinstance(error, NewConnectionError):
            return unreached(url, getattr(inner, "strerror", None) or one_line(inner))
        if isinstance(error, ConnectTimeoutError):
            return unreached(url, f"no connection within {self._connect_s:g} s")
        if isinstance(error, TimeoutError):
            return f"{url}: no answer within {self._timeout_s:g} s"
        advice = "; ca_file may name its authority" if isinstance(inner, ssl.SSLCertVerificationError) else ""
        return f"{url}: {one_line(inner) or type(inner).__name__}{advice}"


class _Server(NamedTuple):
    """One of the addresses. url: as it was given, without / at its end."""

    url: str
    address: Address
    pool: HTTPConnectionPool


def decoder(type: type[T]) -> msgspec.json.Decoder[T]:
    """The decoder of a type, the same for all threads. msgspec looks at a type when it is decoded first, and crashes
    where two threads do so at once."""
    with _first:
        found: msgspec.json.Decoder[T] = _decoders.get(type) or msgspec.json.Decoder(type)
        _decoders[type] = found
    return found


class _Ended(ConnectionError):
    """A kept connection ended without an answer: the server closes what was idle for long, and read no request."""


class _Connection(HTTPConnection):
    """Tells the end of a connection that has answered before from that of a new one."""

    _answered = False

    def connect(self) -> None:
        self._answered = False
        super().connect()

    def getresponse(self) -> HTTPResponse:  # type: ignore[override]  # urllib3's own, which is no http.client's
        try:
            response = super().getresponse()
        except ConnectionError as error:
            if self._answered:
                raise _Ended(str(error)) from None
            raise
        self._answered = True
        return response


class _TlsConnection(_Connection, HTTPSConnection):
    pass


def _may_repeat(method: str, path: str) -> bool:
    """Whether a request may be done twice: all may but changes of the server itself."""
    return method != "POST" or not path.startswith(CHANGES)


def _check_options(
    key: str | None, model: str | None, timeout_s: float, retries: int, connections: int
) -> None:
    """Raise UserError, which names the argument of Client that cannot be used."""
    for name, text in (("key", key), ("model", model)):
        if not isinstance(text, str | None):
            raise UserError(f"{name} must be text or None, not {type(text).__name__}")
    if not re.fullmatch(r"[!-~]*", key or ""):
        raise UserError("the key must be printable ASCII without spaces")
    for name, value, least in (("retries", retries, 0), ("connections", connections, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UserError(f"{name} must be an integer of at least {least}, not {value!r}")
    number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if not number or not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise UserError(f"timeout_s must be above 0 and at most {MAX_TIMEOUT_S:g}, not {timeout_s!r}")


def _named(body: bytes, model: str) -> bytes:
    """The body with a model's name, unless it has one: null is none."""
    fields = msgspec.json.decode(body)
    if fields.get("model") is None:
        fields["model"] = model
    return msgspec.json.encode(fields)


def _of_user(body: bytes) -> tuple[str, bytes]:
    """A hint's path, which has the user, and its body. InvalidRequest where the user is no id."""
    fields = msgspec.json.decode(body)
    user = fields.pop("user_id")
    if not isinstance(user, str | int) or isinstance(user, bool):
        raise InvalidRequest("user_id must be text or an integer", "invalid_request", field="user_id")
    return f"/v1/users/{quote(str(user), safe='')}/prefill", msgspec.json.encode(fields)


def _failure(url: str, response: BaseHTTPResponse, content: bytes) -> RequestFailed:
    """The exception of a refusal. A proxy's refusal, which has another form, is known by its status."""
    waits = response.headers.get("Retry-After", "")
    retry_after = float(waits) if waits.isdecimal() else None
    try:
        error = decoder(ErrorAnswer).decode(content).error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        types: dict[int, ErrorType] = {status: type for type, status in STATUS.items()}
        message = f"{url}: HTTP {response.status} {one_line(response.reason)}"
        lost = response.status in BETWEEN
        failed = failure(
            "internal" if lost else types.get(response.status, "internal"), message, retry_after=retry_after
        )
        failed.by_proxy = lost
        return failed
    field = error.field if isinstance(error.field, str) else None
    told = printable(error.message), field and printable(field), printable(error.request_id)
    return failure(error.type, *told, retry_after)
