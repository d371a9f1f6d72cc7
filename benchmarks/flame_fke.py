# SPDX-License-Identifier: Apache-2.0
"""FLAME's fused-kernel engine: Climber in three builds, on FLAME's two workloads (FLAME-7, 8, 9).

    op_by_op   every operation a program of its own, dispatched by the host
    xla        the same operations as one program
    fused      with the fused ops: on a GPU their kernels, on a CPU their XLA forms

base is 512 events and 128 candidates, long 1024 and 512, each 2 blocks of 12 layers. A build is the engine that `jgr
serve` makes of a model folder by `executors.build`, with one size, the workload's; the rest as by default, so that a
request's user is computed once and with its candidates where the server measures that to be cheaper, as in the paper.
STREAMS clients ask at once, each waiting for its answer before it asks again; throughput is that of all, latency what
an answer takes among them, from the request's fields to its items. (The paper's figures imply 8.) On a CPU a stream is
a core's: XLA gains nothing from a second core for products of this size.

FLOPs are those of the pairs that see each other; beside them what the paper publishes, which counts all pairs. The peak
is the fastest product of the run, of a square and of Climber's own shapes, under the same streams; what of it an engine
reaches has the host's part of a request in it. What a stage's least time is, `fke_stages` says.

    python -m benchmarks.flame_fke [--quick]
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, Protocol, get_args

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import fke_stages, flame_serving, harness
from benchmarks.fke_stages import Stage, Work
from benchmarks.harness import Benchmark, Claim, Measured, Quiet, Row
from jgr.models import climber, climber_costs
from jgr.models.climber import BASE, LONG, ClimberConfig, ClimberParams, Events
from jgr.models.climber_layers import Build
from jgr.models.params import Spec
from jgr.serving.api import Answer, RankRequest
from jgr.serving.engine.engine import Engine
from jgr.serving.scorers.serve import ServedScorer

WORKLOADS = {"base": (BASE, 128), "long": (LONG, 512)}
PUBLISHED_FLOPS = {"base": 3.72e9, "long": 1.64e10}
STREAMS = {"cpu": 2, "gpu": 8}
DTYPE = jnp.float32
"""The type in which scorers are served."""
MAX_DIFFERENCE = {"cpu": 1e-4, "gpu": 3e-2}
RATIO = {"cpu": {"base": 1.0, "long": 1.0}, "gpu": {"base": 4.6, "long": 6.1}}
"""The target for the fused build's throughput over op by op, by device and workload; a GPU's are the paper's."""
PAIRS_PER_S = 1.38e6  # the paper's, of long
SHARE = 0.5
BUILDS: tuple[Build, ...] = get_args(Build)
SECONDS, QUICK_SECONDS = 2.0, 0.3
REQUESTS = 16
START_S = 1_700_000_000


class Answers(Protocol):
    """The part of an engine that clients use."""

    async def answer(self, request: RankRequest) -> Answer: ...


class Run(NamedTuple):
    """What clients measured. calls: answers a second, of all streams. milliseconds: what each answer took."""

    calls: float
    milliseconds: list[float]


def under_load(
    call: Callable[[], Any], streams: int, seconds: float, clock: Callable[[], float] = time.perf_counter
) -> Run:
    """Have `streams` threads call for about so many seconds; every call that began is waited for."""
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


def make_inputs(cfg: ClimberConfig, candidates: int, dtype: Any) -> tuple[ClimberParams, Events, jax.Array]:
    """Drawn weights, a user with a full history over a year, and its candidates: what the stages are given."""
    rng = np.random.default_rng(0)

    def draw(declared: Spec) -> Any:
        scale = declared.fan_in**-0.5 if declared.fan_in else 0.02
        return (scale * rng.standard_normal(declared.shape)).astype(dtype)

    params = jax.tree.map(draw, climber.spec(cfg), is_leaf=lambda x: isinstance(x, Spec))
    rows = rng.integers(0, cfg.n_items, (1, cfg.max_items)).astype(np.int32)
    times = np.sort(rng.integers(0, 31_536_000, rows.shape)).astype(np.int32)
    given: Any = (rows, np.zeros_like(rows), times, times[:, -1] + 60, np.ones(1, np.int32))
    asked = rng.integers(0, cfg.n_items, (1, candidates)).astype(np.int32)
    drawn: tuple[ClimberParams, Events, jax.Array] = jax.device_put((params, Events(*given), asked))
    return drawn


def make_engines(
    folder: Path, cfg: ClimberConfig, candidates: int, streams: int
) -> dict[str, Engine[ServedScorer]]:
    """Write a model folder, and make the engine of each build that serves it. Not yet started."""
    flame_serving.save(folder, cfg)
    settings = [f"executors.{name}={streams}" for name in ("number", "streams")]
    settings += [f"executors.sizes={candidates}"]
    return {build: flame_serving.load(folder, *settings, f"executors.build={build}") for build in BUILDS}


