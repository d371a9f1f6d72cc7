# SPDX-License-Identifier: Apache-2.0
"""FLAME's fused-kernel engine: Climber in three builds, on FLAME's two workloads (FLAME-7, 8, 9).

    op_by_op   every operation a program of its own, dispatched by the host
    xla        the same operations as one program
    fused      with the fused ops: on a GPU their kernels, on a CPU their XLA forms
    batched    on a GPU, fused, with USERS users in one call; the paper has one

base is 512 events and 128 candidates, long 1024 and 512, each 2 blocks of 12 layers; one user a call, whose history is
computed with the candidates, as in the paper. STREAMS threads call at once, each waiting for its answer before it asks
again; throughput is that of all, latency what a call takes among them. (The paper's figures imply 8.) On a CPU a stream
is a core's: XLA gains nothing from a second core for products of this size.

FLOPs are those of the pairs that see each other; beside them what the paper publishes, which counts all pairs. The peak
is the fastest product of the run, of a square and of Climber's own shapes, under the same streams. What a stage's least
time is, `fke_stages` says.

    python -m benchmarks.flame_fke [--quick]
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import fke_stages, harness
from benchmarks.fke_stages import Stage, Work
from benchmarks.harness import Benchmark, Claim, Measured, Quiet, Row
from jgr.models import climber, climber_costs
from jgr.models.climber import BASE, LONG, ClimberConfig, ClimberParams, Events
from jgr.models.climber_layers import Build
from jgr.models.params import Spec

WORKLOADS = {"base": (BASE, 128), "long": (LONG, 512)}
USERS = 8
PUBLISHED_FLOPS = {"base": 3.72e9, "long": 1.64e10}
STREAMS = {"cpu": 2, "gpu": 8}
DTYPE = {"cpu": jnp.float32, "gpu": jnp.bfloat16}
MAX_DIFFERENCE = {"cpu": 1e-4, "gpu": 3e-2}
RATIO = {"cpu": {"base": 1.0, "long": 1.0}, "gpu": {"base": 4.6, "long": 6.1}}
"""Of the fused build's throughput over op by op: the paper's are for a GPU."""
PAIRS_PER_S = 1.38e6  # the paper's, of long
SHARE = 0.5
BUILDS: tuple[Build, ...] = get_args(Build)
SECONDS, QUICK_SECONDS = 2.0, 0.3


class Run(NamedTuple):
    """calls: in a second, of all streams. milliseconds: what each took."""

    calls: float
    milliseconds: list[float]


def under_load(
    call: Callable[[], Any], streams: int, seconds: float, clock: Callable[[], float] = time.perf_counter
) -> Run:
    """So many threads call, for about so long; every call that began is waited for."""
    taken: list[float] = []
    until = clock() + seconds

    def work() -> None:
        begin = clock()
        while begin < until:
            jax.block_until_ready(call())
            end = clock()
            taken.append((end - begin) * 1e3)
            begin = end

    start = clock()
    threads = [threading.Thread(target=work) for _ in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Run(len(taken) / (clock() - start), taken)


def make_inputs(
    cfg: ClimberConfig, candidates: int, dtype: Any, users: int = 1
) -> tuple[ClimberParams, Events, jax.Array]:
    """Drawn weights, users with a full history over a year, and their candidates."""
    rng = np.random.default_rng(0)

    def draw(declared: Spec) -> Any:
        scale = declared.fan_in**-0.5 if declared.fan_in else 0.02
        return (scale * rng.standard_normal(declared.shape)).astype(dtype)

    params = jax.tree.map(draw, climber.spec(cfg), is_leaf=lambda x: isinstance(x, Spec))
    rows = rng.integers(0, cfg.n_items, (users, cfg.max_items)).astype(np.int32)
    times = np.sort(rng.integers(0, 31_536_000, rows.shape)).astype(np.int32)
    given: Any = (rows, np.zeros_like(rows), times, times[:, -1] + 60, np.ones(users, np.int32))
    asked = rng.integers(0, cfg.n_items, (users, candidates)).astype(np.int32)
    drawn: tuple[ClimberParams, Events, jax.Array] = jax.device_put((params, Events(*given), asked))
    return drawn


def builds(
    cfg: ClimberConfig, params: ClimberParams, events: Events, rows: jax.Array
) -> dict[str, Callable[[], jax.Array]]:
    """Of each build, the users' scores."""

    def rank(params: ClimberParams, build: Build) -> jax.Array:
        return climber.rank(params, cfg, events, rows, {}, build=build)

    apart = climber.by_layer(params)
    found: dict[str, Callable[[], jax.Array]] = {"op_by_op": functools.partial(rank, apart, "op_by_op")}
    for build in BUILDS[1:]:
        call = jax.jit(
            lambda params, events, rows, build=build: climber.rank(params, cfg, events, rows, {}, build=build)
        )
        found[build] = functools.partial(call, params, events, rows)
    return found


