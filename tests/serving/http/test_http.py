# SPDX-License-Identifier: Apache-2.0
"""The connection below the requests: pipelining, heads that are too large, bytes that are no HTTP, early signals."""

from __future__ import annotations

import difflib
import gc
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import ANY, Mock, call

import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from jgr.config import ConfigError
from jgr.fields import COMPARED_CHARS
from jgr.serving.http.bounds import MAX_HEAD_BYTES
from jgr.serving.http.connection import LINGER_BYTES, MAX_FRAMING_BYTES, OneWrite
from tests.serving.fakes import PATIENCE_S, LiveServer, make_config

ROOT = Path(__file__).resolve().parents[3]
JGR = "import sys; from jgr.cli.main import run; sys.exit(run())"
LOADS_FOR_EVER = """
import sys, threading
from jgr.cli import main
from jgr.serving.versions import sources
def load(*arguments):
    print("loading", flush=True)
    threading.Event().wait()
sources.make_engine = load
sys.exit(main.run())
"""
PIPE = subprocess.PIPE


def request(path: str, body: object, **headers: str) -> bytes:
    content = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: x", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, f"content-length: {len(content)}", "", ""]).encode() + content


def recommend(item: str) -> bytes:
    return request("/v1/recommend", {"history": [item], "top_k": 1})


def read_replies(connection: socket.socket) -> list[tuple[int, dict[str, str], object]]:
    """Every response until the end of the connection: status, headers, body."""
    data = b""
    while chunk := connection.recv(65536):
        data += chunk
    replies = []
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        length = int(headers["content-length"])
        replies.append((int(first.split()[1]), headers, json.loads(data[:length])))
        data = data[length:]
    return replies


def refusal(reply: tuple[int, dict[str, str], object]) -> tuple[int, str]:
    """Status and type of a refusal in the common shape, on a connection that ends with it."""
    status, headers, body = reply
    assert isinstance(body, dict)
    error = body["error"]
    assert error.keys() == {"type", "message", "request_id"}
    assert headers["content-type"] == "application/json"
    assert headers["connection"] == "close"
    assert headers["x-request-id"] == error["request_id"]
    return status, error["type"]


@pytest.mark.parametrize("waiting", [1, 3, 40])
def test_a_pipelining_client_that_leaves_is_cancelled_and_not_logged(
    waiting: int, caplog: pytest.LogCaptureFixture
) -> None:
    with LiveServer() as server:
        server.executor.hold()
        with server.connect() as connection:
            connection.sendall(recommend("a") * (1 + waiting))
            server.executor.wait_entered()
        if waiting < 16:
            server.wait_for("jgr_cancelled_total", 1)  # further ones are not read while the device is busy
        server.executor.release()
        assert server.call("/v1/rank", {"history": ["a"], "candidates": ["b"]}).status == 200
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_pipelined_requests_are_answered_in_order(server: LiveServer) -> None:
    with server.connect() as connection:
        connection.sendall(b"".join(recommend(item) for item in ["a", "b"] * 20))
        connection.sendall(request("/v1/recommend", {"history": ["a"], "top_k": 1}, connection="close"))
        replies = read_replies(connection)
    found = [body["items"][0]["item_id"] for _, _, body in replies if isinstance(body, dict)]
    assert found == ["c", "d"] * 20 + ["c"]


def test_head_and_body_of_a_response_leave_in_one_write() -> None:
    transport, cycle = Mock(), Mock(response_started=False)
    writes = OneWrite(transport, cycle)
    writes.write(b"100 Continue")
    cycle.response_started = True
    body = b"first" * 1000
    for part in (b"head;", body, b"second"):
        writes.write(part)
    writes.close()
    assert transport.method_calls == [
        call.write(b"100 Continue"),
        call.writelines([b"head;", ANY]),
        call.write(b"second"),
        call.close(),
    ]
    # A page that is served from memory stays one object, however many clients are slow to read it.
    assert transport.writelines.call_args.args[0][1] is body


def test_what_a_request_leaves_needs_no_garbage_collector(server: LiveServer) -> None:
    def left() -> int:
        return sum(type(one) is RequestResponseCycle for one in gc.get_objects())

    with server.connect() as connection:
        connection.settimeout(PATIENCE_S)
        gc.disable()
        gc.freeze()  # what other tests left is not looked at
        try:
            before = left()
            for _ in range(20):
                connection.sendall(recommend("a"))
                assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
            after = left()
        finally:
            gc.unfreeze()
            gc.enable()
    assert after - before <= 2  # the last ones may not have ended


