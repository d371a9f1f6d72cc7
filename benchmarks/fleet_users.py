# SPDX-License-Identifier: Apache-2.0
"""Who comes to the nodes of a fleet, for which items, and how a node's memory is divided among items and users.

The workload is the paper's Books in small: prompts of as many user tokens over item tokens, users and items by its laws
(jgr.traffic.workloads). A user's requests all go to one node. As many users come as the nodes can keep where each item
is on one of them: the "returning" ones of benchmarks/bat_ablation.py, for the paper says that with HRCS "the user cache
space is large enough to minimize user cache capacity misses". All 510,000 users of the data set would fit nowhere.

A node's memory holds items first, and users in what is left (BAT-12), as with the paper's 150 GB: `fleet.items_mb` is
what the placement takes, `fleet.fetched_mb` is for items of other nodes, and the rest is pages for users in the pool,
which on a CPU is the same memory. Besides, the pool has pages for the items of the requests that run, equally many in
each placement. It is as large in all placements, so that programs are compiled once, and users have as many of its
pages as `cache.device_mb` and `cache.item_share` would have given them. Users are not kept in `cache.host_mb`: whether
there is room for a new user, and who is the coldest, is asked of the pool alone, so that memory there admits nobody.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from benchmarks import bat_nodes
from benchmarks.bat_nodes import PREFILL_S, link_tokens
from benchmarks.bat_world import MODEL, World
from benchmarks.fleet_processes import NAMES
from jgr.config import Config, override
from jgr.models import manifest
from jgr.placement.items import ItemPlacement, Items, Workers, hash_items, hrcs, replicate
from jgr.traffic.workloads import BOOKS, Access, Workload

NODES = 2
ITEM_TOKENS = 8
CELL_TOKENS = Config().cache.cell_tokens
PAGE = 16 << 10
"""Bytes of a page of the pool."""
TOKEN_BYTES = 2 * MODEL.layers * MODEL.kv_heads * MODEL.head_dim * 4
ROOM = 0.1
"""The memory of a node for items that it fetched, over that of all items; `replicate` has nobody to fetch from."""
LARGE, SMALL = 1.25, 0.7
"""A node's memory over that of all items. As the paper's 150 GB over Books of 280,000 items; and as much on two nodes
together as its four have for Books of a million items, which on one node do not fit."""


class Size(NamedTuple):
    """candidates: of a request. seen: requests to each node before items are placed; fetching: those that count bytes;
    warm: those that fill the caches; requests: those of a round. in_flight: of them, at once, at each node. shapes:
    numbers of tokens to compile for. memories: of a node, over that of all items."""

    items: int
    candidates: int
    seen: int
    fetching: int
    warm: int
    requests: int
    rounds: int
    in_flight: int
    shapes: int
    memories: Mapping[str, float]
    gbits: Sequence[int]


FULL = Size(4000, 50, 40, 20, 120, 30, 7, 3, 6, {"large": LARGE, "small": SMALL}, bat_nodes.GBITS)
QUICK = Size(160, 6, 8, 4, 8, 6, 1, 2, 1, {"large": LARGE}, bat_nodes.GBITS[:1])


def workload(size: Size) -> Workload:
    """Books with shorter prompts, and as many users as fit where each item is on one node."""
    share = size.candidates * ITEM_TOKENS / bat_nodes.ITEM_TOKENS
    small = replace(
        BOOKS,
        name="books-in-small",
        items=size.items,
        candidates=size.candidates,
        item_tokens=ITEM_TOKENS,
        user_tokens=BOOKS.user_tokens * share,
        max_prompt=round(BOOKS.max_prompt * share),
    )
    left = (NODES * (LARGE - ROOM) - 1) * size.items * ITEM_TOKENS
    return replace(small, users=round(left / small.user_tokens))


def write_model(folder: Path, size: Size) -> tuple[World, Config]:
    """The world, whose model's folder this becomes, and how it is served."""
    world = World(folder, workload(size), speed=1.0)
    most = int(np.sort(world.traffic.item_tokens)[-size.candidates :].sum())
    user = int(world.traffic.user_tokens.max())
    # Geometric, so that each prompt is filled up by about the same share.
    shapes = np.geomspace(max(16, (user + most) / 16), user + most + 16, size.shapes + 1)[1:]
    config = override(
        world.config("hotness", LARGE * world.item_bytes / 2**20, str(folder.parent / "xla")),
        f"cache.page_kb={PAGE >> 10}",
        "beam.width=4",
        "profiles.widths=4",
        f"profiles.tokens={round(shapes[-1])}",
        f"prompt.max_items={user}",
        "rank.requests=1",
        f"rank.tokens={','.join(str(round(tokens)) for tokens in shapes)}",
        f"rank.context={max(most, user) + 16}",
        f"rank.candidates={size.candidates}",
    )
    manifest.write(folder, config, world.catalog)
    return world, config


