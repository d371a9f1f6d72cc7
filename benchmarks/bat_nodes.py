# SPDX-License-Identifier: Apache-2.0
"""How long four simulated nodes take that cache items as a placement says, and users in the memory that is left.

The nodes are jgr.simulation.node's: they plan as `jgr serve` does and move no bytes. A user's requests go to one node,
`user % 4`; the paper only says that load is balanced. Each request is a batch.

A request's time is device time and network time. Device time is measured: the live executor runs the requests of one
node after those of the other. What two systems plan alike is timed once, so that they differ only by what they do
differently. Network time is reckoned: the tokens that a request fetches pass the node's link, a token bucket, before it
runs. A link of 10 Gb/s passes 10e9 / 8 / 28,672 of the paper's tokens a second. Our links are slower by the factor by
which our device computes fewer new tokens a second than the paper's (1586 tokens after 1500 cached ones in 33 ms,
BAT-11 note 3), so that network and device weigh against each other as they do there.
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
from jgr.serving.policies.costs import Point
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
"""The KV of one token of Qwen2-1.5B, the paper's model."""
NODE_BYTES = 150e9
PREFILL_S = 0.033
"""The paper's prefill of BOOKS.user_tokens new tokens after a hundred cached items of BOOKS.item_tokens tokens."""
REQUESTS_PER_S = 128
"""The paper's rate at saturation (table 4), which says how often a user comes while accesses are counted."""
ITEM_TOKENS = BOOKS.candidates * BOOKS.item_tokens
TIMED_AT_ONCE = 50
TOKENS, QUICK_TOKENS = "1024,1536,2048,2560,3072,4096,6144,9216", "2048,4096,9216"
"""The numbers of tokens that programs are compiled for."""


def item_memory(workload: Workload) -> float:
    """The bytes of the KV of all items in the paper's model."""
    return workload.items * workload.item_tokens * TOKEN_BYTES


def link_tokens(gbit: float) -> float:
    """How many tokens of the paper's model a link passes in a second."""
    return gbit * 1e9 / 8 / TOKEN_BYTES


def returning(workload: Workload) -> int:
    """How many users fill the memory that the nodes have left when each item is on one node."""
    left = NODES * NODE_BYTES - item_memory(workload)
    return round(left / (workload.user_tokens * TOKEN_BYTES))


def place_hot(items: Items, workers: Workers, gbit: int) -> ItemPlacement:
    """HRCS for links of `gbit` Gb/s. Its bound is reckoned in the paper's units; t times B is the same in ours."""
    return hrcs(
        items,
        workers,
        prefill_s=PREFILL_S,
        item_tokens=ITEM_TOKENS,
        link_bytes_per_s=link_tokens(gbit) * items.bytes_per_token,
    )


class Run(NamedTuple):
    """One request to be timed: a compiled profile and the work for it."""

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

    gbit: the speed of the link that HRCS was given; None for others. fetched: for each plan the tokens that it reads
    from each other node, [nodes]. users: how many are cached after the last request.
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
        """The share of all tokens that are reused, as the paper counts hits."""
        cached = sum(planned.prompt.cached_tokens for planned in self.plans)
        return cached / (cached + self.computed_tokens)

    @property
    def user_prefix_share(self) -> float:
        return float(np.mean([planned.prompt.layout == "user_prefix" for planned in self.plans]))


class Device:
    """The live executor on this machine, which is timed.

    workload: the one with the largest catalog; smaller catalogs are its first items. tokens: the numbers of tokens that
    programs are compiled for. node_memory: a node's memory over the KV of all those items.
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
        """Let all systems plan the same requests: the systems with their plans, and the runs to be timed, by key.

        workload: the paper's; factor: what its users and items are divided by. before: how many requests come first, to
        fill the caches and to count items for the placement; counted: how many come then, whose plans are kept; timed:
        how many of those are timed. make: makes the systems for the items and for nodes with the paper's memory.
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
            job = Job(number, "rank", task.usage.prompt_tokens, task.width, access.time_ns, None, task.prompt)
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
        """The seconds of each run. A part of the runs is timed again where the machine was not quiet."""
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
    """Our new tokens a second, and the paper's. points: (new tokens, cached tokens, seconds) of each run."""
    measured = [Point(_prefill(new, cached), seconds) for new, cached, seconds in points]
    cost = costs.fit(measured, tuple(_prefill(0, 0)))
    ours = BOOKS.user_tokens / cost.seconds(_prefill(BOOKS.user_tokens, ITEM_TOKENS))
    return {
        "tokens_per_s": harness.rounded(ours),
        "papers_tokens_per_s": harness.rounded(BOOKS.user_tokens / PREFILL_S),
        "prefill_cost": {
            "coefficients": [harness.rounded(x) for x in (cost.constant, *cost.coefficients.values())],
            "mean_relative_error": harness.rounded(cost.errors.mean, 2),
            "points": cost.points,
        },
    }


def _prefill(new: float, cached: float) -> dict[str, float]:
    """What a prefill's time depends on: the matmuls, attention among new tokens, and attention to cached ones."""
    return {"new": new, "among_new": new**2, "to_cached": new * cached}


def link_row(system: System, base: System, seconds: Mapping[Key, float], rate: float) -> Row:
    """The mean time of a request. rate: how many tokens a node's link passes in a second.

    over_...: requests per second over those of `base`, with an interval by resampling the requests that both served.
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
    """Seconds on the device and on the network, [timed requests, 2].

    rate: tokens a second that a node's link passes.
    """
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
