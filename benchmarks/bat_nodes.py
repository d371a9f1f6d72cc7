# SPDX-License-Identifier: Apache-2.0
"""The time that four simulated nodes take, which cache items as a placement says and users in the memory left.

The nodes are jgr.simulation.node's: they plan as `jgr serve` does and move no bytes. A user's requests go to one node,
`user % 4`; the paper only says that load is balanced. Each request is a batch.

Time is a sum of two. Device time: the live executor on one node's requests after the other's; what two systems plan
alike is timed once, so that they differ only by what they do differently. Network time: a request's fetched tokens pass
the node's link, a token bucket, before it runs. A link of 10 Gb/s passes 10e9 / 8 / 28,672 of the paper's tokens a
second; ours passes as many times fewer as our new tokens per second are fewer than the paper's (1586 after 1500 cached
ones in 33 ms, BAT-11 note 3), so that network and device weigh against each other as they do there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks import harness
from benchmarks.bat_world import World
from benchmarks.harness import Quiet, Row
from jgr.evaluation import bootstrap
from jgr.placement.items import ItemPlacement, Items, Workers, hrcs
from jgr.serving.decoders.loading import load_engine
from jgr.serving.decoders.paged_executor import DecoderExecutors
from jgr.serving.decoders.work import SegmentsWork
from jgr.serving.policies import costs
from jgr.serving.policies.jobs import Job, Profile
from jgr.serving.policies.prefix_choice import Policy
from jgr.simulation.network import TokenBucket
from jgr.simulation.node import Cluster, Key, NodeMemory, Planned
from jgr.traffic.histories import Histories
from jgr.traffic.workloads import BOOKS, Access, Traffic, Workload

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

NODES = 4
GBITS = (10, 100)
TOKEN_BYTES = 28672
"""The paper's, of Qwen2-1.5B."""
NODE_BYTES = 150e9
PREFILL_S = 0.033
"""The paper's, of BOOKS.user_tokens new tokens after a hundred items of BOOKS.item_tokens cached ones."""
REQUESTS_PER_S = 128
"""The paper's at saturation, in its table 4; how often a user comes in the time over which accesses are counted."""
ITEM_TOKENS = BOOKS.candidates * BOOKS.item_tokens
TIMED_AT_ONCE = 50
TOKENS, QUICK_TOKENS = "1024,1536,2048,2560,3072,4096,6144,9216", "2048,4096,9216"
"""Compiled sizes."""


def item_memory(workload: Workload) -> float:
    """Of the paper, bytes: the KV of all items."""
    return workload.items * workload.item_tokens * TOKEN_BYTES


def link_tokens(gbit: float) -> float:
    """Tokens a second, of the paper's size."""
    return gbit * 1e9 / 8 / TOKEN_BYTES


def returning(workload: Workload) -> int:
    """Users who fill the memory that the nodes have left when each item is on one of them."""
    left = NODES * NODE_BYTES - item_memory(workload)
    return round(left / (workload.user_tokens * TOKEN_BYTES))


def place_hot(items: Items, workers: Workers, gbit: int) -> ItemPlacement:
    """HRCS for links of so many Gb/s. Its bound is in the paper's units: t times B is the same in ours."""
    return hrcs(
        items,
        workers,
        prefill_s=PREFILL_S,
        item_tokens=ITEM_TOKENS,
        link_bytes_per_s=link_tokens(gbit) * items.bytes_per_token,
    )


class Run(NamedTuple):
    """What is timed."""

    profile: Profile
    work: SegmentsWork

    @property
    def new_tokens(self) -> int:
        assert self.work.plan is not None
        return self.work.plan.computed_tokens

    @property
    def cached_tokens(self) -> int:
        assert self.work.plan is not None
        return self.work.plan.cached_tokens


