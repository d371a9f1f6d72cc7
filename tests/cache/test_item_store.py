# SPDX-License-Identifier: Apache-2.0
"""Items over 8 devices of one process, and over 2 processes: what arrives is what was wanted, and the bytes add up."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from jgr.cache.item_store import Where, plan_exchange

READ = """
import json, sys
import jax
processes, number, port, devices = map(int, sys.argv[1:])
jax.config.update("jax_num_cpu_devices", devices)
if processes > 1:
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, number)
import numpy as np
from jgr.cache.item_store import AXIS, ItemStore, Where, plan_exchange
from jgr.placement.items import Items, Workers, hrcs

D, E, PAIR, MOST = processes * devices, 6, 24, 40
rng = np.random.default_rng(0)
frequency = 1.0 / np.arange(1, 65)
tokens = np.ones(64, np.int64)
items, workers = Items(frequency, tokens, E * 4), Workers(D, 64 * E * 4)
placement = hrcs(items, workers, prefill_s=1.0, item_tokens=20.0, link_bytes_per_s=960.0)
hot_rows = np.flatnonzero(placement.replicated)
values = rng.standard_normal((64, E)).astype(np.float32)
owner, slot = placement.owner.copy(), np.zeros(64, np.int32)
slot[hot_rows] = np.arange(len(hot_rows))
cold = np.zeros((D, 64, E), np.float32)
for device in range(D):
    rows = np.flatnonzero(owner == device)
    slot[rows] = np.arange(len(rows))
    cold[device, : len(rows)] = values[rows]
wanted = [rng.integers(0, 64, rng.integers(1, MOST)).astype(np.int32) for _ in range(D)]
mesh = jax.make_mesh((D,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
store = ItemStore(mesh, values[hot_rows], cold)
exchange = plan_exchange(Where(owner, slot), wanted, PAIR, MOST, len(hot_rows))
out = store.read(exchange)
out.block_until_ready()
right = all(
    np.array_equal(np.asarray(shard.data)[0, : len(wanted[at])], values[wanted[at]])
    for shard in out.addressable_shards
    for at in [shard.index[0].start or 0]
)
predicted = sum(
    int(placement.remote_tokens(device, cells).sum()) * E * 4 for device, cells in enumerate(wanted)
)
print(json.dumps([right, len(hot_rows), store.moved_bytes(exchange), predicted]))
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


def test_lists_that_do_not_fit_are_refused() -> None:
    where = Where(np.array([0, 1, -1], np.int32), np.zeros(3, np.int32))
    for wanted, words in (([1, 1, 1], "of device 1"), ([2] * 5, "room for 4")):
        with pytest.raises(ValueError, match=words):
            plan_exchange(where, [np.array(wanted, np.int32), np.zeros(0, np.int32)], 2, 4, 1)
    exchange = plan_exchange(where, [np.array([1, 2, 0], np.int32), np.array([0], np.int32)], 2, 4, 1)
    assert exchange.useful.tolist() == [[1, 1], [1, 0]]
    assert exchange.take.tolist() == [[3, 0, 1, 0], [1, 0, 0, 0]]
