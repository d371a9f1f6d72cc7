# SPDX-License-Identifier: Apache-2.0
"""Items over the replicas of a fleet, live: replicate, hash and HRCS in processes of their own, on links of two speeds.

A node's memory holds items and users (benchmarks/fleet_users.py): what a placement saves on items keeps more users, who
are then found when they come back. The nodes are benchmarks/fleet_processes.py's; their links are as many times slower
than 10 or 100 Gb/s as this machine computes fewer tokens a second than the paper's (benchmarks/bat_nodes.py says how
that is reckoned). It is an emulation. Two things are measured, of the same nodes:

- Bytes. Every missing item is fetched (fleet.fetch=always) and nothing is kept, one request after the other, so that
  what passes a link is what the placement predicts, request by request (`expected_bytes`); the series counted it.
- Requests a second, as the nodes serve by default: a missing item is fetched where that is cheaper than to compute it,
  and kept, and some requests are in flight at each node. All placements in one size of memory run side by side, and
  take the same requests in turns, so that what else goes on in the machine goes on for all. A claim has the median of
  the rounds' ratios, with its interval.

Beside the times stands what they come of, for each request: tokens that were computed, users that were found, items
that were fetched or computed, and `processor_ms`, what it took of all nodes' processors. These counts hardly depend on
chance, but for the processors' time.

The paper has four nodes, of which sharding takes a quarter of the items' memory each; here are two, of which it takes
a half, so that less is to be had. The paper's nodes fetch an item for each request anew; these compute what is not
worth a fetch, and keep what they fetched or computed. With 90 % of the accesses on a tenth of the items that spares
them most of what hash pays for in the paper: it has .78 of replicate's requests a second there at 10 Gb/s, and HRCS
1.10 times as many at 10 Gb/s, and 1.16 times at 100 Gb/s.

The nodes share one machine's cores, so requests a second are not those of as many machines, and what a transfer costs
the owner's processor is taken from the reader's.

    python -m benchmarks.fleet_items [--quick]
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks import bat_nodes, bat_world, fleet_processes, fleet_users, harness
from benchmarks.bat_nodes import PREFILL_S, link_tokens
from benchmarks.bat_world import World
from benchmarks.fleet_processes import Fleet, Served, together
from benchmarks.fleet_users import (
    FULL,
    NODES,
    QUICK,
    TOKEN_BYTES,
    Size,
    Trace,
    divide,
    see,
    write_model,
)
from benchmarks.harness import Benchmark, Claim, Measured, Missing, Quiet, Row, rounded
from jgr.config import Config, FleetConfig, override
from jgr.placement.items import ItemPlacement, expected_bytes
from jgr.traffic.workloads import BOOKS, Access

SOURCES = (
    __file__,
    fleet_processes.__file__,
    fleet_users.__file__,
    bat_nodes.__file__,
    bat_world.__file__,
)
Part = dict[str, list[Access]]
"""Requests of each node, by its name."""
SERVED = FleetConfig()
"""How nodes fetch by default."""


class Variant(NamedTuple):
    """gbit: the speed of the links; 0 where none is used."""

    placement: str
    gbit: int


def variants(size: Size) -> Iterator[Variant]:
    yield Variant("replicate", 0)
    for placement in ("hash", "hrcs"):
        for gbit in size.gbits:
            yield Variant(placement, gbit)


class Live:
    """A variant's processes with their items placed, and what its rounds took."""

    def __init__(self, fleet: Fleet, about: Row) -> None:
        self.fleet, self.about = fleet, about
        self.rounds: list[Served] = []
        self.missing = {"fetched": 0, "computed": 0}
        self.moved_bytes = 0

    async def round(
        self, bodies: dict[str, list[bytes]], in_flight: int
    ) -> tuple[Served, dict[str, int], int]:
        """What these requests took, what became of missing items, and the bytes that nodes sent for them."""
        before = await self.fleet.counted()
        served = together(await self.fleet.serve(bodies, in_flight))
        after = await self.fleet.counted()
        missing = {outcome: count - before.missing[outcome] for outcome, count in after.missing.items()}
        return served, missing, int((after.moved - before.moved).sum())

    def keep(self, served: Served, missing: dict[str, int], moved_bytes: int) -> None:
        self.rounds.append(served)
        self.missing = {outcome: count + missing[outcome] for outcome, count in self.missing.items()}
        self.moved_bytes += moved_bytes

    def row(self, users: int) -> Row:
        """users: those that are kept now."""
        every = together(self.rounds)
        each = every.requests
        speeds = [one.requests / one.seconds for one in self.rounds]
        return {
            **self.about,
            "requests_per_s": harness.spread(speeds),
            "rounds": [rounded(speed) for speed in speeds],
            "processor_ms": rounded(1e3 * every.processor_s / each),
            "tokens": rounded(every.tokens / each),
            "computed_tokens": rounded(every.computed / each),
            "hit_rate": rounded(every.cached / every.tokens, 3),
            "user_hits": rounded(every.user_hits / each, 3),
            "users_kept": users,
            "fetched_bytes": rounded(self.moved_bytes / each),
            **{f"{outcome}_items": rounded(count / each, 3) for outcome, count in self.missing.items()},
        }


