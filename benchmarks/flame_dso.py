# SPDX-License-Identifier: Apache-2.0
"""FLAME's dynamic stream orchestrator: requests of mixed sizes on executors with explicit shapes (FLAME-10..13).

The model is FLAME's long Climber. A request has a user's history of 1024 events and n candidates; n is one of the
paper's 128, 256, 512 and 1024, or anything from 1 to 1024, each as likely. ACTIVE users come in turn, VISITS times each
with the same history, and then others. All paths are the engine that `jgr serve` makes of a model folder, with as many
threads at work (STREAMS) and as many requests in flight; they differ in what computes, by `executors.share_user` or by
executors of the baselines' own:

    dso           executors of fixed sizes, split by measured costs; the user's part once a request (M-FALCON), a run of
                  its own, or in the only part
    dso_per_part  the same, but each part computes the user's part, as published (FLAME-11)
    dso_cached    the same as dso, but users' parts are kept between requests, which FLAME leaves for later
    pow2          FLAME-13 (b): padded to a power of two, all programs compiled, nothing preallocated
    pad_1024      FLAME-13 (c): padded to 1024; shown, not claimed
    implicit      FLAME-13 (a): a program for every n, compiled when it comes, the last 16 kept; shown, not claimed

The baselines compute the user's part with the candidates, in one program. What is claimed is dso over pow2 where n is
anything; with the paper's sizes there is no padding to save. `implicit` is warm where four sizes come, and mostly
compiles where all do: recompiling costs more than TensorRT's shape inference does, so it stands for nothing of the
paper's. In each round all paths answer the same requests, from IN_FLIGHT clients that ask again at once.

    python -m benchmarks.flame_dso [--quick]
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from benchmarks import flame_serving, harness
from benchmarks.flame_serving import STREAMS, ShapeOnDemand
from benchmarks.harness import Benchmark, Claim, Measured, Quiet, Row
from jgr.models import climber
from jgr.models.climber import ClimberConfig
from jgr.models.scorers import ScorerConfig
from jgr.serving.api import RankRequest
from jgr.serving.engine.engine import Engine
from jgr.serving.scorers.executors import ScorerExecutors
from jgr.serving.scorers.serve import ServedScorer

Mix = Literal["four_sizes", "uniform"]
MIXES: tuple[Mix, ...] = ("four_sizes", "uniform")
FOUR_SIZES = (128, 256, 512, 1024)
LARGEST = 1024
IN_FLIGHT = 6
VISITS, ACTIVE = 4, 16
N_ITEMS = 20_000
START_S = 1_700_000_000

MODEL = replace(climber.LONG, n_items=N_ITEMS)
"""FLAME's `long` configuration, the one of its DSO test."""
SHARES = {"dso": "request", "dso_per_part": "part", "dso_cached": "cache"}


@dataclass(frozen=True)
class Setting:
    """How much is measured. sizes: of the executors. smallest: the least power of two that candidates are padded to.

    requests: in a round. cold: how many of them `implicit` answers where it compiles for each.
    """

    cfg: ClimberConfig = MODEL
    sizes: tuple[int, ...] = (32, 64, 128, 256, 384, 512, 640, 768, 896, 1024)
    smallest: int = 1
    requests: int = 2 * ACTIVE * VISITS
    rounds: int = 5
    cold: int = 12
    cached_users: int = 24


class Traffic:
    """Requests without end: ACTIVE users in turn, VISITS times each; candidates distinct within a request."""

    def __init__(self, mix: Mix, cfg: ScorerConfig, seed: int = 0) -> None:
        self._mix, self._history, self._seed = mix, cfg.max_items, seed
        self._rng = np.random.default_rng(seed)
        self._ids = np.array([str(row) for row in range(cfg.n_items)], object)

    def __iter__(self) -> Iterator[RankRequest]:
        ids = self._ids
        for first in itertools.count(step=ACTIVE):
            users = [(first + at, *self._user()) for at in range(ACTIVE)]
            for user, history, times in users * VISITS:
                candidates = ids[self._rng.choice(len(ids), self.size(), replace=False)].tolist()
                yield RankRequest(
                    history=history, history_times=times, time=times[-1], candidates=candidates,
                    user_id=f"{self._seed}:{user}", top_k=min(10, len(candidates)),
                )  # fmt: skip

    def _user(self) -> tuple[list[str | int], list[int]]:
        """A full history of a month, and its times."""
        history = self._ids[self._rng.integers(0, len(self._ids), self._history)]
        times = START_S + np.sort(self._rng.integers(0, 30 * 86_400, self._history))
        return history.tolist(), times.tolist()

    def size(self) -> int:
        """Draw the number of candidates of a request."""
        if self._mix == "uniform":
            return int(self._rng.integers(1, LARGEST + 1))
        return int(self._rng.choice(FOUR_SIZES))


