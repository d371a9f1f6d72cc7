# SPDX-License-Identifier: Apache-2.0
"""FLAME's proximal data accelerator on a real Redis server: no cache, the cache, and the cache with packed transfer.

A ranking request has a user's history and 128 candidates, whose feature records (12 features, 364 bytes) lie in Redis,
behind a proxy that adds FLAME's network (benchmarks/delay_proxy.py). Candidates are Zipf(1.05) over the items, distinct
within a request. Each path is the engine that `jgr serve` makes of the same model folder, a small Climber with these
features, by default but for:

    no_cache      features.cache_mb=0, one round trip a request; each input of the model is an array of its own
    cache         features.mode=asynchronous (FLAME-2): what is missing is served as default features, and counted
    full          the same, with the engine's executors: all inputs in one buffer (FLAME-6), made after binding to a
                  NUMA node (FLAME-5)
    sync_missing  full, but by the default mode a request waits for what is missing (FLAME-3); shown, not claimed

The first two have executors that allocate each input (benchmarks/flame_serving.py) in the engine's place. Equal CPU
load: every path is driven by random arrivals at the rate at which it keeps 16 % of the machine busy, and throughput is
pairs a second at exactly that load. All of the process counts, the arrivals too, but for XLA's own threads: they run
the model, which the paper's CPUs do not. The process has one core, Redis and the proxy the other. Caches are brought to
their steady state by a time to live of requests in virtual time.

    python -m benchmarks.flame_pda [--quick]
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from benchmarks import delay_proxy, flame_serving, harness, pda_world
from benchmarks.delay_proxy import Network
from benchmarks.flame_serving import ShapeOnDemand
from benchmarks.harness import Benchmark, Claim, Measured, Quiet, Row
from benchmarks.pda_world import CANDIDATES, SCHEMA, Traffic, fill, redis_server
from jgr.features.addresses import open_store
from jgr.features.cache import FeatureCache
from jgr.features.stores import FeatureStore
from jgr.serving.api import RankRequest
from jgr.serving.engine.engine import Engine
from jgr.serving.scorers.executors import ScorerExecutors
from jgr.serving.scorers.serve import ServedScorer

SOURCES = tuple(
    Path(of) for of in (__file__, delay_proxy.__file__, flame_serving.__file__, pda_world.__file__)
)
PATHS = ("no_cache", "cache", "full", "sync_missing")
NETWORK = Network()
FIRST_RATE = 100.0
"""Requests a second, before it is known what they cost."""
CONNECTIONS = 16
"""Connections to the store: more than there are ever round trips under way at once."""
PATIENCE_MS = 5000.0
"""The longest time that requests wait for the store: long enough that a request is served what it waits for."""
LOAD = 0.16 * (os.cpu_count() or 1)
"""The CPU load in cores, of all but the model; the paper's machines stood at 16 %."""


class Setting(NamedTuple):
    """How long is measured. ttl_s: the cache's time to live, for which requests come before anything is timed.

    seconds: of a run.
    """

    items: int = 1_000_000
    cache_mb: float = 512.0
    ttl_s: float = 60.0
    seconds: float = 10.0
    rounds: int = 5


class Clock:
    """A cache's time: stands still while other paths are timed, and can be moved on."""

    def __init__(self) -> None:
        self._now_ns = 0
        self._since_ns: int | None = None

    def __call__(self) -> int:
        return self._now_ns + (0 if self._since_ns is None else time.monotonic_ns() - self._since_ns)

    def advance(self, ns: int) -> None:
        self._now_ns += ns

    @contextmanager
    def going(self) -> Iterator[None]:
        self._since_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self._now_ns, self._since_ns = self(), None


class Switch:
    """A feature store that is near while a cache is brought to its steady state, and far while it is timed."""

    def __init__(self, near: FeatureStore, far: FeatureStore) -> None:
        self.now, self._near, self._far = near, near, far

    def to(self, *, near: bool) -> None:
        self.now = self._near if near else self._far

    def get_many(self, item_ids: Sequence[str]) -> list[bytes | None]:
        return self.now.get_many(item_ids)

    def put_many(self, item_ids: Sequence[str], values: Sequence[bytes]) -> None:
        self.now.put_many(item_ids, values)

    def schema(self) -> str | None:
        return self.now.schema()

    def set_schema(self, text: str) -> None:
        self.now.set_schema(text)

    def close(self) -> None:
        self._near.close()
        self._far.close()


class Served(NamedTuple):
    """The figures of a run. bytes: of the values that the store sent."""

    answers: list[Answer]
    seconds: float
    cpu: CpuTimes
    bytes: int

    @property
    def load(self) -> float:
        return self.cpu.host / self.seconds

    @property
    def pairs_at_load(self) -> float:
        """Pairs a second if the load were LOAD exactly."""
        return len(self.answers) * CANDIDATES / self.cpu.host * LOAD

    @property
    def latencies_ms(self) -> list[float]:
        return [answer.latency_ms for answer in self.answers]


