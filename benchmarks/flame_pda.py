# SPDX-License-Identifier: Apache-2.0
"""FLAME's proximal data accelerator on a real Redis server: no cache, the cache, and the cache with packed transfer.

A ranking request has a user's history and 128 candidates, whose feature records (12 features, 364 bytes) lie in Redis,
behind a proxy that adds FLAME's network (benchmarks/delay_proxy.py). Candidates are Zipf(1.05) over the items, distinct
within a request. The paths, each with threads that take requests in turn, get the records and run the model:

    no_cache      one round trip a request; each input of the model is an array of its own
    cache         the asynchronous cache (FLAME-2): what is missing is served as default features, and counted
    full          cache, and all inputs in one buffer (FLAME-6), made after binding to a NUMA node (FLAME-5)
    sync_missing  full, but a request waits for what is missing (FLAME-3); shown, not claimed

Equal CPU load: every path is driven by random arrivals at the rate at which its threads keep 16 % of the machine
busy, and throughput is pairs a second at exactly that load. Left out are the thread that makes the arrivals, and
XLA's own ones: they run the model, which the paper's CPUs do not. The process has one core, Redis and the proxy the
other. The model is a small stand-in, a table and two layers over the features: no model of jgr reads side features
yet. Caches are brought to their steady state by a time to live of requests in virtual time.

    python -m benchmarks.flame_pda [--quick]
"""

from __future__ import annotations

import os
import queue
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from benchmarks import delay_proxy, harness, pda_world
from benchmarks.delay_proxy import Network
from benchmarks.harness import Benchmark, Claim, Measured, Quiet, Row
from benchmarks.pda_world import (
    CANDIDATES,
    SCHEMA,
    Device,
    Had,
    Packed,
    Request,
    Separate,
    Traffic,
    UInt32,
    fill,
    names,
    parameters,
    random_records,
    redis_server,
)
from jgr.config import FeaturesConfig
from jgr.features import numa
from jgr.features.addresses import open_store
from jgr.features.cache import FeatureCache
from jgr.features.stores import FeatureStore

NETWORK = Network()
FIRST_RATE = 300.0
"""Requests a second, before it is known what they cost."""
THREADS, WAITING_THREADS = 2, 16
"""Of a path: waiting ones are more than there are ever round trips under way at once."""
LOAD = 0.16 * (os.cpu_count() or 1)
"""In cores, of all but the model; the paper's machines stood at 16 %."""


class Setting(NamedTuple):
    """ttl_s: of the cache, and of what is requested before anything is timed. seconds: of a run."""

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
    """A store near by while a cache is brought to its steady state, and the far one while it is timed."""

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
    """What a run took. bytes: of the values that the store sent."""

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


class Source(Protocol):
    """Where records come from; `get` is called in the serving threads."""

    def get(self, request: Request, out: UInt32 | None) -> Had: ...

    def bytes(self) -> int:
        """Of the values that the store has sent so far."""

    def warm(self, requests: Iterable[Request], gap_ns: int) -> None: ...
    def going(self) -> AbstractContextManager[None]: ...
    def close(self) -> None: ...


