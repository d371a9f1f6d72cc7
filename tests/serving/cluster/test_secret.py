# SPDX-License-Identifier: Apache-2.0
"""A fleet is served only where its nodes ask for a secret."""

from __future__ import annotations

import stat
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from jgr.config import UserError
from jgr.serving.cluster.secret import is_open, keep_token, require_closed, require_token


class Head(grpc.GenericRpcHandler):
    """The head of a Ray cluster, as a stranger meets it."""

    def __init__(self, asks: bool) -> None:
        self._asks = asks

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        assert details.method == "/ray.rpc.NodeInfoGcsService/CheckAlive"

        def alive(request: bytes, context: grpc.ServicerContext) -> bytes:
            if self._asks and "authorization" not in dict(context.invocation_metadata()):
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "who is there?")
            return b""

        return grpc.unary_unary_rpc_method_handler(alive)


@pytest.mark.parametrize("asks", [False, True])
def test_a_cluster_that_answers_strangers_is_refused(asks: bool) -> None:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((Head(asks),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        assert is_open(address) is not asks
        if asks:
            require_closed(address)
        else:
            with pytest.raises(
                UserError, match=f"the Ray cluster at {address} asks nobody for a secret; set RAY"
            ):
                require_closed(address)
    finally:
        server.stop(None)


class Silent(grpc.GenericRpcHandler):
    """A head that fails with a status."""

    def __init__(self, status: grpc.StatusCode) -> None:
        self._status = status

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        return grpc.unary_unary_rpc_method_handler(lambda request, context: context.abort(self._status, "no"))


@pytest.mark.parametrize(("status", "says"), [("DEADLINE_EXCEEDED", False), ("UNAVAILABLE", True)])
def test_a_cluster_that_does_not_say_is_refused(status: str, says: bool) -> None:
    """UNAVAILABLE is what Ray's TLS has for a stranger."""
    server = grpc.server(futures.ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((Silent(grpc.StatusCode[status]),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        if says:
            require_closed(address)
        else:
            with pytest.raises(UserError, match=r"does not say whether it asks for a secret .deadline_exc"):
                require_closed(address)
    finally:
        server.stop(None)


def test_ray_asks_for_its_token_unless_it_is_told_not_to() -> None:
    environment: dict[str, str] = {}
    require_token(environment)
    assert environment == {"RAY_AUTH_MODE": "token"}
    require_token({"RAY_AUTH_MODE": "TOKEN"})
    with pytest.raises(UserError, match="RAY_AUTH_MODE=disabled: whoever reaches"):
        require_token({"RAY_AUTH_MODE": "disabled"})


def test_the_token_is_private(tmp_path: Path) -> None:
    """Ray makes it with the rights that files have by default."""
    path = tmp_path / ".ray" / "auth_token"
    for given in ({"RAY_AUTH_TOKEN": "t"}, {"RAY_AUTH_TOKEN_PATH": "/t"}):
        keep_token(given, tmp_path)
        assert not path.parent.exists(), "another one is taken"
    keep_token({}, tmp_path)
    token = path.read_text()
    assert len(token) == 64 and int(token, 16) and stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    keep_token({}, tmp_path)
    assert path.read_text() == token and stat.S_IMODE(path.stat().st_mode) == 0o600
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="auth_token: the token of Ray's cluster cannot be kept private"):
        keep_token({}, tmp_path / "file")
