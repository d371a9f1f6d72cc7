# SPDX-License-Identifier: Apache-2.0
"""Engines that serve a BAT workload: a model with random weights, a catalog of titles, users with histories.

The title of an item has one token less than the item: the item's own token ends it. Times do not depend on the weights,
so these are random.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import tokenizers

from jgr.catalog.catalog import Catalog, save_catalog
from jgr.config import Config, TrainConfig, override
from jgr.models import checkpoint, decoder, params
from jgr.models.decoder import DecoderConfig
from jgr.prompt.tokens import Tokenizer
from jgr.serving.api import Answer, RankRequest
from jgr.serving.decoders.loading import load_engine
from jgr.serving.policies.jobs import Job
from jgr.traffic.histories import Histories
from jgr.traffic.workloads import Access, Traffic, Workload
from jgr.training.generator import decoder_config

WORDS = 500
SYSTEMS = {"RE": "none", "UP": "user", "IP": "item", "cache_agnostic": "cache_agnostic", "BAT": "hotness"}
"""The paper's systems and the cache policy that each is here. UP and IP evict what was used least recently."""
MODEL = TrainConfig(hidden=384, layers=2, heads=4, kv_heads=1, head_dim=32, mlp=1280)
"""Wide layers and narrow heads: besides attention, a new token costs about four times what its attention to 1500 others
costs; in Qwen2-1.5B it is ten times. In a model whose attention dominates, reuse would save little."""


def write_model(folder: Path, catalog: Catalog, shape: TrainConfig, longest: int, seed: int) -> DecoderConfig:
    """Write a model folder with random weights, whose tokenizer knows WORDS words and the catalog's symbols.

    longest: positions that it is made for. Returns what it is.
    """
    words = ["<pad>", "<bos>", "<sid>", "<unk>", *(f"w{n}" for n in range(WORDS)), *catalog.symbols[0]]
    inner = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({str(word): at for at, word in enumerate(words)}, unk_token="<unk>")
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = [str(word) for word in words if str(word).startswith("<")]
    inner.add_special_tokens([tokenizers.AddedToken(word, normalized=False) for word in special])
    cfg = decoder_config(shape, len(words), longest)

    def write_beside(folder: Path) -> None:
        Tokenizer(inner).save(folder / "tokenizer.json")
        save_catalog(catalog, folder / "catalog.jsonl")

    checkpoint.save(folder, cfg, params.initialize(decoder.spec(cfg), jax.random.key(seed)), write_beside)
    return cfg


class World:
    """A workload's users and items as a model folder and requests. speed: of the trace's clock, see Traffic."""

    def __init__(self, folder: Path, workload: Workload, speed: float, seed: int = 0) -> None:
        self.folder, self.traffic, self.speed, self._seed = folder, Traffic(workload, seed), speed, seed
        rng = np.random.default_rng(seed)
        lengths = self.traffic.item_tokens
        titles = [" ".join(f"w{word}" for word in rng.integers(0, WORDS, n - 1)) for n in lengths.tolist()]
        names = [[f"<i_{row}>"] for row in range(workload.items)]
        self.catalog = Catalog.build(
            [str(row) for row in range(workload.items)], names, [{"title": title} for title in titles]
        )
        write_model(folder, self.catalog, MODEL, 16384, seed)
        self._histories = Histories(self.traffic, seed)

    def config(self, policy: str, device_mb: float, cache: str, *settings: str) -> Config:
        """The configuration that serves the world under a cache policy. cache: the folder of compiled programs."""
        workload = self.traffic.workload
        return override(
            Config(),
            f"model.path={self.folder}",
            f"model.compilation_cache={cache}",
            "prompt.template=<bos>{history}",
            "prompt.item={title}{sid}",
            "prompt.max_items=16384",
            "server.max_history=16384",
            "rank.method=item_token",
            "rank.item={title}{sid}",
            f"rank.item_span={workload.max_item_tokens}",
            "rank.requests=8",
            "rank.tokens=512,1024,1536,2048,4096,9216",
            "rank.context=8192",
            f"rank.candidates={8 * workload.candidates}",
            "batching.max_tokens=4096",
            f"cache.policy={policy}",
            f"cache.device_mb={device_mb}",
            f"cache.window_s={300 / self.speed}",
            "cache.shadow=0",
            "profiles.batch=1",
            "profiles.tokens=64",
            *settings,
        )

    @property
    def item_bytes(self) -> int:
        """The bytes of the KV of all items."""
        token = 2 * MODEL.layers * MODEL.kv_heads * MODEL.head_dim * 4
        return int(self.traffic.item_tokens.sum()) * token

    def request(self, access: Access) -> RankRequest:
        return self._histories.request(access)


