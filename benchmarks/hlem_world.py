# SPDX-License-Identifier: Apache-2.0
"""Users, embedding rows, requests and costs for `benchmarks.hlem_split` (SIM-13).

What is real: how often each user asks and in which gaps (KuaiRand-Pure's log, its daily course taken out), how often
each video is asked for (the same log: the first table), the reuse of rows of the other 23 tables (dlrm_datasets'
statistics of 2022), and what a computed event costs (HSTU of jgr on this machine). What is scaled, 1 to 16: lengths of
histories (1 K to 16 K events become 64 to 1024), candidates (100 become 6) and new events (one a request).
"""

from __future__ import annotations

import csv
import gzip
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from benchmarks import harness
from benchmarks.harness import Missing
from jgr.config import UserError
from jgr.models import params as parameters
from jgr.models import scorers, table_file
from jgr.models.hstu import HstuConfig
from jgr.models.scorers import Candidates, Users
from jgr.simulation.controller import workload
from jgr.simulation.controller.workload import Regime

Int32 = npt.NDArray[np.int32]
Float64 = npt.NDArray[np.float64]

USERS, TABLES = 4_000, 24
SHORTEST, LONGEST, MEAN_EVENTS, SIGMA = 64, 1024, 160.0, 0.4
"""Events of a history: a lognormal law, as the epoch model has it, within what 1 K to 16 K are at 1 to 16."""
GROWTH = 64
"""Events that a history may get beyond those at first."""
CANDIDATES = 6
WIDTH, ROWS = 64, 2_000_000
"""Numbers of a row, of 16 bits, and rows of all tables: they stand in one space of ids, as fused tables do."""
HOT = 0.05
HEADS, LAYERS, HIDDEN = 2, 1, 32
EVENT_BYTES = LAYERS * 2 * HIDDEN * 4
"""Bytes of keys and values that are kept of an event."""
SIZES = (64, 256, 1024)
"""Lengths at which a run is timed."""


class Costs(NamedTuple):
    """Seconds of a run that computes all of a history of n events: read[0] + read[1] n + read[2] n^2; and of one that
    adds an event to n kept ones and scores: grow[0] + grow[1] n."""

    read: tuple[float, float, float]
    grow: tuple[float, float]

    def of(self, kept: int, events: int) -> float:
        """Seconds of a request for a history of so many events, of which so many are kept."""
        if not kept:
            return self.read[0] + self.read[1] * events + self.read[2] * events**2 + self.grow[0]
        return (self.grow[0] + self.grow[1] * events) * max(1, events - kept)


@dataclass(frozen=True)
class World:
    """lengths: [USERS] events at first. rows: [events, TABLES] int32, what each event reads, those of a user from
    begins [USERS] on, with GROWTH to come. drawn: [n, CANDIDATES, TABLES], what candidates read, in turns. shares:
    [USERS] of the requests within hot and cold users, the first HOT of them are hot. gaps: between requests, 1 in the
    mean. firsts: the first row of each table, where all stand in one space of ids."""

    lengths: Int32
    begins: npt.NDArray[np.int64]
    rows: Int32
    drawn: Int32
    shares: Float64
    gaps: Float64
    firsts: tuple[int, ...] = (0,)

    @property
    def hot(self) -> int:
        return round(HOT * USERS)


class Requests(NamedTuple):
    """at_s: f64 [n], rising; user: int32 [n]; epoch: int32 [n]."""

    at_s: Float64
    user: Int32
    epoch: Int32


def data() -> Path:
    return Path(os.environ.get("JGR_DATA") or harness.ROOT.parent / "shared" / "data")


@cache
def log() -> tuple[Float64, Int32, Int32]:
    """KuaiRand-Pure's times in s, rising, and requests of each user and of each video. Missing: it is not there."""
    path = data() / "kuairand-pure" / "events_20220425_20220508.csv.gz"
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            seen = {(line["user_id"], line["video_id"], line["time_ms"]) for line in csv.DictReader(file)}
    except OSError as error:
        raise Missing(f"{path}: {error.strerror or error}") from None
    users, videos, times = zip(*seen, strict=True)
    of_users, of_videos = (
        np.unique(each, return_counts=True)[1].astype(np.int32) for each in (users, videos)
    )
    return np.sort(np.array(times, np.float64)) / 1e3, of_users, of_videos


