# SPDX-License-Identifier: Apache-2.0
"""jgr.Client against the live server over a fake executor, and against servers that misbehave."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest

import jgr
from jgr.client import remote
from jgr.client.errors import failure
from jgr.client.recommender import PER_HISTORY, RankFields, RecommendFields
from jgr.serving.api import RankRequest, RecommendRequest
from tests.client.scripted import ANSWER, BUSY, reply, scripted
from tests.serving.fakes import PATIENCE_S, LiveServer

ROOT = Path(jgr.__file__).resolve().parents[1]


def ids(answer: jgr.Answer) -> list[str]:
    return [item.item_id for item in answer.items]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with LiveServer("server.api_key=secret") as server:
        yield server


@pytest.fixture
def client(server: LiveServer) -> Iterator[jgr.Client]:
    with jgr.Client(server.listener.url, key="secret") as client:
        yield client


def test_it_answers_as_the_engine_does(client: jgr.Client) -> None:
    answer = client.recommend(["a"], top_k=3, include_metadata=True)
    assert ids(answer) == ["c", "d", "7"]  # as tests/serving/fakes.py computes them
    assert isinstance(answer, jgr.Answer) and answer.items[0].metadata == {"title": "title of c"}
    histories = [["a"], ["a", "c"], [7]] * 10
    assert [ids(a) for a in client.recommend(histories, top_k=3)] == [
        ids(client.recommend(h, top_k=3)) for h in histories
    ]
    assert [len(a.items) for a in client.rank([["a"], ["b"]], [["b"], ["c", "d"]])] == [1, 2]
    assert client.info.max_beam_width == 5

    async def main() -> tuple[jgr.Answer, list[jgr.Answer]]:
        return await client.arecommend(["a"], top_k=3), await client.arank([["a"], ["b"]], ["c"])

    one, several = asyncio.run(main())
    assert ids(one) == ["c", "d", "7"] and [ids(a) for a in several] == [["c"], ["c"]]


def test_a_refusal_has_its_type_and_field(client: jgr.Client, server: LiveServer) -> None:
    with pytest.raises(jgr.InvalidRequest, match="the nearest is 'top_k'") as caught:
        client.recommend(["a"], top_k=3, top=3)  # type: ignore[call-overload]
    assert (caught.value.field, caught.value.index, len(caught.value.request_id or "")) == ("top", None, 32)
    with pytest.raises(jgr.InvalidRequest, match=r"^histories\[2\]: no item of the history") as several:
        client.recommend([["a"], ["b"], ["none"]], top_k=3)
    assert (several.value.field, several.value.index) == ("history", 2)
    with pytest.raises(jgr.NotFound, match="there is no model 'other'"):
        client.recommend(["a"], top_k=3, model="other")
    for key in (None, "wrong"):
        with jgr.Client(server.listener.url, key) as stranger:
            with pytest.raises(jgr.Unauthorized):
                stranger.recommend(["a"], top_k=3)
    with jgr.Client(server.listener.url, "secret", model="other") as misled:
        with pytest.raises(jgr.NotFound):
            misled.recommend(["a"], top_k=3)
        with pytest.raises(jgr.NotFound):  # null in a request names no model, so that the client's counts
            misled.recommend(["a"], top_k=3, model=None)
        with pytest.raises(jgr.NotFound, match="there is no model 'other'; there are jgr"):
            _ = misled.info
    with jgr.Client(server.listener.url, "secret", model="jgr") as named:
        assert ids(named.recommend(["a"], top_k=3)) == ["c", "d", "7"]


def test_overload_and_deadlines() -> None:
    with LiveServer("batching.max_queue=1", "batching.order=edf") as server, ThreadPoolExecutor(2) as pool:
        with jgr.Client(server.listener.url) as client:
            server.executor.hold()
            running = pool.submit(client.recommend, ["a"], top_k=3)
            server.executor.wait_entered()
            with pytest.raises(jgr.DeadlineExceeded):
                client.recommend(["a"], top_k=3, deadline_ms=1)
            waiting = pool.submit(client.recommend, ["a"], top_k=3)
            server.wait_for("jgr_queue_depth", 1)
            with pytest.raises(jgr.Overloaded) as caught:
                client.recommend(["a"], top_k=3)
            assert caught.value.retry_after == 1.0
            server.executor.release()
            assert ids(running.result(PATIENCE_S)) == ids(waiting.result(PATIENCE_S))


def test_nothing_is_asked_twice_unless_it_is_wanted() -> None:
    with scripted(BUSY) as (url, seen), jgr.Client(url) as client:
        with pytest.raises(jgr.Overloaded, match="busy") as caught:
            client.recommend(["x"])
        assert (caught.value.retry_after, caught.value.request_id, len(seen)) == (0.0, "r1", 1)
    with scripted(None) as (url, seen), jgr.Client(url) as client:
        with pytest.raises(jgr.Unavailable, match=url):
            client.recommend(["x"])
    with scripted(BUSY, None, ANSWER) as (url, seen), jgr.Client(url, retries=2) as client:
        assert [(item.item_id, item.score) for item in client.recommend(["x"]).items] == [("x", -1.5)]
        assert len(seen) == 3
    with scripted(BUSY, BUSY) as (url, seen), jgr.Client(url, retries=1) as client:
        with pytest.raises(jgr.Overloaded):
            client.recommend(["x"])
        assert len(seen) == 2


def test_a_retry_waits_as_long_as_the_server_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(remote, "time", SimpleNamespace(sleep=waits.append))
    patient = [
        BUSY.replace(b"Retry-After: 0", b"Retry-After: %b" % wait) for wait in (b"7", b"999", b"Sun, 1 Jan")
    ]
    with scripted(*patient, None, ANSWER) as (url, _), jgr.Client(url, retries=4) as client:
        assert client.recommend(["x"]).id == "r2"
    assert waits == [7.0, remote.MAX_WAIT_S, 4 * remote.FIRST_WAIT_S, 8 * remote.FIRST_WAIT_S]


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [
        (reply("200 OK", b"<html>"), "InternalError", "is not the answer of a jgr server"),
        (reply("200 OK", {"items": 3}), "InternalError", "is not the answer of a jgr server"),
        (reply("200 OK", b"[" * 100_000), "InternalError", "is not the answer of a jgr server"),
        (reply("503 Service Unavailable", b"<html>"), "Unavailable", "HTTP 503 Service Unavailable"),
        (reply("502 Bad Gateway", b"\xff"), "InternalError", "HTTP 502 Bad Gateway"),
        (reply("404 Not Found", {"detail": "no"}), "NotFound", "HTTP 404"),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "Unavailable", "SSH-2.0"),
    ],
)
def test_another_kind_of_server_is_named(content: bytes, error: str, words: str) -> None:
    with scripted(content) as (url, _), jgr.Client(url) as client:
        with pytest.raises(getattr(jgr, error), match=words) as caught:
            client.recommend(["x"])
        assert type(caught.value) is getattr(jgr, error) and caught.value.sent
        assert caught.value.by_proxy == ("502" in words)


def test_nobody_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with jgr.Client(url, timeout_s=0.05) as client:
            with pytest.raises(jgr.Unavailable, match=r"no answer within 0\.05 s"):
                client.recommend(["a"], top_k=3)
    with jgr.Client(url) as client:
        told = f"nobody answers at {url}: Connection refused; does jgr serve run there\\?$"
        with pytest.raises(jgr.Unavailable, match=told) as caught:
            client.recommend([["a"], ["b"]], top_k=3)
        assert type(caught.value) is jgr.Unavailable and not caught.value.sent, "no private class is shown"
    with pytest.raises(jgr.Unavailable, match="the client is closed"):
        client.recommend(["a"], top_k=3)


@pytest.mark.parametrize(
    "url",
    ["", "127.0.0.1:8000", "ftp://x", "http://", "http://x:port", "http://u:p@x", "http://x?y", "http://x?", "http://x#y",
     "http://x:0", "http://@x", "http://x y", "http://x/\r\nY: z", "http://x\0y", "http://b\xfccher", "http://x:70000",
     "http://[::1", "http://.x", None, b"http://x", 8000],
)  # fmt: skip
def test_addresses_that_are_none(url: Any) -> None:
    with pytest.raises(jgr.Error, match="URL"):
        jgr.Client(url)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"retries": -1}, "retries must be an integer of at least 0, not -1"),
        ({"retries": 1.5}, "retries must be an integer"),
        ({"retries": None}, "retries must be an integer"),
        ({"connections": 0}, "connections must be an integer of at least 1, not 0"),
        ({"connections": True}, "connections must be an integer"),
        ({"timeout_s": 0}, "timeout_s must be above 0"),
        ({"timeout_s": -1.0}, "timeout_s must be above 0"),
        ({"timeout_s": float("nan")}, "timeout_s must be above 0"),
        ({"timeout_s": float("inf")}, "timeout_s must be above 0"),
        ({"timeout_s": "5"}, "timeout_s must be above 0"),
        ({"timeout_s": None}, "timeout_s must be above 0"),
        ({"key": 7}, "key must be text or None, not int"),
        ({"key": b"secret"}, "key must be text or None, not bytes"),
        ({"model": 7}, "model must be text or None, not int"),
    ],
)
def test_options_that_cannot_be_used(options: dict[str, Any], words: str) -> None:
    with pytest.raises(jgr.Error, match=words):
        jgr.Client("http://127.0.0.1:8000", **options)


def test_waits_are_bounded_however_often_a_request_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(remote.time, "sleep", waits.append)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with jgr.Client(url, retries=2000) as client, pytest.raises(jgr.Unavailable, match="refused"):
        client.recommend(["a"])
    assert (
        len(waits) == 2000 and waits[:3] == [0.1, 0.2, 0.4] and max(waits) == waits[-1] == remote.MAX_WAIT_S
    )


def test_a_quota_is_a_reason_to_wait() -> None:
    assert isinstance(failure("quota_exceeded", "later", retry_after=3), jgr.Overloaded)


def test_a_key_is_one_line() -> None:
    with pytest.raises(jgr.Error, match="the key must be printable ASCII"):
        jgr.Client("http://127.0.0.1:8000", "a\r\nX-Other: b")


def test_the_typed_fields_are_those_of_the_requests() -> None:
    given = {"history", "candidates", "top_k"}
    for typed, request in ((RecommendFields, RecommendRequest), (RankFields, RankRequest)):
        assert set(get_type_hints(typed)) == set(request.__struct_fields__) - given
    assert PER_HISTORY <= {*RecommendRequest.__struct_fields__, *RankRequest.__struct_fields__}


def test_what_is_public_is_typed_and_loaded_late() -> None:
    stub = (ROOT / "jgr" / "__init__.pyi").read_text()
    typed = {line.split()[-1] for line in stub.splitlines() if line.startswith("from ")}
    assert typed == set(jgr._PUBLIC) <= set(dir(jgr))
    assert all(getattr(jgr, name) for name in typed)
    errors = [
        getattr(jgr, name) for name in typed if name[0].isupper() and isinstance(getattr(jgr, name), type)
    ]
    errors = [one for one in errors if issubclass(one, Exception)]
    assert len(errors) == 9 and all(issubclass(one, jgr.Error) for one in errors)
    with pytest.raises(AttributeError, match="has no attribute 'Enjine'"):
        _ = jgr.Enjine
    code = (
        "import sys, jgr; assert not {'jax', 'numpy', 'msgspec'} & sys.modules.keys(); jgr.Client; "
        "assert not {'jax', 'starlette', 'uvicorn'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


FIRST = """
import sys, threading
import msgspec
from jgr.client.remote import decoder
sys.setswitchinterval(1e-6)
for n in range(100):
    inner = msgspec.defstruct("Inner", [("a", list[int]), ("b", str)])
    outer = msgspec.defstruct("Outer", [("inner", list[inner]), ("c", float | None)])
    at_once = threading.Barrier(8)
    def decode():
        at_once.wait()
        assert decoder(outer).decode(b'{"inner": [{"a": [1], "b": "x"}], "c": 2.5}').c == 2.5
    threads = [threading.Thread(target=decode) for _ in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
print("whole")
"""


def test_the_first_answers_of_several_threads_are_read_without_a_crash() -> None:
    done = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr
