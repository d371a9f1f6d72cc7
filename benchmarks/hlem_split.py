# SPDX-License-Identifier: Apache-2.0
"""Where the border between embedding rows and kept users should stand, and who finds it (HLEM-17, "must show").

The pool, its pages, their bookkeeping, what is copied and what decides are those of `jgr serve`; time is virtual
(benchmarks/hlem_live.py): an executor with measured costs of HSTU, and a link of a given speed. Users, rows and gaps
between requests are drawn from real logs (benchmarks/hlem_world.py). Costs are multiplied by one number, so that the
executor is busy for BUSY of the time at the split .5 under steady traffic (`cost_scale` in the rows); the latency limit
is .9 of the 99th percentile there, as an operator would set it. 120 epochs of 1 s and 500 requests a second, of which
the first 10 epochs are not judged; a figure is the mean over the epochs of their 99th percentiles, each over 500
requests and more. Every hundredth batch its rows and a user's pages are read back and compared.

The 24 tables are fused into one, as servers fuse them; two runs have them apart, each in pages of its own and read in
a transfer of its own.

The whole run is virtual but for the costs, so that the machine need not be quiet after the first seconds. Where
JGR_HLEM_RUNS names a folder, costs and finished runs are kept there, and a run that was ended goes on.

    JGR_DATA=FOLDER python -m benchmarks.hlem_split [--quick]       kuairand-pure and dlrm-embedding-stats in it
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness, hlem_live, hlem_world
from benchmarks.harness import Benchmark, Claim, Measured, Quiet, Row, rounded
from benchmarks.hlem_live import Epochs, Live
from benchmarks.hlem_world import Costs, World
from jgr.config import MemoryConfig
from jgr.evaluation import bootstrap
from jgr.serving.engine.memory_controller import SHIPPED, make_controller
from jgr.serving.policies.memory_control import Controller, Pid
from jgr.serving.policies.memory_signals import Limits
from jgr.simulation.controller import episodes, workload
from jgr.simulation.controller.epochs import Traffic
from jgr.simulation.controller.workload import Regime

LINKS = {"slow": 300e6, "fast": 600e6}
"""Bytes a second of the emulated links; the fast one is for fixed splits under steady traffic alone."""
STATIC = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Splits that stay: those of the paper's table."""
CONTROLLERS = ("pid", "predictor", "ppo", "full")
RATE, EPOCHS, WARM = 500.0, 120, 10
BUSY, TIGHT = 0.65, 0.9
PROCESSES = 2
FUSED = "rows.table"
SOURCES = (Path(__file__), Path(hlem_live.__file__), Path(hlem_world.__file__), SHIPPED)


class Task(NamedTuple):
    """One run. split: at its begin; controller: static or what moves the border. separate: each table has a file and
    pages of its own, and a batch reads one after the other; else they are fused into one."""

    link: str
    regime: Regime
    split: float
    controller: str
    limit_ms: float
    epochs: int
    seed: int = 0
    separate: bool = False

    @property
    def name(self) -> str:
        return (
            f"static {self.split:.1f}".replace("0.", ".") if self.controller == "static" else self.controller
        )


_state: dict[str, Any] = {}


def begin(folder: str, costs: Costs) -> None:
    """Make what all runs of a process share. folder: with the tables as one file, and as one file each."""
    _state.update(world=hlem_world.make_world(), folder=Path(folder), costs=costs)


def run(task: Task) -> Epochs:
    """Serve a regime's requests, the same for every split and controller; once where finished runs are kept."""
    path = kept(repr((task, _state["costs"])))
    if path is not None and path.exists():
        with np.load(path) as arrays:
            return Epochs(
                **{name: arrays[name] if arrays[name].shape else arrays[name].item() for name in arrays}
            )
    found = _run(task)
    if path is not None:
        np.savez(path, **found._asdict())
    return found


def kept(what: str) -> Path | None:
    """Where a finished run of this code is kept; None: nowhere."""
    folder = os.environ.get("JGR_HLEM_RUNS")
    if not folder:
        return None
    name = hashlib.sha256(f"{harness.source_hash(SOURCES)} {what}".encode()).hexdigest()[:16]
    return Path(folder) / f"{name}.npz"


def measured() -> Costs:
    """Costs of this machine; once where finished runs are kept."""
    path = kept("costs")
    if path is not None and path.exists():
        with np.load(path) as arrays:
            return Costs(tuple(arrays["read"].tolist()), tuple(arrays["grow"].tolist()))
    found = hlem_world.measure_costs()
    if path is not None:
        np.savez(path, **found._asdict())
    return found


def _run(task: Task) -> Epochs:
    world, costs = _state["world"], _state["costs"]
    asked = hlem_world.requests(world, task.regime, RATE, task.epochs, task.seed)
    controller = None if task.controller == "static" else _controller(task, costs)
    table = _state["folder"] if task.separate else _state["folder"] / FUSED
    live = Live(world, costs, table, LINKS[task.link], task.split, controller, task.limit_ms)
    return live.run(asked, task.epochs)


