# SPDX-License-Identifier: Apache-2.0
"""The secret that the nodes of a Ray cluster share.

Whoever can call a Ray process can run code in it, and a replica listens on all addresses of its machine. So a fleet is
served only where Ray asks every caller for a token, or for a certificate; see docs/fleet.md.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from urllib.parse import urlsplit

from jgr.config import UserError

MODE = "RAY_AUTH_MODE"
HOW = (
    "set RAY_AUTH_MODE=token and the same RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH on every node and here, "
    "see docs/fleet.md"
)
_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
_PROBE_S = 10.0


def require_token(environment: MutableMapping[str, str]) -> None:
    """Have Ray ask for its token where nothing else is set, before Ray is imported. Raises UserError where it is told
    not to."""
    mode = environment.setdefault(MODE, "token")
    if mode.lower() != "token":
        raise UserError(f"{MODE}={mode}: whoever reaches a replica's port could run code in it; {HOW}")


def keep_token(environment: Mapping[str, str], home: Path) -> None:
    """See to it that nobody else of this machine reads the token that Ray takes where none is named. Ray writes it as
    the umask says, so it is written here before; one that is there is made private. Raises UserError where that fails.
    """
    if any(environment.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        return
    path = home / ".ray" / "auth_token"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            path.chmod(0o600)
            return
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_hex(32))
    except OSError as error:
        raise UserError(
            f"{path}: the token of Ray's cluster cannot be kept private: {error.strerror}"
        ) from None


def require_closed(address: str) -> None:
    """Raises UserError where a Ray cluster answers a caller who has no secret, or does not say whether it would.
    address: of its head, HOST:PORT."""
    if is_open(address):
        raise UserError(f"the Ray cluster at {address} asks nobody for a secret; {HOW}")


def is_open(address: str) -> bool:
    """Whether the head of a Ray cluster answers a caller without a token and a certificate. UserError where it does not
    say: one that is too busy to answer may be open."""
    import grpc

    # UNAVAILABLE is what a caller gets who does not encrypt: Ray itself has just reached this head.
    codes = grpc.StatusCode
    closed = {codes.UNAUTHENTICATED, codes.PERMISSION_DENIED, codes.UNAVAILABLE}

    with grpc.insecure_channel(urlsplit(f"//{address.rpartition('//')[2]}").netloc) as channel:
        try:
            channel.unary_unary(_ALIVE)(b"", timeout=_PROBE_S)
        except grpc.RpcError as error:
            if error.code() in closed:
                return False
            raise UserError(
                f"the Ray cluster at {address} does not say whether it asks for a secret "
                f"({error.code().name.lower()}); try again, or {HOW}"
            ) from None
    return True
