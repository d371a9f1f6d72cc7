# SPDX-License-Identifier: Apache-2.0
"""What a router gains that knows both which users and which embedding rows a node holds (HLEM-13 to 15).

The router is the live one with its rule `hlem`, told by reports that are up to a second old; beside it the same rule
that looks at users alone (KV-only), at rows alone (EMB-only), and the rules `least` and `random`. Nodes are virtual: a
queue, users and shards of rows by how recently each was used, and the epoch model's analytic costs of a request. How
often each user asks is KuaiRand's; which shards a user reads is drawn: most of them from one of 64 groups. Steady
traffic, and bursts by hot users. Counts in virtual time, so that the machine need not be quiet.

    JGR_DATA=FOLDER python -m benchmarks.hlem_routing [--quick]      kuairand-pure in it
"""

from __future__ import annotations

import heapq
import os
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks import harness
from benchmarks.harness import Benchmark, Claim, Measured, Missing, Quiet, Row, rounded
from jgr.config import UserError
from jgr.serving.policies import shards
from jgr.serving.policies.digests import digest
from jgr.serving.policies.routing import Ask, Report, Router
from jgr.serving.policies.routing_terms import Float64, Late, Residency, View
from jgr.simulation.controller import workload
from jgr.simulation.controller.epochs import World
from jgr.simulation.controller.workload import Regime

NODES, USERS, GROUPS, GROUP = 8, 4_000, 64, 96
"""GROUP: shards that a group's users read."""
OWN = 12
"""Shards of a user's profile that are the group's; the others are anybody's."""
SPLIT, SHARD_BYTES = 0.5, 25e6
"""The share of a node's memory for rows, and the bytes of a shard: 4096 of them are 102 GB."""
EVENTS, SIGMA = 8_000.0, 0.4
BUSY, EPOCH_S, REPORT_S, BITS = 0.7, 1.0, 1.0, 14
SECOND = 1_000_000_000
REGIMES: tuple[Regime, ...] = ("steady", "burst")
RULES = ("hlem", "kv-only", "emb-only", "least", "random")


@dataclass(frozen=True)
class Part(Residency):
    """HLEM's score without what is known of users, or of rows."""

    of_users: float = 1.0
    of_rows: float = 1.0

    def weights(self, view: View) -> tuple[float, float, float]:
        users, rows, full = super().weights(view)
        return users * self.of_users, rows * self.of_rows, full


def router(rule: str) -> Router:
    """A router of the fleet by a rule of RULES."""
    if rule in ("hlem", "least", "random"):
        return Router("front", rule, BITS)  # type: ignore[arg-type]
    made = Router("front", "hlem", BITS)
    part = Part(of_rows=0.0) if rule == "kv-only" else Part(affinity=0.0, of_users=0.0)
    made._terms = (part, Late())
    return made


class Users(NamedTuple):
    """events [users]; profiles [users, PROFILE] shards; shares [users] of the requests within hot and cold users; the
    first `hot` are hot."""

    events: Float64
    profiles: npt.NDArray[np.int64]
    shares: Float64
    hot: int


def make_users(requests: npt.NDArray[Any], seed: int, number: int = USERS) -> Users:
    """Users with the activity of a log. requests: [n] of each of its users."""
    random = np.random.default_rng((9, seed))
    ordered = np.quantile(requests, (np.arange(number) + 0.5) / number)[::-1]
    hot = round(0.05 * number)
    shares = np.concatenate([part / part.sum() for part in (ordered[:hot], ordered[hot:])])
    groups = np.array([random.choice(shards.SHARDS, GROUP, replace=False) for _ in range(GROUPS)])
    of = groups[random.integers(0, GROUPS, number)]
    own = np.array([random.choice(each, OWN, replace=False) for each in of])
    other = random.integers(0, shards.SHARDS, (number, shards.PROFILE - OWN))
    events = np.clip(random.lognormal(np.log(EVENTS) - SIGMA**2 / 2, SIGMA, number), 1_000, 16_000)
    return Users(events, np.concatenate([own, other], 1), shares, hot)


