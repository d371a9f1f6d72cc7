# SPDX-License-Identifier: Apache-2.0
"""What each rule of a fleet's router is worth on a live fleet: four replicas on Ray Serve, one and two fronts.

Requests are events of KuaiRand-Pure in their order (of ML-1M: benchmarks/fleet_routing_ml_1m.py; its files tell the
order of a user's events alone, and users take turns at random), by 200 users of all degrees of activity, with BAT's
prompts: a history of 1500 tokens in the mean over the log's requests, which stays as long as it is in the mean for the
user, and 100 candidates of ten. Counts are those of real engines, times those of executors with a clock of their own
(benchmarks/fleet_clock.py). A sequence of runs has one rule, one age of reports and one number of fronts: it begins
with empty caches and a warm-up, and goes on at 60, 85 and 110 % of the rate that rotation can serve. Latency counts
from when a request was due. Rules that hear no reports run at one age of them, with one front.

The joint score is compared with *hit*, in tokens computed for an answer, and with *load*, in the 99th percentile of
latency, over the runs of all ages and fronts at a load, since one run has some hundred requests alone. That percentile
has an interval, by a bootstrap over the seconds of the runs: both rules are sent the same requests at the same times,
so a second of both is drawn together. The replicas' work in flight is averaged over a run: of its requests one user
sends 8 %. Which front gets a request differs from run to run, and so does the imbalance: with two fronts the joint
score's sequences run three times, and the mean over their runs has an interval, by a bootstrap over these.

    JGR_DATA=FOLDER python -m benchmarks.fleet_routing [--quick]      FOLDER holds kuairand-pure
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from benchmarks import harness
from benchmarks.fleet_clock import Counts, cost_s
from benchmarks.harness import Benchmark, Claim, Measured, Missing, Quiet, Row, rounded
from jgr.cli.cluster import ENVIRONMENT
from jgr.evaluation import bootstrap
from jgr.traffic import open_loop
from jgr.traffic.http_client import Target
from jgr.traffic.replay import Replay
from jgr.traffic.schedule import Request, Schedule
from jgr.traffic.workloads import Workload

if TYPE_CHECKING:
    from benchmarks.fleet_world import Fleet

RULES = ("joint", "hit", "load")
DEAF = ("least", "round_robin", "random", "hash")
"""Rules that hear no reports."""
LOADS, AGES_S, FRONTS = (0.6, 0.85, 1.1), (0.2, 2.0, 7.0), (1, 2)
REPLICAS, USERS, CANDIDATES, ITEM_TOKENS, USER_TOKENS, MOST_TOKENS = 4, 200, 100, 10, 1500.0, 4096
WARM_S, RUN_S = 6.0, 10.0
REPEATS = 3
"""So often the joint score's sequences run with the most fronts."""
RESAMPLES = 2000
KEPT_TOKENS = 50_000
"""So many tokens a replica keeps, of all users and items."""
IN_TIME_S = 1.0
"""Goodput counts answers within so long."""
PATIENCE_S = 60.0


class Dataset(NamedTuple):
    name: str
    source: str
    raw: str
    split: str | None = None
    hours: float | None = None
    """Where the files tell no times: users take turns at random, as if their events lay in so many hours."""


KUAIRAND = Dataset("KuaiRand", "kuairand", "kuairand-pure", split="time")


@dataclass(frozen=True, eq=False)
class Traffic:
    """The requests of a dataset, in their order."""

    name: str
    requests: Sequence[Request]

    def schedule(self, first: int, rate: float, seconds: float, seed: int) -> Schedule:
        """Requests from the first one on, at random times."""
        rng = np.random.default_rng(seed)
        at_s = np.sort(rng.random(rng.poisson(rate * seconds))) * seconds
        which = (first + np.arange(len(at_s), dtype=np.int32)) % len(self.requests)
        return Schedule(at_s, which, self.requests, seconds)


