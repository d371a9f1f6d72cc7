# SPDX-License-Identifier: Apache-2.0
"""README's examples and the commands of docs/, run as they are written, over the folder that the demo leaves.

What is run is tagged `sh` or `python`; other blocks need data or minutes. Four things are changed: models are of one
narrow layer, and the demo's is trained for one step; a server listens on a free port in place of 8000; commands that
would take long get a flag that ends them sooner; and all compile for single requests alone. A command that stands in
several files is run once, and a server goes on for the pages that start the same one. The examples are run as the pages
say; the commands that a page takes from one of them are those that it runs.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jgr.config import load_config, override
from jgr.config.environment import variable
from jgr.data.datasets import load_dataset
from jgr.training.generator import train_generator

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OWN_DATA = ROOT / "docs" / "quickstart" / "own_data.md"
PATIENCE_S = 120.0
ADDRESS = "127.0.0.1:8000"
SMALL = {
    "train.batch": 8, "train.hidden": 16, "train.layers": 1, "train.heads": 2, "train.kv_heads": 2, "train.head_dim": 8,
    "train.mlp": 32, "profiles.batch": 1,
}  # fmt: skip
"""What makes a model of a moment's training, served by few programs."""
SHORTER = {
    "jgr serve": "--port=0",
    "jgr evaluate": "--limit=8 --resamples=10",
    "jgr evaluate(?=.* --sweep=)": "--requests=4",
    "jgr bench serve": "--duration=0.5",
    "jgr profile": "--requests=4",
    "python examples/own_data.py": "--users=60 --steps=2",
    "python examples/serve_and_call.py": "--set=profiles.batch=1",
}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[str, str]]:
    return [(tag, text) for tag, text in BLOCK.findall(page.read_text()) if tag in ("sh", "python")]