@dataclass
class System:
    """A placement and a policy under test, and what they made of the requests.

    gbit: of the link that HRCS was given, else None. fetched: for each plan, [nodes], tokens read from each other node.
    users: cached ones after the last request.
    """

    name: str
    placement: ItemPlacement
    gbit: int | None = None
    policy: Policy = "hotness"
    plans: list[Planned] = field(default_factory=list)
    fetched: list[Int64] = field(default_factory=list)
    users: int = 0

    @property
    def gbits(self) -> tuple[int, ...]:
        return GBITS if self.gbit is None else (self.gbit,)

    @property
    def computed_tokens(self) -> int:
        return sum(planned.prompt.computed_tokens for planned in self.plans)

    @property
    def hit_rate(self) -> float:
        """The paper's: reused tokens of all."""
        cached = sum(planned.prompt.cached_tokens for planned in self.plans)
        return cached / (cached + self.computed_tokens)

    @property
    def user_prefix_share(self) -> float:
        return float(np.mean([planned.prompt.layout == "user_prefix" for planned in self.plans]))


class Device:
    """The live executor. workload: with the largest catalog that is served; smaller ones are its first items.

    tokens: compiled sizes. node_memory: in KV of all those items.
    """

    def __init__(self, folder: Path, workload: Workload, tokens: str, node_memory: float) -> None:
        self._world = World(folder / "model", workload, speed=1.0)
        # Whole cells, and those that what is fetched lands in, come on top of a node's memory.
        pool_mb = 1.4 * (node_memory + 1) * self._world.item_bytes / 2**20
        settings = ("rank.requests=1", f"rank.candidates={workload.candidates}", f"rank.tokens={tokens}")
        self._engine = load_engine(self._world.config("hotness", pool_mb, str(folder / "xla"), *settings))
        executors, caching = self._engine.served.executors, self._engine.served.caching
        assert isinstance(executors, DecoderExecutors) and executors.paged is not None
        assert caching is not None and caching.segments is not None
        self._executor = executors.paged
        self._executor.profiles = tuple(p for p in self._executor.profiles if p.kind == "rank")
        self._contents = [caching.segments.content(row) for row in range(workload.items)]

    def warm_up(self) -> None:
        self._executor.warm_up(lambda done, total, what: harness.note(f"{done} of {total} compiled: {what}"))

    def plan(
        self,
        workload: Workload,
        factor: float,
        before: int,
        counted: int,
        timed: int,
        make: Callable[[Items, Workers], Iterable[System]],
    ) -> tuple[list[System], dict[Key, Run]]:
        """All systems' plans of the same requests, and what is to be timed.

        workload: the paper's; factor: that it is divided by. before: requests that fill the caches, and whose items are
        counted for the placement; counted: that come then and whose plans are kept; timed: the first of those. make:
        systems, of the items and of nodes with memory of the paper's ratio.
        """
        traffic = Traffic(workload.scaled(factor))
        speed = REQUESTS_PER_S / factor / traffic.workload.rate
        accesses = list(islice(traffic.accesses(speed), before + counted))
        items = self._items(traffic, accesses[:before])
        node_bytes = int(NODE_BYTES / item_memory(workload) * items.room_bytes.sum())
        systems = list(make(items, Workers(NODES, node_bytes)))
        pool, kv = self._executor.pool, self._executor.kv
        assert kv.parts == 1, "a page holds all layers of a cell's tokens"
        contents = self._contents[: len(items)]
        memory = NodeMemory(pool.pages, kv.slots, kv.tokens)
        clusters = [
            Cluster(s.placement, contents, memory, self._executor.profiles, s.policy) for s in systems
        ]
        runs: dict[Key, Run] = {}
        histories = Histories(traffic)
        for number, access in enumerate(accesses):
            task = self._engine.served.translator.prepare(histories.request(access))
            job = Job(number, "rank", task.work.tokens, task.width, access.time_ns, None, task.prompt)
            for system, cluster in zip(systems, clusters, strict=True):
                planned = cluster.plan(job, access)
                if number >= before:
                    system.plans.append(planned)
                    system.fetched.append(cluster.fetched(planned))
                if before <= number < before + timed:
                    assert isinstance(task.work, SegmentsWork)
                    runs[planned.key] = Run(planned.profile, replace(task.work, plan=planned.prompt))
        for system, cluster in zip(systems, clusters, strict=True):
            system.users = sum(node.meta.number("user") for node in cluster.nodes)
        return systems, runs

    def _items(self, traffic: Traffic, accesses: Iterable[Access]) -> Items:
        known = self._world.traffic.item_tokens
        tokens = traffic.item_tokens.astype(np.int64)
        assert np.array_equal(tokens, known[: len(tokens)]), "its items are not the first ones of the catalog"
        frequency = np.zeros(len(tokens))
        for access in accesses:
            frequency[access.items] += 1
        token_bytes = self._world.item_bytes // int(known.sum())
        return Items(frequency, tokens, token_bytes, self._executor.kv.tokens)

    def time(self, runs: Mapping[Key, Run], quiet: Quiet) -> dict[Key, float]:
        """Seconds of each, in parts that are timed again where the machine was not quiet."""
        keys, seconds = list(runs), dict[Key, float]()
        while len(seconds) < len(keys):
            part = keys[len(seconds) : len(seconds) + TIMED_AT_ONCE]
            start, found = quiet.wait(), {}
            for key in part:
                run = runs[key]
                begun = time.perf_counter()
                self._executor.run(run.profile, [run.work])
                found[key] = time.perf_counter() - begun
            if quiet.was_quiet_since(start):
                seconds |= found
            harness.note(f"{len(seconds)} of {len(keys)} requests timed")
        return seconds


