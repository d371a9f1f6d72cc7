# SPDX-License-Identifier: Apache-2.0
"""How jgr.Client reaches a server: https with an own authority, a base path, kept connections, and what goes wrong."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import trustme

import jgr
from jgr.client import remote
from tests.client.scripted import ANSWER, BUSY, reply, scripted
from tests.serving.certificates import make_pems, tls
from tests.serving.fakes import PATIENCE_S, LiveServer

HISTORIES = [["a"], ["7"]] * 10
FOUND = [["c", "d", "7"], ["7", "a", "b"]] * 10  # as tests/serving/fakes.py computes them


def ids(answer: jgr.Answer) -> list[str]:
    return [item.item_id for item in answer.items]


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_pems(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def server(pems: dict[str, Path]) -> Iterator[LiveServer]:
    with LiveServer(*tls(pems), "server.base_path=/shop/jgr", "server.api_key=secret") as server:
        yield server


def server_context(certificate: trustme.LeafCert) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate.configure_cert(context)
    return context


def test_https_below_a_base_path_from_many_threads(server: LiveServer, pems: dict[str, Path]) -> None:
    for path in ("", "/shop/jgr", "/shop/jgr/"):
        with jgr.Client(server.listener.url + path, "secret", ca_file=pems["authority"]) as client:
            assert client.info.max_beam_width == 5
            assert [ids(answer) for answer in client.recommend(HISTORIES, top_k=3)] == FOUND
            with ThreadPoolExecutor(8) as pool:
                alone = pool.map(lambda history: client.recommend(history, top_k=3), HISTORIES)
                assert [ids(answer) for answer in alone] == FOUND
    url = f"{server.listener.url}/elsewhere"
    with jgr.Client(url, "secret", ca_file=str(pems["authority"])) as lost, pytest.raises(jgr.NotFound):
        lost.recommend(["a"], top_k=3)


def test_a_server_that_is_not_trusted_is_told_nothing(server: LiveServer, pems: dict[str, Path]) -> None:
    with jgr.Client(server.listener.url, "secret") as client:
        with pytest.raises(
            jgr.Unavailable, match=r"certificate verify failed.*; ca_file may name its authority"
        ):
            client.recommend(["a"])
    authority = trustme.CA()
    elsewhere = server_context(authority.issue_cert("elsewhere.example"))
    with authority.cert_pem.tempfile() as ca_file, scripted(ANSWER, tls=elsewhere) as (url, seen):
        with jgr.Client(url, ca_file=ca_file) as client, pytest.raises(jgr.Unavailable, match="mismatch"):
            client.recommend(["x"])
        assert seen == []
    expired = server_context(authority.issue_cert("127.0.0.1", not_after=datetime(2020, 1, 1, tzinfo=UTC)))
    with authority.cert_pem.tempfile() as ca_file, scripted(ANSWER, tls=expired) as (url, seen):
        with jgr.Client(url, ca_file=ca_file) as client, pytest.raises(jgr.Unavailable, match="expired"):
            client.recommend(["x"])
        assert seen == []


def test_http_and_https_do_not_answer_each_other(server: LiveServer, pems: dict[str, Path]) -> None:
    with jgr.Client(f"http://127.0.0.1:{server.port}") as plain, pytest.raises(jgr.Unavailable, match="127"):
        plain.recommend(["a"])
    with LiveServer() as other, jgr.Client(f"https://127.0.0.1:{other.port}") as secure:
        with pytest.raises(jgr.Unavailable, match="SSL"):
            secure.recommend(["a"])


@pytest.mark.parametrize(
    "content", [None, b"", b"-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n"]
)
def test_a_file_without_authorities_is_one_line(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(jgr.Error, match=r"^ca_file: .*ca\.pem is no PEM file of certificates: ") as caught:
        jgr.Client("https://127.0.0.1:1", ca_file=path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("secure", [False, True])
def test_a_connection_is_used_again_until_it_ends(secure: bool) -> None:
    """Refusals leave it as it was. Where the server closed it meanwhile, the next request opens another."""
    authority = trustme.CA()
    context = server_context(authority.issue_cert("127.0.0.1")) if secure else None
    with (
        authority.cert_pem.tempfile() as ca_file,
        scripted((ANSWER, BUSY, ANSWER), (ANSWER,), (ANSWER, ANSWER), tls=context) as (url, seen),
    ):
        with jgr.Client(url, ca_file=ca_file) as client:
            assert client.recommend(["x"]).id == "r2"
            with pytest.raises(jgr.Overloaded):
                client.recommend(["x"])
            assert [client.recommend(["x"]).id for _ in range(4)] == ["r2"] * 4
    assert len(seen) == 6


def test_a_new_connection_that_ends_is_not_tried_again() -> None:
    with scripted((ANSWER,), None) as (url, seen), jgr.Client(url) as client:
        assert client.recommend(["x"]).id == "r2"
        with pytest.raises(jgr.Unavailable, match="Remote end closed connection without response"):
            client.recommend(["x"])
    assert len(seen) == 2


def test_an_answer_that_is_cut_off_may_be_asked_for_again() -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n40\r\n{"
    with scripted(ANSWER[:-9], chunked, ANSWER) as (url, seen), jgr.Client(url, retries=2) as client:
        assert client.recommend(["x"]).id == "r2" and len(seen) == 3
    with scripted(ANSWER[:-9], ANSWER) as (url, _), jgr.Client(url) as client:
        with pytest.raises(jgr.Unavailable, match="9 more expected"):
            client.recommend(["x"])
        assert client.recommend(["x"]).id == "r2"


def test_what_a_proxy_lost_is_sent_again_and_what_a_server_failed_at_is_not() -> None:
    """A fleet's proxy whose front died answers 500 in words of its own. A change is not sent again: it may be done."""
    lost = reply("500 Internal Server Error", b"Internal Server Error")
    failed = reply(
        "500 Internal Server Error", {"error": {"type": "internal", "message": "a fault", "request_id": "r1"}}
    )
    with scripted(lost, ANSWER) as (url, seen), jgr.Client(url, retries=1) as client:
        assert client.recommend(["x"]).id == "r2" and len(seen) == 2
    for path, answer in (("/v1/models/jgr/reload", lost), ("/v1/recommend", failed)):
        with scripted(answer) as (url, seen), jgr.Client(url, retries=1) as client:
            with pytest.raises(jgr.InternalError):
                client.fetch("POST", path, b"{}", dict)
            assert len(seen) == 1