class Terminal:
    """A project folder after `make demo`, a shell in it, and the servers that were started there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {
            **os.environ,
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HOME": str(folder),
            **{variable(key): str(value) for key, value in SMALL.items()},
        }
        self._servers: dict[
            str, tuple[subprocess.Popen[str], str]
        ] = {}  # with their addresses, by their commands
        self._address = ADDRESS  # of the server that was asked for last
        (folder / "bin").mkdir()
        start = (
            f'{shlex.quote(sys.executable)} -c "import sys; from jgr.cli.main import run; sys.exit(run())"'
        )
        (folder / "bin" / "jgr").write_text(f'#!/bin/sh\nexec {start} "$@"\n')
        (folder / "bin" / "python").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
        for name in ("jgr", "python"):
            (folder / "bin" / name).chmod(0o755)
        (folder / "examples").symlink_to(ROOT / "examples")

    def run(self, tag: str, text: str) -> str:
        """What a block printed; a block that serves goes on in the background."""
        if ADDRESS in text and not self._servers:  # a page that says so only in words
            self.run("sh", "jgr serve runs/shop\n")
        if "--data=runs/example" in text and not (self.folder / "runs" / "example").exists():
            self.run("sh", "python examples/own_data.py\n")
        text = text.replace(ADDRESS, self._address)
        if tag == "python":
            return self._run([sys.executable, "-c", text])
        if text.startswith("jgr serve"):
            return self._serve(text)
        return self._run(["bash", "-euc", self._shortened(text)])

    def _serve(self, text: str) -> str:
        """The URL of the server of this command."""
        if text not in self._servers:
            command = ["bash", "-c", f"exec {self._shortened(text)}"]
            server = subprocess.Popen(
                command, cwd=self.folder, env=self.env, text=True, stdout=subprocess.PIPE
            )
            self._servers[text] = server, ""
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            assert url, text
            self._servers[text] = server, url.removeprefix("http://")
        self._address = self._servers[text][1]
        return f"http://{self._address}"

    def stop(self) -> None:
        while self._servers:
            _, (server, _) = self._servers.popitem()
            with server:
                server.send_signal(signal.SIGTERM)
                assert server.wait(PATIENCE_S) == 0

    def _shortened(self, text: str) -> str:
        """The commands with a flag behind each that has one in SHORTER."""
        for command, flag in SHORTER.items():
            text = re.sub(rf"^{command}\b", rf"\g<0> {flag}", text, flags=re.MULTILINE)
        if self._address != ADDRESS:
            text = text.replace("jgr bench serve", f"jgr bench serve --url=http://{self._address}")
        return text

    def _run(self, command: list[str]) -> str:
        done = subprocess.run(
            command, cwd=self.folder, env=self.env, text=True, capture_output=True, timeout=PATIENCE_S, check=False
        )  # fmt: skip
        assert done.returncode == 0, f"{command[-1]}\n{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    folder = tmp_path_factory.mktemp("project")
    terminal = Terminal(folder)
    small = (f"{key}={value}" for key, value in SMALL.items())
    config = override(load_config("shop"), f"train.out={folder / 'runs/shop'}", "train.steps=1", *small)
    train_generator(config, load_dataset(config.data))
    yield terminal
    terminal.stop()


RUN: set[tuple[str, str]] = set()


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.stem)
def test_what_a_page_says_works(terminal: Terminal, page: Path) -> None:
    for tag, text in blocks(page):
        serves = tag == "sh" and text.startswith(("jgr serve", "curl"))
        lines = [text] if serves or tag == "python" else text.replace("\\\n", "").splitlines()
        for line in lines:
            command = line.partition("  # ")[0].rstrip()  # without what the page says of it
            if (tag, command) in RUN and not serves:
                continue
            RUN.add((tag, command))
            printed = terminal.run(tag, line)
            if line.startswith("curl"):
                answers = [json.loads(answer) for answer in re.split(r"(?<=})(?={)", printed)]
                assert len(answers) == line.count("curl") and not any("error" in answer for answer in answers)
            if page == OWN_DATA:
                _check_commands(page, printed)
            if '"explain": true' in line:
                _check_reuse(terminal, page, line.split("\ncurl")[0])


def _check_commands(page: Path, printed: str) -> None:
    """The commands that a page explains are those that its example ran, up to their sizes."""
    ran = [line.removeprefix("$ ") for line in printed.splitlines() if line.startswith("$ jgr ")]
    shown = [
        line
        for tag, text in BLOCK.findall(page.read_text())
        for line in re.sub(r" \\\n +", " ", text).splitlines()
        if tag == "text" and line.startswith("jgr ")
    ]
    assert len(ran) == 7
    assert [re.sub(r"steps=\d+", "steps=2", line) for line in shown] == ran


def _check_reuse(terminal: Terminal, page: Path, request: str) -> None:
    """A request that comes twice reads the cache, as much of it as the page says."""
    terminal.run("sh", request)
    usage = json.loads(terminal.run("sh", request))["usage"]
    assert usage["cached_tokens"] > 0
    for cached, computed in re.findall(r'"cached_tokens": (\d+), "computed_tokens": (\d+)', page.read_text()):
        assert (usage["cached_tokens"], usage["computed_tokens"]) == (int(cached), int(computed))


STOPPED_SCRIPT = """
import pathlib, sys
sys.path.insert(0, "examples")
import serve_and_call
serve_and_call.JGR = [sys.executable, "-c", '''
import pathlib, signal, sys
def stop(*_):
    pathlib.Path(sys.argv[2]).write_text("stopped")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("http://nowhere", flush=True)
signal.pause()
''']
with serve_and_call.server(pathlib.Path(sys.argv[1]), []) as url:
    print(url, flush=True)
    sys.stdin.read()
"""


def test_the_example_that_is_told_to_end_stops_its_server(tmp_path: Path) -> None:
    """The server is a process that writes down that it was stopped; its model's path says where."""
    stopped = tmp_path / "stopped"
    command = [sys.executable, "-c", STOPPED_SCRIPT, str(stopped)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=env, **pipes) as script:
        assert script.stdout is not None and script.stdout.readline() == "http://nowhere\n"
        script.send_signal(signal.SIGTERM)
        assert script.wait(PATIENCE_S) == 128 + signal.SIGTERM
    assert stopped.read_text() == "stopped"