class Bench:
    """What all variants share. slower: by how many times fewer tokens a second a node computes than the paper's device,
    as the first variant said, so that all have the same links."""

    def __init__(self, world: World, config: Config, size: Size, quiet: Quiet) -> None:
        self.world, self.config, self.size, self.quiet = world, config, size, quiet
        self.slower = 0.0

    async def measure(self, memory: str) -> list[Row]:
        """The rows of all variants with nodes of one size of memory."""
        size, trace, live = self.size, Trace(self.world), dict[Variant, Live]()
        seen, fetching, warm = (trace.take(count) for count in (size.seen, size.fetching, size.warm))
        try:
            for variant in variants(size):
                live[variant] = await self._start(variant, memory, trace, seen, fetching)
                harness.note(str(live[variant].about))
            for each in live.values():
                await each.fleet.serve(trace.bodies(warm), size.in_flight)
            await self._rounds(live, trace)
            rows = [each.row((await each.fleet.counted()).users) for each in live.values()]
        finally:
            for each in live.values():
                await asyncio.to_thread(each.fleet.close)
        for row in rows:
            harness.note(str(row))
        return rows

    async def _rounds(self, live: dict[Variant, Live], trace: Trace) -> None:
        """Rounds of all variants in turns; those in which others took part of the machine do not count."""
        kept = 0
        while kept < self.size.rounds:
            bodies, start = trace.bodies(trace.take(self.size.requests)), self.quiet.wait()
            found = {variant: await each.round(bodies, self.size.in_flight) for variant, each in live.items()}
            if self.quiet.was_quiet_since(start):
                kept += 1
                for variant, took in found.items():
                    live[variant].keep(*took)

    async def _start(self, variant: Variant, memory: str, trace: Trace, seen: Part, fetching: Part) -> Live:
        """Processes that have seen some requests and hold their items, by whose links bytes were counted."""
        size, share = self.size, self.size.memories[memory]
        divided = divide(see(self.world, seen), *variant, share, size)
        settings = (
            *divided.settings(),
            f"model.compilation_cache={self.config.model.compilation_cache}",
            f"server.max_history={self.config.server.max_history}",
            f"fleet.items={variant.placement}",
            f"fleet.replicas={NODES}",
            "fleet.transport=socket",
            "fleet.refresh_s=100000",
        )
        fleet = await asyncio.to_thread(Fleet, self.world.folder, settings, NODES)
        try:
            await fleet.ask_all("limits", divided.limits())
            await fleet.serve(trace.bodies(seen, "user_prefix"), 1)  # which leaves no item on a device
            self.slower = self.slower or await slowness(fleet)
            bytes_per_s = link_tokens(variant.gbit) * self.slower * TOKEN_BYTES
            asked = override(self.config, *settings, f"fleet.link_gbit={bytes_per_s * 8e-9}").fleet
            placement = await place(fleet, asked)
            if variant.gbit:
                await fleet.ask_all("speed", bytes_per_s)
            return Live(
                fleet,
                {
                    "memory": memory,
                    "memory_over_items": share,
                    **variant._asdict(),
                    "emulated_bytes_per_s": rounded(bytes_per_s),
                    "users": self.world.traffic.workload.users,
                    "memory_mb": {name: rounded(part / 2**20) for name, part in divided._asdict().items()},
                    "replicated_items": rounded(placement.replicated_fraction, 3),
                    "dropped_items": len(placement.dropped),
                    **await run_for_bytes(fleet, placement, trace, fetching),
                },
            )
        except BaseException:
            await asyncio.to_thread(fleet.close)
            raise


