# SPDX-License-Identifier: Apache-2.0
"""Copies between the pools of 3 virtual devices, against the same copies made one after the other in numpy."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import jax
jax.config.update("jax_num_cpu_devices", 3)
import numpy as np
from jgr.cache import device_reads
from jgr.cache.entries import Fetch
from jgr.cache.pool import ReplicatedPool
from jgr.models.replicated import Replicated
from jgr.models.words import Cells

devices, cells, (pages, words) = Replicated.of(3), Cells(3, 2), (5, 8)
device_reads.SMALLEST = device_reads.LARGEST = 4  # so that a pair with more is copied in parts
counted = []
for kind in (device_reads.Copies, device_reads.Exchange):
    pool, draw = ReplicatedPool(pages, 4 * words, devices), np.random.default_rng(0)
    held = draw.integers(0, 2**32, (3, pages, words), dtype=np.uint32)
    start = jax.device_put(held.reshape(-1, words), devices.rows_of_each)
    pool.write(lambda array: start, 0)
    reads = kind(pool)
    reads.warm_up(cells)
    assert (np.asarray(pool.read(lambda array: array, 0)) == held.reshape(-1, words)).all(), "warm-up changed cells"
    places = held[:, :, :6].reshape(3, 10, 3)  # a page has two cells of 3 words, and two words that nobody uses
    expected, wanted = places.copy(), np.zeros((3, 3), np.int64)
    for _ in range(60):
        source, to = (int(one) for one in draw.choice(3, 2, replace=False))
        count = int(draw.integers(1, 7))
        some, into = (tuple(map(int, draw.choice(10, count, replace=False))) for _ in range(2))
        expected[to, list(into)] = expected[source, list(some)]
        wanted[source, to] += count * 12
        reads.plan([Fetch(source, to, some, into)], cells, 0)
        if draw.random() < 0.2:
            reads.catch_up()
    reads.catch_up()
    found = np.asarray(pool.read(lambda array: array, 0)).reshape(3, pages, words)
    assert (found[:, :, :6].reshape(3, 10, 3) == expected).all(), kind
    assert (found[:, :, 6:] == held[:, :, 6:]).all(), kind
    assert (reads.bytes == wanted).all() and reads.sent >= wanted.sum(), kind
    counted.append(reads.sent)
    pool.lose(0, RuntimeError("lost"))
    reads.plan([Fetch(0, 1, (0,), (0,))], cells, 0)
    reads.catch_up()  # what was planned for the lost pool is left out
    assert not np.asarray(pool.read(lambda array: array, 1)).any(), kind
assert counted[0] < counted[1]
print("right")
"""


def test_both_ways_copy_what_was_planned_in_its_order() -> None:
    # NPROC sizes XLA's thread pool: with fewer threads than devices a collective can wait for ever.
    environment = {**os.environ, "PYTHONPATH": ".", "NPROC": "16", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, stdout=subprocess.PIPE, text=True, timeout=300
    )
    assert (done.returncode, done.stdout.split()) == (0, ["right"])