def _controller(task: Task, costs: Costs) -> Controller:
    if task.controller != "pid":
        return make_controller(MemoryConfig(controller=task.controller, limit_ms=task.limit_ms))  # type: ignore[arg-type]
    events = round(hlem_world.MEAN_EVENTS)
    read = events * hlem_world.TABLES * 2 * hlem_world.WIDTH
    user_s = costs.of(0, events) - costs.of(events - 1, events)
    return Pid(Limits(limit_ms=task.limit_ms), row_price=read / LINKS[task.link], user_price=user_s)


def scaled(costs: Costs, folder: str, epochs: int) -> tuple[Costs, float, float]:
    """Costs that keep the executor busy for BUSY at the split .5, by what they were multiplied, and the 99th
    percentile there in ms."""
    factor = 1.0
    for _ in range(2):  # fewer late batches change batches a little
        begin(folder, costs)
        found = run(Task("slow", "steady", 0.5, "static", 1e3, epochs))
        by = max(0.02, (BUSY * epochs - found.link_s) / found.work_s)
        costs = Costs(
            (costs.read[0] * by, costs.read[1] * by, costs.read[2] * by),
            (costs.grow[0] * by, costs.grow[1] * by),
        )
        factor *= by
    begin(folder, costs)
    found = run(Task("slow", "steady", 0.5, "static", 1e3, epochs))
    return costs, factor, judged(found)