@dataclass
class Run:
    """The figures of one round of one path."""

    latencies_ms: list[float]
    pairs: int
    seconds: float
    padding: float
    wait_ms: float
    cached: int

    @property
    def pairs_per_s(self) -> float:
        return self.pairs / self.seconds


class System:
    """A path's engine, and clients that ask it. Runs of all paths take turns on one event loop."""

    def __init__(self, engine: Engine[ServedScorer], mix: Mix, cfg: ScorerConfig, requests: int) -> None:
        self.engine, self._requests = engine, requests
        self._traffic = (Traffic(mix, cfg, seed) for seed in itertools.count())

    async def run(self) -> Run:
        """The next round's requests."""
        requests = list(itertools.islice(next(self._traffic), self._requests))
        counted, found, left = self._counts(), Run([], 0, 0.0, 0.0, 0.0, 0), iter(requests)
        start = time.perf_counter()

        async def client() -> None:
            for request in left:
                asked = time.perf_counter()
                answer = await self.engine.answer(request)
                found.latencies_ms.append((time.perf_counter() - asked) * 1e3)
                found.pairs += len(request.candidates)
                found.cached += answer.usage.cached_tokens > 0

        await asyncio.gather(*(client() for _ in range(IN_FLIGHT)))
        found.seconds = time.perf_counter() - start
        pairs, padding, waited_s, parts = (
            now - then for now, then in zip(self._counts(), counted, strict=True)
        )
        found.padding, found.wait_ms = padding / (pairs + padding), 1e3 * waited_s / parts
        return found

    def _counts(self) -> tuple[float, float, float, float]:
        """The counts so far: pairs, padding, seconds that parts waited for executors, and parts."""
        read = self.engine.metrics.registry.get_sample_value
        wait = [read(f"jgr_executor_wait_seconds_{name}") or 0.0 for name in ("sum", "count")]
        executors: Any = self.engine.served.executors
        if isinstance(executors, ShapeOnDemand):
            return executors.pairs, executors.padding, wait[0], wait[1]
        of = [read("jgr_pairs_total", {"of": name}) or 0.0 for name in ("candidates", "padding")]
        return of[0], of[1], wait[0], wait[1]


def make_engine(path: str, setting: Setting, folder: Path) -> Engine[ServedScorer]:
    """A path's engine, not yet started: as the folder is served, or with a baseline's executors."""
    cfg, sizes = setting.cfg, ",".join(map(str, setting.sizes))
    users_mb = setting.cached_users * 2 * 4 * cfg.layers * cfg.max_items * cfg.hidden / 2**20
    settings = [f"model.name={path}", f"executors.streams={STREAMS}", f"executors.number={STREAMS}"]
    settings += [f"executors.sizes={sizes}", f"cache.device_mb={users_mb * 1.1}"]
    if path in SHARES:
        return flame_serving.load(folder, *settings, f"executors.share_user={SHARES[path]}")
    engine = flame_serving.load(folder, *settings)
    assert isinstance(engine.served.executors, ScorerExecutors)
    params = engine.served.executors.programs.params
    powers = [1 << at for at in range(LARGEST.bit_length()) if 1 << at >= setting.smallest]
    padded = {
        "pow2": (lambda n: max(setting.smallest, 1 << (n - 1).bit_length()), powers),
        "pad_1024": (lambda n: LARGEST, [LARGEST]),
        "implicit": (lambda n: n, FOUR_SIZES),
    }[path]
    return flame_serving.with_executors(engine, ShapeOnDemand(cfg, params, *padded, LARGEST))


PATHS = ("dso", "dso_per_part", "dso_cached", "pow2", "pad_1024", "implicit")
QUICK_PATHS = PATHS[:4]


def measure(quick: bool, quiet: Quiet) -> Measured:
    setting = Setting(requests=8, rounds=1, sizes=(128, 1024), smallest=512) if quick else Setting()
    cfg, rows = setting.cfg, list[Row]()
    with tempfile.TemporaryDirectory() as folder:
        flame_serving.save(Path(folder) / "model", cfg)
        paths = QUICK_PATHS if quick else PATHS
        engines = {path: make_engine(path, setting, Path(folder) / "model") for path in paths}
    with asyncio.Runner() as runner:
        try:
            for path, engine in engines.items():
                runner.run(engine.start())
                harness.note(f"{path} is compiled")
            agree(runner, engines, cfg)
            for mix in MIXES:
                rows += measure_mix(mix, engines, setting, runner, quiet)
        finally:
            for engine in engines.values():
                runner.run(engine.drain(0.0))
                engine.join(10.0)
    return Measured(claims(rows), rows)


