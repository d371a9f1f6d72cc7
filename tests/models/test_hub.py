# SPDX-License-Identifier: Apache-2.0
"""Names of the Hugging Face hub against a small hub on this machine, which `HF_ENDPOINT` names."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import unquote

import pytest

from jgr.models import hub

OLD, NEW = "a" * 40, "b" * 40
REVISIONS = {"main": NEW, "v1": OLD, OLD: OLD, NEW: NEW}
RUN = "import sys; from jgr.cli.main import run; sys.exit(run())"
ASK = """
import sys
from jgr.config import UserError
from jgr.models import hub
for name in sys.argv[1:]:
    try:
        folder = hub.local(name)
        print(folder, *sorted(path.name for path in folder.iterdir()))
    except UserError as error:
        print("refused", error)
"""


class Hub(ThreadingHTTPServer):
    """One model, org/tiny, of two commits. asked: the paths of all requests."""

    files: ClassVar[dict[str, dict[str, bytes]]] = {}

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str] = []
        self.thread = threading.Thread(target=self.serve_forever)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def stop(self) -> None:
        self.shutdown()
        self.thread.join()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = unquote(self.path.split("?")[0])
        self.server.asked.append(path)
        parts = path.strip("/").split("/")
        if parts[:4] == ["api", "models", "org", "tiny"]:
            commit = REVISIONS.get(parts[5] if len(parts) > 5 else "main")
            if commit is None:
                self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, body)
            elif parts[4:5] == ["tree"]:
                tree = [
                    {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in self.server.files[commit].items()
                ]
                self._send(200, json.dumps(tree).encode(), {}, body)
            else:
                names = [{"rfilename": name} for name in self.server.files[commit]]
                info = {"id": "org/tiny", "modelId": "org/tiny", "sha": commit, "siblings": names, "tags": []}
                self._send(200, json.dumps(info).encode(), {}, body)
        elif parts[:3] == ["org", "tiny", "resolve"]:
            commit = REVISIONS[parts[3]]
            data = self.server.files[commit]["/".join(parts[4:])]
            tag = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": commit}
            self._send(200, data, tag, body)
        else:
            self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"}, body)

    def _send(self, status: int, data: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Length": str(len(data)),
            "Content-Type": "application/json",
            **headers,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


@pytest.fixture
def server() -> Iterator[Hub]:
    found = Hub()
    found.files = {
        commit: {
            "config.json": b'{"model_type": "qwen2"}' if commit == NEW else b"{}",
            "tokenizer.json": b"{}",
            "model.safetensors": b"weights",
            "pytorch_model.bin": b"a pickle",
            "training_args.bin": b"a pickle",
            "original/model.safetensors": b"others",
            "modeling.py": b"raise SystemExit",
        }
        for commit in (OLD, NEW)
    }
    yield found
    found.stop()


def environment(home: Path, endpoint: str, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1"}
    root = str(Path(__file__).resolve().parents[2])
    return {
        **kept, **quiet, "HF_HOME": str(home), "HF_ENDPOINT": endpoint,
        "PYTHONPATH": f"{root}:{kept.get('PYTHONPATH', '')}", **more,
    }  # fmt: skip


def ask(folder: Path, env: dict[str, str], *names: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", ASK, *names], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_only_weights_config_and_tokenizer_are_fetched_of_the_commit(tmp_path: Path, server: Hub) -> None:
    env = environment(tmp_path / "home", server.url)
    names = ("hf://org/tiny", "hf://org/tiny@v1", f"hf://org/tiny@{OLD}")
    lines = [line.split() for line in ask(tmp_path, env, *names)]
    assert [Path(line[0]).name for line in lines] == [NEW, OLD, OLD]
    for line in lines:
        assert line[1:] == ["config.json", "model.safetensors", "tokenizer.json"]
    folder = Path(lines[0][0])
    assert (folder / "config.json").read_bytes() == server.files[NEW]["config.json"]
    assert hub.commit_of(folder) == NEW[:8] and hub.commit_of(tmp_path / NEW) == ""
    assert not [path for path in server.asked if path.endswith((".bin", ".py")) or "original" in path]


def test_a_path_is_never_asked_for(tmp_path: Path, server: Hub) -> None:
    """Not even one that the hub has a model for: a typing error in a path is told as one."""
    env = environment(tmp_path / "home", server.url)
    for argv in (["serve"], ["config"], ["convert", "--items=i", "--family=minionerec", "--out=o"]):
        done = subprocess.run(
            [sys.executable, "-c", RUN, argv[0], "org/tiny", *argv[1:]], cwd=tmp_path, env=env,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.endswith("; a model of the Hugging Face hub is named hf://org/tiny\n"), done.stderr
    assert server.asked == []


def test_what_the_hub_lacks_is_one_clear_line(tmp_path: Path, server: Hub) -> None:
    env = environment(tmp_path / "home", server.url)
    lines = ask(tmp_path, env, "hf://org/none", "hf://org/tiny@v9", "hf://org")
    assert lines == [
        "refused model.path: hf://org/none is not on this machine, and the Hugging Face hub has no model of this "
        "name, or it needs a token (HF_TOKEN)",
        "refused model.path: hf://org/tiny@v9 is not on this machine, and org/tiny on the Hugging Face hub has no "
        "revision v9",
        "refused model.path: 'hf://org' is no name of the Hugging Face hub, such as hf://org/name@revision",
    ]


def test_without_a_network_what_was_fetched_is_used(tmp_path: Path, server: Hub) -> None:
    home = tmp_path / "home"
    fetched = ask(tmp_path, environment(home, server.url), "hf://org/tiny")
    offline = environment(home, server.url, HF_HUB_OFFLINE="1")
    asked = len(server.asked)
    again, other = ask(tmp_path, offline, "hf://org/tiny", "hf://org/other")
    assert [again] == fetched
    assert other.startswith(
        "refused model.path: hf://org/other is not on this machine, and the Hugging Face hub could not be asked: "
    )
    assert other.endswith("offline mode is enabled")
    assert len(server.asked) == asked
    down = environment(tmp_path / "empty", "http://127.0.0.1:9")
    (line,) = ask(tmp_path, down, "hf://org/tiny")
    assert line.startswith(
        "refused model.path: hf://org/tiny is not on this machine, and the Hugging Face hub could not be asked: "
    )
    assert line.endswith("Connection refused"), "what went wrong, and no advice that is cut off"


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        hub.ConfigError, match=r"hf://org/tiny is not on this machine; .*: pip install jgr\[hub\]"
    ):
        hub.local("hf://org/tiny")


@pytest.mark.parametrize(
    "name",
    ["/abs/path", "./a/b", "a", "a/b", "a/b@main", "a/b/c", "../a", "a/b@", "a/b\0", "-a/b", "a/b@v/../../x"],
)
def test_other_paths_are_never_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert hub.local(name) == Path(name)