def test_what_is_too_large_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MAX_ANSWER_BYTES", len(ANSWER))
    endless = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1000\r\n%b\r\n" % (b" " * 4096)
    for large in (
        reply("200 OK", b" " * 100_000),
        reply("500 Internal Server Error", b" " * 100_000),
        endless,
    ):
        with scripted(large, ANSWER) as (url, _), jgr.Client(url) as client:
            with pytest.raises(jgr.InternalError, match=f"the answer has more than {len(ANSWER)} bytes"):
                client.recommend(["x"])
            assert client.recommend(["x"]).id == "r2"


def test_a_damaged_answer_is_an_error_of_the_client() -> None:
    less_than_nothing = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n{}\r\n"
    with scripted(less_than_nothing, ANSWER) as (url, _), jgr.Client(url, retries=1) as client:
        assert client.recommend(["x"]).id == "r2"


def test_what_a_server_says_does_not_command_a_terminal() -> None:
    clear = "\x1b[2J\x07"
    error = {"type": "invalid_request", "message": f"{clear}bad  id", "request_id": clear, "field": clear}
    refused = reply("422 Unprocessable Content", {"error": error})
    with scripted(refused, reply(f"500 {clear}", b"")) as (url, _), jgr.Client(url) as client:
        with pytest.raises(jgr.InvalidRequest, match=r"bad  id$") as caught:
            client.recommend(["x"])
        told = caught.value
        assert all(text.isprintable() for text in (str(told), told.request_id or "", told.field or ""))
        with pytest.raises(jgr.InternalError, match="HTTP 500") as caught:
            client.recommend(["x"])
        assert str(caught.value).isprintable()


