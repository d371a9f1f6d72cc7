# SPDX-License-Identifier: Apache-2.0
"""Items over 8 devices of one process, and over 2 processes: what arrives is what was wanted, and the bytes add up."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest

from jgr.placement.item_copies import FEWEST, CopyStore, plan_copies
from jgr.placement.item_store import EVERYWHERE, NOBODY, Where, lay_out, plan_exchange
from jgr.placement.items import (
    NOWHERE,
    REPLICATED,
    SHARDED,
    ItemPlacement,
    Items,
    Workers,
    expected_bytes,
    hash_items,
    hrcs,
    replicate,
)

READ = """
import json, sys
import jax
processes, number, port, devices = map(int, sys.argv[1:])
jax.config.update("jax_num_cpu_devices", devices)
if processes > 1:
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, number)
import numpy as np
from jgr.placement.item_store import AXIS, EVERYWHERE, ItemStore, lay_out, plan_exchange
from jgr.placement.items import Items, Workers, expected_bytes, hrcs

D, E, PAIR, MOST = processes * devices, 6, 60, 90
rng = np.random.default_rng(0)
# A cell has 2 tokens of 12 bytes, an item 1 to 3 cells.
items = Items(1.0 / np.arange(1, 65), rng.integers(1, 6, 64), bytes_per_token=12, cell_tokens=2)
workers = Workers(D, int(items.room_bytes.sum()))
placement = hrcs(items, workers, prefill_s=1.0, item_tokens=20.0, link_bytes_per_s=480.0)
where = lay_out(placement)
values = rng.standard_normal((len(where.owner), E)).astype(np.float32)
hot = where.on(EVERYWHERE)
cold = np.zeros((D, max(len(where.on(device)) for device in range(D)), E), np.float32)
for device in range(D):
    cold[device, : len(where.on(device))] = values[where.on(device)]
