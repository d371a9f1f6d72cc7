# SPDX-License-Identifier: Apache-2.0
"""Where items are cached on 4 nodes (BAT-11): all on every node, each on one, or hot ones on all and cold ones on one.

The paper's Books with Qwen2-1.5B: 4 nodes of 150 GB each, items first, users in what is left; all scaled by one factor
(see jgr.data.workloads). A user's requests go to one node, `user % 4`; the paper only says that load is balanced. Each
request is a batch, planned by the policies of `jgr serve` over the node's entries: an item's KV is there (placed here),
fetched (placed elsewhere: read for this request, and forgotten) or computed.

Time is a sum of two. Device time: the live executor on one node's requests after the other's; what two placements plan
alike is timed once, so that they differ only by what they do differently. Network time: a request's fetched tokens pass
the node's link, a token bucket, before it runs. A link of 10 Gb/s passes 10e9 / 8 / 28,672 of the paper's tokens a
second; ours passes as many times fewer as our new tokens per second are fewer than the paper's (1586 after 1500 cached
ones in 33 ms, BAT-11 note 3), so that network and device weigh against each other as they do there.

Bytes per pair of nodes are counted three ways, which must agree: as planned, request by request; by `expected_bytes`
from the placement; and by the item store, which lays the cells out and says what its program would send.

The paper has, of the requests per second of Replicate: HRCS 1.10 at 10 Gb/s and 1.16 at 100, Hash .78 at 10, where the
network is 31 % of Hash's latency. It does not say with which alpha. HRCS is measured with two: .2, from BAT-11, note 3,
which lets it shard everything at 100 Gb/s and so be Hash; and .05, found by trying, because on this workload the memory
that Hash leaves to users saves only some 4 % of the computed tokens, less than .2 lets the network take.

    python -m benchmarks.bat_placement [--quick]
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from benchmarks import bat_nodes, bat_world, harness
from benchmarks.bat_nodes import Cluster, Key, Planned, Run
from benchmarks.bat_world import World, at_skew
from benchmarks.harness import Benchmark, Claim, Measured, Quiet, Row
from jgr.cache.entries import Content
from jgr.cache.item_store import EVERYWHERE, lay_out, plan_exchange
from jgr.data.workloads import BOOKS, Traffic
from jgr.evaluation import bootstrap
from jgr.placement import costs
from jgr.placement.items import ItemPlacement, Items, Workers, expected_bytes, hash_items, hrcs, replicate
from jgr.serving.loading import load_engine
from jgr.serving.paged_executor import Executors
from jgr.serving.policies.batching import Job
from jgr.serving.work import SegmentsWork

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

THREADS = 2
NODES = 4
GBITS = (10, 100)
SKEWS = (0.9, 0.5)
PAPER_TOKEN_BYTES = 28672
PAPER_NODE_BYTES = 150e9
PAPER_PREFILL_S = 0.033
"""Of BOOKS.user_tokens new tokens after a hundred items of BOOKS.item_tokens cached ones."""
PAPER_REQUESTS_PER_S = 128
"""At saturation, in the paper's table 4; how often a user comes in the time over which accesses are counted."""
TIMED_AT_ONCE = 50
ITEM_TOKENS = BOOKS.candidates * BOOKS.item_tokens
BUDGET_RATIO = PAPER_NODE_BYTES / (BOOKS.items * BOOKS.item_tokens * PAPER_TOKEN_BYTES)
"""A node's memory over the KV of all items."""


class Size(NamedTuple):
    """factor: that users and items are divided by. before: requests that are only planned, whose items are counted;
    requests: that are timed. tokens: compiled sizes. alphas: HRCS's.
    """

    factor: float
    before: int
    requests: int
    tokens: str
    skews: tuple[float, ...]
    alphas: tuple[float, ...]


FULL = Size(100, 4_000, 600, "1024,1536,2048,2560,3072,4096,6144,9216", SKEWS, (0.2, 0.05))
QUICK = Size(175, 400, 16, "2048,4096,9216", SKEWS[:1], (0.2,))


