# SPDX-License-Identifier: Apache-2.0
"""`jgr convert org/name` and `model.path=org/name` from a hub on this machine to answers that name the commit."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from jgr.catalog.catalog import load_catalog
from tests.cli.test_convert import INDEX, NAMES, published
from tests.models.test_hub import NEW, OLD, RUN, Hub, environment, server  # noqa: F401


@pytest.fixture
def published_hub(tmp_path: Path, server: Hub) -> Hub:  # noqa: F811
    folder = published(tmp_path / "hf", "qwen2", NAMES)
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    server.files = {commit: {**whole, "pytorch_model.bin": b"a pickle"} for commit in (OLD, NEW)}
    (tmp_path / "Toys.index.json").write_text(json.dumps(INDEX))
    (tmp_path / "Toys.item.json").write_text(json.dumps({"10": {"title": "a kite"}}))
    return server


def test_convert_by_name_and_its_one_rule(tmp_path: Path, published_hub: Hub) -> None:
    env = environment(tmp_path / "home", published_hub.url)
    argv = ["convert", "hf://org/tiny@v1", "--items=Toys.index.json", "--family=minionerec", "--out=out"]

    def convert(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", RUN, *argv, *more], cwd=tmp_path, env=env, capture_output=True, text=True,
            check=False,
        )  # fmt: skip

    done = convert()
    assert done.returncode == 0, done.stderr
    assert f"commit {OLD}" in done.stderr
    assert load_catalog(tmp_path / "out" / "catalog.jsonl").n_items == 3
    again = convert()
    assert again.returncode == 2
    assert "jgr: out holds a model: --overwrite replaces it, or give another --out\n" in again.stderr
    assert convert("--overwrite").returncode == 0


def test_a_served_model_of_the_hub_names_its_commit(tmp_path: Path, published_hub: Hub) -> None:
    env = environment(tmp_path / "home", published_hub.url)
    settings = (
        "model.path=hf://org/tiny", "model.name=tiny", "model.compilation_cache=", "catalog.path=Toys.index.json",
        "prompt.template={history}", "prompt.item={sid}", "prompt.max_items=4", "beam.width=3", "profiles.batch=1",
        "profiles.tokens=8", "profiles.widths=3", "profiles.candidates=3",
    )  # fmt: skip
    command = [sys.executable, "-c", RUN, "serve", "--port=0", *(f"--set={setting}" for setting in settings)]
    with subprocess.Popen(command, cwd=tmp_path, env=env, text=True, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            with urllib.request.urlopen(f"{url}/v1/models") as answer:
                (model,) = json.load(answer)["data"]
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    name, _, revision = model["version"].partition("@")
    assert name == "tiny" and revision.endswith(f"-{NEW[:8]}")
    assert not [path for path in published_hub.asked if path.endswith(".bin")]