class Kept:
    """Things of some size up to `room`, the least recently used go first."""

    def __init__(self, room: float) -> None:
        self._room, self._used = room, 0.0
        self._sizes: OrderedDict[Hashable, float] = OrderedDict()

    def touch(self, thing: Hashable, size: float) -> bool:
        """Whether it was there; it is from now on."""
        there = thing in self._sizes
        self._used += size - self._sizes.get(thing, 0.0)
        self._sizes[thing] = size
        self._sizes.move_to_end(thing)
        while self._used > self._room and len(self._sizes) > 1:
            self._used -= self._sizes.popitem(last=False)[1]
        return there

    def names(self, of: str) -> Iterable[str]:
        return (f"{of} {thing}" for thing in self._sizes)


@dataclass
class Node:
    users: Kept
    rows: Kept
    free_s: float = 0.0
    worked_s: float = 0.0
    tokens: float = 0.0
    answered: int = 0
    late_s: list[float] = field(default_factory=list)


class Found(NamedTuple):
    """latency_s [requests]; hit rates; the busiest node's work over the mean; busy: share of the time."""

    latency_s: Float64
    user_hits: float
    row_hits: float
    imbalance: float
    busy: float
    mean_s: float


def took_s(world: World, events: float, kept: bool, row_hits: float) -> float:
    """`epochs.service_s` of a single request, in plain numbers."""
    gone = 0.0 if kept else events
    new = float(world.fresh) + float(world.candidates) + gone
    pairs = new * (events + float(world.fresh)) - 0.5 * gone**2
    missed = new * float(world.tables) * float(world.row_bytes) * (1.0 - row_hits)
    work_s = float(world.start_s) + float(world.token_s) * new + float(world.pair_s) * pairs
    return work_s + missed / float(world.link)


def serve(users: Users, rule: str, regime: Regime, rate: float, epochs: int, seed: int) -> Found:
    """One run; the same requests under each rule. The first fifth warms up and is not judged."""
    world = workload.world(workload.zipf_users(USERS, 0.6), workload.zipf_rows(10**8, 0.8))
    random = np.random.default_rng((seed, REGIMES.index(regime)))
    course = workload.traffic(regime, random, epochs)
    chosen = router(rule)
    names = [f"node-{number}" for number in range(NODES)]
    chosen.become(names)
    pool = float(world.pool)
    nodes = {name: Node(Kept((1 - SPLIT) * pool), Kept(SPLIT * pool)) for name in names}
    running: list[tuple[float, str, str]] = []
    reported, number, now = 0.0, 0, 0.0
    latency, user_hits, row_hits = [], [], []
    for epoch in range(epochs):
        count = int(random.poisson(rate * float(course.load[epoch]) * EPOCH_S))
        hot = random.random(count) < float(course.hot_share[epoch])
        who = np.where(
            hot,
            random.choice(users.hot, count, p=users.shares[: users.hot]),
            users.hot + random.choice(len(users.shares) - users.hot, count, p=users.shares[users.hot :]),
        )
        for at, user in zip(np.sort(random.random(count)).tolist(), who.tolist(), strict=True):
            now, number = epoch * EPOCH_S + at * EPOCH_S, number + 1
            while running and running[0][0] <= now:
                _, request, of = heapq.heappop(running)
                chosen.ended(request, of)
            if now >= reported + REPORT_S:
                reported = now
                _report(chosen, nodes, world)
            events, profile = float(users.events[user]), users.profiles[user].tolist()
            read = [shards.name(shard) for shard in profile]
            ask = Ask(str(number), f"user {user}", events, (), 0.0, 120.0, shards=read)
            name = chosen.rank(ask, round(now * SECOND))[0]
            chosen.sent(ask, name, round(now * SECOND))
            node = nodes[name]
            kept = node.users.touch(user, events * float(world.event_bytes))
            there = [node.rows.touch(shard, SHARD_BYTES) for shard in profile]
            took = took_s(world, events, kept, float(np.mean(there)))
            node.free_s = max(now, node.free_s) + took
            node.worked_s += took
            node.tokens += 120.0 if kept else events + 120.0
            node.answered += 1
            heapq.heappush(running, (node.free_s, ask.id, name))
            if epoch >= epochs // 5:
                latency.append(node.free_s - now)
                user_hits.append(kept)
                row_hits.append(np.mean(there))
    worked = np.array([node.worked_s for node in nodes.values()])
    return Found(
        np.array(latency),
        float(np.mean(user_hits)),
        float(np.mean(row_hits)),
        float(worked.max() / worked.mean()),
        float(worked.mean()) / max(now, 1e-9),
        float(worked.sum()) / max(1, number),
    )


