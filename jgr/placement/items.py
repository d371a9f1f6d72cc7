# SPDX-License-Identifier: Apache-2.0
"""Placements of cached items on cache workers: replicate, hash, and hot-replicated cold-sharded (BAT-11).

Every item has a home, `row % N`, and is held everywhere, at home only, or nowhere. The home is the stable hash of the
row that also divides any run of rows evenly, so a catalog in order of popularity spreads its hot items; and because it
does not depend on the frequencies, an item that cools down or warms up never moves from one worker to another: copies
beside the one at home come and go. A placement may have homes of its own (jgr/placement/similarity.py), which move.

One copy of every item is worth more than two copies of some: where memory is short, HRCS first replicates fewer items,
and then drops the coldest. Only items that were never accessed are dropped in favour of replicas.

All functions are pure. The n items are rows 0..n-1, the N workers are 0..N-1. Sizes are bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from jgr.config import UserError

Bool = npt.NDArray[np.bool_]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]

BURST_LEAST, BURST_TIMES = 16, 4.0
"""An item is in a burst that was asked for so often of late, and so many times as often as usually."""
NOWHERE, SHARDED, REPLICATED = np.uint8(0), np.uint8(1), np.uint8(2)
Bound = Literal["paper", "physical"]


@dataclass(frozen=True, eq=False)
class Items:
    """The items that are placed. ValueError where shapes or values are wrong.

    frequency: [n] float64, how often each is accessed, in any unit. tokens: [n] int64, at least 1 each.
    bytes_per_token: the KV of one token. cell_tokens: the tokens of a cell; an item takes whole cells of memory.
    """

    frequency: Float64
    tokens: Int64
    bytes_per_token: int
    cell_tokens: int = 1

    def __post_init__(self) -> None:
        if self.frequency.ndim != 1 or self.frequency.shape != self.tokens.shape or not len(self.tokens):
            raise ValueError(
                f"frequency {self.frequency.shape} and tokens {self.tokens.shape}: both must be [n >= 1]"
            )
        if not np.isfinite(self.frequency).all() or self.frequency.min() < 0:
            raise ValueError("frequency: must be finite and not negative")
        if not np.issubdtype(self.tokens.dtype, np.integer) or self.tokens.min() < 1:
            raise ValueError("tokens: must be integers of at least 1")
        if self.bytes_per_token < 1 or self.cell_tokens < 1:
            raise ValueError("bytes_per_token and cell_tokens: must be at least 1")

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def share(self) -> Float64:
        """Each item's share of all accesses, [n]; equal shares where no access was seen."""
        largest = self.frequency.max()
        weight = self.frequency / largest if largest > 0 else np.ones(len(self))
        share: Float64 = weight / weight.sum()
        return share

    @cached_property
    def transfer_bytes(self) -> Int64:
        """The bytes that a read of each item over a link moves, [n]."""
        return self.tokens.astype(np.int64) * self.bytes_per_token

    @cached_property
    def room_bytes(self) -> Int64:
        """The bytes of a worker's memory that a copy of each item takes, [n]."""
        cells = -(-self.tokens.astype(np.int64) // self.cell_tokens)
        return cells * self.cell_tokens * self.bytes_per_token

    @cached_property
    def by_share(self) -> Int32:
        """The rows by their share of accesses, the hottest first, [n]; equal shares in order of the rows."""
        return np.argsort(-self.share, kind="stable").astype(np.int32)


@dataclass(frozen=True)
class Workers:
    """The cache workers: how many (N), and the bytes that each has for items. UserError where one is not possible."""

    count: int
    capacity_bytes: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UserError(f"cache workers: must be at least 1, got {self.count}")
        if self.capacity_bytes < 0:
            raise UserError(
                f"capacity_bytes of a cache worker: must not be negative, got {self.capacity_bytes}"
            )


@dataclass(frozen=True)
class LinkBudget:
    """The bound of HRCS: transfers may take at most the share `alpha` of the prefill time.

    per_remote: the share that transfers would take if every access went to a sharded item. It is inf for one worker,
    where the paper's form allows no such access.
    """

    alpha: float
    per_remote: float

    @property
    def max_remote(self) -> float:
        """R_max, in [0, 1]: the share of accesses that may go to sharded items."""
        return min(1.0, self.alpha / self.per_remote) if self.per_remote > 0 else 1.0


@dataclass(frozen=True, eq=False)
class ItemPlacement:
    """Which worker holds which item.

    holding: [n] uint8, NOWHERE, SHARDED (at home only) or REPLICATED (everywhere).
    order: [n] int32, the rows, the most wanted first. budget: the bound that HRCS was given; None for other placements.
    homes: [n] int32, each row's home; None: `home`, which is row % N.
    """

    items: Items
    workers: Workers
    holding: npt.NDArray[np.uint8]
    order: Int32
    budget: LinkBudget | None = None
    homes: Int32 | None = None

    @property
    def replicated(self) -> Bool:
        """Which items every worker holds, [n] bool."""
        return np.equal(self.holding, REPLICATED)

    @property
    def dropped(self) -> Int32:
        """The rows that no worker holds, ascending."""
        return np.flatnonzero(self.holding == NOWHERE).astype(np.int32)

    @cached_property
    def owner(self) -> Int32:
        """The one worker that holds each sharded item, [n] int32; -1 for other items."""
        return np.where(self.holding == SHARDED, self.home, -1).astype(np.int32)

    @cached_property
    def home(self) -> Int32:
        """The home of each row, [n] int32."""
        return home(len(self.items), self.workers.count) if self.homes is None else self.homes

    @property
    def replicated_fraction(self) -> float:
        """The share of the items that are replicated: r of BAT-11."""
        return float(self.replicated.mean())

    @property
    def sharded_share(self) -> float:
        """The share of the accesses that go to sharded items: R of BAT-11."""
        return float(self.items.share[self.holding == SHARDED].sum())

    @property
    def alpha(self) -> float | None:
        """The share of the prefill time that transfers take under this placement, by its own bound."""
        if self.budget is None:
            return None
        if self.workers.count == 1 or self.sharded_share == 0:
            return 0.0
        return self.budget.per_remote * self.sharded_share

    @property
    def alpha_exceeded(self) -> bool:
        """Whether short memory forced more remote reads than the bound allows (BAT-11, note 4)."""
        needed = self.alpha
        return self.budget is not None and needed is not None and needed > self.budget.alpha * (1 + 1e-9)

    def held(self) -> Bool:
        """Which worker holds which row, [N, n] bool."""
        workers = np.arange(self.workers.count)[:, None]
        held: Bool = self.replicated | (self.owner == workers)
        return held

    def used_bytes(self) -> Int64:
        """The bytes that items take on each worker, [N]."""
        room = self.items.room_bytes
        sharded = self.owner >= 0
        shards = _sums(self.owner[sharded], room[sharded], self.workers.count)
        return shards + int(room[self.replicated].sum())

    def check(self) -> None:
        """Audit: each worker's items fit into its memory. AssertionError where they do not."""
        used = self.used_bytes()
        assert (used <= self.workers.capacity_bytes).all(), f"{used} bytes of {self.workers.capacity_bytes}"
        assert np.array_equal(np.sort(self.order), np.arange(len(self.items))), "order is not a permutation"
        assert self.home.shape == self.order.shape, "not every row has a home"
        assert ((self.home >= 0) & (self.home < self.workers.count)).all(), "a home is no worker"


def home(n: int, n_workers: int) -> Int32:
    """The home of each row, [n] int32, where nothing else is known: the worker that holds it if any does."""
    return np.arange(n, dtype=np.int32) % n_workers


def replicate(items: Items, workers: Workers) -> ItemPlacement:
    """Every worker holds the hottest items, as many as fit; none is sharded."""
    order = items.by_share
    holding = np.zeros(len(items), np.uint8)
    holding[order[: _fitting(np.cumsum(items.room_bytes[order]), workers)]] = REPLICATED
    return ItemPlacement(items, workers, holding, order)


def hash_items(items: Items, workers: Workers) -> ItemPlacement:
    """Every item at home only. Where a home is short of memory, its coldest items are dropped."""
    return _place(items, workers, items.by_share, wanted=0)


def place_at(items: Items, workers: Workers, order: Int32, wanted: int, homes: Int32) -> ItemPlacement:
    """The first `wanted` rows of `order` on every worker, the others at these homes, as far as memory allows."""
    return _place(items, workers, order, wanted, homes=homes)


def hrcs(
    items: Items,
    workers: Workers,
    *,
    prefill_s: float,
    item_tokens: float,
    link_bytes_per_s: float,
    alpha: float = 0.2,
    bound: Bound = "paper",
) -> ItemPlacement:
    """Hot items replicated, cold ones sharded, so that transfers take at most alpha of the prefill time (BAT-11).

    prefill_s: t, the prefill time of a typical request whose items are all cached. item_tokens: c * tau_i, the item
    tokens of that request. bound: "paper" has the factor (N - 1) / N as printed; "physical" has its reciprocal, since
    1 / N of the accesses to sharded items are local. Both clamp R_max to [0, 1]. One worker replicates all that fits.
    Short memory may make it replicate less: see `alpha_exceeded`. UserError names an argument that is not possible.
    """
    for name, value in (
        ("prefill_s", prefill_s),
        ("item_tokens", item_tokens),
        ("link_bytes_per_s", link_bytes_per_s),
    ):
        if not (math.isfinite(value) and value > 0):
            raise UserError(f"{name}: must be above 0, got {value}")
    if not 0 <= alpha <= 1:
        raise UserError(f"alpha: must be a share of the prefill time, 0..1, got {alpha}")
    if bound not in ("paper", "physical"):
        raise UserError(f'bound: must be "paper" or "physical", got {bound!r}')

    budget = _budget(
        workers.count, prefill_s, item_tokens * items.bytes_per_token / link_bytes_per_s, alpha, bound
    )
    order = items.by_share
    if workers.count == 1:
        wanted = len(items)
    else:
        cdf = np.concatenate([[0.0], np.cumsum(items.share[order])])
        # The tolerance lets .5 + .2 + .1 reach .8.
        wanted = int(np.searchsorted(cdf / cdf[-1], 1 - budget.max_remote - 1e-12))
    return _place(items, workers, order, wanted, budget=budget)


def bursting(placement: ItemPlacement, rows: Int32, times: Int64, asked: int) -> Int32:
    """Which of these rows are in a burst, the hottest first (BAT-12): they are not replicated, and by now as hot as
    those that are. None where nothing is replicated, since the links do not need it then.

    rows: [m], each once, that were asked for of late. times: [m], how often. asked: how often all items were.
    """
    replicated, usual = placement.replicated, placement.items.share
    count = int(replicated.sum())
    if not count or not len(rows):
        return np.zeros(0, np.int32)
    coldest = usual[placement.items.by_share[count - 1]]  # were the replicated ones the hottest
    share = times / max(asked, 1)
    hot = ~replicated[rows] & (times >= BURST_LEAST)
    hot &= (share >= BURST_TIMES * usual[rows]) & (share >= coldest)
    found = rows[hot][np.argsort(-times[hot], kind="stable")]
    return found.astype(np.int32)


def burst(placement: ItemPlacement, rows: Iterable[int]) -> ItemPlacement:
    """An HRCS placement in which these rows are replicated, too, because of a burst of accesses (BAT-12).

    Where memory is short, the coldest other items give way: first their replicas, then their only copies. Where not
    all of the rows fit on a worker, the last of them are sharded or dropped. ValueError for a row that does not exist.
    """
    n = len(placement.items)
    pushed = np.array(list(dict.fromkeys(rows)), np.int32)
    if len(pushed) and not 0 <= pushed.min() <= pushed.max() < n:
        raise ValueError(f"rows: must be in 0..{n - 1}")
    wanted = len(np.union1d(pushed, np.flatnonzero(placement.replicated)))
    order = np.concatenate([pushed, placement.order[~np.isin(placement.order, pushed)]])
    return _place(
        placement.items, placement.workers, order, wanted,
        at_least=len(pushed), budget=placement.budget, homes=placement.homes,
    )  # fmt: skip


def expected_bytes(
    placement: ItemPlacement, requests: Iterable[tuple[int, Int32]], *, whole_cells: bool = False
) -> Int64:
    """The bytes that reads of cached items move from each source to each destination, [N, N].

    requests: for each request, the worker that serves it and the rows that it reads. Each occurrence of a row is one
    read; where a row is read once for a whole batch, give the batch as one request. Dropped items move nothing: they
    are computed where they are needed. whole_cells: count the cells that an item takes, not only its tokens.
    """
    n_workers = placement.workers.count
    sizes = placement.items.room_bytes if whole_cells else placement.items.transfer_bytes
    moved = np.zeros((n_workers, n_workers), np.int64)
    for worker, rows in requests:
        sources = placement.owner[rows]
        remote = (sources >= 0) & (sources != worker)
        moved[:, worker] += _sums(sources[remote], sizes[rows][remote], n_workers)
    return moved


def _budget(n_workers: int, prefill_s: float, transfer_s: float, alpha: float, bound: Bound) -> LinkBudget:
    """transfer_s: the time that all item tokens of a request take over one link."""
    if n_workers == 1:
        return LinkBudget(alpha, math.inf)
    factor = (n_workers - 1) / n_workers
    return LinkBudget(alpha, transfer_s / prefill_s * (1 / factor if bound == "paper" else factor))


def _place(
    items: Items,
    workers: Workers,
    order: Int32,
    wanted: int,
    *,
    at_least: int = 0,
    budget: LinkBudget | None = None,
    homes: Int32 | None = None,
) -> ItemPlacement:
    """Replicate the first `wanted` rows of `order` and shard the rest, as far as memory allows.

    Fewer are replicated where otherwise some accessed item would be held nowhere; but the first `at_least` rows are
    replicated whenever they fit. Then each home is filled in order.
    """
    room = items.room_bytes[order]
    at = order % workers.count if homes is None else homes[order]
    replicas = np.concatenate([[0], np.cumsum(room)])  # [n + 1]: of the k first
    fullest = np.zeros(
        len(items), np.int64
    )  # [n]: the fullest home's shard if the k first are not part of it
    for worker in range(workers.count):
        mine = np.where((at == worker) & (items.share[order] > 0), room, 0)
        np.maximum(fullest, np.cumsum(mine[::-1])[::-1], out=fullest)
    all_held = _fitting(replicas + np.append(fullest, 0), workers) - 1
    count = max(min(wanted, all_held), min(at_least, _fitting(replicas[1:], workers)), 0)

    holding = np.zeros(len(items), np.uint8)
    holding[order[:count]] = REPLICATED
    left = Workers(workers.count, workers.capacity_bytes - int(replicas[count]))
    for worker in range(workers.count):
        cold = np.flatnonzero(at[count:] == worker) + count
        holding[order[cold[: _fitting(np.cumsum(room[cold]), left)]]] = SHARDED
    return ItemPlacement(items, workers, holding, order, budget, homes)


def _fitting(sizes: Int64, workers: Workers) -> int:
    """How many of these sums of sizes, which never decrease, are within a worker's capacity."""
    return int(np.searchsorted(sizes, workers.capacity_bytes, side="right"))


def _sums(keys: Int32, values: Int64, n: int) -> Int64:
    """[n]: the exact sum of the values of each key."""
    sums = np.zeros(n, np.int64)
    np.add.at(sums, keys, values)
    return sums