def traffic(dataset: Dataset, folder: Path, count: int, users: int = USERS) -> Traffic:
    """The first `count` events of so many users. Missing where the dataset is not there."""
    from jgr.data.preparation.prepare import Options, prepare

    raw = Path(os.environ.get("JGR_DATA") or harness.ROOT.parent / "shared" / "data") / dataset.raw
    if not raw.is_dir():
        raise Missing(f"needs the dataset: no {dataset.raw} in the folder that JGR_DATA names")
    prepare(Options(dataset.source, raw, folder, split=dataset.split))  # type: ignore[arg-type]
    replay = Replay(
        folder,
        item_tokens=ITEM_TOKENS,
        candidates=CANDIDATES,
        user_tokens=USER_TOKENS,
        max_prompt=MOST_TOKENS,
        hours=dataset.hours,
    )
    return Traffic(dataset.name, list(itertools.islice(requests(replay, users), count)))


def requests(replay: Replay, users: int) -> Iterator[Request]:
    """The events of so many users, of all degrees of activity; a user's history is drawn once."""
    seen = [(access.user, access.user_tokens) for access in replay.accesses()]
    events = np.bincount([user for user, _ in seen])
    tokens = np.bincount([user for user, _ in seen], [number for _, number in seen]) / np.maximum(1, events)
    order = np.argsort(-events, kind="stable")[: np.count_nonzero(events)]
    chosen = order[np.linspace(0, len(order) - 1, min(users, len(order))).round().astype(int)].tolist()
    histories: dict[int, list[str]] = {}
    for user in chosen:
        rows = np.random.default_rng((7, user)).integers(
            0, len(replay.item_tokens), max(1, int(tokens[user]) // ITEM_TOKENS)
        )
        histories[user] = list(map(str, rows.tolist()))
    for access in replay.accesses():
        if access.user not in histories:
            continue
        body = {
            "user_id": f"u{access.user}",
            "history": histories[access.user],
            "candidates": list(map(str, access.items.tolist())),
            "top_k": 10,
        }
        yield Request("/v1/rank", msgspec.json.encode(body), "rank", "rank")


def model(folder: Path, items: int) -> Path:
    """A folder with the configuration of a model of so many items; its weights are never used."""
    from benchmarks.bat_world import World
    from jgr.config.formats import dump

    workload = Workload(
        "fleet", USERS, items, USER_TOKENS, ITEM_TOKENS, 1.0, candidates=CANDIDATES, top10_share=0.5
    )
    world = World(folder / "model", workload, speed=1.0)
    token_mb = world.item_bytes / float(world.traffic.item_tokens.sum()) / 2**20
    config = world.config(
        "hotness",
        KEPT_TOKENS * token_mb,
        "",
        "rank.requests=1",
        f"rank.candidates={CANDIDATES}",
        "rank.tokens=1024,2048,3072,5120",
        "cache.item_share=0.2",
        "cache.window_s=20",
        f"fleet.replicas={REPLICAS}",
        "fleet.cpus=0.1",
    )
    path = folder / "fleet.toml"
    path.write_text(dump(config, "toml"))
    return path


class Driver:
    """Sends requests to a fleet. name: of the traffic; fronts: of the fleet."""

    def __init__(self, fleet: Fleet, of: Traffic, fronts: int) -> None:
        self._fleet, self._of, self._fronts = fleet, of, fronts
        self._target, self._next = Target(fleet.host, fleet.port), 0

    def sequence(
        self, rule: str, age_s: float, rates: Mapping[float, float], warm_s: float, run_s: float
    ) -> list[Row]:
        """A row for each load, whose requests a second are given."""
        self._fleet.begin(rule, age_s)
        self._next = 0
        self._send(max(rates.values()) * 0.7, warm_s, 0)
        return [self._run(rule, age_s, load, rate, run_s) for load, rate in rates.items()]

    def capacity(self, warm_s: float, run_s: float) -> float:
        """Requests a second that rotation can serve, by what its requests take."""
        self._fleet.begin("round_robin", 2.0)
        self._next = 0
        self._send(0.5 * REPLICAS / cost_s(1500, 1000), warm_s, 0)
        before = self._fleet.counts()
        self._send(0.5 * REPLICAS / cost_s(1500, 1000), run_s, 1)
        done = self._fleet.counts().minus(before)
        return REPLICAS * done.requests / done.busy_s

    def _run(self, rule: str, age_s: float, load: float, rate: float, run_s: float) -> Row:
        before: Counts = self._fleet.counts()
        self._fleet.flown()
        found = self._send(rate, run_s, round(100 * load))
        done, flown = self._fleet.counts().minus(before), self._fleet.flown()
        latency_s = found.end_s - found.due_s
        well = np.array([verdict.status == "200" for verdict in found.verdicts])[found.ended]
        return {
            "traffic": self._of.name,
            "rule": rule,
            "load": load,
            "report_s": age_s,
            "fronts": self._fronts,
            "requests": len(found),
            "answered": int(well.sum()),
            "hit_rate": rounded(done.cached / max(1, done.tokens)),
            "tokens_an_answer": rounded((done.tokens - done.cached) / max(1, int(well.sum()))),
            "goodput": rounded(float((well & (latency_s <= IN_TIME_S)).mean())),
            "busy": rounded(done.busy_s / REPLICAS / run_s),
            "p99_ms": rounded(1e3 * float(np.quantile(latency_s[well], 0.99))),
            "imbalance": imbalance(flown),
            "client_late_p99_ms": rounded(1e3 * float(np.quantile(found.began_s - found.due_s, 0.99))),
            "latency_ms": [
                1e3 * latency_s[well & (found.due_s.astype(int) == s)] for s in range(round(run_s))
            ],
        }

    def _send(self, rate: float, seconds: float, seed: int) -> open_loop.Results:
        schedule = self._of.schedule(self._next, rate, seconds, seed)
        self._next += len(schedule)
        return open_loop.run(
            schedule,
            self._target,
            max_connections=256,
            timeout_s=PATIENCE_S,
            progress=lambda done, total, what: None,
        )


def imbalance(flown: Mapping[str, float]) -> float:
    """The most over the mean of the replicas' token seconds in flight; 1 where there were none."""
    mean = sum(flown.values()) / REPLICAS
    return rounded(max(flown.values()) / mean) if mean else 1.0


def tail(rows: Sequence[Row], base: Sequence[Row]) -> tuple[float, tuple[float, float]]:
    """The 99th percentile of latency over that of the base, of runs in the same order, and its 95 % interval."""
    pairs = [
        pair
        for one, other in zip(rows, base, strict=True)
        for pair in zip(one["latency_ms"], other["latency_ms"], strict=True)
    ]

    def ratio(which: Iterable[int]) -> float:
        chosen = [pairs[at] for at in which]
        ours, theirs = (np.quantile(np.concatenate(side), 0.99) for side in zip(*chosen, strict=True))
        return float(ours / theirs)

    rng = np.random.default_rng(0)
    drawn = np.array([ratio(rng.integers(0, len(pairs), len(pairs))) for _ in range(RESAMPLES)])
    low, high = bootstrap.interval(drawn)
    return rounded(ratio(range(len(pairs)))), (rounded(float(low)), rounded(float(high)))


def skew(imbalances: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """The mean of runs' imbalances, and its 95 % interval."""
    means = bootstrap.resampled_means(np.array(imbalances)[:, None], RESAMPLES, seed=0)
    low, high = bootstrap.interval(means)
    return rounded(float(np.mean(imbalances))), (rounded(float(low[0])), rounded(float(high[0])))


def claims(rows: Sequence[Row], name: str = "fleet-routing") -> list[Claim]:
    """The worst load, each over all ages of reports and numbers of fronts; the imbalance of two fronts at the worst age
    of reports, the mean over the runs at all loads. name: what the claims' begin with."""
    tokens: list[float] = []
    tails: list[tuple[float, tuple[float, float]]] = []
    for load in dict.fromkeys(row["load"] for row in rows):
        first = [row for row in rows if row["load"] == load and not row["repeat"]]
        at = {rule: [row for row in first if row["rule"] == rule] for rule in RULES}
        mean = {
            rule: sum(r["tokens_an_answer"] * r["answered"] for r in each) / sum(r["answered"] for r in each)
            for rule, each in at.items()
        }
        tokens.append(float(mean["joint"] / mean["hit"]))
        tails.append(tail(at["joint"], at["load"]))
    most = max(row["fronts"] for row in rows)
    joint = [row for row in rows if (row["rule"], row["fronts"]) == ("joint", most)]
    skews = [
        skew([row["imbalance"] for row in joint if row["report_s"] == age_s])
        for age_s in dict.fromkeys(row["report_s"] for row in joint)
    ]
    p99, ends = max(tails)
    most_skewed, skewed_ends = max(skews)
    of = rows[0]["traffic"]
    return [
        Claim(f"{name}-{which}", value, "x", "lower", target, f"{words}; {of}, live", interval)
        for which, value, interval, target, words in (
            (
                "tokens-over-hit-only",
                rounded(max(tokens)),
                None,
                1.1,
                "Tokens computed for an answer by a router's whole score over those by caches alone; worst load",
            ),
            (
                "p99-over-load-only",
                p99,
                ends,
                1.1,
                "99th percentile of latency by a router's whole score over that by load alone; worst load",
            ),
            (
                "imbalance-of-two-fronts",
                most_skewed,
                skewed_ends,
                1.3,
                "The most over the mean of the work in flight at four replicas behind two fronts, averaged over "
                f"{RUN_S:g} s; mean of {REPEATS * len(LOADS)} runs",
            ),
        )
    ]


def sequences(fronts: int, quick: bool) -> list[tuple[str, float]]:
    """The rules and the ages of reports that run on a fleet of so many fronts."""
    if quick:
        return [(rule, 0.2) for rule in RULES]
    deaf = [(rule, 2.0) for rule in DEAF] if fronts == 1 else []
    again = [("joint", age_s) for age_s in AGES_S] * (REPEATS - 1) if fronts == max(FRONTS) else []
    return [*itertools.product(RULES, AGES_S), *deaf, *again]


def measure(quick: bool, quiet: Quiet, dataset: Dataset = KUAIRAND, name: str = "fleet-routing") -> Measured:
    """Claims on the joint score; a row for each run."""
    if find_spec("ray") is None:
        raise Missing("needs Ray: pip install 'jgr[cluster]'")
    os.environ.update(ENVIRONMENT | dict(os.environ))  # before Ray is imported
    from benchmarks import fleet_world

    warm_s, run_s, loads = (2.0, 2.0, LOADS[1:2]) if quick else (WARM_S, RUN_S, LOADS)
    rows: list[Row] = []
    rates: Mapping[float, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        of = traffic(dataset, Path(folder) / "data", 4000)
        config = model(Path(folder), 1 + _largest(of))
        for fronts in FRONTS[: 1 if quick else None]:
            quiet.wait()
            with fleet_world.running(config, [f"fleet.fronts={fronts}"]) as fleet:
                driver = Driver(fleet, of, fronts)
                most = max(rates.values()) / max(loads) if rates else driver.capacity(warm_s, 2 * run_s)
                rates = {load: load * most for load in loads}
                ran: Counter[tuple[str, float]] = Counter()
                for rule, age_s in sequences(fronts, quick):
                    harness.note(f"{of.name}, {fronts} fronts, {rule}, reports {age_s} s old")
                    found = driver.sequence(rule, age_s, rates, warm_s, run_s)
                    rows += [row | {"repeat": ran[rule, age_s]} for row in found]
                    ran[rule, age_s] += 1
    measured = claims(rows, name)
    for row in rows:
        del row["latency_ms"]
    return Measured(measured, rows)


def _largest(of: Traffic) -> int:
    bodies = [msgspec.json.decode(request.body) for request in of.requests]
    return max(int(item) for body in bodies for item in (*body["history"], *body["candidates"]))


if __name__ == "__main__":
    harness.main(Benchmark("fleet_routing", measure, ("ray", "numpy"), (Path(__file__),)))
