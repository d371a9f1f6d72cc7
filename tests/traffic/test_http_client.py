# SPDX-License-Identifier: Apache-2.0
"""The HTTP client against a server of a few lines: what is sent, what an answer means, when a connection is kept."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from pathlib import Path

import pytest
import trustme

from jgr.fields import UserError
from jgr.traffic.http_client import (
    BAD_RESPONSE,
    DISCONNECTED,
    MAX_HEAD_BYTES,
    HttpConnection,
    Target,
    Verdict,
    target_of,
)
from jgr.traffic.open_loop import reach
from jgr.traffic.schedule import LoadError, Request
from tests.traffic.tcp_server import OK, tcp_server


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://127.0.0.1:8000", Target("127.0.0.1", 8000)),
        ("http://localhost/", Target("localhost", 80)),
        ("http://[::1]:9", Target("::1", 9)),
        ("https://localhost", Target("localhost", 443, secure=True)),
        ("https://127.0.0.1:8443/shop/jgr/", Target("127.0.0.1", 8443, secure=True, path="/shop/jgr")),
    ],
)
def test_urls_of_this_machine(url: str, target: Target) -> None:
    assert target_of(url) == target
    assert target.is_loopback


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:8000",
        "ftp://127.0.0.1",
        "http://",
        "http://x:y",
        "http://a@x",
        "http://x?y",
    ],
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(UserError, match="URL"):
        target_of(url)


@pytest.mark.parametrize("host", ["10.0.0.1", "example.org", "0.0.0.0", "localhost.example.org", "::2"])
def test_other_hosts_are_not_loopback(host: str) -> None:
    assert not Target(host, 80).is_loopback


def test_an_api_key_cannot_smuggle_headers() -> None:
    assert target_of("http://localhost", "k3y").api_key == "k3y"
    with pytest.raises(LoadError, match="API key"):
        target_of("http://localhost", "k\r\nHost: x")


def test_https_and_what_stands_before_every_path(tmp_path: Path) -> None:
    """Only a server of the authority that is named is told anything."""
    authority = trustme.CA()
    ca_file, context = str(tmp_path / "ca.pem"), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.cert_pem.write_to_path(ca_file)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    received: list[bytes] = []

    async def main() -> list[Verdict]:
        async with tcp_server([OK, OK], received, context) as server:
            with pytest.raises(LoadError, match="certificate verify failed"):
                await reach(server, 30.0)
            target = target_of(f"https://127.0.0.1:{server.port}/shop/jgr", "k3y", ca_file)
            connection = await HttpConnection.open(target)
            with contextlib.closing(connection):
                return [await _answer(connection, target) for _ in range(2)]

    assert asyncio.run(main()) == [Verdict("200")] * 2
    assert [head.split(b"\r\n")[0] for head in received] == [b"POST /shop/jgr/v1/rank HTTP/1.1"] * 2
    with pytest.raises(UserError, match=r"ca_file: .*nowhere\.pem is no PEM file"):
        target_of("https://localhost", ca_file=str(tmp_path / "nowhere.pem"))


async def _answer(connection: HttpConnection, target: Target) -> Verdict:
    ended: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
    connection.send(target.render(Request("/v1/rank", b'{"a":1}')), ended.set_result)
    return await ended


def _post(answers: list[bytes], count: int) -> tuple[list[Verdict], bool, list[bytes]]:
    """The verdicts of `count` requests on one connection, whether it is still usable, and what the server got."""
    received: list[bytes] = []

    async def main() -> tuple[list[Verdict], bool, list[bytes]]:
        async with tcp_server(answers, received) as target:
            connection = await HttpConnection.open(target)
            with contextlib.closing(connection):
                verdicts = [await _answer(connection, target) for _ in range(count)]
                return verdicts, connection.usable, received

    return asyncio.run(main())


def test_requests_share_a_connection() -> None:
    # A third answer is there, so that the server keeps the connection.
    verdicts, usable, received = _post([OK, b"HTTP/1.1 429 \r\ncontent-length:0\r\n\r\n", OK], 2)
    assert (verdicts, usable) == ([Verdict("200"), Verdict("429")], True)
    head, _, body = received[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/rank HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"\r\nAuthorization: Bearer k3y" in head
    assert b"\r\nContent-Length: 7" in head
    assert body == b'{"a":1}'


def test_a_connection_that_will_be_closed_is_not_used_again() -> None:
    closing = b"HTTP/1.1 200 OK\r\nConnection: Close\r\nContent-Length: 0\r\n\r\n"
    assert _post([closing, OK], 1)[:2] == ([Verdict("200")], False)


def test_an_answer_in_chunks_is_whole() -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    assert _post([chunked, OK, OK], 2)[:2] == ([Verdict("200"), Verdict("200")], True)


def _refusal(body: bytes) -> bytes:
    return b"HTTP/1.1 429 Too Many\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"error": {"type": "overloaded", "message": "m", "request_id": "1"}}', "overloaded"),
        (b'{"error": {"type": "%b"}}' % (b"x" * 1000), "x" * 64),
        (b'{"error": {"type": "\\u001b[2Jevil\\n\\u009b"}}', "?[2Jevil??"),
        (b'{"error": "overloaded"}', ""),
        (b"\xff", ""),
        (b"", ""),
        (b" " * (1 << 18), ""),
    ],
)
def test_a_refusal_has_the_reason_of_its_body(body: bytes, reason: str) -> None:
    assert _post([_refusal(body), OK], 1)[0] == [Verdict("429", reason)]


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (b"", DISCONNECTED),
        (OK[:-1], DISCONNECTED),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", BAD_RESPONSE),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n", BAD_RESPONSE),
        (b"SSH-2.0\r\n\r\n", BAD_RESPONSE),
        (b"HTTP/1.1 200 OK\r\nx: " + b"x" * (MAX_HEAD_BYTES + 10), BAD_RESPONSE),
    ],
)
def test_broken_answers(answer: bytes, verdict: Verdict) -> None:
    assert _post([answer], 1)[:2] == ([verdict], False)