def make_world(seed: int = 0) -> World:
    """The users and what they read, the same for the same seed. Missing: the data is not there."""
    random = np.random.default_rng(seed)
    times, users, videos = log()
    try:
        reuse = np.array(workload.dlrm_rows(data()))
    except UserError as error:
        raise Missing(str(error)) from None
    per_table = (ROWS - len(videos)) // (TABLES - 1)
    firsts = [0, *(len(videos) + per_table * at for at in range(TABLES - 1))]

    def draw(count: int) -> Int32:
        found = np.empty((count, TABLES), np.int32)
        for at, first in enumerate(firsts):
            found[:, at] = first + (
                _by_count(random, videos, count) if at == 0 else _by_bins(random, reuse, per_table, count)
            )
        return found

    drawn = random.lognormal(np.log(MEAN_EVENTS) - SIGMA**2 / 2, SIGMA, USERS)
    lengths = np.clip(drawn, SHORTEST, LONGEST - GROWTH).astype(np.int32)
    ends = np.cumsum(lengths.astype(np.int64) + GROWTH)
    hot = round(HOT * USERS)
    ordered = np.sort(users)[::-1].astype(np.float64)
    cut = round(HOT * len(ordered))
    shares = np.concatenate([_quantiles(ordered[:cut], hot), _quantiles(ordered[cut:], USERS - hot)])
    gaps = np.diff(times)
    gaps = gaps[gaps < np.quantile(gaps, 0.999)]
    window = 500  # the course of the day goes, what is within minutes stays
    usual = np.convolve(gaps, np.full(window, 1 / window), "same")
    steady = (gaps / np.maximum(usual, 1e-9))[window:-window]
    return World(
        lengths,
        ends - lengths - GROWTH,
        draw(int(ends[-1])),
        draw(20_000 * CANDIDATES).reshape(-1, CANDIDATES, TABLES),
        shares,
        steady / steady.mean(),
        tuple(firsts),
    )


def _by_count(random: np.random.Generator, counts: Int32, count: int) -> npt.NDArray[np.int64]:
    ends = np.cumsum(counts)
    return np.searchsorted(ends, random.integers(0, ends[-1], count), "right")


def _by_bins(random: np.random.Generator, reuse: Float64, rows: int, count: int) -> npt.NDArray[np.int64]:
    """Rows of a table whose reuse is that of (share of the rows, share of the reads) bins; rows that share less than
    one row have one."""
    sizes = np.maximum(1, np.round(reuse[:, 0] * rows)).astype(np.int64)
    sizes[0] = rows - sizes[1:].sum()
    begins = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    of = np.searchsorted(np.cumsum(reuse[:, 1]) / reuse[:, 1].sum(), random.random(count), "right")
    of = np.minimum(of, len(sizes) - 1)
    return begins[of] + (random.random(count) * sizes[of]).astype(np.int64)


def _quantiles(values: Float64, count: int) -> Float64:
    found: Float64 = np.quantile(values, (np.arange(count) + 0.5) / count)[::-1]
    shares: Float64 = found / found.sum()
    return shares


def requests(world: World, regime: Regime, rate: float, epochs: int, seed: int) -> Requests:
    """So many epochs of 1 s of a regime, as HLEM's generator has them."""
    random = np.random.default_rng((seed, workload.REGIMES.index(regime)))
    course = workload.traffic(regime, random, epochs)
    per_epoch = [round(rate * load) for load in course.load]
    at, users, number = list[Float64](), list[Int32](), list[Int32]()
    for epoch, count in enumerate(per_epoch):
        first = int(random.integers(0, len(world.gaps) - count))
        gaps = world.gaps[first : first + count]
        at.append(epoch + np.cumsum(gaps) / gaps.sum() * (1 - 1 / count))
        hot = random.random(count) < course.hot_share[epoch]
        chosen = np.where(
            hot,
            random.choice(world.hot, count, p=world.shares[: world.hot]),
            world.hot + random.choice(USERS - world.hot, count, p=world.shares[world.hot :]),
        )
        users.append(chosen.astype(np.int32))
        number.append(np.full(count, epoch, np.int32))
    return Requests(np.concatenate(at), np.concatenate(users), np.concatenate(number))