def measure(quick: bool, quiet: Quiet) -> Measured:
    device = jax.default_backend()
    streams, seconds, rounds = STREAMS[device], *((QUICK_SECONDS, 1) if quick else (SECONDS, 5))
    rows = [
        measure_workload(name, device, streams, seconds, rounds, quiet)
        for name in (("base",) if quick else WORKLOADS)
    ]
    return Measured(claims(rows, device), rows)


def measure_workload(name: str, device: str, streams: int, seconds: float, rounds: int, quiet: Quiet) -> Row:
    cfg, candidates = WORKLOADS[name]
    params, events, asked = make_inputs(cfg, candidates, DTYPE[device])
    calls = builds(cfg, params, events, asked)
    answers = {build: np.asarray(call(), np.float32) for build, call in calls.items()}
    users = dict.fromkeys(calls, 1)
    if device == "gpu":
        calls["batched"] = builds(cfg, *make_inputs(cfg, candidates, DTYPE[device], USERS))["fused"]
        users["batched"] = USERS
    difference = max(float(np.abs(x - answers["xla"]).max()) for x in answers.values())
    stages = fke_stages.stages(params, cfg, events, asked)
    products = fke_stages.products(cfg, candidates, DTYPE[device], device)
    movers = fke_stages.movers(device)
    timed: dict[str, Callable[[], Any]] = {
        **calls,
        **{f"stage {stage}": found.run for stage, found in stages.items()},
        **{f"rate {rate}": run for rate, (run, _) in (products | movers).items()},
    }
    variants = {
        key: functools.partial(under_load, run, streams, seconds if key in calls else seconds / 4)
        for key, run in timed.items()
    }
    runs = harness.interleave(variants, rounds, quiet)
    per_s = {key: float(np.median([run.calls for run in found])) for key, found in runs.items()}
    rates = {rate: work * per_s[f"rate {rate}"] for rate, (_, work) in (products | movers).items()}
    row = {
        "workload": name,
        "config": asdict(cfg),
        "candidates": candidates,
        "streams": streams,
        "dtype": np.dtype(DTYPE[device]).name,
        **make_row(cfg, candidates, users, {build: runs[build] for build in calls}, rates, tuple(products)),
        "stages": make_stages(stages, {s: per_s[f"stage {s}"] for s in stages}, rates, tuple(products)),
        "published_flops": PUBLISHED_FLOPS[name],
        "max_difference": harness.rounded(difference, 2),
    }
    for line in lines(row):
        print(line)
    return row


