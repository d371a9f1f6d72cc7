# SPDX-License-Identifier: Apache-2.0
"""Ray's own commands serve a fleet from `deploy/fleet/fleet.yaml`, with a small model in the place of /model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest
import urllib3
import yaml

import jgr
from benchmarks.fault_world import descendants, until
from jgr.cli.cluster import ENVIRONMENT, own_port
from jgr.models import manifest
from tests.serving.fakes import PATIENCE_S
from tests.serving.tiny_model import N_ITEMS, make_catalog, make_folder

pytestmark = pytest.mark.ray

LONG_S = 300.0
"""Replicas that start compile."""
ROOT = Path(__file__).resolve().parents[3]
SERVE = str(Path(sys.executable).with_name("serve"))
KEY = "key-of-the-tests"
FEW = ("profiles.batch=4", "profiles.tokens=32", "rank.requests=4")
"""Few programs, since every process compiles its own."""
HISTORIES = [[f"B{(5 * start + event) % N_ITEMS:03}" for event in range(2 + start)] for start in range(6)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    manifest.write(tmp_path / "tiny", make_folder(tmp_path / "tiny"), make_catalog())
    return tmp_path


@pytest.fixture
def environment() -> Iterator[Mapping[str, str]]:
    """What docs/fleet-operations.md says to set, and a folder of its own for Ray."""
    with tempfile.TemporaryDirectory(
        prefix="r", dir="/tmp"
    ) as ray:  # the names of Ray's sockets must be short
        own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4, "RAY_TMPDIR": ray}
        yield os.environ | ENVIRONMENT | own


def copied(folder: Path, port: int) -> Path:
    """The file, with what this machine has: a small model, a file of keys, one core a replica, and a free port."""
    keys = folder / "keys.json"
    keys.write_text(json.dumps({"keys": [{"name": "tests", "key": KEY, "role": "client"}]}))
    keys.chmod(0o600)
    given = yaml.safe_load((ROOT / "deploy" / "fleet" / "fleet.yaml").read_text())
    given["http_options"] = {"host": "127.0.0.1", "port": port}
    (application,) = given["applications"]
    assert application["args"]["models"] == ["/model"]
    settings = {field.partition("=")[0]: field for field in application["args"]["settings"]}
    assert settings.keys() == {"server.keys", "fleet.replicas", "fleet.cpus"}
    settings |= {"server.keys": f"server.keys={keys}", "fleet.cpus": "fleet.cpus=0.5"}
    application["args"] = {"models": [str(folder / "tiny")], "settings": [*settings.values(), *FEW]}
    file = folder / "fleet.yaml"
    file.write_text(yaml.safe_dump(given))
    return file


def ready(url: str) -> int:
    """How many replicas serve."""
    with suppress(urllib3.exceptions.HTTPError):
        answer = urllib3.request("GET", f"{url}/health/ready", timeout=PATIENCE_S, retries=False)
        if answer.status == 200:
            return int(answer.json()["replicas"])
    return 0


def test_serve_build_writes_a_file_that_serve_takes(folder: Path, environment: Mapping[str, str]) -> None:
    """As the documentation has it: of an application in a module of the user's."""
    settings = ["fleet.replicas=3", "fleet.health_s=5", "server.drain_timeout_s=7"]
    (folder / "shop.py").write_text(
        "from jgr.serving.cluster.application import fleet\n\n"
        f"app = fleet({{'models': [{str(folder / 'tiny')!r}], 'settings': {settings!r}}})\n"
    )
    path = f"{folder}{os.pathsep}{ROOT}"
    subprocess.run(
        [SERVE, "build", "shop:app", "-o", "shop.yaml"],
        check=True,
        cwd=folder,
        env={**environment, "PYTHONPATH": path},
    )
    (application,) = yaml.safe_load((folder / "shop.yaml").read_text())["applications"]
    assert (application["import_path"], application["route_prefix"]) == ("shop:app", "/")
    found = {each["name"]: each for each in application["deployments"]}
    assert found.keys() == {"Replica", "Coordinator", "Front"}
    replica = found["Replica"]
    told = ("num_replicas", "health_check_period_s", "graceful_shutdown_timeout_s")
    assert [replica[name] for name in told] == [3, 5.0, 17.0]
    router = replica["request_router_config"]
    assert router["request_router_class"] == "jgr.serving.cluster.application.FleetRouter"
    assert router["request_router_kwargs"]["rule"] == "joint"


def test_serve_run_of_the_file_answers_as_one_engine(folder: Path, environment: Mapping[str, str]) -> None:
    port = own_port("127.0.0.1")
    url, log = f"http://127.0.0.1:{port}", folder / "log"
    # A command that a shell runs in the background ignores SIGINT, and so do all that it starts, Ray's too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with log.open("w") as output:
        process = subprocess.Popen(
            [SERVE, "run", str(copied(folder, port))], stdout=output, stderr=output, cwd=ROOT, env=environment
        )
    try:
        until(lambda: process.poll() is not None or ready(url) == 2, LONG_S)
        assert ready(url) == 2, log.read_text()
        with jgr.Client(url, KEY, timeout_s=PATIENCE_S) as client:
            answers = client.recommend(HISTORIES, top_k=5)
        with pytest.raises(jgr.Unauthorized), jgr.Client(url, timeout_s=PATIENCE_S) as stranger:
            stranger.recommend(HISTORIES[:1], top_k=5)
        process.send_signal(signal.SIGINT)
        process.wait(LONG_S)  # Ray takes its time where the cores have other work
        assert ready(url) == 0
    finally:
        for pid in (*descendants(process.pid), process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
    with jgr.Engine(str(folder / "tiny"), FEW) as alone:
        for ours, theirs in zip(answers, alone.recommend(HISTORIES, top_k=5), strict=True):
            expected = {item.item_id: item.score for item in theirs.items}
            assert {item.item_id: item.score for item in ours.items} == pytest.approx(expected, abs=1e-4)