class Answer(NamedTuple):
    """One answer. Its latency counts from the time at which the request was due."""

    latency_ms: float
    missing: int
    stale: int


def make_engine(folder: Path, items: int, address: str, path: str, setting: Setting) -> Engine[ServedScorer]:
    """A path's engine, not yet started."""
    mode = {"no_cache": "synchronous", "sync_missing": "sync_missing"}.get(path, "asynchronous")
    settings = {
        "executors.sizes": CANDIDATES,
        "features.store": address,
        "features.mode": mode,
        "features.cache_mb": 0 if path == "no_cache" else setting.cache_mb,
        "features.ttl_s": setting.ttl_s,
        "features.max_wait_ms": PATIENCE_MS,
        "features.timeout_ms": PATIENCE_MS,
    }
    if mode != "asynchronous":
        settings["features.connections"] = CONNECTIONS
    engine = flame_serving.load(folder, *(f"{name}={value}" for name, value in settings.items()))
    if path in ("full", "sync_missing"):
        return engine
    assert isinstance(engine.served.executors, ScorerExecutors)
    params, cfg = engine.served.executors.programs.params, replace(pda_world.MODEL, n_items=items)
    executors = ShapeOnDemand(cfg, params, lambda n: CANDIDATES, [CANDIDATES], CANDIDATES, schema=SCHEMA)
    return flame_serving.with_executors(engine, executors)


class System:
    """A path's engine under random arrivals. Its cache has a clock and a store that are other ones while it is brought
    to its steady state."""

    def __init__(
        self,
        runner: asyncio.Runner,
        engine: Engine[ServedScorer],
        far: FeatureStore,
        traffic: Traffic,
        setting: Setting,
    ) -> None:
        served = engine.served
        assert served.features is not None
        served.features.close()
        settings = served.config.features
        self._store = Switch(open_store(settings.store, PATIENCE_MS / 1e3), far)
        self._clock, self._runner, self._traffic, self._setting = Clock(), runner, traffic, setting
        ids = engine.catalog.item_ids
        self.features = FeatureCache(self._store, SCHEMA, ids, settings, clock=self._clock)
        self.engine = Engine(replace(served, features=self.features), None)
        self.rate = FIRST_RATE
        runner.run(self.engine.start())

    def settle(self) -> None:
        """Bring the cache to its steady state, and the rate to the load that is wanted."""
        for _ in range(2):
            if self.engine.served.config.features.cache_mb:
                self._warm(round(self.rate * self._setting.ttl_s), round(1e9 / self.rate))
            for _ in range(2):
                self.rate = self.run(self._setting.seconds / 4).pairs_at_load / CANDIDATES

    def _warm(self, count: int, gap_ns: int) -> None:
        self._store.to(near=True)
        for request in self._traffic.requests(count):
            self._clock.advance(gap_ns)
            self.features.get_many(request.rows)
        self._store.to(near=False)

    def run(self, seconds: float | None = None) -> Served:
        """Send requests at random times, at the present rate, for so many seconds."""
        seconds = seconds or self._setting.seconds
        count = max(1, round(self.rate * seconds))
        requests = [request.asked() for request in self._traffic.requests(count)]
        due = np.cumsum(np.random.default_rng(count).exponential(seconds / count, count)).tolist()
        self._store.to(near=False)
        with self._clock.going():
            received, cpu, start = self.features.counts().bytes, cpu_times(), time.perf_counter()
            answers = self._runner.run(self._serve(requests, [start + at for at in due]))
            elapsed_s, used = time.perf_counter() - start, cpu_times() - cpu
        return Served(answers, elapsed_s, used, self.features.counts().bytes - received)

    async def _serve(self, requests: Sequence[RankRequest], due: Sequence[float]) -> list[Answer]:
        async def one(request: RankRequest, due_s: float) -> Answer:
            usage = (await self.engine.answer(request)).usage
            latency_ms = (time.perf_counter() - due_s) * 1e3
            return Answer(latency_ms, usage.feature_missing or 0, usage.feature_stale or 0)

        asked = []
        for request, at in zip(requests, due, strict=True):
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            asked.append(asyncio.ensure_future(one(request, at)))
        return await asyncio.gather(*asked)

    def close(self) -> None:
        self._runner.run(self.engine.drain(0.0))
        self.engine.join(10.0)


class CpuTimes(NamedTuple):
    """CPU seconds of the threads that Python started, and of XLA's own, which run the model."""

    host: float
    model: float

    def __sub__(self, other: CpuTimes) -> CpuTimes:
        return CpuTimes(self.host - other.host, self.model - other.model)


def cpu_times() -> CpuTimes:
    python = {thread.native_id for thread in threading.enumerate()}
    host = model = 0.0
    for path in Path("/proc/self/task").iterdir():
        try:
            seconds = int((path / "schedstat").read_text().split()[0]) / 1e9
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread has ended since it was listed
        if int(path.name) in python:
            host += seconds
        else:
            model += seconds
    return CpuTimes(host, model)