def measure_mix(
    mix: Mix,
    engines: Mapping[str, Engine[ServedScorer]],
    setting: Setting,
    runner: asyncio.Runner,
    quiet: Quiet,
) -> list[Row]:
    compiles = "implicit" if mix == "uniform" else None
    systems = {
        path: System(engine, mix, setting.cfg, setting.cold if path == compiles else setting.requests)
        for path, engine in engines.items()
    }
    runs = harness.interleave(
        {path: partial(_run, runner, system) for path, system in systems.items()},
        setting.rounds,
        quiet,
        once=[path for path in systems if path == compiles],
    )
    return [row(mix, path, runs[path], systems[path]) for path in systems]


def _run(runner: asyncio.Runner, system: System) -> Run:
    return runner.run(system.run())


def agree(runner: asyncio.Runner, engines: Mapping[str, Engine[ServedScorer]], cfg: ScorerConfig) -> None:
    """Check that all paths give a request the same scores, except `implicit`, which would compile for it."""
    request = next(iter(Traffic("uniform", cfg, seed=9)))
    answers = [runner.run(engine.answer(request)) for path, engine in engines.items() if path != "implicit"]
    scores = {item.item_id: item.score for item in answers[0].items}
    for item in [item for answer in answers for item in answer.items]:
        np.testing.assert_allclose(item.score, scores.get(item.item_id, item.score), atol=1e-3)


def row(mix: Mix, path: str, runs: Sequence[Run], system: System) -> Row:
    executors: Any = system.engine.served.executors
    latencies_ms = [ms for run in runs for ms in run.latencies_ms]
    found: Row = {
        "mix": mix,
        "path": path,
        "streams": STREAMS,
        "in_flight": IN_FLIGHT,
        "requests": len(latencies_ms),
        "pairs_per_s": harness.spread(run.pairs_per_s for run in runs),
        "mean_ms": harness.spread(float(np.mean(run.latencies_ms)) for run in runs),
        "p50_ms": harness.rounded(float(np.percentile(latencies_ms, 50))),
        "p99_ms": harness.rounded(float(np.percentile(latencies_ms, 99))),
        "padding_share": harness.rounded(float(np.mean([run.padding for run in runs])), 3),
        "executor_wait_ms": harness.rounded(float(np.mean([run.wait_ms for run in runs])), 3),
    }
    if isinstance(executors, ShapeOnDemand):
        found["programs_compiled"] = executors.compiled
    else:
        found["costs_ms"] = {str(size): harness.rounded(s * 1e3, 3) for size, s in executors.costs.items()}
        found["costs_with_user_ms"] = {
            str(size): harness.rounded(s * 1e3, 3) for size, s in executors.whole.items()
        }
        found["cached_share"] = harness.rounded(sum(run.cached for run in runs) / len(latencies_ms), 3)
    return found


def claims(rows: Sequence[Row]) -> list[Claim]:
    of = {(row["mix"], row["path"]): row for row in rows}

    def ratio(mix: Mix, path: str, name: str) -> float:
        ours, base = (of[mix, each][name] for each in (path, "pow2"))
        return float(ours / base if name == "p99_ms" else ours["median"] / base["median"])

    p99 = max(ratio(mix, "dso", "p99_ms") for mix in MIXES)
    found = [
        ("dso-throughput-over-power-of-two-uniform-mix", ratio("uniform", "dso", "pairs_per_s"), "higher", 1.3),
        ("dso-p99-to-power-of-two-worse-mix", p99, "lower", 1.0),
        (
            "dso-throughput-with-cached-users-over-power-of-two-uniform-mix",
            ratio("uniform", "dso_cached", "pairs_per_s"), "higher", 1.3,
        ),
    ]  # fmt: skip
    if jax.default_backend() == "gpu":
        four = ratio("four_sizes", "dso", "pairs_per_s")
        found.append(("dso-throughput-over-power-of-two-four-sizes", four, "higher", 1.3))
        mean = 1 / ratio("four_sizes", "dso", "mean_ms")
        found.append(("dso-mean-latency-of-power-of-two-over-dso-four-sizes", mean, "higher", 1.7))
    return [Claim(id, harness.rounded(value, 3), "x", better, target) for id, value, better, target in found]  # type: ignore[arg-type]


if __name__ == "__main__":
    harness.main(
        Benchmark(
            name="flame_dso",
            measure=measure,
            packages=("jax", "jaxlib", "numpy"),
            sources=(Path(__file__), Path(flame_serving.__file__)),
            device=jax.default_backend(),
        )
    )
