# SPDX-License-Identifier: Apache-2.0
"""Starts a fleet of two replicas by one command of an installed jgr, asks it, and ends it.

    python -m tools.try_fleet PATH/TO/jgr

`make fleet-wheel` does so with the wheel and `jgr[cluster]` from the registry. The replicas serve numbered items, so no
model is needed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REPLICAS = 2
START_S = 300.0
END_S = 120.0


def ask(url: str, body: Any = None) -> Any:
    """The JSON of an answer; a refusal is an HTTPError."""
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, content, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=START_S) as answer:
        return json.load(answer)


def _ready(url: str) -> Any:
    """What the fleet says of its health, once no replica is too slow to be counted."""
    ends_s = time.monotonic() + START_S
    while (told := ask(f"{url}/health/ready"))["replicas"] < REPLICAS and time.monotonic() < ends_s:
        pass
    return told


def try_fleet(jgr: Path, folder: Path, env: Mapping[str, str]) -> dict[str, Any]:
    """What the fleet said: `ready`, `replicas` (their states) and `items` of an answer. folder: for logs and for Ray,
    whose sockets need a short path. RuntimeError where it does not start or end well."""
    command: Sequence[str] = [str(jgr), "cluster", "--null", f"--replicas={REPLICAS}", "--port=0"]
    with (folder / "log").open("w") as log:
        fleet = subprocess.Popen(
            command, cwd=folder, env={**env, "RAY_TMPDIR": str(folder)}, text=True,
            stdout=subprocess.PIPE, stderr=log,
        )  # fmt: skip
    with fleet:
        try:
            assert fleet.stdout is not None
            url = next((line.strip() for line in fleet.stdout if line.startswith("http")), "")
            if not url:  # Ray's own lines may stand before it
                raise RuntimeError(f"it has not started: {(folder / 'log').read_text()}")
            models = ask(f"{url}/v1/models")
            answer = ask(f"{url}/v1/recommend", {"history": ["1"], "top_k": 3})
            told = {
                "ready": _ready(url),
                "replicas": [replica["state"] for replica in models["replicas"]],
                "items": [item["item_id"] for item in answer["items"]],
            }
            fleet.send_signal(signal.SIGTERM)
            if fleet.wait(END_S):
                raise RuntimeError(f"it has not ended well: {(folder / 'log').read_text()}")
            return told
        finally:
            fleet.kill()


def main(argv: Sequence[str]) -> int:
    if len(argv) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="jgr-") as folder:
        print(json.dumps(try_fleet(Path(argv[0]).absolute(), Path(folder), os.environ)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
