# SPDX-License-Identifier: Apache-2.0
"""What stands before the application where it is configured: a base path, CORS, TLS. Elsewhere nothing does, so that a
request pays nothing for it.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from urllib.parse import quote, unquote

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from jgr.config import ConfigError, ServerConfig
from jgr.files import reading
from jgr.serving.http.kserve import JSON_BYTES

METHODS = ("GET", "POST", "DELETE")
ASKED_HEADERS = ("Authorization", "Content-Type", "X-Request-Id", "traceparent", "tracestate", JSON_BYTES)
TOLD_HEADERS = ("X-Request-Id", "Retry-After", "Location", "traceresponse", JSON_BYTES)
PREFLIGHT_S = 600


def front(application: ASGIApp, config: ServerConfig) -> ASGIApp:
    """The application behind what is configured to stand before it; itself where nothing is."""
    if config.base_path:
        application = _BelowBasePath(application, config.base_path)
    if config.cors_origins:
        application = CORSMiddleware(
            application,
            allow_origins=config.cors_origins,
            allow_methods=METHODS,
            allow_headers=ASKED_HEADERS,
            expose_headers=TOLD_HEADERS,
            max_age=PREFLIGHT_S,
        )
    return application


def own_path(path: str, base_path: str) -> str:
    """A request's path without the base path, with which or without which a gateway passes it on."""
    if path == base_path:
        return "/"
    return path.removeprefix(base_path) if path.startswith(base_path + "/") else path


def below(path: str, base_path: str) -> str:
    """A path as it was sent, without the base path: byte by byte, for it may be no UTF-8."""
    own = own_path(unquote(path, errors="surrogateescape"), base_path)
    return quote(own, errors="surrogateescape")


class _BelowBasePath:
    def __init__(self, application: ASGIApp, base_path: str) -> None:
        self._application, self._base_path = application, base_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["path"] = own_path(scope["path"], self._base_path)
        await self._application(scope, receive, send)


def check_tls(config: ServerConfig) -> None:
    """Raise ConfigError, which names the field, for a certificate and key that cannot be used."""
    if not config.tls_certificate:
        return
    for name, path in (("tls_certificate", config.tls_certificate), ("tls_key", config.tls_key)):
        try:
            with reading(Path(path), ConfigError) as stream:
                stream.read(1)
        except ConfigError as error:
            raise ConfigError(f"server.{name}: {error}") from None
    try:
        # With a password, though it is none, OpenSSL does not ask for one at the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            config.tls_certificate, config.tls_key, password=lambda: ""
        )
    except (ssl.SSLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ConfigError(
            f"server.tls_certificate, server.tls_key: {config.tls_certificate} and {config.tls_key} are no PEM "
            f"certificate with its key, without a password: {reason}"
        ) from None


def check_grpc(config: ServerConfig) -> None:
    """Raise ConfigError where gRPC is asked for and the extra is not installed."""
    if config.grpc_port is not None:
        try:
            import google.protobuf  # noqa: F401
            import grpc  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                f"server.grpc_port: needs gRPC ({error}); install it by: pip install 'jgr[grpc]'"
            ) from None