class TokenBucket:
    """A link. rate: tokens a second; burst: tokens that may pass at once after it was idle."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        self._level, self._at = burst, 0.0

    def passed(self, tokens: float, now: float) -> float:
        """When so many tokens, sent from `now` on and behind all earlier ones, have passed. `now` never goes back."""
        self._level = min(self._burst, self._level + (now - self._at) * self._rate) - tokens
        self._at = now
        return now + max(0.0, -self._level) / self._rate


@dataclass
class System:
    """A placement under test, and what it made of the requests. gbit: of the link that HRCS was given, else None.

    fetched: for each plan, [nodes], tokens read from each other node.
    """

    name: str
    placement: ItemPlacement
    gbit: int | None
    plans: list[Planned] = field(default_factory=list)
    fetched: list[Int64] = field(default_factory=list)
    users: int = 0

    @property
    def gbits(self) -> tuple[int, ...]:
        return GBITS if self.gbit is None else (self.gbit,)


def systems(items: Items, workers: Workers, alphas: Sequence[float]) -> Iterator[System]:
    """HRCS's bound is in the paper's units: t times B is the same in ours."""
    yield System("replicate", replicate(items, workers), None)
    yield System("hash", hash_items(items, workers), None)
    for gbit in GBITS:
        for alpha in alphas:
            placement = hrcs(
                items,
                workers,
                prefill_s=PAPER_PREFILL_S,
                item_tokens=ITEM_TOKENS,
                link_bytes_per_s=link_tokens(gbit) * items.bytes_per_token,
                alpha=alpha,
            )
            yield System("hrcs", placement, gbit)


def link_tokens(gbit: float) -> float:
    """Tokens a second, of the paper's size."""
    return gbit * 1e9 / 8 / PAPER_TOKEN_BYTES


class Setup:
    """A world, and the live executor for it."""

    def __init__(self, folder: Path, size: Size) -> None:
        self.size, self.world = size, World(folder / "model", BOOKS.scaled(size.factor), speed=1.0)
        # Whole cells, and those that what is fetched lands in, come on top of a node's memory.
        pool_mb = 1.4 * (BUDGET_RATIO + 1) * self.world.item_bytes / 2**20
        settings = ("rank.requests=1", f"rank.candidates={BOOKS.candidates}", f"rank.tokens={size.tokens}")
        self.engine = load_engine(self.world.config("hotness", pool_mb, str(folder / "xla"), *settings))
        executors, caching = self.engine.executor, self.engine.caching
        assert isinstance(executors, Executors) and executors.paged is not None
        assert caching is not None and caching.segments is not None
        self.executor = executors.paged
        self.executor.profiles = tuple(p for p in self.executor.profiles if p.kind == "rank")
        self.executor.warm_up(lambda done, total, label: harness.note(f"{done} of {total} compiled: {label}"))
        self.contents = [
            Content(caching.segments.item(row)) for row in range(self.world.traffic.workload.items)
        ]

    def items(self, frequency: Float64) -> Items:
        tokens = self.world.traffic.item_tokens.astype(np.int64)
        return Items(
            frequency,
            tokens,
            bytes_per_token=self.world.item_bytes // int(tokens.sum()),
            cell_tokens=self.executor.shape.cell_tokens,
        )

    def plan(self, skew: float) -> tuple[list[System], dict[Key, Run]]:
        """All systems' plans of the same requests, and what is to be timed."""
        traffic = Traffic(at_skew(self.world.traffic.workload, skew))
        speed = PAPER_REQUESTS_PER_S / BOOKS.rate
        accesses = list(islice(traffic.accesses(speed), self.size.before + self.size.requests))
        frequency = np.zeros(len(self.contents))
        for access in accesses[: self.size.before]:
            frequency[access.items] += 1
        items = self.items(frequency)
        found = list(
            systems(items, Workers(NODES, int(BUDGET_RATIO * items.room_bytes.sum())), self.size.alphas)
        )
        shape, profiles = self.executor.shape, self.executor.profiles
        clusters = [Cluster(system.placement, self.contents, shape, profiles) for system in found]
        runs: dict[Key, Run] = {}
        for number, access in enumerate(accesses):
            task = self.engine.translator.prepare(self.world.request(access))
            job = Job(number, "rank", task.work.tokens, task.width, access.time_ns, None, task.parts)
            for system, cluster in zip(found, clusters, strict=True):
                planned = cluster.plan(job, access)
                if number >= self.size.before:
                    assert isinstance(task.work, SegmentsWork)
                    system.plans.append(planned)
                    system.fetched.append(cluster.fetched(planned))
                    runs[planned.key] = Run(planned.profile, replace(task.work, plan=planned.prompt))
        for system, cluster in zip(found, clusters, strict=True):
            system.users = sum(node.meta.number("user") for node in cluster.nodes)
        return found, runs

    def time(self, runs: Mapping[Key, Run], quiet: Quiet) -> dict[Key, float]:
        """Seconds of each, in parts that are timed again where the machine was not quiet."""
        keys, seconds = list(runs), dict[Key, float]()
        while len(seconds) < len(keys):
            part = keys[len(seconds) : len(seconds) + TIMED_AT_ONCE]
            start, found = quiet.wait(), {}
            for key in part:
                run = runs[key]
                begun = time.perf_counter()
                self.executor.run(run.profile, [run.work])
                found[key] = time.perf_counter() - begun
            if quiet.was_quiet_since(start):
                seconds |= found
            harness.note(f"{len(seconds)} of {len(keys)} requests timed")
        return seconds