def _report(chosen: Router, nodes: dict[str, Node], world: World) -> None:
    """What each node holds now, and what a token and a request without its rows take."""
    rows_s = took_s(world, EVENTS, False, 0.0) - took_s(world, EVENTS, False, 1.0)
    for name, node in nodes.items():
        told = Report(
            digest(node.users.names("user"), BITS),
            ns_per_token=node.worked_s / node.tokens * SECOND if node.tokens else 0.0,
            shards=digest(node.rows.names("shard"), BITS),
            rows_ns=rows_s * SECOND,
        )
        chosen.heard(name, told)


def measure(quick: bool, quiet: Quiet) -> Measured:
    """A row for each rule and regime, the mean over the seeds."""
    del quiet
    folder = Path(os.environ.get("JGR_DATA") or harness.ROOT.parent / "shared" / "data")
    try:
        requests = workload.kuairand_users(folder)
    except UserError as error:
        raise Missing(str(error)) from None
    seeds, epochs = (1, 5) if quick else (3, 24)
    found: dict[tuple[str, Regime], list[Found]] = {(rule, of): [] for of in REGIMES for rule in RULES}
    for seed in range(seeds):
        users = make_users(requests, seed)
        mean_s = serve(users, "least", "steady", 100.0, 2 * epochs, seed).mean_s
        rate = BUSY * NODES / mean_s
        for (rule, regime), runs in found.items():
            runs.append(serve(users, rule, regime, rate, epochs, seed))
        harness.note(f"fleet {seed + 1} of {seeds}")
    rows = [row(rule, regime, runs) for (rule, regime), runs in found.items()]
    return Measured(claims(rows), rows)


def row(rule: str, regime: Regime, runs: Sequence[Found]) -> Row:
    p99_ms = [float(np.quantile(run.latency_s, 0.99)) * 1e3 for run in runs]
    return {
        "rule": rule,
        "regime": regime,
        "p99_ms": rounded(float(np.mean(p99_ms))),
        "mean_ms": rounded(float(np.mean([run.latency_s.mean() for run in runs])) * 1e3),
        "user_hits": rounded(float(np.mean([run.user_hits for run in runs]))),
        "row_hits": rounded(float(np.mean([run.row_hits for run in runs]))),
        "imbalance": rounded(float(np.mean([run.imbalance for run in runs]))),
        "busy": rounded(float(np.mean([run.busy for run in runs]))),
        "requests": sum(len(run.latency_s) for run in runs),
    }


def claims(rows: Sequence[Row]) -> list[Claim]:
    """The paper's tenth off the 99th percentile, against each router that lacks what the score has."""
    at = {(found["rule"], found["regime"]): found["p99_ms"] for found in rows}
    return [
        Claim(
            f"hlem-routing-p99-over-{rule}-{regime}",
            rounded(at["hlem", regime] / at[rule, regime]),
            "x",
            "lower",
            0.9 if rule in ("least", "random") else 1.0,
        )
        for regime in REGIMES
        for rule in RULES[1:]
    ]


if __name__ == "__main__":
    harness.main(Benchmark("hlem_routing", measure, ("numpy",), (Path(__file__),)))
