# SPDX-License-Identifier: Apache-2.0
"""`jgr bench serve` as a user meets it, against a live server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jgr.catalog.catalog import save_catalog
from tests.serving.fakes import CATALOG, LiveServer

RUN = "import sys; from jgr.cli.main import run; sys.exit(run())"


def _bench(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", RUN, "bench", *argv], capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with LiveServer("server.api_key=k3y") as server:
        yield server


@pytest.fixture
def catalog(tmp_path: Path) -> str:
    save_catalog(CATALOG, tmp_path / "catalog.jsonl")
    return f"catalog.path={tmp_path / 'catalog.jsonl'}"


def test_alone_it_lists_its_benchmarks() -> None:
    done = _bench()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("jgr bench serve ")


@pytest.mark.parametrize(("kind", "more"), [("recommend", []), ("rank", ["--candidates=3"])])
def test_a_load_at_a_rate(server: LiveServer, catalog: str, kind: str, more: list[str]) -> None:
    shape = ["--rate=40", "--duration=0.5", "--arrivals=constant", f"--kind={kind}", *more]
    limits = ["--history_length=2", "--top_k=2", "--slo_ms=60000", "--api_key=k3y"]
    done = _bench("serve", f"--url={server.listener.url}", "--set", catalog, *shape, *limits)
    assert (done.returncode, done.stderr) == (0, "")
    *lines, last = done.stdout.splitlines()
    lines = [line for line in lines if not line.startswith("warning")]  # of a client that had no core
    report = json.loads(last)
    assert (report["sent"], report["answered"], report["failed"]) == (20, {"200": 20}, {})
    assert (report["in_time"], report["slo_ms"]) == (20, 60000.0)
    assert report["load"]["kind"] == kind
    assert [line.split()[0] for line in lines] == ["sent", "goodput", "latency", "lateness"]
    assert "20 requests" in lines[0]
    assert "20 answered 200" in lines[0]
    assert "100.0% of the requests" in lines[1]


def test_a_trace_and_the_configured_address(server: LiveServer, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    paths = ["/v1/recommend", "/v1/recommend", "/v1/nowhere"]
    bodies: list[object] = [{"history": ["a"], "top_k": 1}, {"history": []}, {}]
    lines = [
        {"at_ms": 5 * i, "path": path, "body": body}
        for i, (path, body) in enumerate(zip(paths, bodies, strict=True))
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = _bench("serve", f"--trace={trace}", f"--set=server.port={server.port}", "--set=server.api_key=k3y")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["answered"] == {"200": 1, "404": 1, "422": 1}
    assert report["load"] == {"trace": str(trace), "duration_s": None}
    assert "k3y" not in done.stdout


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["srv"], ["no benchmark 'srv'", "there are: serve"]),
        (["serve", "now"], ["unexpected argument 'now'"]),
        (["serve", "--url=http://10.0.0.1:1"], ["10.0.0.1 is not this machine", "--allow_remote"]),
        (["serve", "--url=https://localhost"], ["http://127.0.0.1:8000"]),
        (["serve"], ["--set catalog.path=", "--trace"]),
        (["serve", "--rate=1000", "--duration=200"], ["200000 requests", "--max_requests is 100000"]),
        (["serve", "--rate=nan"], ["--rate must be a finite number"]),
        (["serve", "--slo_ms=inf"], ["--slo_ms must be a finite number"]),
        (["serve", "--rate=0"], ["rate"]),
        (["serve", "--trace=/nowhere.jsonl"], ["/nowhere.jsonl: cannot be read"]),
        (["serve", "--trace=/dev/null"], ["nothing to send"]),
    ],
)
def test_mistakes_are_one_line(argv: list[str], words: list[str]) -> None:
    done = _bench(*argv)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    for word in words:
        assert word in done.stderr