rows = [rng.integers(0, 64, rng.integers(1, 30)).astype(np.int32) for _ in range(D)]
wanted = [where.cells(some) for some in rows]
mesh = jax.make_mesh((D,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
store = ItemStore(mesh, values[hot], cold)
exchange = plan_exchange(where, wanted, PAIR, MOST, len(hot))
out = store.read(exchange)
out.block_until_ready()
right = all(
    np.array_equal(np.asarray(shard.data)[0, : len(wanted[at])], values[wanted[at]])
    for shard in out.addressable_shards
    for at in [shard.index[0].start or 0]
)
predicted = expected_bytes(placement, list(enumerate(rows)), whole_cells=True)
between = exchange.useful * (1 - np.eye(D, dtype=np.int64)) * E * 4
right = right and np.array_equal(between, predicted)
print(json.dumps([right, int(placement.replicated.sum()), store.moved_bytes(exchange), int(predicted.sum())]))
if processes > 1:
    jax.distributed.shutdown()
"""


def run(processes: int, devices: int) -> list[Any]:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    # NPROC sizes XLA's thread pool: with fewer threads than devices a collective can wait for ever.
    environment = {**os.environ, "PYTHONPATH": ".", "NPROC": "16", "JAX_PLATFORMS": "cpu"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", READ, *map(str, (processes, number, port, devices))],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(processes)
    ]
    try:
        return [json.loads(one.communicate(timeout=300)[0].splitlines()[-1]) for one in started]
    finally:
        for one in started:
            one.kill()


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "devices"), [(1, 8), (2, 2)])
def test_every_device_gets_what_it_wants_and_the_bytes_are_the_placements(
    processes: int, devices: int
) -> None:
    for right, hot, (useful, sent), predicted in run(processes, devices):
        assert right
        assert 0 < hot < 64, "some items are replicated, some are not"
        assert 0 < useful == predicted < sent


def test_cells_are_numbered_item_by_item_and_laid_out_device_by_device() -> None:
    items = Items(np.array([1.0, 9.0, 2.0, 3.0, 1.0]), np.array([3, 1, 2, 4, 2]), 1, cell_tokens=2)
    holding = np.array([SHARDED, REPLICATED, SHARDED, SHARDED, NOWHERE], np.uint8)
    where = lay_out(ItemPlacement(items, Workers(2, 99), holding, np.arange(5, dtype=np.int32)))
    # Rows 0 and 2 are at home on device 0, row 3 on device 1; rows 0 and 3 have two cells each.
    assert where.ends.tolist() == [2, 3, 4, 6, 7]
    assert where.owner.tolist() == [0, 0, EVERYWHERE, 0, 1, 1, NOBODY]
    assert where.slot[:6].tolist() == [0, 1, 0, 2, 0, 1]
    assert where.cells(np.array([3, 0, 3, 1], np.int32)).tolist() == [4, 5, 0, 1, 4, 5, 2]
    assert where.on(0).tolist() == [0, 1, 3] and where.on(EVERYWHERE).tolist() == [2]
    with pytest.raises(ValueError, match="device 1 wants a cell that no device has"):
        plan_exchange(where, [np.zeros(0, np.int32), np.array([6], np.int32)], 2, 4, 1)


def test_lists_that_do_not_fit_are_refused() -> None:
    where = Where(np.array([0, 1, -1], np.int32), np.zeros(3, np.int32), np.arange(1, 4))
    for wanted, words in (([1, 1, 1], "of device 1"), ([2] * 5, "room for 4")):
        with pytest.raises(ValueError, match=words):
            plan_exchange(where, [np.array(wanted, np.int32), np.zeros(0, np.int32)], 2, 4, 1)
    exchange = plan_exchange(where, [np.array([1, 2, 0], np.int32), np.array([0], np.int32)], 2, 4, 1)
    assert exchange.useful.tolist() == [[1, 1], [1, 0]]
    assert exchange.take.tolist() == [[3, 0, 1, 0], [1, 0, 0, 0]]


@pytest.mark.parametrize("name", ["replicate", "hash", "hrcs"])
def test_copies_bring_what_is_wanted_and_the_bytes_are_the_placements(name: str) -> None:
    rng, devices, most = np.random.default_rng(0), 4, 96
    items = Items(1.0 / np.arange(1, 65), rng.integers(1, 6, 64), bytes_per_token=12, cell_tokens=2)
    workers = Workers(devices, int(items.room_bytes.sum()))
    if name == "hrcs":
        placement = hrcs(items, workers, prefill_s=1.0, item_tokens=20.0, link_bytes_per_s=480.0)
        assert 0 < placement.replicated.sum() < 64
    else:
        placement = {"replicate": replicate, "hash": hash_items}[name](items, workers)
    where = lay_out(placement)
    values = rng.standard_normal((len(where.owner), 6)).astype(np.float32)
    parts = [where.on(device) for device in range(devices)]
    cold = np.zeros((devices, max(1, *map(len, parts)), 6), np.float32)
    for part, cells in zip(cold, parts, strict=True):
        part[: len(cells)] = values[cells]
    rows = [rng.integers(0, 64, rng.integers(0, 30)).astype(np.int32) for _ in range(devices)]
    wanted = [where.cells(some) for some in rows]
    plan = plan_copies(where, wanted, most)
    store = CopyStore([jax.devices()[0]] * devices, values[where.on(EVERYWHERE)], cold)
    for found, cells in zip(store.read(plan), wanted, strict=True):
        assert found.shape == (most, 6)
        assert np.array_equal(np.asarray(found)[: len(cells)], values[cells])
    predicted = expected_bytes(placement, list(enumerate(rows)), whole_cells=True)
    useful, sent = store.moved_bytes(plan)
    assert useful == predicted.sum() == (0 if name == "replicate" else useful)
    between = sum(copy.source != copy.to for copy in plan.pairs)
    assert useful <= sent < 2 * useful + between * FEWEST * 24 + 1


def test_copies_that_do_not_fit_are_refused() -> None:
    where = Where(np.array([0, NOBODY], np.int32), np.zeros(2, np.int32), np.arange(1, 3))
    with pytest.raises(ValueError, match="device 0 wants 5 cells, there is room for 4"):
        plan_copies(where, [np.zeros(5, np.int32)], 4)
    with pytest.raises(ValueError, match="device 0 wants a cell that no device has"):
        plan_copies(where, [np.array([1], np.int32)], 4)