async def place(fleet: Fleet, config: FleetConfig) -> ItemPlacement:
    """Have the coordinator place the items by what was asked for so far. Needs no slow link."""
    from jgr.serving.cluster.placements import Placements

    placements = Placements(fleet, config)
    for _ in range(50):
        if await placements.look():
            assert placements.placement is not None
            return placements.placement
    raise Missing("the nodes could not be given their items; see the log")


async def slowness(fleet: Fleet) -> float:
    """By how many times fewer tokens a second a node computes than the paper's device."""
    counts = (await fleet.items_all("counts")).values()
    mine = np.mean([each["user_tokens"] / each["prefill_s"] for each in counts])
    return float(mine / (BOOKS.user_tokens / PREFILL_S))


async def run_for_bytes(fleet: Fleet, placement: ItemPlacement, trace: Trace, part: Part) -> Row:
    """One round in which all that is missing is fetched, and kept by nobody. The nodes then fetch by default."""
    await fetch(fleet, fetch="always", keep_fetched=False, fetch_ms=60_000.0)
    before = (await fleet.counted()).moved
    await fleet.serve(trace.bodies(part, "item_prefix"), 1)
    moved = (await fleet.counted()).moved - before
    await fetch(fleet, fetch=SERVED.fetch, keep_fetched=SERVED.keep_fetched, fetch_ms=SERVED.fetch_ms)
    reads = [(number, access.items) for number, some in enumerate(part.values()) for access in some]
    predicted = expected_bytes(placement, reads, whole_cells=True)
    return {
        "bytes_from_to": moved.tolist(),
        "predicted_bytes_from_to": predicted.tolist(),
        "bytes_over_predicted": rounded(largest_error(moved, predicted)),
    }


async def fetch(fleet: Fleet, **how: Any) -> None:
    """How nodes fetch from now on: fields of the section `fleet`."""
    await fleet.ask_all("fetch", how)


def largest_error(moved: npt.NDArray[np.int64], predicted: npt.NDArray[np.int64]) -> float:
    """The largest share by which a link's bytes differ from what was predicted."""
    return float((np.abs(moved - predicted) / np.maximum(predicted, 1)).max())


def measure(quick: bool, quiet: Quiet) -> Measured:
    size = QUICK if quick else FULL
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(*write_model(Path(folder) / "model", size), size, quiet)
        rows = [row for memory in size.memories for row in asyncio.run(bench.measure(memory))]
    return Measured(claims(rows), rows)


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Bytes as predicted, and the paper's order of the placements on each link."""
    of = {(row["memory"], row["placement"], row["gbit"]): row for row in rows}
    found = [
        Claim(
            "fleet-items-bytes-against-prediction",
            max(row["bytes_over_predicted"] for row in rows),
            "",
            "lower",
            0.02,
        )
    ]
    for memory, placement, gbit in of:
        if placement != "hrcs":
            continue
        hrcs, sharded, whole = (
            of[memory, name, at] for name, at in (("hrcs", gbit), ("hash", gbit), ("replicate", 0))
        )
        at = f"{gbit}-gbit-{memory}"
        found.append(_faster(f"fleet-items-hrcs-over-replicate-{at}", hrcs, whole))
        saved = rounded(whole["computed_tokens"] / hrcs["computed_tokens"])
        found.append(Claim(f"fleet-items-computed-replicate-over-hrcs-{at}", saved, "x", "higher", 1.0))
        if gbit == bat_nodes.GBITS[0]:
            found.append(_faster(f"fleet-items-hrcs-over-hash-{at}", hrcs, sharded))
            found.append(_faster(f"fleet-items-replicate-over-hash-{at}", whole, sharded))
    return found


def _faster(name: str, row: Row, base: Row) -> Claim:
    """How many times as many requests a second a row has, in the median of the rounds."""
    ratios = [mine / others for mine, others in zip(row["rounds"], base["rounds"], strict=True)]
    interval = harness.interval_of_median(ratios) if len(ratios) > 1 else None
    return Claim(name, rounded(float(np.median(ratios))), "x", "higher", 1.0, interval=interval)


if __name__ == "__main__":
    harness.main(
        Benchmark(
            "fleet_items",
            measure,
            ("jax", "jaxlib", "numpy"),
            tuple(Path(name) for name in SOURCES),
        )
    )
