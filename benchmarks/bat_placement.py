# SPDX-License-Identifier: Apache-2.0
"""Where items are cached on 4 nodes (BAT-11): all on every node, each on one, or hot ones on all and cold ones on one.

The workload is the paper's Books with Qwen2-1.5B: 4 nodes of 150 GB each, items first, users in what is left. All of it
is scaled by one factor (see jgr.traffic.workloads), so that a node has room for some dozens of users. All items take
120 GB. So where every node has them all, 30 GB are left for its users; where each has a quarter, 120 GB are left.
benchmarks/bat_nodes.py says how time is reckoned.

What the memory is worth depends on who comes. There are two sets of users, each measured at its steady state:

- all: the 510,000 users of the data set, as in the other benchmarks. Even four times 120 GB hold 2 % of them only, so
  with any placement hardly a user is still cached on coming back.
- returning: 10,500 users, as many as fill the memory that sharding leaves; four times 30 GB hold a quarter of them. The
  paper draws a trace from its users and does not say how many they are; but it says that with HRCS "the user cache
  space is large enough to minimize user cache capacity misses" (6.4, on table 4), and that the room for users is its
  gain over Replicate. That fits these users, at the edge, and not the first set.

The bytes between each pair of nodes are counted in three ways, which must agree: as planned, request by request; by
`expected_bytes` from the placement; and by the item store, which lays the cells out and says what it would send.

The paper's requests per second, over those of Replicate, are: HRCS 1.10 at 10 Gb/s and 1.16 at 100 Gb/s; Hash .78 at
10 Gb/s, where the network is 31 % of Hash's latency. The paper does not give its alpha; here it is .2 (BAT-11, note 3).
With it HRCS shards everything at 100 Gb/s, and is then the same as Hash.

    python -m benchmarks.bat_placement [--quick]
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from benchmarks import bat_nodes, bat_world, harness
from benchmarks.bat_nodes import (
    GBITS,
    NODES,
    Device,
    Int64,
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
from jgr.placement.item_store import EVERYWHERE, lay_out, plan_exchange
from jgr.placement.items import Items, Workers, expected_bytes, hash_items, replicate
from jgr.simulation.node import Key
from jgr.traffic.workloads import BOOKS

THREADS = 2
USERS = {"all": BOOKS.users, "returning": returning(BOOKS)}
SETTINGS = tuple((users, skew) for users in USERS for skew in (0.9, 0.5))


class Size(NamedTuple):
    """factor: what users and items are divided by. before, counted, timed: how many requests each setting has, see
    `Device.plan`; computed tokens are summed over those counted, requests per second are of those timed. tokens: the
    numbers of tokens to compile for. settings: a set of users, and the share of accesses that go to a tenth of the
    items."""

    factor: float
    before: int
    counted: int
    timed: int
    tokens: str
    settings: tuple[tuple[str, float], ...]


FULL = Size(25, 4_000, 1_000, 400, bat_nodes.TOKENS, SETTINGS)
QUICK = Size(175, 400, 100, 16, bat_nodes.QUICK_TOKENS, SETTINGS[-2:-1])


def systems(items: Items, workers: Workers) -> Iterator[System]:
    yield System("replicate", replicate(items, workers))
    yield System("hash", hash_items(items, workers))
    for gbit in GBITS:
        yield System("hrcs", place_hot(items, workers, gbit), gbit)


def measure(quick: bool, quiet: Quiet) -> Measured:
    size = QUICK if quick else FULL
    ratio = bat_nodes.NODE_BYTES / item_memory(BOOKS)
    found: dict[tuple[str, float], tuple[list[System], dict[Key, float]]] = {}
    points: list[tuple[float, float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        device = Device(Path(folder), BOOKS.scaled(size.factor), size.tokens, ratio)
        device.warm_up()
        for users, skew in size.settings:
            workload = at_skew(replace(BOOKS, users=USERS[users]), skew)
            planned, runs = device.plan(workload, size.factor, size.before, size.counted, size.timed, systems)
            seconds = device.time(runs, quiet)
            found[users, skew] = planned, seconds
            points += [(run.new_tokens, run.cached_tokens, seconds[key]) for key, run in runs.items()]
    speed = speed_row(points)
    about: Row = {
        "workload": BOOKS.name,
        "factor": size.factor,
        "users": {users: round(count / size.factor) for users, count in USERS.items()},
        "items": round(BOOKS.items / size.factor),
        "requests": {"before": size.before, "counted": size.counted, "timed": size.timed},
        "node_memory_over_items_kv": harness.rounded(ratio, 3),
        **speed,
        "paper": {"hrcs_over_replicate": {"10": 1.10, "100": 1.16}, "hash_over_replicate": {"10": 0.78}},
    }
    slower = speed["tokens_per_s"] / speed["papers_tokens_per_s"]
    rows = [
        {"users": users, "top10_share": skew, **make_row(system, planned[0], seconds, slower)}
        for (users, skew), (planned, seconds) in found.items()
        for system in planned
    ]
    return Measured(claims(rows), [about, *rows])


def make_row(system: System, base: System, seconds: Mapping[Key, float], of_papers_speed: float) -> Row:
    """A system's row. base: the system that its requests per second are compared with."""
    placement = system.placement
    moved, disagree = moved_bytes(system)
    used = placement.used_bytes()
    return {
        "placement": system.name,
        "asked_alpha": None if placement.budget is None else placement.budget.alpha,
        "needed_alpha": placement.alpha if placement.alpha is None else harness.rounded(placement.alpha, 3),
        "alpha_exceeded": placement.alpha_exceeded,
        "replicated_items": harness.rounded(placement.replicated_fraction, 3),
        "accesses_of_sharded_items": harness.rounded(placement.sharded_share, 3),
        "dropped_items": len(placement.dropped),
        "items_share_of_memory": harness.rounded(float(used.max()) / placement.workers.capacity_bytes, 3),
        "users_cached": system.users,
        "hit_rate": harness.rounded(system.hit_rate, 3),
        "computed_tokens": system.computed_tokens,
        "user_prefix_share": harness.rounded(system.user_prefix_share, 3),
        "bytes_from_to": moved.tolist(),
        "pairs_counted_differently": disagree,
        "links": [
            {"gbit_per_s": gbit, **link_row(system, base, seconds, link_tokens(gbit) * of_papers_speed)}
            for gbit in system.gbits
        ],
    }


def moved_bytes(system: System) -> tuple[Int64, int]:
    """The bytes from each source to each destination, and for how many pairs of nodes the other counts differ."""
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
    """Claims that the three placements stand in the paper's order on each link."""
    speed = {
        (row["users"], row["top10_share"], row["placement"], link["gbit_per_s"]): link["requests_per_s"]
        for row in rows
        for link in row["links"]
    }
    found = []
    for (users, skew, name, gbit), value in speed.items():
        base = speed[users, skew, "replicate", gbit]
        at = f"at-{gbit}-gbit-{users}-users-at-{round(100 * skew)}-percent-skew"
        if name == "hrcs":
            found.append(
                Claim(f"hrcs-over-replicate-{at}", harness.rounded(value / base), "x", "higher", 1.0)
            )
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
