# SPDX-License-Identifier: Apache-2.0
"""Every answer of a fleet is that of one engine, through changes and a kill: 10,000 mixed requests.

Recommendations, rankings by the decoder with its cache and by the scorer that keeps its users; users come back. The
decoder is reloaded twice, and a replica is killed. Each answer is compared with that of one engine without a cache, of
the version that the answer names, in the layout that it names; so an answer of a mixed version is wrong too.

    python -m benchmarks.fleet_equality [--quick]
"""

from __future__ import annotations

import os
import signal
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from benchmarks import fault_world, harness
from benchmarks.fault_world import REPLICA, Callers, Fleet, Models, Reference, outcomes, until
from benchmarks.harness import Benchmark, Claim, Measured, Missing, Quiet

REQUESTS, REPLICAS, RATE = 10_000, 4, 40.0
QUICK_REQUESTS, QUICK_REPLICAS, QUICK_RATE = 500, 2, 10.0
LONGEST_S = 900.0


def measure(quick: bool, quiet: Quiet) -> Measured:
    """Claims on wrong answers and on lost requests."""
    harness.require("ray", "2.60.0")
    quiet.wait()
    requests, replicas, rate = (
        (QUICK_REQUESTS, QUICK_REPLICAS, QUICK_RATE) if quick else (REQUESTS, REPLICAS, RATE)
    )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jgr-f")))
        models = Models(folder)
        reference = Reference(models)
        stack.callback(reference.close)
        fleet = stack.enter_context(Fleet(models, replicas, folder / "ray", f"fleet.cpus={1 / replicas}"))
        with Callers([fleet.url], rate, deadline_ms=None) as callers:
            for part, change in enumerate(("two", "kill", "one"), 1):
                if until(partial(callers.have, part * requests // 4), LONGEST_S) is None:
                    raise Missing(f"only {len(callers.calls)} requests were answered")
                if change == "kill":
                    os.kill(fleet.pids(REPLICA)[0], signal.SIGKILL)
                    continue
                models.switch(change)
                fleet.change("/v1/models/jgr/reload")
            if until(partial(callers.have, requests), LONGEST_S) is None:
                raise Missing(f"only {len(callers.calls)} requests were answered")
        wrong = reference.wrong(callers.calls)
        for reason in wrong[:5]:
            harness.note(reason)
    found = outcomes(callers.calls)
    versions = {str(call.answer.get("model")) for call in callers.calls if call.outcome == "ok"}
    cached = sum(
        bool(call.answer["usage"].get("cached_tokens")) for call in callers.calls if call.outcome == "ok"
    )
    return Measured(
        [
            Claim("fleet-equality-wrong", len(wrong), "answers", "lower", 0.0),
            Claim("fleet-equality-lost", found["lost"], "requests", "lower", 0.0),
        ],
        [
            {
                "requests": len(callers.calls),
                "replicas": replicas,
                **found,
                "wrong": len(wrong),
                "cached": cached,
                "versions": len(versions),
            }
        ],
    )


if __name__ == "__main__":
    harness.main(
        Benchmark("fleet_equality", measure, ("numpy",), (Path(__file__), Path(fault_world.__file__)))
    )