def make_row(
    cfg: ClimberConfig,
    candidates: int,
    users: Mapping[str, int],
    runs: Mapping[str, Sequence[Run]],
    rates: Mapping[str, float],
    products: Sequence[str],
) -> Row:
    """users: of a call of each build. rates: of a second. products: those that are of FLOPs."""
    needed = climber_costs.cost(cfg, climber_costs.of_both(cfg, candidates)).flops
    peak = max(rates[product] for product in products)
    found: Row = {
        "flops": needed,
        "flops_of_all_pairs": climber_costs.cost(cfg, climber_costs.all_pairs(cfg, candidates)).flops,
        "rates_per_s": {name: harness.rounded(rate) for name, rate in rates.items()},
        "builds": {},
    }
    for build, several in runs.items():
        taken = np.concatenate([run.milliseconds for run in several])
        ranked = [run.calls * users[build] for run in several]
        found["builds"][build] = {
            "users_a_call": users[build],
            "pairs_per_s": harness.spread(candidates * x for x in ranked),
            "latency_ms": {
                "mean": harness.rounded(float(taken.mean())),
                "p99": harness.rounded(float(np.percentile(taken, 99))),
                "calls": len(taken),
            },
            "share_of_matmul_peak": harness.rounded(needed * float(np.median(ranked)) / peak, 3),
        }
    return found


def make_stages(
    stages: Mapping[str, Stage],
    per_s: Mapping[str, float],
    rates: Mapping[str, float],
    products: Sequence[str],
) -> Row:
    """Of each stage: what it took, with the streams side by side, the least that it could, and what binds that."""
    best = Work(max(rates[product] for product in products), rates["bytes"], rates["exponentials"])
    found: Row = {}
    for name, stage in stages.items():
        bounds = stage.work.seconds(best)
        bound = max(bounds, key=lambda of: bounds[of])
        found[name] = {
            "ms": harness.rounded(1e3 / per_s[name]),
            "least_ms": harness.rounded(1e3 * bounds[bound]),
            "bound": bound,
            "share": harness.rounded(bounds[bound] * per_s[name], 3),
        }
    return found


def claims(rows: Sequence[Row], device: str) -> list[Claim]:
    found = [
        Claim(
            "climber-builds-differ-by", max(row["max_difference"] for row in rows), "", "lower",
            MAX_DIFFERENCE[device],
        )
    ]  # fmt: skip
    for row in rows:
        name, built = row["workload"], row["builds"]
        pairs = {build: of["pairs_per_s"]["median"] for build, of in built.items()}
        ratio = harness.rounded(pairs["fused"] / pairs["op_by_op"], 3)
        found.append(
            Claim(f"fused-over-op-by-op-throughput-{name}", ratio, "x", "higher", RATIO[device][name])
        )
        if device == "cpu":
            share = built["fused"]["share_of_matmul_peak"]
            found.append(Claim(f"fused-climber-share-of-matmul-peak-{name}", share, "", "higher", SHARE))
            continue
        for stage, of in row["stages"].items():
            found.append(Claim(f"share-of-roofline-of-{stage}-{name}", of["share"], "", "higher", SHARE))
        if name == "long":
            most = max(pairs["fused"], pairs["batched"])
            found.append(Claim("fused-pairs-per-s-long", most, "/s", "higher", PAIRS_PER_S))
    return found


def lines(row: Row) -> list[str]:
    """A workload's row for people."""
    shown = [
        f"{row['workload']}, {row['streams']} streams, {row['dtype']}: {row['flops']:.3g} FLOPs, "
        f"{row['flops_of_all_pairs']:.3g} of all pairs, {row['published_flops']:.3g} published"
    ]
    for build, of in row["builds"].items():
        latency = of["latency_ms"]
        shown.append(
            f"  {build:<9} {of['pairs_per_s']['median']:>10.0f} pairs/s, {latency['mean']:.2f} ms mean, "
            f"{latency['p99']:.2f} ms P99, {of['share_of_matmul_peak']:.0%} of the matmul peak"
        )
    for stage, of in row["stages"].items():
        shown.append(
            f"  {stage:<11} {of['ms']:.3g} ms, least {of['least_ms']:.3g} ms by {of['bound']}: {of['share']:.0%}"
        )
    return shown


if __name__ == "__main__":
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[: STREAMS["cpu"]])  # before XLA counts the cores
    if jax.default_backend() != "cpu":
        os.sched_setaffinity(0, cores)
    harness.main(
        Benchmark(
            name="flame_fke",
            measure=measure,
            packages=("jax", "jaxlib", "numpy"),
            sources=(Path(__file__), Path(fke_stages.__file__)),
            device=jax.default_backend(),
        )
    )
