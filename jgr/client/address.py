# SPDX-License-Identifier: Apache-2.0
"""Where a server is, as every command and client that takes a URL reads it."""

from __future__ import annotations

import os
import re
import ssl
from typing import NamedTuple
from urllib.parse import urlsplit

from jgr.fields import UserError

PORTS = {"http": 80, "https": 443}
_HOST = re.compile(r"[0-9A-Za-z_:][0-9A-Za-z._:%-]*")


class Address(NamedTuple):
    """host: without the brackets of an IPv6 address. path: what stands before every path, without / at its end."""

    secure: bool
    host: str
    port: int
    path: str


def parse_url(url: str) -> Address:
    """The server of an http or https URL. Raises UserError for what is none, or says more than where the server is."""
    if not isinstance(url, str) or not re.fullmatch(r"[!-~]*", url):
        raise UserError(f"the URL must be printable ASCII without spaces, not {url!r}")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise UserError(f"{url!r} is not a URL: {error}") from None
    wanted = parts.scheme in PORTS and port != 0 and _HOST.fullmatch(host or "")
    if not wanted or parts.query or parts.fragment or "@" in parts.netloc or "?" in url or "#" in url:
        raise UserError(f"{url!r} is not the URL of a server, such as http://127.0.0.1:8000")
    return Address(parts.scheme == "https", host or "", port or PORTS[parts.scheme], parts.path.rstrip("/"))


def unreached(where: str, reason: str) -> str:
    """What is told of a server that no connection can be made to. where: a URL, or a host with its port."""
    return f"nobody answers at {where}: {reason}; does jgr serve run there?"


def tls_context(ca_file: str | os.PathLike[str] | None = None) -> ssl.SSLContext:
    """Checks servers' certificates. ca_file: a PEM file of the authorities to trust; None or empty: the system's.

    Raises UserError for a file that cannot be used.
    """
    try:
        return ssl.create_default_context(cafile=ca_file or None)
    except (OSError, ValueError, TypeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"ca_file: {ca_file} is no PEM file of certificates: {reason}") from None
