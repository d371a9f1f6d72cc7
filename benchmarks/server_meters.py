# SPDX-License-Identifier: Apache-2.0
"""What a server on this machine has used: processor time by its threads, and device time by its own metrics."""

from __future__ import annotations

import os
import time
import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families


def processor_s() -> dict[str, float]:
    """Processor seconds so far of the server, the one process that this one has started, by what its threads do; and of
    this process, which is the client."""
    (server_id,) = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    found = {"client": time.process_time(), "event_loop": 0.0, "model": 0.0, "other_threads": 0.0}
    for task in Path(f"/proc/{server_id}/task").iterdir():
        name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
        user, system = rest.split()[11:13]
        part = "event_loop" if task.name == server_id else "model" if "Eigen" in name else "other_threads"
        found[part] += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return found


def device_s(host: str, port: int) -> tuple[float, float]:
    """Seconds of runs on the device so far, and those of them that no answer came of."""
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=10.0) as reply:
        families = text_string_to_metric_families(reply.read().decode())
    totals = {sample.name: sample.value for family in families for sample in family.samples}
    return totals["jgr_device_seconds_total"], totals["jgr_wasted_device_seconds_total"]
