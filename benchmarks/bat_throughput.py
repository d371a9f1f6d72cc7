# SPDX-License-Identifier: Apache-2.0
"""BAT's systems on one engine: requests per second at saturation, share of tokens reused, tokens computed, latencies.

RE caches nothing, UP always puts the user first, IP the items, cache_agnostic whichever is longer, and BAT decides by
hotness (BAT-10). All else is the same: the engine, batching with a cap on new tokens, the pool. There are the paper's
four workloads (jgr.traffic.workloads says what of them is inferred), each with users and items divided by one factor;
token counts, skew and the ratio of the pool to the KV of all items are kept. In the paper's trace 90 % of the accesses
go to a tenth of the items; in real public ones it is 40 to 60 %, so every workload is also shown at 50 %.

Before the timed requests comes a long run that is planned but not computed, so that the cache holds what it would hold.
Systems take turns, each with the same next requests; a closed loop keeps 16 requests in the engine. The window over
which users' accesses are counted is scaled as the time of the trace is.

    python -m benchmarks.bat_throughput [--quick]
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import bat_world, harness
from benchmarks.bat_world import SYSTEMS, Served, System, World, add, at_skew, event_loop, facts
from benchmarks.harness import Benchmark, Claim, Measured, Quiet, Row
from jgr.traffic.workloads import BEAUTY, BOOKS, GAMES, INDUSTRY, Workload

THREADS = 2
CONCURRENCY = 16
SERVED_PER_S = 20.0
"""Requests a second that the engine serves, roughly; the time of the trace is scaled to it."""


class Setting(NamedTuple):
    """A workload, what its users and items are divided by, and the size of the paper's pool over the KV of all items.

    The paper's pool is 4 nodes of 150 GB; a token of Qwen2-1.5B has 28,672 bytes of KV.
    """

    workload: Workload
    factor: float
    pool_ratio: float


def pool_ratio(workload: Workload) -> float:
    return 4 * 150e9 / (workload.items * workload.item_tokens * 28672)


SETTINGS = tuple(
    Setting(workload, workload.items / 1600, pool_ratio(workload))
    for workload in (GAMES, BEAUTY, BOOKS, INDUSTRY)
)
SKEWS = (0.9, 0.5)


def measure(quick: bool, quiet: Quiet) -> Measured:
    rounds, count, planned = (1, 16, 300) if quick else (5, 24, 5_000)
    settings = SETTINGS[-1:] if quick else SETTINGS
    rows = []
    with tempfile.TemporaryDirectory() as folder, event_loop() as loop:
        for setting in settings:
            for skew in SKEWS[:1] if quick else SKEWS:
                workload = at_skew(setting.workload.scaled(setting.factor), skew)
                world = World(
                    Path(folder) / f"{workload.name}-{skew}".replace("/", "_"), workload, speed(workload)
                )
                device_mb = round(setting.pool_ratio * world.item_bytes / 2**20, 2)
                systems = {
                    name: System(world, world.config(policy, device_mb, f"{folder}/xla"), loop, planned)
                    for name, policy in SYSTEMS.items()
                }
                runs = harness.interleave(
                    {
                        name: functools.partial(system.saturate, count, CONCURRENCY)
                        for name, system in systems.items()
                    },
                    rounds,
                    quiet,
                )
                rows.append(make_row(setting, world, device_mb, runs))
                if setting.workload is INDUSTRY and skew == SKEWS[0]:
                    rows += latencies(systems, rows[-1], 16 if quick else 120, quiet)
                for system in systems.values():
                    system.stop()
    return Measured(claims(rows), rows)


def speed(workload: Workload) -> float:
    return SERVED_PER_S / workload.rate


def make_row(setting: Setting, world: World, device_mb: float, runs: Mapping[str, Sequence[Served]]) -> Row:
    systems: dict[str, Any] = {}
    for name, served in runs.items():
        total = add(served)
        systems[name] = {
            "qps": harness.spread(run.qps for run in served),
            "hit_rate": harness.rounded(total.cached_tokens / total.tokens, 3),
            "computed_tokens": total.computed_tokens,
            "user_prefix_share": harness.rounded(total.by_user / len(total.latency_ms), 3),
            "p99_ms": harness.rounded(float(np.percentile(total.latency_ms, 99))),
        }
    qps = {name: entry["qps"]["median"] for name, entry in systems.items()}
    best = max(("UP", "IP"), key=lambda name: qps[name])
    computed = {name: entry["computed_tokens"] for name, entry in systems.items()}
    return {
        "workload": setting.workload.name,
        "factor": setting.factor,
        **facts(world, device_mb),
        "requests": len(add(runs["RE"]).latency_ms),
        "systems": systems,
        "bat_over": {name: harness.rounded(qps["BAT"] / qps[name], 3) for name in qps if name != "BAT"},
        "better_of_up_and_ip": best,
        "bat_computed_over_the_better": harness.rounded(
            computed["BAT"] / min(computed["UP"], computed["IP"]), 4
        ),
        "bat_below_the_better_by_more_than_the_spread": systems["BAT"]["qps"]["q3"]
        < systems[best]["qps"]["q1"],
    }


def latencies(systems: Mapping[str, System], row: Row, count: int, quiet: Quiet) -> list[Row]:
    """Latencies in an open loop at shares of the rate that RE serves at saturation."""
    rows = []
    for share in (0.5, 0.8, 1.1):
        rate = share * row["systems"]["RE"]["qps"]["median"]
        shown = {}
        for name, system in systems.items():
            quiet.wait()
            served = system.at_rate(count, rate)
            shown[name] = {
                "p50_ms": harness.rounded(float(np.percentile(served.latency_ms, 50))),
                "p99_ms": harness.rounded(float(np.percentile(served.latency_ms, 99))),
            }
        rows.append(
            {
                "latency_at": harness.rounded(rate, 3),
                "share_of_re": share,
                "requests": count,
                "systems": shown,
            }
        )
    return rows


def claims(rows: Sequence[Row]) -> list[Claim]:
    found = []
    for skew in SKEWS:
        at = [row for row in rows if row.get("top10_share") == skew]
        if not at:
            continue
        label = f"at-{round(100 * skew)}-percent-skew"
        hit = max(row["systems"]["BAT"]["hit_rate"] for row in at)
        computed = max(row["bat_computed_over_the_better"] for row in at)
        below = sum(row["bat_below_the_better_by_more_than_the_spread"] for row in at)
        found += [
            Claim(
                f"bat-over-up-on-the-best-workload-{label}",
                max(r["bat_over"]["UP"] for r in at),
                "x",
                "higher",
                1.6,
            ),
            Claim(
                f"bat-over-re-on-the-best-workload-{label}",
                max(r["bat_over"]["RE"] for r in at),
                "x",
                "higher",
                2.3,
            ),
            Claim(f"bat-share-of-tokens-reused-on-the-best-workload-{label}", hit, "", "higher", 0.58),
            Claim(f"bat-computed-tokens-over-the-better-of-up-and-ip-{label}", computed, "x", "lower", 1.02),
            Claim(
                f"workloads-on-which-bat-is-slower-than-the-better-{label}", float(below), "", "lower", 0.0
            ),
        ]
    return found


if __name__ == "__main__":
    # Before XLA counts the cores.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    harness.main(
        Benchmark(
            name="bat_throughput",
            measure=measure,
            packages=("jax", "jaxlib", "numpy"),
            sources=(Path(__file__), Path(bat_world.__file__)),
            device=jax.default_backend(),
        )
    )
