# SPDX-License-Identifier: Apache-2.0
"""Which replica holds which item, and the steps from what is held to what should be (BAT-8, BAT-11, BAT-12).

There is one of these in a fleet. Again and again it looks who is there, gives each replica the number of a cache
worker, or a number above theirs where there are more replicas than workers, and takes back the numbers of those that
have gone, with all that they held. By how often items were asked for, as the replicas counted it, it places the items
anew, and has the steps of the life cycle done one after the other. A step that cannot be done ends the plan, and the
next look makes another one.

Replicas read by a view of who holds what, which may be old: who is asked for an item that is not there says so, and the
item is computed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from jgr.config import FleetConfig
from jgr.placement.items import (
    Int32,
    ItemPlacement,
    Items,
    Workers,
    burst,
    bursting,
    hash_items,
    home,
    hrcs,
    replicate,
)
from jgr.placement.lifecycle import Lifecycle, Step
from jgr.placement.similarity import Drift, best_share, homes, similarity
from jgr.placement.transport import Peer
from jgr.serving.cluster.nodes import View

LOOK_S = 1.0
"""Between two looks at who is there."""
TELL_S = 3.0
"""So long a replica has to take what it is told; one that hangs holds up nobody else's look for longer."""
PREFILL_S, CANDIDATES = 0.03, 100
"""What is believed of a request before any came: its prefill time, and how many items it has."""
LINK_BYTES_PER_S = 1.25e9
BURST_S = 10.0
"""So long a request counts for what has become hot."""
REQUESTS = 50_000
"""So many requests' items are known at most, for fleet.items=similarity."""

_log = logging.getLogger(__name__)


class Fleet(Protocol):
    """The replicas, as a placement sees them."""

    async def items(self, name: str, what: str, *arguments: Any) -> Any: ...
    async def items_all(self, what: str, *arguments: Any) -> dict[str, Any]: ...


class _Member(NamedTuple):
    """A replica that has a number. worker: tells what it holds now from what it held as another version."""

    name: str
    worker: int
    peer: Peer


@dataclass
class _World:
    """The items of one version of model and catalog, and who holds them. tokens: [n] of each item. lately: when, and
    what, a replica told of items that were asked for since the placement."""

    key: str
    items: Items
    workers: Workers
    life: Lifecycle
    members: dict[int, _Member] = field(default_factory=dict)  # by number; see Placements._give_numbers
    placement: ItemPlacement | None = None
    placed_s: float = 0.0
    told: View | None = None
    drift: Drift = field(default_factory=Drift)
    lately: deque[tuple[float, Mapping[str, Any]]] = field(default_factory=deque)
    requests: deque[Int32] = field(default_factory=lambda: deque(maxlen=REQUESTS))

    @property
    def holders(self) -> list[int]:
        """The numbers of those that are there and hold items."""
        return [number for number in self.members if number < self.workers.count]