class Served(NamedTuple):
    """What a run of requests took. tokens: the sum over all prompts; latency_ms: one for each request."""

    seconds: float
    tokens: int
    cached_tokens: int
    computed_tokens: int
    by_user: int
    latency_ms: list[float]

    @property
    def qps(self) -> float:
        return len(self.latency_ms) / self.seconds


class System:
    """An engine, and the next requests of the trace. Its cache starts as a long run would have left it."""

    def __init__(self, world: World, config: Config, loop: asyncio.AbstractEventLoop, planned: int) -> None:
        """planned: how many requests are planned first, as if they had run; their pages hold zeros."""
        self._world, self._loop = world, loop
        self._accesses = world.traffic.accesses(world.speed)
        self._begin_ns = 0
        self.engine = load_engine(config)
        loop.run_until_complete(self.engine.start())
        self._plan(planned)

    def _plan(self, count: int) -> None:
        caching = self.engine.served.caching
        assert caching is not None
        grouping = caching.groupings["rank"]
        ahead = list(islice(self._accesses, count))
        start_ns = time.monotonic_ns() - (ahead[-1].time_ns + 1 if ahead else 0)
        for number, access in enumerate(ahead):
            task = self.engine.served.translator.prepare(self._world.request(access))
            now_ns = start_ns + access.time_ns
            job = Job(number, "rank", task.tokens, task.width, now_ns, None, task.prompt)
            group = grouping.group([job], True, now_ns)
            assert group is not None
            grouping.finished(group.jobs, True)

    def saturate(self, count: int, concurrency: int) -> Served:
        """Serve the next requests of the trace, `concurrency` of them at a time."""
        requests = [self._world.request(access) for access in islice(self._accesses, count)]
        return self._loop.run_until_complete(self._closed_loop(requests, concurrency))

    def at_rate(self, count: int, per_second: float) -> Served:
        """Serve the next requests at random times; latency counts from the time at which each was due."""
        requests = [self._world.request(access) for access in islice(self._accesses, count)]
        gaps = np.random.default_rng(count).exponential(1 / per_second, count)
        return self._loop.run_until_complete(self._open_loop(requests, np.cumsum(gaps).tolist()))

    async def _closed_loop(self, requests: Sequence[RankRequest], concurrency: int) -> Served:
        waiting = iter(requests)
        answers: list[tuple[Answer, float]] = []

        async def client() -> None:
            for request in waiting:
                start = time.perf_counter()
                answer = await self.engine.answer(request)
                answers.append((answer, (time.perf_counter() - start) * 1e3))

        start = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(concurrency)))
        return _served(time.perf_counter() - start, answers)

    async def _open_loop(self, requests: Sequence[RankRequest], due: Sequence[float]) -> Served:
        start = time.perf_counter()

        async def client(request: RankRequest, at: float) -> tuple[Answer, float]:
            await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
            answer = await self.engine.answer(request)
            return answer, (time.perf_counter() - start - at) * 1e3

        answers = await asyncio.gather(*map(client, requests, due))
        return _served(time.perf_counter() - start, answers)

    def stop(self) -> None:
        self._loop.run_until_complete(self.engine.drain(None))


def _served(seconds: float, answers: Sequence[tuple[Answer, float]]) -> Served:
    usages = [answer.usage for answer, _ in answers]
    return Served(
        seconds,
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.cached_tokens for usage in usages),
        sum(usage.computed_tokens for usage in usages),
        sum(usage.layout == "user_prefix" for usage in usages),
        [ms for _, ms in answers],
    )


def add(runs: Sequence[Served]) -> Served:
    """Several runs as one."""
    return Served(
        sum(run.seconds for run in runs),
        sum(run.tokens for run in runs),
        sum(run.cached_tokens for run in runs),
        sum(run.computed_tokens for run in runs),
        sum(run.by_user for run in runs),
        [ms for run in runs for ms in run.latency_ms],
    )


@contextmanager
def event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    try:
        yield loop
    finally:
        loop.close()


def at_skew(workload: Workload, share: float) -> Workload:
    """The workload with this share of the accesses going to a tenth of the items."""
    return replace(workload, top10_share=share)


def facts(world: World, device_mb: float) -> dict[str, Any]:
    """What a result's row says of a workload."""
    workload = world.traffic.workload
    return {
        "users": workload.users,
        "items": workload.items,
        "top10_share": workload.top10_share,
        "mean_user_tokens": round(float(world.traffic.user_tokens.mean()), 1),
        "mean_item_tokens": round(float(world.traffic.item_tokens.mean()), 2),
        "pool_over_items_kv": round(device_mb * 2**20 / world.item_bytes, 2),
        "device_mb": device_mb,
    }