def test_a_head_without_a_body_leaves_and_the_connection_goes_on(server: LiveServer) -> None:
    with server.connect() as connection:
        head = b"%b /health/live HTTP/1.1\r\nhost: x\r\n%b\r\n"
        connection.sendall(head % (b"HEAD", b""))
        connection.settimeout(PATIENCE_S)
        assert connection.recv(65536).partition(b"\r\n\r\n")[::2] == (ANY, b"")
        connection.sendall(head % (b"GET", b"connection: close\r\n"))
        ((status, _, _),) = read_replies(connection)
    assert status == 200


def test_a_client_that_waits_to_be_told_to_continue_is_told(server: LiveServer) -> None:
    asked = request(
        "/v1/recommend", {"history": ["a"], "top_k": 1}, expect="100-continue", connection="close"
    )
    head, _, body = asked.partition(b"\r\n\r\n")
    with server.connect() as connection:
        connection.sendall(head + b"\r\n\r\n")
        connection.settimeout(PATIENCE_S)
        assert connection.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        ((status, _, answer),) = read_replies(connection)
    assert status == 200 and isinstance(answer, dict) and answer["items"][0]["item_id"] == "c"


def test_bytes_that_are_no_http_get_a_refusal_in_the_common_shape(server: LiveServer) -> None:
    chunked = b"POST /v1/rank HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    for data in (b"\x16\x03\x01 hello\r\n\r\n", b"GET / HTTP/1.1\r\nno colon\r\n\r\n", chunked + b"zz\r\n"):
        with server.connect() as connection:
            connection.sendall(data)
            (reply,) = read_replies(connection)
        assert refusal(reply) == (400, "invalid_http")


def test_what_came_before_the_bytes_that_are_no_http_is_answered() -> None:
    with LiveServer() as server:
        server.executor.hold()
        with server.connect() as connection:
            connection.sendall(recommend("a"))
            server.executor.wait_entered()
            connection.sendall(recommend("b") + b"\x16\x03\x01\r\n\r\n")
            server.call("/health/live")
            connection.sendall(b"more of it\r\n\r\n")
            server.call("/health/live")
            server.executor.release()
            replies = read_replies(connection)
    assert [status for status, _, _ in replies] == [200, 200]
    assert replies[-1][1]["connection"] == "close"


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health/live HTTP/1.1\r\nx-long: " + b"x" * 70_000,
        b"GET /health/live HTTP/1.1" + b"\r\nx-many: 1234567890" * 4000,
        b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\nhost: x",
    ],
    ids=["a long header", "many headers", "a long path"],
)
@pytest.mark.parametrize("ended", [True, False])
def test_a_head_that_is_too_large_is_refused(server: LiveServer, head: bytes, ended: bool) -> None:
    with server.connect() as connection:
        connection.sendall(head + (b"\r\n\r\n" if ended else b""))
        (reply,) = read_replies(connection)
    assert refusal(reply) == (431, "head_too_large")


def test_a_head_within_the_limit_is_read(server: LiveServer) -> None:
    assert server.call("/health/live", x_long="x" * (MAX_HEAD_BYTES - 1000)).status == 200


