# SPDX-License-Identifier: Apache-2.0
"""What a move of the border between embedding rows and kept users costs while both are served (HLEM-10, 11, 16).

Moves: the pages, bookkeeping and array of `jgr serve` with a pool that is full on both sides; a move of 4 % of it goes
there and back, and is timed alone. Counted: programs that were dispatched meanwhile, which would be copies, and
whether the array stands where it stood.

Requests: an engine of `jgr serve` in this process (HSTU, rows in pages, users kept), with random arrivals. Its border
stands still, or moves by 4 % of the pool every 10 ms; the pages that change sides are of users who do not come back
and of rows that nobody reads, so that what differs is the moving.

Refill: the same engine behind a link that is emulated: a read of rows takes their bytes over the link's speed, one
after the other. Every second rows lose two thirds of their pages and get them back, and these are filled by the budget
of `embeddings.link_mb_s` (throttled), as fast as it goes (unthrottled), or not at all (none).

    python -m benchmarks.hlem_border [--quick]
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from benchmarks import flame_serving, harness
from benchmarks.harness import Benchmark, Claim, Measured, Quiet, Row, rounded
from jgr.cache.border import Border
from jgr.cache.embeddings import EmbeddingCache, Table
from jgr.cache.entries import Name
from jgr.cache.meta import CacheMeta
from jgr.cache.pages import Pages, Room
from jgr.cache.pool import DevicePool
from jgr.cache.refill import RefillBudget
from jgr.catalog.catalog import Catalog, save_catalog
from jgr.evaluation import bootstrap
from jgr.models import params as parameters
from jgr.models import scorers
from jgr.models.hstu import HstuConfig
from jgr.models.retrievers import items_digest
from jgr.serving.api import RankRequest
from jgr.serving.policies.user_cache import WholeContent

PART = 0.04
"""The share of the pool that a move takes."""
PAGES, PAGE_BYTES, ROW_BYTES, USER_PAGES = 8192, 64 << 10, 1024, 24
"""The pool of the moves: rows of 512 numbers of 16 bits, users of 24 pages, as HLEM-2 has them."""
ITEMS, HISTORY, CANDIDATES = 20_000, 64, 32
USERS = 40
MODEL = HstuConfig(
    n_items=ITEMS, max_items=HISTORY, hidden=64, layers=2, heads=2, qk_dim=32, v_dim=32, length=HISTORY + 11,
    items="", bias="positions",
)  # fmt: skip
RATE = 60.0
EVERY_S = 0.01
LINK_MB_S = 4.0
"""The emulated link: 64 rows of 256 bytes take 4 ms."""
CYCLE_S = 1.0


class Setting(NamedTuple):
    """How much is measured. moves: there and back; seconds: of a run; rounds."""

    moves: int = 200
    seconds: float = 5.0
    rounds: int = 3


class Values:
    """Rows without a file: what they hold does not matter to a move."""

    def read(self, table: str, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        return np.zeros((len(rows), ROW_BYTES // 2), np.float16)


def moves(number: int) -> Row:
    """Times of moves of PART of a pool that is full on both sides, and what was dispatched meanwhile."""
    pages, pool = Pages(PAGES, PAGE_BYTES), DevicePool(PAGES, PAGE_BYTES)
    table = Table(2 * PAGES * (PAGE_BYTES // ROW_BYTES), ROW_BYTES // 2, np.dtype(np.float16))
    rows = EmbeddingCache(pool, {"rows": table}, Values())
    rows.compile("rows", 1)
    meta = CacheMeta(pages, {"user": Room(PAGE_BYTES, USER_PAGES)}, moving=True)
    border = Border(rows, meta, pages, "rows", PAGES, PAGES // 2)
    border.start()
    part, users, first = round(PART * PAGES), 0, 0
    random = np.random.default_rng(0)
    us: dict[str, list[float]] = {"to_rows": [], "to_users": []}
    dispatched = moved_array = changed = 0
    for _ in range(number):
        while meta.has_room("user", 1):
            entry = meta.extend(Name("user", users, ""), WholeContent(users.to_bytes(8, "little")))
            assert entry is not None
            meta.written(entry)
            meta.release(entry)
            users += 1
        while rows.pages.empty:
            count = rows.pages.empty * (PAGE_BYTES // ROW_BYTES)
            rows.bring("rows", (first + np.arange(min(count, 8192))) % table.rows)
            first += min(count, 8192)
        rows.bring(
            "rows", np.unique(random.integers(0, table.rows, 500))
        )  # pages are not used in their order
        for way, wanted in (("to_rows", border.wanted + part), ("to_users", border.wanted)):
            calls, before = [0], _address(pool)
            counted = _Counted(pool, calls)
            start = time.perf_counter_ns()
            done = border.set_limit(wanted)
            us[way].append((time.perf_counter_ns() - start) / 1e3)
            counted.end()
            dispatched += calls[0]
            moved_array += _address(pool) != before
            changed += done
            assert done == part and border.delayed == 0
            if way == "to_rows":  # the pages are in use when they go back
                while rows.pages.empty:
                    rows.bring("rows", (first + np.arange(8192)) % table.rows)
                    first += 8192
    border.check()
    meta.check()
    return {
        "pages": PAGES,
        "page_kb": PAGE_BYTES // 1024,
        "pages_of_a_move": part,
        "pages_moved": changed,
        "to_rows_us": harness.spread(us["to_rows"]),
        "to_users_us": harness.spread(us["to_users"]),
        "to_rows_us_a_page": rounded(float(np.median(us["to_rows"])) / part),
        "to_users_us_a_page": rounded(float(np.median(us["to_users"])) / part),
        "programs_dispatched": dispatched,
        "array_moved": moved_array,
    }


class _Counted:
    """Counts the programs that are dispatched over a pool, until `end`."""

    def __init__(self, pool: DevicePool, calls: list[int]) -> None:
        self._pool, self._were = pool, (pool.read, pool.write)

        def count(call: Callable[..., Any]) -> Callable[..., Any]:
            def counted(*given: Any) -> Any:
                calls[0] += 1
                return call(*given)

            return counted

        pool.read, pool.write = count(pool.read), count(pool.write)  # type: ignore[method-assign]

    def end(self) -> None:
        self._pool.read, self._pool.write = self._were  # type: ignore[method-assign]


def _address(pool: DevicePool) -> int:
    return int(pool.read(lambda array: array.unsafe_buffer_pointer(), pool.epoch))


class Link:
    """An emulated link before a table's shards: reads take their bytes over its speed, one after the other."""

    def __init__(self, source: Any, bytes_per_s: float) -> None:
        self._source, self._speed, self._free_s = source, bytes_per_s, 0.0
        self.counts = source.counts

    def read(self, table: str, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        found: npt.NDArray[Any] = self._source.read(table, rows)
        self._free_s = max(self._free_s, time.perf_counter()) + found.nbytes / self._speed
        time.sleep(max(0.0, self._free_s - time.perf_counter()))
        return found

    def close(self) -> None:
        self._source.close()


class System:
    """An engine with rows in pages and kept users, under random arrivals at RATE."""

    def __init__(
        self, runner: asyncio.Runner, folder: Path, device_mb: float, link_mb_s: float = 0.0
    ) -> None:
        settings = (
            "embeddings.tables=paged",
            "executors.share_user=cache",
            f"executors.sizes={CANDIDATES}",
            "executors.number=1",
            "cache.page_kb=4",
            f"cache.device_mb={device_mb}",
            "model.name=hstu",
        )
        self._runner, self.engine = runner, flame_serving.load(folder, *settings)
        paging = self.engine.served.paging
        assert paging is not None
        self.border, self.rows = paging.border, paging.rows
        if link_mb_s:
            self.rows.source = Link(self.rows.source, link_mb_s * 2**20)
        self._seed = 0
        runner.run(self.engine.start())

    def run(
        self, seconds: float, moving: Callable[[System], Any] | None, items: int, hot: float
    ) -> list[float]:
        """Latencies in ms of requests at random times. moving: makes what runs beside them. items: that are asked for;
        hot: exponent of their popularity, 0: all alike."""
        self._seed += 1
        random = np.random.default_rng(self._seed)
        count = round(RATE * seconds)
        due = np.cumsum(random.exponential(seconds / count, count))
        weights = np.arange(1, items + 1.0) ** -hot
        drawn = random.choice(items, (count, CANDIDATES), p=weights / weights.sum())
        asked = [
            RankRequest(
                history=[str((7 * user + place) % 500) for place in range(HISTORY - 1)],
                candidates=list(dict.fromkeys(map(str, of))),
                user_id=f"u{user}",
            )
            for user, of in zip(random.integers(0, USERS, count).tolist(), drawn.tolist(), strict=True)
        ]
        return self._runner.run(self._send(asked, due.tolist(), moving))

    async def _send(
        self, asked: Sequence[RankRequest], due: Sequence[float], moving: Callable[[System], Any] | None
    ) -> list[float]:
        beside = None if moving is None else asyncio.ensure_future(moving(self))
        start = time.perf_counter()

        async def one(request: RankRequest, at: float) -> float:
            await self.engine.answer(request)
            return (time.perf_counter() - start - at) * 1e3

        sent = []
        for request, at in zip(asked, due, strict=True):
            await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
            sent.append(asyncio.ensure_future(one(request, at)))
        found = list(await asyncio.gather(*sent))
        if beside is not None:
            beside.cancel()
            await asyncio.gather(beside, return_exceptions=True)
        return found

    def close(self) -> None:
        self._runner.run(self.engine.drain(0.0))
        assert self.engine.join(10.0)
        self.engine.check()


async def every_10_ms(system: System) -> None:
    """Move the border by PART of the pool, there and back."""
    border, at = system.border, system.border.wanted
    part, there = round(PART * border.total), True
    while True:
        border.set_limit(at - part if there else at)
        there = not there
        await asyncio.sleep(EVERY_S)


async def cycles(system: System) -> None:
    """Rows lose two thirds of their pages, and get them back: something to refill, every CYCLE_S."""
    border, at = system.border, system.border.wanted
    while True:
        border.set_limit(max(border.least, at // 3))
        await asyncio.sleep(0.05)
        border.set_limit(at)
        await asyncio.sleep(CYCLE_S - 0.05)


class _None(RefillBudget):
    """A budget of nothing."""

    def take(self, wanted: int, now_ns: int) -> int:
        return 0


BUDGETS: dict[str, Callable[[], RefillBudget]] = {
    "none": lambda: _None(1.0),
    "throttled": lambda: RefillBudget(LINK_MB_S * 2**20),
    "unthrottled": lambda: RefillBudget(0.0),
}


def save(folder: Path) -> None:
    """The model's folder, with drawn weights and its items' table in a file of its own."""
    ids = [str(row) for row in range(ITEMS)]
    cfg = replace(MODEL, items=items_digest(ids))
    catalog = Catalog.build(ids, [(row,) for row in range(ITEMS)], [{}] * ITEMS)
    weights = parameters.initialize(scorers.scorer(cfg).spec(cfg), jax.random.key(0))
    scorers.save(
        folder, cfg, weights, lambda folder: save_catalog(catalog, folder / "catalog.jsonl"), "float32"
    )


def measure(quick: bool, quiet: Quiet) -> Measured:
    setting = Setting(10, 2.0, 1) if quick else Setting()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model"
        save(folder)
        runner = stack.enter_context(asyncio.Runner())
        moved = moves(setting.moves)
        near = System(runner, folder, 16.0)
        stack.callback(near.close)
        runs = harness.interleave(
            {
                "still": lambda: near.run(setting.seconds, None, 1500, 0.0),
                "moving": lambda: near.run(setting.seconds, every_10_ms, 1500, 0.0),
            },
            setting.rounds,
            quiet,
        )
        far = System(runner, folder, 7.0, LINK_MB_S)
        stack.callback(far.close)

        def refilled(name: str) -> Callable[[], list[float]]:
            def run() -> list[float]:
                far.rows._budget = BUDGETS[name]()
                return far.run(setting.seconds, cycles, ITEMS, 1.0)

            return run

        links = harness.interleave({name: refilled(name) for name in BUDGETS}, setting.rounds, quiet)
    rows = [
        {"part": "moves", **moved},
        *(row("requests", name, found) for name, found in runs.items()),
        *(row("refill", name, found) for name, found in links.items()),
    ]
    return Measured(claims(moved, runs, links), rows)


def row(part: str, name: str, found: Sequence[Sequence[float]]) -> Row:
    every = [ms for run in found for ms in run]
    return {
        "part": part,
        "variant": name,
        "requests": len(every),
        **{f"p{q}_ms": rounded(float(np.percentile(every, q))) for q in (50, 90, 99)},
    }


def ratio(
    found: Sequence[Sequence[float]], base: Sequence[Sequence[float]]
) -> tuple[float, tuple[float, float]]:
    """The 99th percentile over that of the base, and its 95 % interval by a bootstrap over rounds and requests."""
    random = np.random.default_rng(0)
    one, other = (np.concatenate([np.asarray(run) for run in runs]) for runs in (found, base))
    drawn = [
        float(
            np.percentile(random.choice(one, len(one)), 99)
            / np.percentile(random.choice(other, len(other)), 99)
        )
        for _ in range(2000)
    ]
    low, high = (rounded(float(end)) for end in bootstrap.interval(np.array(drawn)))
    return rounded(float(np.percentile(one, 99) / np.percentile(other, 99))), (low, high)


def claims(
    moved: Row, runs: dict[str, list[list[float]]], links: dict[str, list[list[float]]]
) -> list[Claim]:
    moving, moving_ends = ratio(runs["moving"], runs["still"])
    slow, slow_ends = ratio(links["throttled"], links["none"])
    fast, fast_ends = ratio(links["unthrottled"], links["none"])
    return [
        Claim("hlem-border-to-rows-us-a-page", moved["to_rows_us_a_page"], "us", "lower", 1.0),
        Claim("hlem-border-to-users-us-a-page", moved["to_users_us_a_page"], "us", "lower", 1.0),
        Claim(
            "hlem-border-copies", moved["programs_dispatched"] + moved["array_moved"], "programs", "lower", 0
        ),
        Claim("hlem-border-p99-moving", moving, "x", "lower", 1.05, interval=moving_ends),
        Claim("hlem-border-p99-throttled-refill", slow, "x", "lower", 1.05, interval=slow_ends),
        Claim("hlem-border-p99-unthrottled-refill", fast, "x", "higher", 1.05, interval=fast_ends),
    ]


if __name__ == "__main__":
    harness.main(
        Benchmark(
            "hlem_border",
            measure,
            ("jax", "jaxlib", "numpy"),
            (Path(__file__), Path(flame_serving.__file__)),
            device=jax.default_backend(),
        )
    )