def measure(quick: bool, quiet: Quiet) -> Measured:
    size = QUICK if quick else FULL
    with tempfile.TemporaryDirectory() as folder:
        setup = Setup(Path(folder), size)
        found: dict[float, tuple[list[System], dict[Key, float]]] = {}
        points: list[tuple[float, float, float]] = []
        for skew in size.skews:
            planned, runs = setup.plan(skew)
            seconds = setup.time(runs, quiet)
            found[skew] = planned, seconds
            points += [(run.new_tokens, run.cached_tokens, seconds[key]) for key, run in runs.items()]
    cost = costs.fit(points)
    ours = BOOKS.user_tokens / cost.seconds(BOOKS.user_tokens, ITEM_TOKENS)
    paper = BOOKS.user_tokens / PAPER_PREFILL_S
    about: Row = {
        "workload": setup.world.traffic.workload.name,
        "users": setup.world.traffic.workload.users,
        "items": setup.world.traffic.workload.items,
        "requests": size.requests,
        "node_memory_over_items_kv": harness.rounded(BUDGET_RATIO, 3),
        "tokens_per_s": harness.rounded(ours),
        "papers_tokens_per_s": harness.rounded(paper),
        "prefill_cost": {
            "coefficients": [harness.rounded(x) for x in cost.coefficients],
            "mean_relative_error": harness.rounded(cost.mean_relative_error, 2),
            "points": cost.points,
        },
        "paper": {"hrcs_over_replicate": {"10": 1.10, "100": 1.16}, "hash_over_replicate": {"10": 0.78}},
    }
    rows = [
        make_row(skew, system, planned[0], seconds, ours / paper)
        for skew, (planned, seconds) in found.items()
        for system in planned
    ]
    return Measured(claims(rows), [about, *rows])


def spent(system: System, seconds: Mapping[Key, float], rate: float) -> Float64:
    """[requests, 2] seconds, of the device and of the network. rate: tokens a second of a node's link."""
    buckets = [TokenBucket(rate, BOOKS.item_tokens) for _ in range(NODES)]
    now = [0.0] * NODES
    times = np.zeros((len(system.plans), 2))
    for at, (planned, fetched) in enumerate(zip(system.plans, system.fetched, strict=True)):
        node = planned.node
        arrived = buckets[node].passed(float(fetched.sum()), now[node])
        times[at] = seconds[planned.key], arrived - now[node]
        now[node] = arrived + seconds[planned.key]
    return times