class Uncached:
    """A round trip for every request."""

    def __init__(self, store: FeatureStore) -> None:
        self._store, self._bytes = store, 0

    def get(self, request: Request, out: UInt32 | None) -> Had:
        values = self._store.get_many(request.ids)
        found = [SCHEMA.default if value is None else value for value in values]
        if SCHEMA.faults(found):
            raise harness.Missing("the store holds something else than was put there")
        records = SCHEMA.records(found)
        self._bytes += records.nbytes
        if out is not None:
            out[:] = records.view(np.uint32).reshape(out.shape)
        return Had(records, values.count(None), 0)

    def bytes(self) -> int:
        return self._bytes

    def warm(self, requests: Iterable[Request], gap_ns: int) -> None:
        pass

    def going(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        self._store.close()


class Cached:
    """The cache, with a clock and a store that are other ones while it is brought to its steady state."""

    def __init__(self, near: FeatureStore, far: FeatureStore, setting: Setting, mode: str) -> None:
        config: dict[str, Any] = {"mode": mode, "cache_mb": setting.cache_mb, "ttl_s": setting.ttl_s}
        self._clock, self._store = Clock(), Switch(near, far)
        self._cache = FeatureCache(
            self._store, SCHEMA, names(setting.items), FeaturesConfig(**config), clock=self._clock
        )

    def get(self, request: Request, out: UInt32 | None) -> Had:
        features = self._cache.get_many(request.rows, out=out)
        return Had(features.records, features.missing, features.stale)

    def bytes(self) -> int:
        return self._cache.counts().bytes

    def warm(self, requests: Iterable[Request], gap_ns: int) -> None:
        self._store.to(near=True)
        for request in requests:
            self._clock.advance(gap_ns)
            self._cache.get_many(request.rows)
        self._store.to(near=False)

    def going(self) -> AbstractContextManager[None]:
        return self._clock.going()

    def close(self) -> None:
        self._cache.close()


class Answer(NamedTuple):
    """Latency counts from the time that the request was due."""

    latency_ms: float
    missing: int
    stale: int


class System:
    """A path from request to scores: threads that take requests in turn, each with buffers of its own."""

    def __init__(
        self,
        source: Source,
        device: type[Separate | Packed],
        threads: int,
        traffic: Traffic,
        setting: Setting,
    ) -> None:
        self.source, self._device, self._traffic, self._setting = source, device, traffic, setting
        self.rate = FIRST_RATE
        self._due: queue.SimpleQueue[tuple[Request, float] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Answer | BaseException] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def settle(self) -> None:
        """Bring the cache to its steady state, and the rate to the load that is wanted."""
        for _ in range(2):
            count = round(self.rate * self._setting.ttl_s)
            self.source.warm(self._traffic.requests(count), round(1e9 / self.rate))
            for _ in range(2):
                self.rate = self.run(self._setting.seconds / 4).pairs_at_load / CANDIDATES

    def run(self, seconds: float | None = None) -> Served:
        """Random arrivals at the rate. This thread makes them, and its time does not count."""
        seconds = seconds or self._setting.seconds
        count = max(1, round(self.rate * seconds))
        requests = list(self._traffic.requests(count))
        due = np.cumsum(np.random.default_rng(count).exponential(seconds / count, count)).tolist()
        with self.source.going():
            received, cpu, start = self.source.bytes(), cpu_times(), time.perf_counter()
            for request, at in zip(requests, due, strict=True):
                time.sleep(max(0.0, start + at - time.perf_counter()))
                self._due.put((request, start + at))
            answers = [self._answers.get() for _ in requests]
            elapsed_s, used = time.perf_counter() - start, cpu_times() - cpu
        good = [answer for answer in answers if isinstance(answer, Answer)]
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return Served(good, elapsed_s, used, self.source.bytes() - received)

    def _serve(self) -> None:
        numa.bind_thread()  # before it makes its buffers
        device: Device = self._device(parameters())
        while (asked := self._due.get()) is not None:
            request, due_s = asked
            try:
                _, had = device.run(request, self.source.get)
                self._answers.put(Answer((time.perf_counter() - due_s) * 1e3, had.missing, had.stale))
            except Exception as error:
                self._answers.put(error)

    def close(self) -> None:
        for _ in self._threads:
            self._due.put(None)
        for thread in self._threads:
            thread.join()
        self.source.close()


class CpuTimes(NamedTuple):
    """CPU seconds of threads that Python started, but for the calling one, and of XLA's own, which run the model."""

    host: float
    model: float

    def __sub__(self, other: CpuTimes) -> CpuTimes:
        return CpuTimes(self.host - other.host, self.model - other.model)


def cpu_times() -> CpuTimes:
    python = {thread.native_id for thread in threading.enumerate()}
    host = model = 0.0
    for path in Path("/proc/self/task").iterdir():
        seconds = int((path / "schedstat").read_text().split()[0]) / 1e9
        if int(path.name) == threading.get_native_id():
            continue
        if int(path.name) in python:
            host += seconds
        else:
            model += seconds
    return CpuTimes(host, model)


def measure(quick: bool, quiet: Quiet) -> Measured:
    setting = Setting(items=20_000, cache_mb=16.0, ttl_s=4.0, seconds=3.0, rounds=1) if quick else Setting()
    check()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0]})
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        socket = stack.enter_context(redis_server(folder, cores[-1]))
        port = stack.enter_context(delay_proxy.delay_proxy(socket, NETWORK, cores[-1]))
        near, far = f"unix://{socket}", f"redis://127.0.0.1:{port}/0"

        def store(address: str) -> FeatureStore:
            return open_store(address, 5.0)

        def cached(mode: str) -> Cached:
            return Cached(store(near), store(far), setting, mode)

        filling = store(near)
        fill(filling, setting.items)
        filling.close()
        traffic = Traffic(setting.items)
        make: dict[str, tuple[Source, type[Separate | Packed], int]] = {
            "no_cache": (Uncached(store(far)), Separate, WAITING_THREADS),
            "cache": (cached("asynchronous"), Separate, THREADS),
            "full": (cached("asynchronous"), Packed, THREADS),
            "sync_missing": (cached("sync_missing"), Packed, WAITING_THREADS),
        }
        systems = {name: System(*parts, traffic, setting) for name, parts in make.items()}
        for system in systems.values():
            stack.callback(system.close)
        for system in systems.values():
            quiet.wait()
            system.settle()
        runs = harness.interleave(
            {name: system.run for name, system in systems.items()}, setting.rounds, quiet
        )
    os.sched_setaffinity(0, cores)
    rows = [row(name, runs[name], setting) for name in runs]
    return Measured(claims(rows), rows)


def check() -> None:
    """Both ways to the device give the same scores."""
    request = next(Traffic(1000).requests(1))
    content = b"".join(random_records(CANDIDATES, np.random.default_rng(2)))
    had = Had(np.frombuffer(content, SCHEMA.dtype), 0, 0)

    def get(request: Request, out: UInt32 | None) -> Had:
        if out is not None:
            out[:] = np.frombuffer(content, np.uint32).reshape(out.shape)
        return had

    separate, packed = (device(parameters()).run(request, get)[0] for device in (Separate, Packed))
    np.testing.assert_allclose(packed, separate, rtol=1e-5, atol=1e-5)


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
            sources=(Path(__file__), Path(delay_proxy.__file__), Path(pda_world.__file__)),
            device=jax.default_backend(),
        )
    )