def judged(found: Epochs) -> float:
    """The mean of the epochs' 99th percentiles, in ms, without the first epochs."""
    return float(found.p99_ms[min(WARM, len(found.p99_ms) // 2) :].mean())


def measure(quick: bool, quiet: Quiet) -> Measured:
    epochs = 12 if quick else EPOCHS
    with tempfile.TemporaryDirectory() as folder:
        hlem_world.write_table(Path(folder) / FUSED)
        hlem_world.write_tables(Path(folder), hlem_world.make_world().firsts)
        quiet.wait()
        costs, scale, p99_ms = scaled(measured(), folder, 6 if quick else 20)
        limit_ms = TIGHT * p99_ms
        tasks = make_tasks(quick, limit_ms, epochs)
        with ProcessPoolExecutor(
            PROCESSES, multiprocessing.get_context("spawn"), begin, (folder, costs)
        ) as pool:
            found = dict(zip(tasks, pool.map(run, tasks), strict=True))
    rows = [row(task, of, limit_ms, scale) for task, of in found.items()]
    return Measured(claims(found, best_modelled(_state["world"], costs, limit_ms)), rows)


def make_tasks(quick: bool, limit_ms: float, epochs: int) -> list[Task]:
    regimes: Sequence[Regime] = ("steady",) if quick else workload.REGIMES
    slow = [
        Task("slow", regime, split, name, limit_ms, epochs)
        for regime in regimes
        for split, name in (
            *((split, "static") for split in STATIC),
            *((0.5, name) for name in CONTROLLERS),
        )
    ]
    fast = [Task("fast", "steady", split, "static", limit_ms, epochs) for split in STATIC[::2]]
    separate = [
        Task("slow", "steady", 0.5, name, limit_ms, epochs, separate=True) for name in ("static", "full")
    ]
    return [*slow, *fast, *separate]


def row(task: Task, found: Epochs, limit_ms: float, scale: float) -> Row:
    late = slice(min(WARM, len(found.p99_ms) // 2), None)
    return {
        "link": task.link,
        "regime": task.regime,
        "controller": task.name,
        "tables": hlem_world.TABLES if task.separate else 1,
        "p99_ms": rounded(judged(found)),
        "p50_ms": rounded(float(np.median(found.latency_ms))),
        "in_time": rounded(float((found.latency_ms <= limit_ms).mean())),
        "user_hits": rounded(float(found.user_hits[late].mean())),
        "row_hits": rounded(float(found.row_hits[late].mean())),
        "split": rounded(float(found.split[late].mean())),
        "least_split": rounded(float(found.split[late].min())),
        "most_split": rounded(float(found.split[late].max())),
        "busy": rounded(found.busy),
        "requests": len(found.latency_ms),
        "pages_moved": found.moved,
        "read_back": found.checked,
        "limit_ms": rounded(limit_ms),
        "cost_scale": rounded(scale),
    }


def best_modelled(world: World, costs: Costs, limit_ms: float) -> float:
    """The best split of steady traffic by the epoch model, with this pool, popularity and costs."""
    users = tuple(
        workload._fixed(np.ones(len(part)), part / part.sum(), factor=1.0)
        if len(part) <= workload.BINS
        else workload._fixed(*workload.binned(part, workload.BINS))
        for part in (world.shares[: world.hot], world.shares[world.hot :])
    )
    rows = workload.row_popularity(workload.dlrm_rows(hlem_world.data()), hlem_world.ROWS)
    made = workload.world(users, rows)._replace(  # type: ignore[arg-type]
        pool=hlem_live.POOL_BYTES, event_bytes=hlem_world.EVENT_BYTES, row_bytes=2 * hlem_world.WIDTH,
        tables=hlem_world.TABLES, candidates=hlem_world.CANDIDATES, fresh=1.0, link=LINKS["slow"],
        refill=LINKS["slow"] * 0.8, start_s=max(0.0, costs.read[0] + costs.grow[0]), token_s=costs.read[1],
        pair_s=2 * costs.read[2], rate=RATE, epoch_s=hlem_live.EPOCH_S, limit_s=limit_ms / 1e3,
    )  # fmt: skip
    made = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), made)
    steady = Traffic(*(np.full(1, value, np.float32) for value in (0.2, 1.0, hlem_world.MEAN_EVENTS)))
    p99 = np.asarray(episodes.table(made, steady))[0]
    return float(episodes.GRID[p99.argmin()])


def claims(found: dict[Task, Epochs], modelled: float) -> list[Claim]:
    """What the paper says, each against its own target."""
    apart = {task.name: of for task, of in found.items() if task.separate}
    found = {task: of for task, of in found.items() if not task.separate}
    at = {(task.link, task.regime, task.name): of for task, of in found.items()}
    made = [
        _claim(
            "hlem-split-separate-over-fused", apart["static .5"], [at["slow", "steady", "static .5"]], 1.05
        )
    ]
    for link in LINKS:
        means = {
            t.split: judged(of)
            for t, of in found.items()
            if (t.link, t.regime, t.controller) == (link, "steady", "static")
        }
        best = min(means, key=lambda split: means[split])
        ends = min(best - min(means), max(means) - best)
        made += [
            Claim(f"hlem-split-from-the-ends-{link}", rounded(ends), "of the pool", "higher", 0.1),
            Claim(
                f"hlem-split-wrong-over-best-{link}",
                rounded(max(means.values()) / means[best]),
                "x",
                "higher",
                1.2,
            ),
        ]
    for regime in dict.fromkeys(task.regime for task in found):
        static = {
            t.split: of
            for t, of in found.items()
            if (t.link, t.regime, t.controller) == ("slow", regime, "static")
        }
        by = sorted(static, key=lambda split: judged(static[split]))
        full = at["slow", regime, "full"]
        third = [static[split] for split in by[-max(1, len(by) // 3) :]]
        made += [
            _claim(f"hlem-split-full-over-worst-third-{regime}", full, third, 0.8),
            _claim(
                f"hlem-split-full-over-best-static-{regime}",
                full,
                [static[by[0]]],
                1.05 if regime == "steady" else 1.0,
            ),
        ]
        if regime == "steady":
            tails = np.interp(modelled, sorted(static), [judged(static[split]) for split in sorted(static)])
            made.append(
                Claim(
                    "hlem-split-modelled-over-best",
                    rounded(float(tails) / judged(static[by[0]])),
                    "x",
                    "lower",
                    1.05,
                )
            )
    return made


def _claim(name: str, one: Epochs, others: Sequence[Epochs], target: float) -> Claim:
    """The ratio of mean 99th percentiles, with an interval by a paired bootstrap over epochs."""
    late = slice(min(WARM, len(one.p99_ms) // 2), None)
    mine = one.p99_ms[late]
    theirs = np.mean([of.p99_ms[late] for of in others], axis=0)
    chosen = np.random.default_rng(0).integers(0, len(mine), (2000, len(mine)))
    low, high = bootstrap.interval(mine[chosen].mean(1) / theirs[chosen].mean(1))
    ends = (rounded(float(low)), rounded(float(high)))
    return Claim(name, rounded(float(mine.mean() / theirs.mean())), "x", "lower", target, interval=ends)


def plot(rows: Sequence[Row], path: Path) -> None:
    """The 99th percentile by split, a panel for each regime, and where the controllers went."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    regimes = list(dict.fromkeys(row["regime"] for row in rows))
    figure, axes = pyplot.subplots(1, len(regimes), figsize=(4.2 * len(regimes), 3.6), squeeze=False)
    for axis, regime in zip(axes[0], regimes, strict=True):
        for link in LINKS:
            here = [
                r
                for r in rows
                if (r["link"], r["regime"], r["tables"]) == (link, regime, 1) and "static" in r["controller"]
            ]
            axis.plot(
                [r["split"] for r in here], [r["p99_ms"] for r in here], "o-", label=f"static, {link} link"
            )
        for name in CONTROLLERS:
            for r in rows:
                if (r["link"], r["regime"], r["tables"], r["controller"]) == ("slow", regime, 1, name):
                    axis.plot(r["split"], r["p99_ms"], "*", markersize=11, label=name)
        axis.set(title=regime, xlabel="share of embedding rows (mean)", ylabel="P99, ms", yscale="log")
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    harness.main(
        Benchmark(
            "hlem_split",
            measure,
            ("jax", "jaxlib", "numpy"),
            SOURCES,
            plot=plot,
            device=jax.default_backend(),
        )
    )
