# SPDX-License-Identifier: Apache-2.0
"""A reload for which a process has too few addresses left (RLIMIT_AS), in a process of its own."""

from __future__ import annotations

import http.client
import json
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jgr.models.room import SPARE_ADDRESSES
from tests.serving.tiny_model import make_folder

ROOT = Path(__file__).parents[3]
PATIENCE_S = 300.0
JGR = "import sys; from jgr.cli.main import run; sys.exit(run())"
ADMIN = {"Authorization": "Bearer 4dm1n"}
LEFT_BYTES = SPARE_ADDRESSES - (64 << 20)
"""Too little for any model's weights, and enough for the threads that read its files."""

REFUSAL = re.compile(
    r".*: there is no room for this model: it needs \d+ MB of address space \(RLIMIT_AS\), \d+ MB are free"
)


def ask(port: int, method: str, path: str, body: Any = None, **headers: str) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return answer


def reload(port: int) -> Any:
    assert ask(port, "POST", "/v1/models/tiny/reload", **ADMIN)["reload"] == "running"
    while (model := ask(port, "GET", "/v1/models/tiny"))["reload"] == "running":
        pass
    return model


@pytest.mark.slow
def test_a_reload_without_addresses_is_refused_and_the_old_model_goes_on(tmp_path: Path) -> None:
    for seed, name in enumerate("ab", 1):
        make_folder(tmp_path / name, seed=seed, layers=1, depth=1)
    link = tmp_path / "now"
    link.symlink_to(tmp_path / "a")
    settings = (
        "model.name=tiny", "model.compilation_cache=", "prompt.max_items=10", "profiles.batch=1",
        "profiles.tokens=32", "profiles.widths=8", "profiles.candidates=4", "beam.width=8", "server.admin_key=4dm1n",
    )  # fmt: skip
    command = [sys.executable, "-c", JGR, "serve", str(link), "--port=0"]
    command += [f"--set={setting}" for setting in settings]
    request = {"history": ["B001", "B002"], "top_k": 4}
    log = tmp_path / "log"
    with (
        log.open("w") as said,
        subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=said) as server,
    ):
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline().rpartition(":")[2])
            while "error" in (before := ask(port, "POST", "/v1/recommend", request)):
                assert server.poll() is None
            link.unlink()
            link.symlink_to(tmp_path / "b")
            status = Path(f"/proc/{server.pid}/status").read_text()
            taken = int(re.search(r"VmSize:\s+(\d+) kB", status)[1]) << 10  # type: ignore[index]
            free = resource.prlimit(server.pid, resource.RLIMIT_AS)
            resource.prlimit(server.pid, resource.RLIMIT_AS, (taken + LEFT_BYTES, free[1]))
            model = reload(port)
            assert model["reload"] == "failed" and model["version"] == before["model"]
            assert REFUSAL.fullmatch(model["reload_error"])
            assert len(re.findall("the new model failed", log.read_text())) == 1
            assert "Traceback" not in log.read_text()
            again = ask(port, "POST", "/v1/recommend", request)
            assert (again["model"], again["items"]) == (before["model"], before["items"])
            resource.prlimit(server.pid, resource.RLIMIT_AS, free)
            model = reload(port)
            assert model["reload"] == "done" and model["version"] != before["model"]
        finally:
            server.terminate()
            server.communicate()
    assert server.returncode == 0
