# SPDX-License-Identifier: Apache-2.0
"""Traffic for memory control: three regimes over worlds of users and embedding rows (SIM-13, HLEM's workloads).

A world's popularity is a Zipf law, or one that was measured: `user_popularity` and `row_popularity` make bins of it.
Arrays are NumPy's; they go to the device when the epoch model is called.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterable
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

import jax
import numpy as np
import numpy.typing as npt

from jgr.config import UserError
from jgr.serving.policies.memory_signals import HOT_USERS
from jgr.simulation.controller import epochs
from jgr.simulation.controller.epochs import Popularity, Traffic, World

Float64 = npt.NDArray[np.float64]
Regime = Literal["steady", "trend", "burst"]
REGIMES: tuple[Regime, ...] = ("steady", "trend", "burst")
EPOCHS = 200
EPOCH_S = 5.0
BINS = 12
"""Bins of the hot users, of the cold ones, and half of the rows'."""
BINS_OF_REUSE, FEW = 17, 0.005
"""Bins of dlrm_datasets' statistics, and the share of the rows below which three digits say too little."""
SMALL = 10_000.0
"""Rows of the tables that are always there."""
SPIKE_LOAD = 1.5
SPIKES_EVERY = 12
"""Epochs between the begins of two bursts, in the mean."""


def zipf(things: int, exponent: float, bins: int) -> tuple[Float64, Float64]:
    """(count, mass) of a Zipf law over so many things, in bins of equal ratios of ranks; mass sums to 1."""
    edges = np.unique(np.round(np.geomspace(1, things + 1, bins + 1)))
    count = np.diff(edges)
    middle = np.sqrt(edges[:-1] * (edges[1:] - 1).clip(1))
    mass = count * middle**-exponent
    return count, mass / mass.sum()


def binned(requests: npt.NDArray[Any], bins: int) -> tuple[Float64, Float64]:
    """(count, mass) of things that were asked for so often, in bins of equal ratios of ranks.

    requests: [things], any order, above 0.
    """
    ordered = np.sort(np.asarray(requests, np.float64))[::-1]
    edges = np.unique(np.round(np.geomspace(1, len(ordered) + 1, bins + 1)).astype(int)) - 1
    mass = np.add.reduceat(ordered, edges[:-1])
    return np.diff(edges).astype(np.float64), mass / mass.sum()


def user_popularity(requests: npt.NDArray[Any], users: int) -> tuple[Popularity, Popularity]:
    """(hot, cold) of a log's requests by user, stretched to so many users: the shape stays, the number changes."""
    ordered = np.sort(np.asarray(requests, np.float64))[::-1]
    cut = max(1, round(HOT_USERS * len(ordered)))
    return tuple(  # type: ignore[return-value]
        _fixed(*binned(part, BINS), factor=users / len(ordered)) for part in (ordered[:cut], ordered[cut:])
    )


def zipf_users(users: int, exponent: float) -> tuple[Popularity, Popularity]:
    """(hot, cold) of a Zipf law."""
    ranks = np.arange(1, users + 1, dtype=np.float64)
    return user_popularity(ranks**-exponent, users)


def row_popularity(histogram: Iterable[tuple[float, float]], rows: float) -> Popularity:
    """Rows of (share of the rows, share of the reads) as a reuse histogram gives them, stretched to so many rows."""
    found = np.array([pair for pair in histogram if pair[0] > 0 and pair[1] > 0], np.float64)
    return _fixed(found[:, 0] * rows, found[:, 1] / found[:, 1].sum(), size=2 * BINS)


def zipf_rows(rows: int, exponent: float) -> Popularity:
    """The rows of a Zipf law."""
    return _fixed(*zipf(rows, exponent, 2 * BINS), size=2 * BINS)


def lognormal_rows(rows: int, sigma: float) -> Popularity:
    """Rows whose reuse follows a lognormal law, which is nearer to what recommenders' tables show than Zipf's: no row
    is asked for by far the most, and few are never asked for again."""
    normal = NormalDist()
    edges = np.unique(np.round(np.geomspace(1, rows + 1, 2 * BINS + 1)))
    middle = np.sqrt(edges[:-1] * (edges[1:] - 1).clip(1))
    each = np.exp([sigma * normal.inv_cdf(1 - (rank - 0.5) / rows) for rank in middle])
    count = np.diff(edges)
    return _fixed(count, count * each / (count * each).sum(), size=2 * BINS)


def with_small_tables(rows: Popularity, share: float) -> Popularity:
    """The rows, and a share of the reads that goes to tables so small that they are always there: categories and
    the like. The two bins of the rarest rows become one."""
    things, mass = (np.asarray(column, np.float64) for column in rows)
    rarest = np.argsort(mass / things)[:2]
    kept = np.delete(np.arange(len(things)), rarest)
    count = np.concatenate([[SMALL], things[kept], [things[rarest].sum()]])
    of = np.concatenate([[share], (1 - share) * np.append(mass[kept], mass[rarest].sum())])
    return Popularity(count.astype(np.float32), of.astype(np.float32))


def _fixed(count: Float64, mass: Float64, size: int = BINS, factor: float = 1.0) -> Popularity:
    """Popularity in exactly `size` bins, so that worlds stand side by side: the last bins are halved until they do."""
    counts, masses = list(count * factor), list(mass)
    while len(counts) < size:
        at = int(np.argmax(counts))
        for values in (counts, masses):
            values[at : at + 1] = [values[at] / 2] * 2
    return Popularity(np.array(counts, np.float32), np.array(masses, np.float32))