class Placements:
    """fleet: asks the replicas. config: how items are placed. clock: seconds."""

    def __init__(
        self,
        fleet: Fleet,
        config: FleetConfig,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._fleet, self._config, self._clock, self._wait = fleet, config, clock, wait
        self._secret = secrets.token_bytes(32)
        self._world: _World | None = None

    @property
    def wanted(self) -> bool:
        return self._config.items != "none"

    @property
    def placement(self) -> ItemPlacement | None:
        """The last one that was made."""
        return None if self._world is None else self._world.placement

    async def go_on(self) -> None:
        """Look again and again, until it is cancelled. What goes wrong is logged once, until something else does."""
        told = ""
        while True:
            try:
                await self.look()
                told = ""
            except Exception as error:
                if (why := repr(error)) != told:
                    _log.exception("items are not placed")
                    told = why
            await self._wait(min(LOOK_S, self._config.refresh_s))

    async def look(self) -> bool:
        """Look once, and do what is to be done; whether all that should be held is held."""
        world = await self._meet()
        if world is None:
            return False
        due = world.placement is None or self._clock() - world.placed_s >= self._config.refresh_s
        if due:
            world.placement = await self._place(world)
            world.placed_s = self._clock()
            world.lately.clear()  # it is counted by now
        elif world.placement is not None and len(hot := self._bursting(world, world.placement)):
            _log.info("items: %d have become hot, and are replicated", len(hot))
            world.placement, due = burst(world.placement, hot.tolist()), True
            world.lately.clear()
        absent = sorted(set(range(world.workers.count)) - set(world.holders))
        if not due and not self._unfinished(world):
            return not absent
        assert world.placement is not None
        world.life.plan(world.placement, absent)
        done = await self._do_steps(world)
        await self._tell(world)
        return done and not absent

    async def _meet(self) -> _World | None:
        """Give numbers to those that are there; the world that they are of. None: nobody is there."""
        abouts = {
            name: about for name, about in (await self._fleet.items_all("about")).items() if about["key"]
        }
        keys = [about["key"] for about in abouts.values()]
        if not keys:
            return None
        key = max(sorted(set(keys)), key=keys.count)  # the version that most replicas have
        if self._world is None or self._world.key != key:
            name = next(name for name, about in abouts.items() if about["key"] == key)
            self._world = await self._begin(key, name)
        world = self._world
        for number, member in list(world.members.items()):
            about = abouts.get(member.name, {})
            if (about.get("key"), about.get("worker"), about.get("number")) != (key, member.worker, number):
                _log.info("items: node %d (%s) is gone", number, member.name)
                del world.members[number]
                if number < world.workers.count:
                    world.life.lose(number)
        await self._give_numbers(world, abouts)
        now_s = self._clock()
        world.lately.extend((now_s, about) for about in abouts.values() if about["key"] == key)
        await self._tell(world)
        return world

    async def _give_numbers(self, world: _World, abouts: Mapping[str, Mapping[str, Any]]) -> None:
        """Whoever has no number gets the lowest free one. From workers.count on they are of replicas that hold nothing
        and only fetch; where one below is free, such a replica gets it."""
        numbers = {member.name: number for number, member in world.members.items()}
        for name in sorted(name for name, about in abouts.items() if about["key"] == world.key):
            free = next(number for number in itertools.count() if number not in world.members)
            if name in numbers:
                if numbers[name] < world.workers.count or free >= world.workers.count:
                    continue
                del world.members[numbers[name]]
            try:
                peer = await asyncio.wait_for(self._fleet.items(name, "join", free, self._secret), TELL_S)
            except Exception as error:  # the next look asks it again, if it is there
                _log.warning("items: %s did not become a node: %r", name, error)
                continue
            world.members[free] = _Member(name, abouts[name]["worker"], Peer(*peer))
            _log.info("items: node %d is %s", free, name)

    def _bursting(self, world: _World, placement: ItemPlacement) -> Int32:
        """The rows that have become hot since the placement, with fleet.items=hrcs (BAT-12)."""
        while world.lately and world.lately[0][0] < self._clock() - BURST_S:
            world.lately.popleft()
        told = [about for _, about in world.lately if about.get("asked")]
        if self._config.items != "hrcs" or not told:
            return np.zeros(0, np.int32)
        rows, at = np.unique(
            np.concatenate([np.frombuffer(each["rows"], np.int32) for each in told]), return_inverse=True
        )
        times = np.zeros(len(rows), np.int64)
        np.add.at(times, at, np.concatenate([np.frombuffer(each["times"], np.int32) for each in told]))
        return bursting(placement, rows, times, sum(each["asked"] for each in told))

    async def _begin(self, key: str, name: str) -> _World:
        facts = await self._fleet.items(name, "facts")
        tokens = np.frombuffer(facts["tokens"], np.int32).astype(np.int64)
        items = Items(np.zeros(len(tokens)), tokens, facts["token_bytes"], facts["cell_tokens"])
        workers = Workers(self._config.replicas, facts["capacity"])
        return _World(key, items, workers, Lifecycle(workers))

    async def _place(self, world: _World) -> ItemPlacement:
        """The placement by what the replicas have counted."""
        counts = (await self._fleet.items_all("counts")).values()
        counted = [
            each for each in counts if each["key"] == world.key
        ]  # rows of another version are other items
        frequency = np.zeros(len(world.items))
        for each in counted:
            rows = np.frombuffer(each["rows"], np.int32)
            np.add.at(frequency, rows, np.frombuffer(each["frequency"], np.float32))
        items = Items(frequency, world.items.tokens, world.items.bytes_per_token, world.items.cell_tokens)
        kind = self._config.items
        if kind == "replicate":
            return replicate(items, world.workers)
        if kind == "hash":
            return hash_items(items, world.workers)
        if kind == "similarity":
            return await self._place_by_similarity(world, items, counted)
        requests = sum(each["requests"] for each in counted)
        asked = float(frequency @ items.tokens) / requests if requests > 0 else 0.0
        prefills = [each["prefill_s"] for each in counted if each["prefill_s"] > 0]
        speeds = [each["bytes_per_s"] for each in counted if each["bytes_per_s"]]
        link = self._config.link_gbit * 1e9 / 8 or (np.mean(speeds) if speeds else LINK_BYTES_PER_S)
        placement = hrcs(
            items,
            world.workers,
            prefill_s=float(np.mean(prefills)) if prefills else PREFILL_S,
            item_tokens=asked or CANDIDATES * float(items.tokens.mean()),
            link_bytes_per_s=float(link),
            alpha=self._config.alpha,
        )
        if placement.alpha_exceeded:
            _log.warning(
                "fleet.items: fetches will take %.2f of the prefill time, more than fleet.alpha; fleet.items_mb is "
                "too little to replicate more items",
                placement.alpha,
            )
        return placement

    async def _place_by_similarity(
        self, world: _World, items: Items, counted: Sequence[Mapping[str, Any]]
    ) -> ItemPlacement:
        """The hottest items everywhere, the others by who asks for them together (RCLLM-7), with the homes they had
        where requests still find them together. The graph is parted in a thread."""
        new = [rows for each in counted for rows in _lists(each)]
        world.requests.extend(new)
        before, workers, requests = world.placement, world.workers, list(world.requests)
        share = best_share(before.held(), new) if before is not None and new else None
        at = home(len(items), workers.count) if before is None else before.home
        if world.drift.due(len(items), len(requests), share):
            at = await asyncio.to_thread(homes, items, workers, requests, at, hot=self._config.hot)
            world.drift.parted(len(items), len(requests))
            _log.info(
                "items: parted anew by %d requests; the last ones found %s of their items on one node",
                len(requests), "none" if share is None else f"{share:.2f}",
            )  # fmt: skip
        return similarity(items, workers, at, hot=self._config.hot)

    def _unfinished(self, world: _World) -> bool:
        """Whether somebody who is there lacks what it is to hold."""
        assert world.placement is not None
        life = world.life
        return bool(life.steps) or any(
            (world.placement.held()[number] & ~life.published(number)).any() for number in world.holders
        )

    async def _do_steps(self, world: _World) -> bool:
        """Do the steps of the plan; False where one could not be done. What is dropped is no more in the view."""
        life, before = world.life, ""
        while life.steps:
            step = life.steps[0]
            if step.kind == "drop" and before != "drop":
                await self._tell(
                    world, list(itertools.takewhile(lambda step: step.kind == "drop", life.steps))
                )
            before = step.kind
            if not await self._do(world, step):
                if step.kind == "copy":
                    life.fail(step)
                return False
            life.commit(step)
        return True

    async def _do(self, world: _World, step: Step) -> bool:
        member = world.members.get(step.worker)
        if member is None:
            return False
        rows = step.rows.astype(np.int32).tobytes()
        try:
            return bool(await self._fleet.items(member.name, "step", step.kind, rows, step.source))
        except Exception as error:  # it is gone, and the next look will say so
            _log.warning("items: node %d did not do a %s: %s", step.worker, step.kind, error)
            return False

    async def _tell(self, world: _World, leaving: Sequence[Step] = ()) -> None:
        """Tell everybody who holds what at home, where that has changed. leaving: what is dropped next."""
        homes, count = world.life.homes, world.workers.count
        held = np.zeros(len(world.items), bool)
        if world.placement is not None:
            for number in world.holders:
                mine = homes == number
                held[: len(mine)][mine] = world.life.published(number)[mine]
        for step in leaving:
            held[step.rows[homes[step.rows] == step.worker]] = False
        peers = {number: member.peer for number, member in world.members.items()}
        moved = self._config.items == "similarity"
        at = homes.astype(np.int16).tobytes() if moved else b""
        view = View(peers, count, np.packbits(held, bitorder="little").tobytes(), at)
        if view != world.told:
            names = [member.name for member in world.members.values()]
            told = await asyncio.gather(*(self._see(name, view) for name in names))
            world.told = view if all(told) else None  # else the next look tells all of them again

    async def _see(self, name: str, view: View) -> bool:
        """Tell one; whether it was told."""
        try:
            await asyncio.wait_for(self._fleet.items(name, "see", view), TELL_S)
        except Exception as error:
            _log.warning("items: %s was not told who holds what: %r", name, error)
            return False
        return True


def _lists(counted: Mapping[str, Any]) -> list[Int32]:
    """The items of each request that a replica tells of."""
    lengths = np.frombuffer(counted["lengths"], np.int32)
    return (
        np.split(np.frombuffer(counted["lists"], np.int32), np.cumsum(lengths)[:-1]) if len(lengths) else []
    )
