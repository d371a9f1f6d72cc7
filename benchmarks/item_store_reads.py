# SPDX-License-Identifier: Apache-2.0
"""Items' KV over the 8 devices of one process, read in two ways: by one all_to_all, or by copies from device to device.

BAT's cache workers are here the devices of one process: hot items are on all of them, each cold one is on one
(jgr/placement). A batch's reads are what each device wants of the items of its requests. `ItemStore` reads by one
program with an all_to_all, whose lists are as long for every pair of devices as the fullest pair of a batch needs;
`CopyStore` sends each device's cells by themselves. Both read the same, bit for bit.

What is counted: bytes between devices that are wanted, and that are sent with the padding; programs and copies that are
dispatched. Those do not depend on the machine. Seconds here are those of 8 virtual devices of one CPU, whose links are
its memory: they compare what the two ways cost the host, and say nothing of NVLink or PCIe. Neither way is chosen by
them. `jgr serve` reads items in both ways, out of pools that change: `benchmarks.device_reads` measures that.

    python -m benchmarks.item_store_reads [--quick]
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from benchmarks import harness
from benchmarks.harness import Benchmark, Claim, Measured, Quiet, Row
from jgr.placement.item_copies import CopyStore, plan_copies
from jgr.placement.item_store import AXIS, EVERYWHERE, ItemStore, lay_out, plan_exchange
from jgr.placement.items import ItemPlacement, Items, Workers, hash_items, hrcs, replicate

DEVICES = 8
N_ITEMS = 2000
CELL_TOKENS, TOKEN_BYTES = 2, 2048
"""A cell is 4 KB: scaled down from 229 KB of a Qwen3-0.6B in 16 bits, so that all fits into a CPU's memory."""
REQUESTS, CANDIDATES = 4, 50
"""A batch of a device: so many requests with so many candidates, each read once."""
ROUNDS = 9


class World(NamedTuple):
    """A placement with its cells' values, [cells, E] float32, and both stores of them."""

    name: str
    placement: ItemPlacement
    values: npt.NDArray[np.float32]
    exchange: ItemStore
    copies: CopyStore


def placements() -> Iterator[tuple[str, ItemPlacement]]:
    """The three placements of items whose popularity falls as 1 / rank, where every device has room for them all."""
    tokens = np.random.default_rng(0).integers(2, 9, N_ITEMS)
    items = Items(1.0 / np.arange(1, N_ITEMS + 1), tokens, TOKEN_BYTES, CELL_TOKENS)
    workers = Workers(DEVICES, int(items.room_bytes.sum()))
    asked = CANDIDATES * float(tokens.mean())
    yield "replicate", replicate(items, workers)
    yield "hash", hash_items(items, workers)
    # A request takes 2 ms, a tenth of which may pass on a link of 10 Gb/s: about half of what it reads.
    yield "hrcs", hrcs(items, workers, prefill_s=0.002, item_tokens=asked, link_bytes_per_s=1.25e9, alpha=0.1)