def make_request(cfg: ClimberConfig, candidates: int, seed: int) -> RankRequest:
    """A user with a full history over a year, who asks for all candidates' scores."""
    rng = np.random.default_rng(seed)
    times = np.sort(rng.integers(0, 31_536_000, cfg.max_items)) + START_S
    history: list[str | int] = list(map(str, rng.integers(0, cfg.n_items, cfg.max_items).tolist()))
    return RankRequest(
        history=history, history_times=times.tolist(), time=int(times[-1]) + 60, scenario=1, top_k=candidates,
        candidates=list(map(str, rng.choice(cfg.n_items, candidates, replace=False).tolist())),
    )  # fmt: skip


async def drive(
    engine: Answers,
    requests: Iterable[RankRequest],
    clients: int,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Run:
    """Have clients ask an engine for some seconds, each one request after the other, and count and time the answers."""
    taken: list[float] = []
    asked, until = itertools.cycle(requests), clock() + seconds

    async def client() -> None:
        begin = clock()
        while begin < until:
            await engine.answer(next(asked))
            end = clock()
            taken.append((end - begin) * 1e3)
            begin = end

    start = clock()
    await asyncio.gather(*(client() for _ in range(clients)))
    return Run(len(taken) / (clock() - start), taken)


def _drive(runner: asyncio.Runner, *given: Any) -> Run:
    return runner.run(drive(*given))


def scores_of(answer: Answer) -> dict[str, Sequence[float]]:
    """The scores of each item of an answer, one for each task."""
    return {item.item_id: list(item.scores.values()) for item in answer.items if item.scores}


def difference(answers: Sequence[Answer]) -> float:
    """The largest difference between the scores of several answers to one request."""
    first, *others = (scores_of(answer) for answer in answers)
    return max(
        float(np.abs(np.subtract(scores, other[item])).max())
        for other in others
        for item, scores in first.items()
    )


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
    params, events, asked = make_inputs(cfg, candidates, DTYPE)
    stages = fke_stages.stages(params, cfg, events, asked)
    products = fke_stages.products(cfg, candidates, DTYPE, device)
    movers = fke_stages.movers(device)
    timed: dict[str, Callable[[], Any]] = {
        **{f"stage {stage}": found.run for stage, found in stages.items()},
        **{f"rate {rate}": run for rate, (run, _) in (products | movers).items()},
    }
    requests = [make_request(cfg, candidates, seed) for seed in range(REQUESTS)]
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        engines = make_engines(Path(folder) / "model", cfg, candidates, streams)
        try:
            for engine in engines.values():
                runner.run(engine.start())
            answers = [runner.run(engine.answer(requests[0])) for engine in engines.values()]
            variants: dict[str, Callable[[], Run]] = {
                build: functools.partial(_drive, runner, engine, requests, streams, seconds)
                for build, engine in engines.items()
            }
            for key, run in timed.items():
                variants[key] = functools.partial(under_load, run, streams, seconds / 4)
            runs = harness.interleave(variants, rounds, quiet)
        finally:
            for engine in engines.values():
                runner.run(engine.drain(0.0))
                engine.join(10.0)
    per_s = {key: float(np.median([run.calls for run in found])) for key, found in runs.items()}
    rates = {rate: work * per_s[f"rate {rate}"] for rate, (_, work) in (products | movers).items()}
    row = {
        "workload": name,
        "config": asdict(cfg),
        "candidates": candidates,
        "streams": streams,
        "dtype": np.dtype(DTYPE).name,
        **make_row(cfg, candidates, {build: runs[build] for build in engines}, rates, tuple(products)),
        "stages": make_stages(stages, {s: per_s[f"stage {s}"] for s in stages}, rates, tuple(products)),
        "published_flops": PUBLISHED_FLOPS[name],
        "max_difference": harness.rounded(difference(answers), 2),
    }
    for line in lines(row):
        print(line)
    return row


def make_row(
    cfg: ClimberConfig,
    candidates: int,
    runs: Mapping[str, Sequence[Run]],
    rates: Mapping[str, float],
    products: Sequence[str],
) -> Row:
    """runs: by build. rates: what the device does in a second. products: names of the rates in FLOPs."""
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
        ranked = [run.calls for run in several]
        found["builds"][build] = {
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
    """What each stage took, with the streams side by side, the least that it could take, and what binds that."""
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
            found.append(Claim("fused-pairs-per-s-long", pairs["fused"], "/s", "higher", PAIRS_PER_S))
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
            sources=(Path(__file__), Path(fke_stages.__file__), Path(flame_serving.__file__)),
            device=jax.default_backend(),
        )
    )