def write_table(path: Path) -> None:
    """The rows of all tables: each number depends on row and place, so that a wrong row is noticed."""
    table_file.write(path, "rows", _parts(0, ROWS), width=WIDTH, dtype="float16")


def write_tables(folder: Path, firsts: tuple[int, ...]) -> None:
    """The same rows as files of their own, one for each table: see `name_of`."""
    for number, (first, end) in enumerate(zip(firsts, (*firsts[1:], ROWS), strict=True)):
        path = folder / f"{name_of(number)}.table"
        table_file.write(path, name_of(number), _parts(first, end), width=WIDTH, dtype="float16")


def name_of(number: int) -> str:
    """The name of a table that has a file of its own."""
    return f"rows{number}"


def _parts(first: int, end: int) -> Iterator[npt.NDArray[np.float32]]:
    for at in range(first, end, 100_000):
        yield expected(np.arange(at, min(at + 100_000, end)))


def expected(rows: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """What the table has in some rows [n], f32 [n, WIDTH] that 16 bits hold exactly."""
    mixed = (rows[:, None].astype(np.int64) * 2_654_435_761 + np.arange(WIDTH) * 40_503) >> 7
    return (mixed % 2048 - 1024).astype(np.float32)


def measure_costs() -> Costs:
    """Time HSTU's two runs on this machine, at several lengths, and fit their costs."""
    reads, grows = (np.array(each) for each in zip(*(_times(size) for size in SIZES), strict=True))
    n = np.array(SIZES, np.float64)
    by_read = np.linalg.solve(np.stack([np.ones(3), n, n**2], 1), reads)
    by_grow = np.linalg.lstsq(np.stack([np.ones(3), n], 1), grows, rcond=None)[0]
    return Costs(tuple(by_read.tolist()), tuple(by_grow.tolist()))


def _times(size: int) -> tuple[float, float]:
    """Seconds of a run over a whole history of so many events, and of one that adds the last one and scores."""
    cfg = HstuConfig(
        n_items=1000, max_items=size, hidden=HIDDEN, layers=LAYERS, heads=HEADS, qk_dim=HIDDEN // HEADS,
        v_dim=HIDDEN // HEADS, length=size + 11, items="", bias="positions",
    )  # fmt: skip
    model, weights = (
        scorers.growing(cfg),
        parameters.initialize(scorers.scorer(cfg).spec(cfg), jax.random.key(0)),
    )
    whole = np.arange(size, dtype=np.int32)[None] % 1000
    asked = Candidates(jnp.arange(CANDIDATES + 2, dtype=np.int32)[None], {})

    @jax.jit
    def read(weights: Any, users: Users) -> Any:
        return model.begin(weights, cfg, users)

    @jax.jit
    def grow(weights: Any, kept: Any, users: Users) -> Any:
        kept = model.grow(weights, cfg, kept, users, 1)
        return kept, scorers.scorer(cfg).score(weights, cfg, model.state(weights, cfg, kept, users), asked)

    users, before = _users(whole), _users(np.where(np.arange(size) < size - 1, whole, -1).astype(np.int32))
    kept = jax.block_until_ready(read(weights, before))
    jax.block_until_ready(grow(weights, kept, users))
    whole_ms, _ = harness.timed(lambda: jax.block_until_ready(read(weights, users)))
    grown_ms, _ = harness.timed(lambda: jax.block_until_ready(grow(weights, kept, users)))
    return whole_ms / 1e3, grown_ms / 1e3


def _users(rows: Int32) -> Users:
    one, same = jnp.zeros(1, np.int32), jnp.zeros(rows.shape, np.int32)
    return Users(jnp.asarray(rows), same, same, one, jnp.zeros((1, 0), np.int32), one)
