# SPDX-License-Identifier: Apache-2.0
"""What each of BAT's parts is worth: the paper's table 4, on 4 nodes, with Books of 280,000 and of a million items.

A is bipartite attention: a request's prefix is its user or its items; without it the user, always. B is HRCS (BAT-11);
without it all items are on every node, or where they do not fit, as a million do not, each on one. C is hotness
(BAT-10); without it the longer of user and items comes first, and the least recently used user goes. So `none` keeps
users only, with all the memory; the paper has no `recompute`, which keeps nothing.

The memory of the paper, 150 GB a node, and the workload are scaled by one factor; how time is reckoned is told in
benchmarks/bat_nodes.py. The table is of 100 Gb/s, the paper's network; 10 Gb/s is measured too. There are two sets of
users, each measured at its steady state: all 510,000 of the data set, of whom hardly anyone is still cached when he
comes back; and 10,500 who return, as many as fill what 280,000 sharded items leave. The paper draws a trace from its
users and does not say how many they are.

Neither gives the paper's whole table. On Books-280K it has AB as fast as ABC, because "the user cache space is large
enough to minimize user cache capacity misses", which is so with returning users; yet AB 1.54 times as fast as none,
which has more space still, for users alone, and should miss as little. That many misses of none are so with all users;
then the longer-first rule of A and AB misses as often.

    python -m benchmarks.bat_ablation [--quick]
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from benchmarks import bat_nodes, bat_world, harness
from benchmarks.bat_nodes import (
    GBITS,
    NODE_BYTES,
    Device,
    System,
    item_memory,
    link_row,
    link_tokens,
    place_hot,
    returning,
    speed_row,
)
from benchmarks.bat_world import at_skew
from benchmarks.harness import Benchmark, Claim, Measured, Quiet, Row
from jgr.placement.items import ItemPlacement, Items, Workers, hash_items, replicate
from jgr.simulation.node import Key
from jgr.traffic.workloads import BOOKS, books

THREADS = 2
PAPER = {
    "books-280k": {"ABC": 128, "AB": 128, "AC": 115, "A": 102, "none": 83},
    "books-1m": {"ABC": 126, "AB": 106, "AC": 125, "A": 105, "none": 83},
}
"""The requests per second of the paper's table, by catalog and parts."""
ITEMS = {"books-280k": 280_000, "books-1m": 1_000_000}
USERS = {"all": BOOKS.users, "returning": returning(BOOKS)}
PAIRS = (("ABC", "AB"), ("ABC", "AC"), ("ABC", "A"), ("ABC", "none"), ("A", "none"))
PAPER_SKEW, PAPER_GBIT = 0.9, 100


class Setting(NamedTuple):
    """Which parts of BAT are on, and for which users. skew: share of the accesses that go to a tenth of the items."""

    catalog: str
    users: str
    skew: float


class Size(NamedTuple):
    """How much is measured. factor: by which users and items are divided.

    before, counted, timed: numbers of requests of each setting, see `Device.plan`; tokens are summed over those
    counted, requests per second come from those timed. tokens: compiled sizes."""

    factor: float
    before: int
    counted: int
    timed: int
    tokens: str
    settings: tuple[Setting, ...]


TRAFFIC = (("all", PAPER_SKEW), ("returning", PAPER_SKEW), ("returning", 0.5))
SETTINGS = tuple(Setting(catalog, users, skew) for users, skew in TRAFFIC for catalog in ITEMS)
FULL = Size(40, 2_500, 600, 100, bat_nodes.TOKENS, SETTINGS)
QUICK = Size(175, 200, 50, 6, bat_nodes.QUICK_TOKENS, SETTINGS[2:4])


def systems(items: Items, workers: Workers) -> Iterator[System]:
    nothing = ItemPlacement(items, workers, np.zeros(len(items), np.uint8), items.by_share)
    yield System("none", nothing, policy="user")
    yield System("recompute", nothing, policy="none")
    fits = items.room_bytes.sum() <= workers.capacity_bytes
    without_b = replicate(items, workers) if fits else hash_items(items, workers)
    yield System("A", without_b, policy="cache_agnostic")
    yield System("AC", without_b)
    for gbit in GBITS:
        placement = place_hot(items, workers, gbit)
        yield System("AB", placement, gbit, "cache_agnostic")
        yield System("ABC", placement, gbit)