def speed_row(points: Sequence[tuple[float, float, float]]) -> Row:
    """Of (new tokens, cached tokens, seconds): our new tokens a second, and the paper's."""
    cost = costs.fit(points)
    ours = BOOKS.user_tokens / cost.seconds(BOOKS.user_tokens, ITEM_TOKENS)
    return {
        "tokens_per_s": harness.rounded(ours),
        "papers_tokens_per_s": harness.rounded(BOOKS.user_tokens / PREFILL_S),
        "prefill_cost": {
            "coefficients": [harness.rounded(x) for x in cost.coefficients],
            "mean_relative_error": harness.rounded(cost.mean_relative_error, 2),
            "points": cost.points,
        },
    }


def link_row(system: System, base: System, seconds: Mapping[Key, float], rate: float) -> Row:
    """What a request takes in the mean. rate: tokens a second of a node's link.

    over_...: requests per second over those of `base`, with an interval over the requests, which both served.
    """
    times, others = spent(system, seconds, rate), spent(base, seconds, rate)
    sums = np.stack([times.sum(axis=1), others.sum(axis=1)], axis=1)
    resampled = bootstrap.resampled_means(sums, 1000, 0)
    low, high = bootstrap.interval(resampled[:, 1:] / resampled[:, :1])
    device_s, network_s = times.mean(axis=0).tolist()
    return {
        "device_ms": harness.rounded(1e3 * device_s),
        "network_ms": harness.rounded(1e3 * network_s),
        "network_share": harness.rounded(network_s / (device_s + network_s), 3),
        "requests_per_s": harness.rounded(NODES / (device_s + network_s)),
        f"over_{base.name}": harness.rounded(sums[:, 1].sum() / sums[:, 0].sum()),
        "interval": [harness.rounded(float(low[0])), harness.rounded(float(high[0]))],
    }


def spent(system: System, seconds: Mapping[Key, float], rate: float) -> Float64:
    """[timed requests, 2] seconds, of the device and of the network. rate: tokens a second of a node's link."""
    buckets = [TokenBucket(rate, BOOKS.item_tokens) for _ in range(NODES)]
    now = [0.0] * NODES
    times = []
    for planned, fetched in zip(system.plans, system.fetched, strict=True):
        if planned.key not in seconds:
            break
        node, device_s = planned.node, seconds[planned.key]
        arrived = buckets[node].passed(float(fetched.sum()), now[node])
        times.append((device_s, arrived - now[node]))
        now[node] = arrived + device_s
    return np.array(times)