class Trace:
    """The requests of the world's users, in the order in which each node gets them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._nodes = {name: self._of(number) for number, name in enumerate(NAMES[:NODES])}

    def _of(self, number: int) -> Iterator[Access]:
        return (access for access in self._world.traffic.accesses() if access.user % NODES == number)

    def take(self, count: int) -> dict[str, list[Access]]:
        """The next requests of each node."""
        return {name: list(islice(accesses, count)) for name, accesses in self._nodes.items()}

    def bodies(self, part: Mapping[str, Sequence[Access]], layout: str = "") -> dict[str, list[bytes]]:
        """Requests as they are sent. layout: the one that they insist on."""
        return {name: [self._body(access, layout) for access in some] for name, some in part.items()}

    def _body(self, access: Access, layout: str) -> bytes:
        asked = self._world.request(access)
        fields = {"user_id": asked.user_id, "history": asked.history, "candidates": asked.candidates}
        return msgspec.json.encode(fields | ({"layout": layout} if layout else {}))


class Divided(NamedTuple):
    """The bytes of a node's memory: for items that it holds, for those that it fetched, and for users. working: beside
    that, for the items of the requests that run."""

    items: int
    fetched: int
    users: int
    working: int

    def settings(self) -> tuple[str, ...]:
        """Fields of the configuration for the items' memory."""
        return f"fleet.items_mb={self.items / 2**20}", f"fleet.fetched_mb={self.fetched / 2**20}"

    def limits(self) -> dict[str, int]:
        """How many of the pool's pages each kind of entries may have."""
        return {"user": self.users // PAGE, "item": self.working // PAGE}


class Seen(NamedTuple):
    """What a placement knows of the requests so far: how often items were asked for, and the mean tokens of a request's
    user and of its candidates together."""

    items: Items
    user_tokens: float
    item_tokens: float


def see(world: World, part: Mapping[str, Sequence[Access]]) -> Seen:
    """What these requests tell."""
    tokens = world.traffic.item_tokens.astype(np.int64)
    accesses = [access for some in part.values() for access in some]
    frequency = np.zeros(len(tokens))
    for access in accesses:
        frequency[access.items] += 1
    user = float(np.mean([access.user_tokens for access in accesses]))
    items = Items(frequency, tokens, TOKEN_BYTES, CELL_TOKENS)
    return Seen(items, user, float(frequency @ tokens) / len(accesses))


def divide(seen: Seen, placement: str, gbit: int, memory: float, size: Size) -> Divided:
    """How a node of so much memory is divided under a placement, in whole pages: items first."""
    room_bytes = seen.items.room_bytes
    everything = int(room_bytes.sum())
    node = int(memory * everything)
    fetched = 0 if placement == "replicate" else _pages(ROOM * everything)
    held = _pages(_place(seen, placement, gbit, node - fetched).used_bytes().max())
    most = int(np.sort(room_bytes)[-size.candidates :].sum())
    users = (node - fetched - held) // PAGE * PAGE
    return Divided(held, fetched, max(0, users), _pages((size.in_flight + 1) * most))


def _pages(size: float) -> int:
    """So many bytes, and as many more as fill the last page."""
    return math.ceil(size / PAGE) * PAGE


def _place(seen: Seen, placement: str, gbit: int, capacity: int) -> ItemPlacement:
    """As the coordinator will place them; hrcs in the paper's units, in which t times B is the same."""
    workers = Workers(NODES, capacity)
    if placement == "hrcs":
        return hrcs(
            seen.items,
            workers,
            prefill_s=seen.user_tokens / BOOKS.user_tokens * PREFILL_S,
            item_tokens=seen.item_tokens,
            link_bytes_per_s=link_tokens(gbit) * TOKEN_BYTES,
        )
    return (replicate if placement == "replicate" else hash_items)(seen.items, workers)
