# SPDX-License-Identifier: Apache-2.0
"""The sockets that a server listens on. Importing this is cheap, so that a port can be tried before a model is read."""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket

from jgr.config import ServerConfig, UserError

BACKLOG = 2048

_log = logging.getLogger(__name__)


def warn_if_open(config: ServerConfig, host: str) -> None:
    """Say in the log that anybody may ask, where no client needs a key and other machines reach the host."""
    if not (config.api_key or config.keys or _is_own(host)):
        _log.warning(
            "server.host: other machines can reach %s, and neither server.api_key nor server.keys is set: anybody may "
            "ask",
            host,
        )


def _is_own(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bind(host: str, port: int, field: str = "server.port") -> socket.socket:
    """Open a listening socket. field: names the port. Raises UserError if the address cannot be used."""
    return listen(hold(host, port, field), field)


def hold(host: str, port: int, field: str = "server.port") -> socket.socket:
    """Take an address for this process, which does not listen there yet: nobody else can take it, and clients find
    nobody. Raises UserError if it cannot be used."""
    found = _socket(host)
    try:
        try:
            found.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            # Connections that have ended do not hold a port. Without the option, another process that has it could take
            # the same address until somebody listens, so it is given back at once.
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind((host, port))
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        found.close()
        raise _refused(host, port, field, error) from None
    except BaseException:
        found.close()
        raise
    return found


def listen(found: socket.socket, field: str = "server.port") -> socket.socket:
    """Let clients connect to the address that `hold` took. Returns the same socket."""
    host, port = found.getsockname()[:2]
    try:
        # The connections made here get the option too, so that the next server is not kept from the address by them.
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.listen(BACKLOG)
    except OSError as error:  # somebody has begun to listen since it was bound
        found.close()
        raise _refused(host, port, field, error) from None
    return found


def hold_ports(config: ServerConfig) -> socket.socket:
    """The server's address, held (see `hold`) while its models load. gRPC takes its port itself, which must be free
    now. Raises UserError where one cannot be used."""
    held = hold(config.host, config.port)
    if config.grpc_port is not None:
        try:
            hold(config.host, config.grpc_port, "server.grpc_port").close()
        except BaseException:
            held.close()
            raise
    return held


def _socket(host: str) -> socket.socket:
    if not host.isprintable():
        raise UserError(f"server.host: cannot listen on {host!a}: no host has such a name")
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    if found.family == socket.AF_INET6:
        found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    return found


def _refused(host: str, port: int, field: str, error: OSError) -> UserError:
    return UserError(f"server.host, {field}: cannot listen on {host}:{port}: {error.strerror}")