def test_a_proxy_of_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would read the key, which is for the server of the URL alone."""
    with scripted() as (proxy, told), scripted(ANSWER) as (url, seen):
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy)
        with jgr.Client(url, "secret") as client:
            assert client.recommend(["x"]).id == "r2"
        assert (len(seen), told) == (1, [])


def test_a_redirect_is_not_followed() -> None:
    """Whoever sends one could learn the key, and a POST would become a GET."""
    moved = reply("301 Moved Permanently", b"", "Location: https://elsewhere.example/v1/recommend")
    with scripted(moved) as (url, _), jgr.Client(url, "secret", retries=3) as client:
        with pytest.raises(jgr.InternalError, match="HTTP 301 Moved Permanently"):
            client.recommend(["x"])


def test_a_server_that_starts_again_is_found_again() -> None:
    with LiveServer() as first, ThreadPoolExecutor(4) as pool:
        client = jgr.Client(first.listener.url)
        list(pool.map(lambda history: client.recommend(history, top_k=3), HISTORIES))
    with pytest.raises(jgr.Unavailable):
        client.recommend(["a"], top_k=3)
    with LiveServer(f"server.port={first.port}"), client:
        assert [ids(answer) for answer in client.recommend(HISTORIES, top_k=3)] == FOUND


def test_closing_lets_requests_end_and_refuses_others(server: LiveServer, pems: dict[str, Path]) -> None:
    client = jgr.Client(server.listener.url, "secret", ca_file=pems["authority"])
    with ThreadPoolExecutor(1) as pool:
        server.executor.forget_entered()
        server.executor.hold()
        asked = pool.submit(client.recommend, ["a"], top_k=3)
        server.executor.wait_entered()
        client.close()
        server.executor.release()
        assert ids(asked.result(PATIENCE_S)) == ["c", "d", "7"]
    client.close()
    with pytest.raises(jgr.Unavailable, match="the client is closed"):
        client.recommend(["a"])


def test_a_forked_process_has_connections_of_its_own(
    server: LiveServer, pems: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes on one connection would read each other's answers."""
    with jgr.Client(server.listener.url, "secret", ca_file=pems["authority"]) as client:
        client.recommend(["a"], top_k=3)
        parents = client._servers[0].pool
        monkeypatch.setattr(remote.os, "getpid", lambda: -1)
        for _ in range(2):
            assert ids(client.recommend(["a"], top_k=3)) == ["c", "d", "7"]
        assert client._servers[0].pool is not parents
        made = client._make_pool

        def owned_meanwhile(*given: Any) -> object:
            assert client._process != remote.os.getpid(), "another thread would take the parent's connections"
            return made(*given)

        monkeypatch.setattr(remote.os, "getpid", lambda: -2)
        monkeypatch.setattr(client, "_make_pool", owned_meanwhile)
        client.recommend(["a"], top_k=3)
        assert (client._servers[0].pool.num_connections, parents.num_connections) == (1, 1)


def test_a_users_name_is_one_part_of_the_path() -> None:
    """Whatever it is made of, and as it was quoted."""
    with (
        scripted(BUSY) as (url, seen),
        jgr.Client(f"{url}/shop%2Fa") as client,
        pytest.raises(jgr.Overloaded),
    ):
        client.prefill(["x"], user_id="../a?b#c%2f ü")
    line = b"POST /shop%2Fa/v1/users/..%2Fa%3Fb%23c%252f%20%C3%BC/prefill HTTP/1.1"
    assert seen[0].splitlines()[0] == line