def measure(quick: bool, quiet: Quiet) -> Measured:
    size = QUICK if quick else FULL
    largest = books(max(ITEMS.values()))
    found: dict[Setting, tuple[list[System], dict[Key, float]]] = {}
    points: list[tuple[float, float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        memory = NODE_BYTES / item_memory(largest)
        device = Device(Path(folder), largest.scaled(size.factor), size.tokens, memory)
        device.warm_up()
        for setting in size.settings:
            workload = at_skew(books(ITEMS[setting.catalog], USERS[setting.users]), setting.skew)
            planned, runs = device.plan(workload, size.factor, size.before, size.counted, size.timed, systems)
            seconds = device.time(runs, quiet)
            found[setting] = planned, seconds
            points += [(run.new_tokens, run.cached_tokens, seconds[key]) for key, run in runs.items()]
    speed = speed_row(points)
    about: Row = {
        "factor": size.factor,
        "users": {users: round(count / size.factor) for users, count in USERS.items()},
        "items": {catalog: round(count / size.factor) for catalog, count in ITEMS.items()},
        "node_memory_over_items_kv": {
            catalog: harness.rounded(NODE_BYTES / item_memory(books(count)), 3)
            for catalog, count in ITEMS.items()
        },
        "requests": {"before": size.before, "counted": size.counted, "timed": size.timed},
        **speed,
    }
    slower = speed["tokens_per_s"] / speed["papers_tokens_per_s"]
    rows = [
        make_row(setting, planned, seconds, gbit, slower)
        for setting, (planned, seconds) in found.items()
        for gbit in GBITS
    ]
    return Measured(claims(rows), [about, *rows])


def make_row(
    setting: Setting,
    planned: Sequence[System],
    seconds: Mapping[Key, float],
    gbit: int,
    of_papers_speed: float,
) -> Row:
    """One line of the table."""
    base, rate = planned[0], link_tokens(gbit) * of_papers_speed
    shown = {
        system.name: {
            **link_row(system, base, seconds, rate),
            "computed_tokens": system.computed_tokens,
            "hit_rate": harness.rounded(system.hit_rate, 3),
            "user_prefix_share": harness.rounded(system.user_prefix_share, 3),
            "users_cached": system.users,
            "replicated_items": harness.rounded(system.placement.replicated_fraction, 3),
            "dropped_items": len(system.placement.dropped),
        }
        for system in planned
        if gbit in system.gbits
    }
    row: Row = {
        "catalog": setting.catalog,
        "users": setting.users,
        "top10_share": setting.skew,
        "gbit_per_s": gbit,
        "systems": shown,
    }
    if gbit == PAPER_GBIT:
        row["paper_requests_per_s"] = PAPER[setting.catalog]
    return row


def claims(rows: Sequence[Row]) -> list[Claim]:
    """The paper's order on its network, with its ratios in the names, and at the other skew how much of it is lost."""
    found, lost = [], dict[str, int]()
    for row in rows:
        if row["gbit_per_s"] != PAPER_GBIT:
            continue
        catalog, skew = row["catalog"], row["top10_share"]
        speed = {name: system["requests_per_s"] for name, system in row["systems"].items()}
        ratios = {pair: harness.rounded(speed[pair[0]] / speed[pair[1]]) for pair in PAIRS}
        if skew == PAPER_SKEW:
            found += [
                Claim(name(catalog, row["users"], pair), value, "x", "higher", 1.0)
                for pair, value in ratios.items()
            ]
        else:
            of = f"{row['users']}-users-at-{round(100 * skew)}-percent-skew"
            lost[of] = lost.get(of, 0) + sum(value < 1 for value in ratios.values())
    return [
        *found,
        *(
            Claim(f"ratios-below-one-of-the-ablation-{of}", float(n), "", "lower", 0.0)
            for of, n in lost.items()
        ),
    ]


def name(catalog: str, users: str, pair: tuple[str, str]) -> str:
    first, second = pair
    paper = PAPER[catalog][first] / PAPER[catalog][second]
    return f"{first}-over-{second}-{catalog}-{users}-users-paper-{paper:.2f}".lower()


if __name__ == "__main__":
    # Before XLA counts the cores.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    harness.main(
        Benchmark(
            name="bat_ablation",
            measure=measure,
            packages=("jax", "jaxlib", "numpy"),
            sources=(Path(__file__), Path(bat_nodes.__file__), Path(bat_world.__file__)),
            device=jax.default_backend(),
        )
    )
