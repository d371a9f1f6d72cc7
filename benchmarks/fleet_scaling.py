# SPDX-License-Identifier: Apache-2.0
"""A fleet that grows under load and shrinks after it, live: how long each takes, and that no request is lost.

The models are small, so the wait that the fleet aims at is set far below what their load makes it. Seconds hold Ray's
own part: it starts a process, and keeps a replica for a minute before it ends one. The programs come from the
compilation cache.

    python -m benchmarks.fleet_scaling [--quick]
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks import fault_world, harness
from benchmarks.fault_world import Callers, Fleet, Models, Reference, outcomes, until
from benchmarks.harness import Benchmark, Claim, Measured, Missing, Quiet

MOST, RATE, QUICK_RATE = 3, 120.0, 40.0
LONGEST_S = 300.0
SETTINGS = (f"fleet.max_replicas={MOST}", "fleet.target_wait_ms=1", "fleet.cpus=0.5")


def measure(quick: bool, quiet: Quiet) -> Measured:
    """Claims on lost requests and on wrong answers, and on the seconds until a replica more serves."""
    harness.require("ray", "2.60.0")
    quiet.wait()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jgr-f")))
        models = Models(folder)
        reference = Reference(models)
        stack.callback(reference.close)
        fleet = stack.enter_context(Fleet(models.files, 1, folder / "ray", *SETTINGS))
        with Callers([fleet.url], QUICK_RATE if quick else RATE, deadline_ms=None) as loaded:
            grown_s = until(lambda: len(fleet.served()) > 1, LONGEST_S)
        if grown_s is None:
            raise Missing(f"no replica was added in {LONGEST_S:.0f} s under {len(loaded.calls)} requests")
        most = len(fleet.served())
        with Callers([fleet.url], 2.0, deadline_ms=None) as idle:
            shrunk_s = until(lambda: len(fleet.served()) == 1, LONGEST_S)
        if shrunk_s is None:
            raise Missing(f"no replica was ended in {LONGEST_S:.0f} s without load")
        calls = [*loaded.calls, *idle.calls]
        wrong, found = reference.wrong(calls), outcomes(calls)
    return Measured(
        [
            Claim("fleet-scaling-wrong", len(wrong), "answers", "lower", 0.0),
            Claim("fleet-scaling-lost", found["lost"], "requests", "lower", 0.0),
            Claim("fleet-scaling-grown", round(grown_s, 1), "s", "lower", 60.0),
        ],
        [
            {
                "requests": len(calls),
                "replicas": most,
                "grown_s": round(grown_s, 1),
                "shrunk_s": round(shrunk_s, 1),
                **found,
                "wrong": len(wrong),
            }
        ],
    )


if __name__ == "__main__":
    harness.main(
        Benchmark("fleet_scaling", measure, ("numpy",), (Path(__file__), Path(fault_world.__file__)))
    )
