# SPDX-License-Identifier: Apache-2.0
"""`jgr top` over a live server and real HTTP."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import jgr
from jgr.cli import top
from jgr.config import UserError
from jgr.traffic import view_file
from jgr.traffic.view import COLUMNS, View
from tests.serving.fakes import PATIENCE_S, LiveServer
from tests.traffic.test_view import two

RUN = "import sys; from jgr.cli.main import run; sys.exit(run())"
KEY = "k" * 16
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with LiveServer(f"server.api_key={KEY}") as server:
        yield server


def command(*argv: str) -> list[str]:
    return [sys.executable, "-c", RUN, "top", *argv]


def run_top(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*argv),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | env,
        timeout=PATIENCE_S,
        check=False,
    )


def test_a_view_counts_what_was_asked_between_two_looks(server: LiveServer) -> None:
    now_s = iter([100.0, 104.0, 106.0])

    def ask(seconds: float) -> None:
        for _ in range(8):
            body = {"history": ["a"], "candidates": ["c"]}
            assert server.call("/v1/rank", body, authorization=f"Bearer {KEY}").status == 200

    with jgr.Client(f"http://127.0.0.1:{server.port}", KEY) as client:
        found = top.views(client, "here", 2.0, ask, lambda: next(now_s))
        first, second = next(found), next(found)
    assert isinstance(first, View) and isinstance(second, View)
    assert (first.seconds, first.total.goodput_per_s) == (4.0, 2.0)
    assert (second.seconds, second.total.goodput_per_s, second.total.requests_per_s) == (2.0, 4.0, 4.0)
    (row,) = second.replicas
    version = server.model(authorization=f"Bearer {KEY}")["version"]
    assert (row.replica, row.state, row.versions) == ("here", "ready", (version,))
    assert row.p99_ms is not None and row.memory_bytes > 1 << 20


def test_once_prints_a_table_and_json_an_object_and_both_are_kept(server: LiveServer, tmp_path: Path) -> None:
    url, path = f"http://127.0.0.1:{server.port}", tmp_path / "run.jsonl"
    done = run_top(url, "--once", "--interval=0.05", f"--api_key={KEY}")
    assert (done.returncode, done.stderr) == (0, "")
    names, row = done.stdout.splitlines()
    assert names.split("  ")[0].strip() == COLUMNS[0]
    assert row.split()[:3] == [f"127.0.0.1:{server.port}", "-", "ready"]
    done = run_top(url, "--once", "--json", "--interval=0.05", f"--record={path}", JGR_SERVER__API_KEY=KEY)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["replicas"][0]["state"] == "ready"
    assert view_file.line(view_file.read(path)[0]).decode() == done.stdout
    again = run_top(url, "--once", f"--record={path}", JGR_SERVER__API_KEY=KEY)
    assert (again.returncode, "--record" in again.stderr) == (2, True)


def test_a_terminal_is_drawn_over_and_is_as_before_after_ctrl_c(server: LiveServer) -> None:
    ours, theirs = pty.openpty()
    arguments = command(f"http://127.0.0.1:{server.port}", "--interval=0.05", f"--api_key={KEY}")
    with subprocess.Popen(arguments, stdout=theirs, stderr=subprocess.PIPE, cwd=ROOT) as process:
        os.close(theirs)
        shown = b""
        while shown.count(top.HOME.encode()) < 3:  # it is drawn again and again
            shown += os.read(ours, 1 << 16)
        process.send_signal(signal.SIGINT)
        try:
            while part := os.read(ours, 1 << 16):
                shown += part
        except OSError:  # the other end is closed
            pass
        assert process.stderr is not None
        assert (process.wait(PATIENCE_S), process.stderr.read()) == (0, b"")
    os.close(ours)
    text = shown.decode()
    assert text.startswith(top.OWN_SCREEN + top.CURSOR_OFF)
    assert text.endswith(top.CURSOR_ON + top.USUAL_SCREEN)
    assert "Ctrl-C ends" in text


def test_what_does_not_fit_the_terminal_is_left_out() -> None:
    text = top.page([f"line {number} {'x' * 40}" for number in range(9)], 10, 5)
    plain = text.replace(top.HOME, "").replace(top.REST_OF_LINE, "").replace(top.REST, "")
    assert plain.split("\r\n") == ["line 0 xxx", "line 1 xxx", "line 2 xxx", "... and 6 ", ""]


def test_where_nothing_answers_it_says_so(server: LiveServer, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    done = run_top(f"http://127.0.0.1:{port}", "--once")
    assert (done.returncode, done.stderr) == (
        2,
        f"jgr: nobody answers at http://127.0.0.1:{port}: Connection refused; does jgr serve run there?\n",
    )
    url = f"http://127.0.0.1:{server.port}"
    record = tmp_path / "run.jsonl"
    done = run_top(url, "--once", "--api_key=wrong", f"--record={record}")
    assert not record.exists()
    assert done.returncode == 2 and done.stderr.startswith(
        f"jgr: {url} asks for a client's key; see --api_key; it "
    )
    with jgr.Client(url, "wrong") as client:
        with pytest.raises(jgr.Unauthorized, match="API key"):
            next(top.views(client, "here", 0.0))


def test_a_server_that_goes_away_is_told_of_and_looked_at_again() -> None:
    with LiveServer() as server, jgr.Client(f"http://127.0.0.1:{server.port}") as client:
        found = top.views(client, "here", 0.0, lambda seconds: None)
        assert isinstance(next(found), View)
        server.stop()
        server.join()
        assert "127.0.0.1" in str(next(found))
        assert "127.0.0.1" in str(next(found))


class TakesAPart(io.FileIO):
    """A file whose writes take at most 100 bytes, as one may on a disk that is nearly full."""

    def write(self, data: memoryview) -> int:  # type: ignore[override]
        return super().write(data[:100])


def test_a_view_that_is_written_in_parts_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.jsonl"
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", lambda path, mode, buffering: TakesAPart(path, mode))
        with top._kept(str(path)) as keep:
            keep(two())
            keep(two())
    assert path.read_bytes() == 2 * view_file.line(two())


def test_a_disk_that_is_full_is_told_of_with_the_flag() -> None:
    with pytest.raises(UserError, match=r"^--record: /dev/full: No space left on device$"):
        with top._kept("/dev/full") as keep:
            keep(two())
