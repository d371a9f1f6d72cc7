# SPDX-License-Identifier: Apache-2.0
"""The access log: a line for each request, on the logger "jgr.access", from `info` up.

Health and metrics are asked for every few seconds by machines, and would be most of it: they get a line only where they
are refused or fail.

With `--log_format=json` what the line says are fields of the object. It names no key and nothing of a body or a query,
which may hold users' ids; a path may name a user, as those of the API do.
"""

from __future__ import annotations

import logging

from starlette.types import Scope

from jgr.serving.errors import quoted
from jgr.serving.http.operations import OPERATIONS

MAX_PATH_CHARS = 1024
PROBED = frozenset(operation.path for operation in OPERATIONS if operation.group in ("health", "metrics"))

_log = logging.getLogger("jgr.access")


def log_access(scope: Scope, status: int, size: int, took_ms: float, request_id: str) -> None:
    """Log one request that has ended. size: bytes of the answer's body. took_ms: from its head to its end."""
    client, method, path = scope.get("client"), scope["method"], scope["path"]
    if status == 200 and path in PROBED:
        return
    fields = {
        "client": client[0] if client else "",
        "method": method,
        "path": path if len(path) <= MAX_PATH_CHARS else f"{path[: MAX_PATH_CHARS - 3]}...",
        "status": status,
        "bytes": size,
        "took_ms": round(took_ms, 3),
        "request_id": request_id,
    }
    said = path if path.isprintable() and " " not in path and len(path) <= 256 else quoted(path)
    _log.info(
        "%s %s %s %d, %d bytes, %.3f ms, %s",
        fields["client"] or "-",
        method,
        said,
        status,
        size,
        took_ms,
        request_id,
        extra=fields,
    )
