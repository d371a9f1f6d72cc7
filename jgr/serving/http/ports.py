# SPDX-License-Identifier: Apache-2.0
"""The sockets that a server listens on. Importing this is cheap, so that a port can be tried before a model is read."""

from __future__ import annotations

import socket

from jgr.config import ServerConfig, UserError

BACKLOG = 2048


def bind(host: str, port: int, field: str = "server.port") -> socket.socket:
    """Open a listening socket. field: names the port. Raises UserError if the address cannot be used."""
    found = _bound(host, port, field)
    try:
        found.listen(BACKLOG)
    except OSError as error:  # somebody has begun to listen since it was bound
        found.close()
        raise _refused(host, port, field, error) from None
    return found


def check_ports(config: ServerConfig) -> None:
    """Raise UserError if the server could not listen now. Nothing listens for that, so no client finds it there yet."""
    _bound(config.host, config.port, "server.port").close()
    if config.grpc_port is not None:
        _bound(config.host, config.grpc_port, "server.grpc_port").close()


def _bound(host: str, port: int, field: str) -> socket.socket:
    if not host.isprintable():
        raise UserError(f"server.host: cannot listen on {host!a}: no host has such a name")
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        # Connections that have ended do not hold a port.
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if found.family == socket.AF_INET6:
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        found.bind((host, port))
    except OSError as error:
        found.close()
        raise _refused(host, port, field, error) from None
    except BaseException:
        found.close()
        raise
    return found


def _refused(host: str, port: int, field: str, error: OSError) -> UserError:
    return UserError(f"server.host, {field}: cannot listen on {host}:{port}: {error.strerror}")