CHUNKED = b"POST /v1/recommend HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "endless",
    [b"x-trailer: " + b"x" * 1000 + b"\r\n", b"x" * 1000, b"1;" + b"x" * 1000 + b"\r\nx\r\n"],
    ids=["trailers", "one trailer", "extensions of chunks"],
)
def test_what_frames_a_body_is_bounded(server: LiveServer, endless: bytes) -> None:
    last = b"" if endless.startswith(b"1;") else b"0\r\n"
    with server.connect() as connection:
        connection.sendall(CHUNKED + last + endless * (MAX_FRAMING_BYTES // 990 + 20))
        (reply,) = read_replies(connection)
    assert refusal(reply) == (400, "invalid_http")


def test_who_still_sends_reads_that_it_was_refused(server: LiveServer) -> None:
    with server.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        connection.sendall(b"no HTTP at all\r\n\r\n")
        for _ in range(LINGER_BYTES // 10_000):
            connection.sendall(b"x" * 10_000)
        (reply,) = read_replies(connection)
    assert refusal(reply) == (400, "invalid_http")


def test_who_was_refused_is_not_read_for_ever(server: LiveServer) -> None:
    with server.connect() as connection:
        connection.sendall(b"no HTTP at all\r\n\r\n")
        with pytest.raises(OSError):
            for _ in range(1000):
                connection.sendall(b"x" * 10_000)


def test_who_was_refused_and_stays_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jgr.serving.http.connection.LINGER_S", 0.05)
    with LiveServer() as server, server.connect() as connection:
        connection.sendall(b"no HTTP at all\r\n\r\n")
        (reply,) = read_replies(connection)
        assert refusal(reply) == (400, "invalid_http")
        with pytest.raises(OSError):
            while True:
                connection.sendall(b"x")


def test_trailers_are_left_out(server: LiveServer) -> None:
    body = b'{"history": ["a"], "top_k": 1}'
    with server.connect() as connection:
        connection.sendall(CHUNKED + b"%x\r\n%b\r\n0\r\nx-request-id: trailer\r\n\r\n" % (len(body), body))
        connection.sendall(b"GET /health/live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        replies = read_replies(connection)
    assert [status for status, *_ in replies] == [200, 200]
    assert replies[0][1]["x-request-id"] != "trailer"


@pytest.mark.parametrize("endless", [b"x-trailer: x\r\n" * 90_000, b"100000\r\n" + b"x" * 2**20 + b"\r\n"])
def test_what_follows_a_refusal_is_not_read_for_ever(endless: bytes) -> None:
    with LiveServer("server.api_key=k") as server, server.connect() as connection:
        connection.sendall(CHUNKED + (b"0\r\n" if endless.startswith(b"x") else b""))
        assert connection.recv(12) == b"HTTP/1.1 401"
        with pytest.raises(OSError):
            for _ in range(200):
                connection.sendall(endless)


def test_a_clients_name_is_compared_no_further_than_it_is_quoted(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = Mock(wraps=difflib.get_close_matches)
    monkeypatch.setattr(difflib, "get_close_matches", compared)
    reply = server.call("/v1/recommend", {"history": ["a"], "top_k": 1, "topk" + "x" * 100_000: 1})
    assert reply.status == 422 and "...'; there are history, " in reply.error["message"]
    assert [len(call.args[0]) for call in compared.call_args_list] == [COMPARED_CHARS]


@pytest.mark.parametrize(
    ("settings", "warned"),
    [(("server.host=0.0.0.0",), True), (("server.host=0.0.0.0", "server.api_key=k"), False), ((), False)],
)
def test_a_server_that_is_open_to_all_says_so(
    settings: tuple[str, ...], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with LiveServer(*settings):
        pass
    assert ("other machines can reach 0.0.0.0" in caplog.text) is warned


def test_waiting_for_company_is_bounded() -> None:
    make_config("batching.max_wait_ms=60000")
    with pytest.raises(ConfigError, match=r"batching.max_wait_ms must be at most 60000"):
        make_config("batching.max_wait_ms=60001")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_model_is_loading_ends_the_process_with_0(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LOADS_FOR_EVER, "serve", "--null"],
        cwd=ROOT,
        text=True,
        stdout=PIPE,
        stderr=PIPE,
    ) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == "loading\n"
            child.send_signal(number)
            assert child.wait(PATIENCE_S) == 0
            assert child.stderr is not None
            assert child.stderr.read() == "jgr: stopped before the model was loaded\n"
        finally:
            child.kill()


@pytest.mark.parametrize(
    ("name", "folder"),
    [("serving.json", "{}"), ("config.json", "{}"), ("tokenizer.json", "--set=model.path={}"),
     ("model.safetensors", "--set=model.path={}")],
)  # fmt: skip
def test_a_pipe_in_place_of_a_models_file_is_refused_in_a_line(
    tmp_path: Path, name: str, folder: str
) -> None:
    """To open one waits for somebody who writes to it, which may be never."""
    os.mkfifo(tmp_path / name)
    command = [sys.executable, "-c", JGR, "serve", folder.format(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"jgr: {tmp_path / name}: cannot be read: it is not a regular file\n"


def test_a_zero_byte_in_a_models_path_is_refused_in_a_line(tmp_path: Path) -> None:
    settings = tmp_path / "zero.py"
    settings.write_text(
        "from jgr.config import Config, ModelConfig\n"
        "def get_config(): return Config(model=ModelConfig(path='a\\0b'))\n"
    )
    command = [sys.executable, "-c", JGR, "serve", f"--config={settings}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "jgr: model.path: 'a\\x00b' has a zero byte, which no folder's name has\n"