def make_world(name: str, placement: ItemPlacement) -> World:
    where = lay_out(placement)
    shape = len(where.owner), CELL_TOKENS * TOKEN_BYTES // 4
    values = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    parts = [where.on(device) for device in range(DEVICES)]
    cold = np.zeros((DEVICES, max(1, *map(len, parts)), shape[1]), np.float32)
    for part, cells in zip(cold, parts, strict=True):
        part[: len(cells)] = values[cells]
    hot = values[where.on(EVERYWHERE)]
    mesh = jax.make_mesh((DEVICES,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    return World(
        name, placement, values, ItemStore(mesh, hot, cold), CopyStore(list(mesh.devices), hot, cold)
    )


def batch(placement: ItemPlacement, seed: int) -> list[npt.NDArray[np.int32]]:
    """The cells that each device wants: those of its requests' candidates, each once."""
    rng, share = np.random.default_rng(seed), placement.items.share
    where = lay_out(placement)
    drawn = (rng.choice(N_ITEMS, REQUESTS * CANDIDATES, p=share) for _ in range(DEVICES))
    return [where.cells(np.unique(rows).astype(np.int32)) for rows in drawn]


def seconds(read: Callable[[Any], Any], plans: Sequence[Any]) -> float:
    """Read by all plans, each waited for before the next, and return how long that takes."""
    start = time.perf_counter()
    for plan in plans:
        jax.block_until_ready(read(plan))
    return time.perf_counter() - start


def is_right(out: Sequence[Any], world: World, wanted: Sequence[npt.NDArray[np.int32]]) -> bool:
    """Whether each device has what it wanted, bit for bit."""
    return all(
        np.array_equal(np.asarray(found)[: len(cells)], world.values[cells])
        for found, cells in zip(out, wanted, strict=True)
    )


def measure_world(world: World, batches: int, rounds: int, quiet: Quiet) -> Row:
    """Both ways over the same batches, in turns."""
    where = lay_out(world.placement)
    asked = [batch(world.placement, seed) for seed in range(batches)]
    most = max(len(cells) for wanted in asked for cells in wanted)
    loads = [
        np.count_nonzero(where.owner[cells] == d)
        for wanted in asked
        for cells in wanted
        for d in range(DEVICES)
    ]
    pair, replicated = max(1, int(np.max(loads))), len(where.on(EVERYWHERE))
    exchanges = [plan_exchange(where, wanted, pair, most, replicated) for wanted in asked]
    copies = [plan_copies(where, wanted, most) for wanted in asked]
    for wanted, exchange, plan in zip(asked, exchanges, copies, strict=True):
        out = world.exchange.read(exchange)
        right = is_right(list(np.asarray(out)), world, wanted)
        if not (right and is_right(world.copies.read(plan), world, wanted)):
            raise AssertionError(f"{world.name}: a device was given other cells than it wanted")
    variants = {
        "all_to_all": partial(seconds, world.exchange.read, exchanges),
        "copies": partial(seconds, world.copies.read, copies),
    }
    timings = harness.interleave(variants, rounds, quiet)
    useful, sent = np.sum([world.exchange.moved_bytes(one) for one in exchanges], axis=0) / batches
    useful_too, copied = np.sum([world.copies.moved_bytes(one) for one in copies], axis=0) / batches
    assert useful == useful_too
    pairs = sum(len(one.pairs) for one in copies) / batches
    return {
        "placement": world.name,
        "replicated_share": harness.rounded(world.placement.replicated_fraction),
        "cells_a_batch": sum(len(cells) for wanted in asked for cells in wanted) / batches,
        "wanted_bytes_a_batch": float(useful),
        "sent_bytes_a_batch": {"all_to_all": float(sent), "copies": float(copied)},
        # On each device one program; against a gather for it and, for each pair with cells, a gather, a copy, a put.
        "dispatches_a_batch": {"all_to_all": 1, "copies": DEVICES + 3 * pairs},
        "ms_a_batch": {
            name: harness.spread(1e3 * x / batches for x in found) for name, found in timings.items()
        },
    }


def claims(rows: Sequence[Row]) -> list[Claim]:
    return [
        Claim(
            f"sent-over-wanted-bytes-{way.replace('_', '-')}-{row['placement']}",
            harness.rounded(row["sent_bytes_a_batch"][way] / row["wanted_bytes_a_batch"]),
            "times",
            "lower",
            2.0,
            f"Bytes sent between 8 devices, padding included, over those wanted; {place}, {words}",
        )
        for row in rows
        if row["wanted_bytes_a_batch"]
        for place in ["each item on one" if row["placement"] == "hash" else "popular items on all"]
        for way, words in (
            ("all_to_all", "all devices in one exchange"),
            ("copies", "copied device by device"),
        )
    ]


def measure(quick: bool, quiet: Quiet) -> Measured:
    batches, rounds = (2, 2) if quick else (8, ROUNDS)
    rows = [
        measure_world(make_world(name, placement), batches, rounds, quiet) for name, placement in placements()
    ]
    return Measured(claims(rows), rows)


if __name__ == "__main__":
    # With fewer threads than devices a collective can wait for ever; read when XLA's backend starts.
    os.environ.setdefault("NPROC", "16")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    harness.main(
        Benchmark(
            name="item_store_reads",
            measure=measure,
            packages=("jax", "jaxlib", "numpy"),
            sources=(Path(__file__),),
        )
    )