def world(
    users: tuple[Popularity, Popularity],
    rows: Popularity,
    *,
    rate: float = 70.0,
    pool: float = 60e9,
    limit_ms: float = 30.0,
    tables: float = 14.0,
    layers: int = 6,
) -> World:
    """A device with the paper's model (512 dims, 16 bits) and an A100-like cost: analytic, not measured.

    rate: requests/s. pool: bytes. tables: rows that an event reads. layers: of the HSTU.
    """
    values = {
        "pool": pool,
        "event_bytes": layers * 2048.0,
        "row_bytes": 1024.0,
        "tables": tables,
        "candidates": 100.0,
        "fresh": 20.0,
        "link": 32e9,
        "refill": 3.2e9,
        "start_s": 1e-3,
        "token_s": layers * 3e-8,
        "pair_s": layers * 1.4e-11,
        "rate": rate,
        "epoch_s": EPOCH_S,
        "limit_s": limit_ms / 1e3,
    }
    scalars: dict[str, Any] = {name: np.float32(value) for name, value in values.items()}
    return World(*users, rows, **scalars)


def sized(found: World, busy: float, tightness: float) -> World:
    """The world with the load and the latency limit that an operator would give it.

    busy: its utilisation at the split .5 and a fifth of hot requests. tightness: the limit, over the 99th percentile
    there.
    """
    now = Traffic(np.float32(0.2), np.float32(1.0), np.float32(8_000))
    used = float(_latency(found._replace(rate=np.float32(1.0)), now, np.float32(0.5)).busy)
    found = found._replace(rate=np.float32(busy / used))
    p99_s = float(_latency(found, now, np.float32(0.5)).p99_s)
    return found._replace(limit_s=np.float32(tightness * p99_s))


_latency = jax.jit(epochs.steady)


def random_world(random: np.random.Generator) -> World:
    """A world to train in: skews, sizes, prices, load and latency limit by chance."""
    size = int(10 ** random.uniform(7.9, 8.6))
    if random.random() < 0.5:
        rows = zipf_rows(size, random.uniform(0.6, 0.95))
    else:
        rows = lognormal_rows(size, random.uniform(1.3, 2.4))
    rows = with_small_tables(rows, random.uniform(0.01, 0.4))
    found = world(
        zipf_users(int(random.integers(2_500, 4_500)), random.uniform(0.4, 0.8)),
        rows,
        tables=random.uniform(12, 24),
    )
    return sized(found, random.uniform(0.55, 0.72), random.uniform(0.6, 1.0))


def traffic(regime: Regime, random: np.random.Generator, epochs: int = EPOCHS) -> Traffic:
    """The epochs of a regime: HLEM's generator defaults, with the mean length of histories drawn once.

    Bursts of 3 to 5 epochs begin as Poisson has it, so that one may begin in another.
    """
    load = np.ones(epochs)
    if regime == "steady":
        hot = np.full(epochs, 0.2)
    elif regime == "trend":
        hot = np.linspace(0.15, 0.6, epochs)
    else:
        hot = np.full(epochs, 0.2)
        begin = random.exponential(SPIKES_EVERY)
        while begin < epochs:
            spike = slice(int(begin), int(begin) + int(random.integers(3, 6)))
            hot[spike], load[spike] = 0.6, SPIKE_LOAD
            begin += random.exponential(SPIKES_EVERY)
    events = np.full(epochs, random.uniform(7_000, 9_000))
    return Traffic(*(np.asarray(column, np.float32) for column in (hot, load, events)))


def kuairand_users(folder: Path) -> npt.NDArray[np.int64]:
    """Requests of each user in KuaiRand-Pure's log, without its duplicates. UserError where the file is missing."""
    path = folder / "kuairand-pure" / "events_20220425_20220508.csv.gz"
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            next(file)
            seen = {tuple(re.split(r"[\t,]", line, maxsplit=5)[at] for at in (0, 1, 4)) for line in file}
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    _, counts = np.unique([user for user, _, _ in seen], return_counts=True)
    return np.asarray(counts, np.int64)


def dlrm_rows(folder: Path, year: int = 2022) -> list[tuple[float, float]]:
    """(share of the rows, share of the reads) by reuse in the first trace of dlrm_datasets' statistics.

    The statistics have three digits: of the hottest rows, with a quarter of the reads, they say that there are 0.000.
    How many there are of those follows from their reads, each being read as often as the middle of its bin is.
    """
    path = folder / "dlrm-embedding-stats" / f"locality_stats_{year}.txt.gz"
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            text = file.read(1 << 20)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    usual = float(re.findall(r"Avg col size: ([\d.]+)", text)[0])
    parts = text.split("Ratio of index distribution", 1)
    bins = r"^\((\d+)(?:, (\d+)\]|\+): (\d\.\d+)"
    of_rows, of_reads = (re.findall(bins, part, re.MULTILINE)[:BINS_OF_REUSE] for part in parts)
    found = list[tuple[float, float]]()
    for (low, high, rows), (_, _, reads) in zip(of_rows, of_reads, strict=True):
        uses = (int(low) * int(high or 2 * int(low))) ** 0.5
        share = float(rows) if float(rows) >= FEW else float(reads) * usual / uses
        found.append((share, float(reads)))
    return found