def make_row(
    skew: float, system: System, base: System, seconds: Mapping[Key, float], of_papers_speed: float
) -> Row:
    """base: that requests per second are compared with."""
    placement, prompts = system.placement, [planned.prompt for planned in system.plans]
    links = []
    for gbit in system.gbits:
        rate = link_tokens(gbit) * of_papers_speed
        times, others = spent(system, seconds, rate), spent(base, seconds, rate)
        sums = np.stack([times.sum(axis=1), others.sum(axis=1)], axis=1)
        resampled = bootstrap.resampled_means(sums, 1000, 0)
        low, high = bootstrap.interval(resampled[:, 1:] / resampled[:, :1])
        device_s, network_s = times.mean(axis=0).tolist()
        links.append(
            {
                "gbit_per_s": gbit,
                "device_ms": harness.rounded(1e3 * device_s),
                "network_ms": harness.rounded(1e3 * network_s),
                "network_share": harness.rounded(network_s / (device_s + network_s), 3),
                "requests_per_s": harness.rounded(NODES / (device_s + network_s)),
                "over_replicate": harness.rounded(sums[:, 1].sum() / sums[:, 0].sum()),
                "interval": [harness.rounded(float(low[0])), harness.rounded(float(high[0]))],
            }
        )
    moved, disagree = moved_bytes(system)
    cached, computed = (
        sum(getattr(p, name) for p in prompts) for name in ("cached_tokens", "computed_tokens")
    )
    used = placement.used_bytes()
    return {
        "top10_share": skew,
        "placement": system.name,
        "asked_alpha": None if placement.budget is None else placement.budget.alpha,
        "needed_alpha": placement.alpha if placement.alpha is None else harness.rounded(placement.alpha, 3),
        "alpha_exceeded": placement.alpha_exceeded,
        "replicated_items": harness.rounded(placement.replicated_fraction, 3),
        "accesses_of_sharded_items": harness.rounded(placement.sharded_share, 3),
        "dropped_items": len(placement.dropped),
        "items_share_of_memory": harness.rounded(float(used.max()) / placement.workers.capacity_bytes, 3),
        "users_cached": system.users,
        "hit_rate": harness.rounded(cached / (cached + computed), 3),
        "computed_tokens": computed,
        "user_prefix_share": harness.rounded(float(np.mean([p.layout == "user_prefix" for p in prompts])), 3),
        "bytes_from_to": moved.tolist(),
        "pairs_counted_differently": disagree,
        "links": links,
    }


def moved_bytes(system: System) -> tuple[Int64, int]:
    """[source, destination], and for how many pairs of nodes another count says something else."""
    placement = system.placement
    items = placement.items
    as_planned = np.zeros((NODES, NODES), np.int64)
    cells = np.zeros((NODES, NODES), np.int64)
    where = lay_out(placement)
    for planned, fetched in zip(system.plans, system.fetched, strict=True):
        as_planned[:, planned.node] += fetched * items.bytes_per_token
        wanted = [np.zeros(0, np.int32)] * NODES
        wanted[planned.node] = where.cells(planned.rows)
        most = len(wanted[planned.node])
        cells += plan_exchange(where, wanted, most, most, len(where.on(EVERYWHERE))).useful
    np.fill_diagonal(cells, 0)
    reads = [(planned.node, planned.rows) for planned in system.plans]
    whole = expected_bytes(placement, reads, whole_cells=True)
    agree = (expected_bytes(placement, reads) == as_planned) & (
        cells * items.cell_tokens * items.bytes_per_token == whole
    )
    return as_planned, int((~agree).sum())


def claims(rows: Sequence[Row]) -> list[Claim]:
    """The paper's order of the three on each link."""
    speed = {
        (row["top10_share"], row["placement"], row["asked_alpha"], link["gbit_per_s"]): link["requests_per_s"]
        for row in rows
        for link in row["links"]
    }
    found = []
    for (skew, name, alpha, gbit), value in speed.items():
        base = speed[skew, "replicate", None, gbit]
        at = f"at-{gbit}-gbit-at-{round(100 * skew)}-percent-skew"
        if name == "hrcs":
            words = f"hrcs-of-alpha-{alpha:g}-over-replicate-{at}"
            found.append(Claim(words, harness.rounded(value / base), "x", "higher", 1.0))
        elif name == "hash" and gbit == GBITS[0]:
            found.append(
                Claim(f"replicate-over-hash-{at}", harness.rounded(base / value), "x", "higher", 1.0)
            )
    wrong = sum(row["pairs_counted_differently"] for row in rows)
    return [*found, Claim("pairs-of-nodes-whose-bytes-are-counted-differently", wrong, "", "lower", 0.0)]


if __name__ == "__main__":
    # Before XLA counts the cores.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    harness.main(
        Benchmark(
            name="bat_placement",
            measure=measure,
            packages=("jax", "jaxlib", "numpy"),
            sources=(Path(__file__), Path(bat_nodes.__file__), Path(bat_world.__file__)),
            device=jax.default_backend(),
        )
    )