def measure(quick: bool, quiet: Quiet) -> Measured:
    setting = Setting(items=20_000, cache_mb=16.0, ttl_s=4.0, seconds=3.0, rounds=1) if quick else Setting()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0]})
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        socket = stack.enter_context(redis_server(folder, cores[-1]))
        port = stack.enter_context(delay_proxy.delay_proxy(socket, NETWORK, cores[-1]))
        near, far = f"unix://{socket}", f"redis://127.0.0.1:{port}/0"

        filling = open_store(near, PATIENCE_MS / 1e3, create=True)
        fill(filling, setting.items)
        filling.close()
        runner = stack.enter_context(asyncio.Runner())
        flame_serving.save(folder / "model", replace(pda_world.MODEL, n_items=setting.items))
        systems = {}
        for path in PATHS:
            engine = make_engine(folder / "model", setting.items, near, path, setting)
            store = open_store(far, PATIENCE_MS / 1e3)
            systems[path] = System(runner, engine, store, Traffic(setting.items), setting)
            stack.callback(systems[path].close)
        agree(runner, [system.engine for system in systems.values()])
        for system in systems.values():
            quiet.wait()
            system.settle()
        runs = harness.interleave(
            {name: system.run for name, system in systems.items()}, setting.rounds, quiet
        )
    os.sched_setaffinity(0, cores)
    rows = [row(name, runs[name], setting) for name in runs]
    return Measured(claims(rows), rows)


def agree(runner: asyncio.Runner, engines: Sequence[Engine[ServedScorer]]) -> None:
    """Check that all paths give a request the same scores, once its features are cached."""
    request = next(Traffic(CANDIDATES).requests(1)).asked()
    found = []
    for engine in engines:
        answer = runner.run(engine.answer(request))
        while answer.usage.feature_missing:
            answer = runner.run(engine.answer(request))
        found.append({item.item_id: item.score for item in answer.items})
    for scores in found:
        assert scores.keys() == found[0].keys()
        np.testing.assert_allclose([scores[item] for item in found[0]], list(found[0].values()), atol=1e-5)


def row(name: str, runs: Sequence[Served], setting: Setting) -> Row:
    latencies = [ms for run in runs for ms in run.latencies_ms]
    items = len(latencies) * CANDIDATES
    seconds = sum(run.seconds for run in runs)
    return {
        "path": name,
        "items": setting.items,
        "ttl_s": setting.ttl_s,
        "requests": len(latencies),
        "requests_per_s": harness.rounded(len(latencies) / seconds),
        "host_load_cores": harness.spread(run.load for run in runs),
        "pairs_per_s_at_load": harness.spread(run.pairs_at_load for run in runs),
        "host_cpu_us": harness.rounded(1e6 * sum(run.cpu.host for run in runs) / len(latencies)),
        "model_cpu_us": harness.rounded(1e6 * sum(run.cpu.model for run in runs) / len(latencies)),
        "mean_ms": harness.spread(float(np.mean(run.latencies_ms)) for run in runs),
        "p50_ms": harness.rounded(float(np.percentile(latencies, 50))),
        "p99_ms": harness.rounded(float(np.percentile(latencies, 99))),
        "network_mb_per_s": harness.rounded(sum(run.bytes for run in runs) / seconds / 1e6),
        "bytes_per_pair": harness.rounded(sum(run.bytes for run in runs) / items),
        "missing_share": harness.rounded(
            sum(answer.missing for run in runs for answer in run.answers) / items, 3
        ),
        "stale_share": harness.rounded(
            sum(answer.stale for run in runs for answer in run.answers) / items, 3
        ),
    }


def claims(rows: Sequence[Row]) -> list[Claim]:
    of = {row["path"]: row for row in rows}
    base, full = of["no_cache"], of["full"]
    pairs = full["pairs_per_s_at_load"]["median"] / base["pairs_per_s_at_load"]["median"]
    latency = base["mean_ms"]["median"] / full["mean_ms"]["median"]
    return [
        Claim(
            "pda-throughput-over-no-cache-at-equal-cpu-load", harness.rounded(pairs, 3), "x", "higher", 1.9
        ),
        Claim("pda-mean-latency-of-no-cache-over-full", harness.rounded(latency, 3), "x", "higher", 1.7),
    ]


if __name__ == "__main__":
    # One core: XLA counts them when it starts.
    ALL = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(ALL)})
    jax.devices()
    os.sched_setaffinity(0, ALL)
    harness.main(
        Benchmark(
            name="flame_pda",
            measure=measure,
            packages=("jax", "jaxlib", "numpy", "redis", "hiredis", "uvloop"),
            sources=tuple(
                Path(of)
                for of in (__file__, delay_proxy.__file__, flame_serving.__file__, pda_world.__file__)
            ),
            device=jax.default_backend(),
        )
    )
