# SPDX-License-Identifier: Apache-2.0
"""Replicas of a fleet without Ray, each in a process of its own, on links that are made as slow as one likes.

Each has all that `jgr cluster` has of a replica: the same store, transport and steps. Bytes go over sockets on the
loopback, and a token bucket in the owner says how fast.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

NAMES = "abcdefgh"
"""The nodes' names, in order of their numbers."""


class Served(NamedTuple):
    """What some requests took. processor_s: of the node's process. tokens: of the prompts; cached, computed: those that
    came from the cache and those that did not. user_hits: requests whose user came from the cache."""

    requests: int = 0
    seconds: float = 0.0
    processor_s: float = 0.0
    tokens: int = 0
    cached: int = 0
    computed: int = 0
    user_hits: int = 0


def together(parts: Sequence[Served]) -> Served:
    """What nodes served side by side: the longest time, and the sums of the rest."""
    summed = Served._make(map(sum, zip(*parts, strict=True)))
    return summed._replace(seconds=max(each.seconds for each in parts))


class Counted(NamedTuple):
    """What the series say, since the start. moved: bytes for requests from each node to each other one, [nodes, nodes].
    missing: what became of items that were missing. users: entries of users on the devices, now."""

    moved: npt.NDArray[np.int64]
    missing: dict[str, int]
    users: int


def node(pipe: Connection, folder: str, settings: Sequence[str], name: str) -> None:
    """A process with a replica that does what comes through the pipe."""
    asyncio.run(_node(pipe, folder, settings, name))


async def _node(pipe: Connection, folder: str, settings: Sequence[str], name: str) -> None:
    from jgr.placement.transport import Bucket
    from jgr.serving.cluster.hints import Hint
    from jgr.serving.cluster.record import NoOthers
    from jgr.serving.cluster.replica import Replica, Source

    bucket = Bucket(1e12)
    replica = Replica(Source((folder,), assignments=tuple(settings)), name, NoOthers(), bucket=bucket)
    await replica.start()
    pipe.send(replica.models.infos[0].id)
    while (told := await asyncio.to_thread(pipe.recv)) is not None:
        what, *arguments = told
        if what == "items":
            pipe.send((await replica.items(Hint(), *arguments))[1])
        elif what == "speed":
            bucket.bytes_per_s = arguments[0]
            pipe.send(None)
        elif what == "series":
            pipe.send(replica.models.render_metrics().decode())
        elif what == "fetch":
            assert replica.item_share is not None
            replica.item_share.fleet = replace(replica.item_share.fleet, **arguments[0])
            pipe.send(None)
        elif what == "limits":
            _limit(replica, arguments[0])
            pipe.send(None)
        else:
            pipe.send(await _serve(replica, *arguments))
    await replica.end()
    pipe.close()
    os._exit(0)  # Ray alone calls the replica's __del__


def _limit(replica: Any, limits: Mapping[str, int]) -> None:
    """Let each kind of entries have so many of the pool's pages."""
    engine = replica.item_share.engine()
    for kind, pages in limits.items():
        engine.served.caching.meta.set_limit(kind, pages)


async def _serve(replica: Any, bodies: Sequence[bytes], in_flight: int) -> Served:
    """Answer requests, so many of them at once."""
    import msgspec

    from jgr.serving.cluster.hints import glance
    from jgr.serving.cluster.relay import Asked

    found, left, begun = Served(), iter(bodies), (time.perf_counter(), time.process_time())

    async def one_after_the_other() -> None:
        nonlocal found
        for body in left:
            asked = Asked("POST", "/v1/rank", b"", [(b"content-length", b"%d" % len(body))], body)
            answered = await replica.answer(glance("/v1/rank", body), asked)
            assert answered.status == 200, answered.body
            usage = msgspec.json.decode(answered.body)["usage"]
            tokens, cached = usage["prompt_tokens"], usage["cached_tokens"]
            hit = cached > 0 and usage["layout"] == "user_prefix"
            one = Served(1, 0.0, 0.0, tokens, cached, usage["computed_tokens"], hit)
            found = Served._make(mine + more for mine, more in zip(found, one, strict=True))

    await asyncio.gather(*(one_after_the_other() for _ in range(in_flight)))
    return found._replace(seconds=time.perf_counter() - begun[0], processor_s=time.process_time() - begun[1])


class Fleet:
    """The processes, as the coordinator sees them."""

    def __init__(self, folder: Path, settings: Sequence[str], nodes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: dict[str, Connection] = {}
        self._processes = []
        for name in NAMES[:nodes]:
            ours, theirs = context.Pipe()
            process = context.Process(target=node, args=(theirs, str(folder), settings, name), daemon=True)
            process.start()
            theirs.close()
            self._pipes[name] = ours
            self._processes.append(process)
        for pipe in self._pipes.values():
            pipe.recv()

    async def ask(self, name: str, *told: Any) -> Any:
        pipe = self._pipes[name]
        pipe.send(told)
        return await asyncio.to_thread(pipe.recv)

    async def ask_all(self, *told: Any) -> dict[str, Any]:
        found = await asyncio.gather(*(self.ask(name, *told) for name in self._pipes))
        return dict(zip(self._pipes, found, strict=True))

    async def items(self, name: str, what: str, *arguments: Any) -> Any:
        return await self.ask(name, "items", what, *arguments)

    async def items_all(self, what: str, *arguments: Any) -> dict[str, Any]:
        found = await self.ask_all("items", what, *arguments)
        return {name: answer for name, answer in found.items() if answer is not None}

    async def serve(self, bodies: Mapping[str, Sequence[bytes]], in_flight: int) -> list[Served]:
        """What each node's requests took, all nodes at once, each with so many in flight."""
        told = [self.ask(name, "serve", some, in_flight) for name, some in bodies.items()]
        found: list[Served] = await asyncio.gather(*told)
        return found

    async def counted(self) -> Counted:
        from prometheus_client.parser import text_string_to_metric_families

        nodes = len(self._pipes)
        moved, missing, users = np.zeros((nodes, nodes), np.int64), {"fetched": 0, "computed": 0}, 0
        for text in (await self.ask_all("series")).values():
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    name, labels, value = sample.name, sample.labels, round(sample.value)
                    if name == "jgr_fleet_item_bytes_total" and labels["purpose"] == "request":
                        moved[int(labels["from"]), int(labels["to"])] += value
                    elif name == "jgr_fleet_items_missing_total":
                        missing[labels["outcome"]] += value
                    elif name == "jgr_cache_entries" and labels["kind"] == "user":
                        users += value
        return Counted(moved, missing, users)

    def close(self) -> None:
        for pipe in self._pipes.values():
            pipe.send(None)
        for process in self._processes:
            process.join(30)
            if process.is_alive():
                process.kill()
