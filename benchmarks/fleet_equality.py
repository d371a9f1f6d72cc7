# SPDX-License-Identifier: Apache-2.0
"""Every answer of a fleet is that of one engine, through changes and a kill: 10,000 mixed requests.

Recommendations, rankings by the decoder with its cache and by the scorer that keeps its users; users come back. The
replicas hold items for each other, fetch those that they lack for each request anew, and place them again every few
seconds. The decoder is reloaded twice, and a replica is killed. Each answer is compared with that of one engine
without a fleet, of the version that the answer names, in the layout that it names; so an answer of a mixed version is
wrong too. Counts alone, so that the machine need not be quiet: no request has a deadline.

    python -m benchmarks.fleet_equality [--quick]
"""

from __future__ import annotations

import os
import signal
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from benchmarks import fault_world, harness
from benchmarks.fault_world import REPLICA, Callers, Fleet, Models, Reference, outcomes, until
from benchmarks.harness import Benchmark, Claim, Measured, Missing, Quiet

REQUESTS, REPLICAS, RATE = 10_000, 4, 40.0
QUICK_REQUESTS, QUICK_REPLICAS, QUICK_RATE = 500, 2, 10.0
LONGEST_S = 3000.0
ITEMS = (
    "fleet.items=hrcs",
    "fleet.items_mb=0.02",
    "fleet.fetched_mb=0.1",
    "fleet.fetch=always",
    "fleet.fetch_ms=1000",
    "fleet.keep_fetched=false",
    "fleet.refresh_s=3",
    "fleet.items_window_s=10",
)
"""Room for some of the items on each replica, so that there is always one to be fetched."""


def item_counts(fleet: Fleet) -> dict[str, int]:
    """What the replicas that are there in the end counted: bytes of items that were moved, and candidates that were
    missing."""
    _, text = fleet.ask("GET", "/metrics")
    found = dict.fromkeys(("request_bytes", "placement_bytes", "fetched_items", "computed_items"), 0)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "jgr_fleet_item_bytes_total":
                found[f"{sample.labels['purpose']}_bytes"] += round(sample.value)
            elif sample.name == "jgr_fleet_items_missing_total":
                found[f"{sample.labels['outcome']}_items"] += round(sample.value)
    return found


def measure(quick: bool, quiet: Quiet) -> Measured:
    """Claims on wrong answers and on lost requests."""
    harness.require("ray", "2.60.0")
    requests, replicas, rate = (
        (QUICK_REQUESTS, QUICK_REPLICAS, QUICK_RATE) if quick else (REQUESTS, REPLICAS, RATE)
    )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jgr-f")))
        models = Models(folder)
        reference = Reference(models)
        stack.callback(reference.close)
        given = (*ITEMS, f"fleet.cpus={1 / replicas}", "fleet.health_s=30")
        fleet = stack.enter_context(Fleet(models.files, replicas, folder / "ray", *given))
        with Callers([fleet.url], rate, deadline_ms=None, timeout_s=LONGEST_S) as callers:
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
        moved = item_counts(fleet)
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
                **moved,
            }
        ],
    )


if __name__ == "__main__":
    harness.main(
        Benchmark("fleet_equality", measure, ("numpy",), (Path(__file__), Path(fault_world.__file__)))
    )
