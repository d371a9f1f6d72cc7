# SPDX-License-Identifier: Apache-2.0
"""A server's process: the ports that it takes, the signals that end it, and what it exits with."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path

import pytest

from jgr.config import ServerConfig, UserError
from jgr.serving.http.ports import bind, hold, hold_ports, listen
from tests.serving.fakes import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]


def test_an_address_in_use_is_the_users_mistake() -> None:
    with bind("127.0.0.1", 0) as taken, pytest.raises(UserError, match=r"server.port.*in use"):
        bind("127.0.0.1", taken.getsockname()[1])


def test_a_port_in_use_is_told_before_anything_of_a_model_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        for field, settings in (
            ("server.port", [f"--port={port}"]),
            ("server.grpc_port", ["--port=0", f"--set=server.grpc_port={port}"]),
        ):
            done = subprocess.run(
                [sys.executable, "-c", JGR, "serve", str(tmp_path), *settings],
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
                check=False,
            )
            words = f"jgr: server.host, {field}: cannot listen on 127.0.0.1:{port}: Address already in use\n"
            assert (done.returncode, done.stdout, done.stderr) == (2, "", words)


def test_a_port_that_is_held_is_nobody_elses_and_answers_nobody() -> None:
    with hold("127.0.0.1", 0) as held:
        port = held.getsockname()[1]
        with pytest.raises(UserError, match=r"server.port.*in use"):
            hold("127.0.0.1", port)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        listen(held)
        with socket.create_connection(("127.0.0.1", port)) as client:
            there, _ = held.accept()
            there.close()  # the server's side closes first, so the port has a connection that has ended for a minute
            assert client.recv(1) == b""
    with hold("127.0.0.1", port) as again, pytest.raises(UserError, match=r"server.port.*in use"):
        assert again.getsockname()[1] == port
        hold("127.0.0.1", port)


def test_a_port_is_tried_without_a_moment_in_which_it_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "listen", lambda *of: pytest.fail("it listens"))
    hold_ports(ServerConfig(port=0, grpc_port=0)).close()


JGR = "import sys; from jgr.cli.main import run; sys.exit(run())"


@contextmanager
def process(*flags: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """`jgr serve --null` in a process of its own, and its port."""
    command = [sys.executable, "-c", JGR, "serve", "--null", "--port=0", *flags]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, text=True, stdout=pipe, stderr=pipe) as child:
        try:
            assert child.stdout is not None
            yield child, int(child.stdout.readline().rpartition(":")[2])
        finally:
            child.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_the_process_and_it_exits_with_0(number: signal.Signals) -> None:
    with process("--api_key=k") as (child, port):
        idle = HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        idle.request("GET", "/v1/items/17", headers={"authorization": "Bearer k"})
        assert b'"title":"item 17"' in idle.getresponse().read()
        child.send_signal(number)
        assert child.wait(PATIENCE_S) == 0
        assert idle.sock is not None and idle.sock.recv(1) == b"", "closed, not waited for"
        idle.close()
        assert child.stderr is not None
        said = [line.split(": ", 1)[1] for line in child.stderr.read().splitlines()]
        assert said[0] == f"listening on http://127.0.0.1:{port}; jgr is being compiled"
        assert said[1].startswith("ready after ") and said[3].startswith("drained after ")
        name = signal.Signals(number).name
        assert said[2] == f"{name}: no more requests are taken, what was accepted is finished"
        assert said[4:] == ["ended with code 0"]


def test_sighup_at_the_end_of_a_stop_changes_nothing() -> None:
    """A loop that closes takes its handlers with it; the signal's own action ends the process."""
    command = [sys.executable, "-c", JGR, "serve", "--null", "--port=0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        try:
            assert child.stdout is not None and child.stdout.readline().startswith(b"http://")
            child.send_signal(signal.SIGTERM)
            while child.poll() is None:
                child.send_signal(signal.SIGHUP)
                with suppress(subprocess.TimeoutExpired):
                    child.wait(0.02)
            assert child.returncode == 0
        finally:
            child.kill()


def test_a_second_signal_ends_the_process_at_once() -> None:
    with process() as (child, port):
        with (
            socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as idle,
            socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as stuck,
        ):
            stuck.sendall(b"POST /v1/rank HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{")
            child.send_signal(signal.SIGTERM)
            assert idle.recv(1) == b"", "the end has begun; the stuck request holds it up"
            child.send_signal(signal.SIGTERM)
            assert child.wait(PATIENCE_S) == -signal.SIGTERM


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--set=batching.max_tokens=10", "batching.max_tokens=10 leaves no profile"),
        ("--set=beam.width=64", "beam.width is 64, but the largest of profiles.widths is 32"),
        ("--port=70000", "server.port must be at most 65535"),
        ("--set=server.keys=/no/such", "server.keys: /no/such: cannot be read: No such file"),
    ],
)
def test_a_configuration_that_cannot_be_served_exits_with_2(flag: str, words: str) -> None:
    command = [sys.executable, "-c", JGR, "serve", "--null", flag]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1, "one line, no traceback"
