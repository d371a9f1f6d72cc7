# SPDX-License-Identifier: Apache-2.0
"""One replica's part in the items that the fleet's replicas hold for each other (BAT-7, BAT-11, BAT-12).

Before a request is handed to the engine, the candidates that are not here are fetched from the replicas that hold them,
where that is cheaper than to compute them. They are then found like all others. Whatever does not come in time, or
whole, or is of other tokens, is computed: an answer never depends on it.

What is to be held here is said by the coordinator (`jgr.serving.cluster.placements`), in steps. A replica gets the
items of a step from a folder that was built ahead, from another replica, or computes them while nobody else waits.

All state belongs to the event loop. Threads move bytes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jgr.cache.entries import Entry
from jgr.config import Config, ConfigError, UserError
from jgr.models.words import WORD
from jgr.placement.kv_folder import KvFolder
from jgr.placement.landing import TransportError
from jgr.placement.nixl import nixl_reader
from jgr.placement.shared_items import Block, SharedItems
from jgr.placement.transport import Bucket, ItemServer, Peer, SocketTransport, machine
from jgr.placement.worker import item_name
from jgr.serving.cluster.hints import Hint
from jgr.serving.cluster.nodes import STEP_S, Node, View, from_folder, from_peer, lend
from jgr.serving.decoders.caching import Caching, identity
from jgr.serving.decoders.item_blocks import compute, portions
from jgr.serving.decoders.serve import ServedDecoder
from jgr.serving.engine.engine import Engine
from jgr.serving.errors import RequestError
from jgr.serving.policies.fetching import Links, Missing
from jgr.serving.policies.prefix_choice import KEEP_ITEMS
from jgr.serving.versions.served_models import Models

THREADS = 8
FOLDER = "folder"
"""The name of the files that were built ahead, among the nodes that items come from."""
TRIES, BUSY_S = 40, 0.05
"""How often, and after how long, room is asked for again that others have still to give back."""
MOST_TOLD = 1024
"""The most items that a replica tells of at each look of the coordinator: those that were asked for most since the last
one."""
MOST_COUNTED = 200_000
"""The most items whose frequencies a replica reports."""

_log = logging.getLogger(__name__)


class ItemShare:
    """models: those of the replica; one of them shares its items. host: the address to give items on. bucket: makes the
    links as slow as others are, for measurements. kv: the folder that was built ahead, and the field that names it.
    fleet: says how missing items are fetched; measurements replace it between requests.
    late: others serve already, so that a folder which cannot be used any more keeps nobody from starting: items are
    computed.

    Raises ConfigError where no model keeps items, and UserError where the folder is not of the model."""

    def __init__(
        self,
        models: Models,
        config: Config,
        host: str = "127.0.0.1",
        bucket: Bucket | None = None,
        kv: tuple[str, str] | None = None,
        late: bool = False,
    ) -> None:
        self._late = late
        self._models, self.fleet, self._host, self._bucket = models, config.fleet, host, bucket
        self._kv, self._kv_field = (config.fleet.kv, "fleet.kv") if kv is None else kv
        self._threads = ThreadPoolExecutor(THREADS, "jgr-items")
        self._engine: Engine[ServedDecoder] | None = None
        self._node: Node | None = None
        self._folder: KvFolder | None = None
        self._links = Links(8 / config.fleet.link_gbit) if config.fleet.link_gbit else Links()
        self._arriving: dict[int, asyncio.Future[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._used: dict[int, int] = {}  # requests that use a row which is to be forgotten
        self._worker = 0
        self._computing = asyncio.Lock()  # one request for items at a time
        if self._bind() is None:
            field = "fleet.items" if kv is None else self._kv_field
            raise ConfigError(
                f"{field}: no model keeps items: it takes rank.method=item_token or item_probe, and cache.policy="
                f"{' or '.join(KEEP_ITEMS)}"
            )
        if config.fleet.transport == "nixl":
            nixl_reader()  # it takes a while, and is told at the start where it is not installed

    # What the coordinator asks.

    def about(self) -> dict[str, Any]:
        """What this replica could hold items of, and whether it has joined."""
        engine = self._bind()
        if engine is None:
            return {"key": "", "worker": self._worker, "number": None}
        number = None if self._node is None else self._node.number
        return {"key": self._key(engine), "worker": self._worker, "number": number, **self._lately()}

    def _lately(self) -> dict[str, Any]:
        """What was asked for since the last time, for who replicates what becomes hot."""
        seen = self._caching().frequencies
        if self.fleet.items != "hrcs" or seen is None:
            return {}
        rows, times = np.unique(seen.lists()[0], return_counts=True)
        most = np.argsort(-times, kind="stable")[:MOST_TOLD]
        told = {"rows": rows[most].tobytes(), "times": times[most].astype(np.int32).tobytes()}
        return {**told, "asked": int(times.sum())}

    def facts(self) -> dict[str, Any]:
        """Sizes: tokens of each item, [n] int32, bytes of a token, tokens of a cell, bytes that are for items."""
        caching = self._caching()
        assert caching.segments is not None and caching.items is not None
        kv = caching.kv
        return {
            "tokens": caching.segments.item_lengths.astype(np.int32).tobytes(),
            "token_bytes": kv.parts * kv.cells.words * WORD // kv.tokens,
            "cell_tokens": kv.tokens,
            "capacity": caching.items.placed_bytes,
        }

    def join(self, number: int, secret: bytes) -> Peer:
        """Become the node of a number, which holds nothing yet; returns where it gives its items."""
        engine = self._bind()
        assert engine is not None and engine.served.caching is not None
        self._leave()
        caching = engine.served.caching
        assert caching.items is not None
        caching.items.clear()
        engine.metrics.items_held.set(0)
        name = identity(engine.info.version.rpartition("@")[2], caching.kv)
        loop = asyncio.get_running_loop()
        source = partial(lend, loop, caching.items)
        by = self.fleet.transport
        server = ItemServer(source, secret, name, self._host, self._bucket, nixl=by == "nixl")
        transport = SocketTransport(secret, name, caching.kv.cells.words, by == "auto", nixl=by == "nixl")
        self._node = Node(number, server, transport, engine.catalog.n_items)
        return Peer(self._host, server.port, machine())

    def see(self, view: View) -> None:
        """Learn who holds what."""
        if self._node is not None:
            self._node.see(View(*view))
            self._links.keep([*self._node.peers, FOLDER])

    def counts(self) -> dict[str, Any]:
        """How often items were asked for in the last window, and what was seen besides."""
        caching, engine = self._caching(), self._engine
        assert engine is not None and caching.frequencies is not None
        now_ns, seen = engine.clock(), caching.frequencies
        rows, frequency = seen.hottest(MOST_COUNTED, now_ns)
        prefill_ns = caching.planner("rank").compute_ns(max(1, round(seen.user_tokens)))
        lists, lengths = seen.lists()
        return {
            "key": self._key(engine),
            "rows": rows.tobytes(),
            "frequency": frequency.tobytes(),
            "requests": seen.requests(now_ns),
            "lists": lists.tobytes(),
            "lengths": lengths.tobytes(),
            "user_tokens": seen.user_tokens,
            "prefill_s": prefill_ns / 1e9,
            # A disk, or its pages in memory, tells nothing of the network.
            "bytes_per_s": self._links.bytes_per_s(() if self._node is None else self._node.peers),
        }

    async def step(self, kind: str, raw: bytes, source: int | None) -> bool:
        """Do a step of the placement's life cycle; False: it could not be done, and nothing has changed."""
        rows = np.frombuffer(raw, np.int32).tolist()
        engine, node = self._bind(), self._node
        if engine is None or node is None:
            return False
        items = self._items()
        if kind == "publish":
            items.publish_placed()
        elif kind == "drop":
            items.drop(rows)
        else:
            return await self._copy(engine, node, items, rows, source)
        engine.metrics.items_held.set(items.placed)
        return True

    # What a request needs.

    async def fetch(self, hint: Hint, user_tokens: float) -> Sequence[int]:
        """Fetch the candidates that are not here, as far as that pays; returns those that `done` is to be told of.
        user_tokens: of the request's history, roughly."""
        engine, node = self._bind(), self._node
        if engine is None or not hint.items or hint.model not in ("", engine.info.id, engine.info.version):
            return ()
        if len(hint.items) > engine.info.max_candidates or engine.served.watch.fell_back:
            return ()  # it will be refused, or read no items
        caching = self._caching()
        assert caching.segments is not None
        rows = dict.fromkeys(engine.catalog.rows(hint.items)[0].tolist())
        content, grouping = caching.segments.content, caching.planner("rank")
        missing = [row for row in rows if not grouping.keeps(item_name(row), content(row))]
        if not missing or not self._reads_items(engine, caching, hint, list(rows), round(user_tokens)):
            return ()
        sources = self._sources(node, caching, missing)
        most_s = self.fleet.fetch_ms / 1e3
        if hint.left_ms is not None:  # the rest is for the model
            most_s = min(most_s, (hint.left_ms - hint.waited_ms) / 2e3)
        wanted = {
            of: Missing(
                sum(map(self._block_bytes, some)), grouping.compute_ns(sum(len(content(row)) for row in some))
            )
            for of, some in sources.items()
        }
        now_ns = engine.clock()
        chosen = self._links.choose(wanted, now_ns, round(most_s * 1e9), self.fleet.fetch)
        arriving = {self._arriving[row] for row in missing if row in self._arriving}
        for of in chosen:
            arriving.add(self._begin(engine, node, of, sources[of], time.monotonic() + most_s))
        if arriving:
            await asyncio.wait(arriving, timeout=max(0.0, most_s))
        came = [row for row in missing if grouping.keeps(item_name(row), content(row))]
        engine.metrics.items_missing.labels("fetched").inc(len(came))
        engine.metrics.items_missing.labels("computed").inc(len(missing) - len(came))
        if self.fleet.keep_fetched:
            return ()
        for row in came:
            self._used[row] = self._used.get(row, 0) + 1
        return came

    def done(self, rows: Sequence[int]) -> None:
        """A request that fetched these rows has ended; they are forgotten with the last one."""
        for row in rows:
            self._used[row] -= 1
            if not self._used[row]:
                del self._used[row]
                if self._engine is not None and self._engine is self.engine():
                    self._items().forget(row)
                    self._caching().meta.drop(item_name(row))

    def close(self) -> None:
        self._leave()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def engine(self) -> Engine[ServedDecoder] | None:
        """The engine whose items are shared now."""
        for deployment in self._models.deployments:
            served = deployment.engine.served
            if (
                isinstance(served, ServedDecoder)
                and served.caching is not None
                and served.caching.items is not None
            ):
                return deployment.engine
        return None

    # How.

    def _bind(self) -> Engine[ServedDecoder] | None:
        """The engine that is shared; where it is another one than before, this replica is a new node."""
        engine = self.engine()
        if engine is not self._engine:
            self._leave()
            if self._engine is not None and engine is not None:
                _count_on(self._engine, engine)
            self._engine, self._folder = engine, None
            self._worker += 1
            if engine is not None and self._kv:
                self._open_folder(engine)
        return engine

    def _open_folder(self, engine: Engine[ServedDecoder]) -> None:
        """Map what was built ahead. Raises UserError where it is not of the first model; of a later one, or where
        others serve, it is left."""
        revision = engine.info.version.rpartition("@")[2]
        try:
            self._folder = KvFolder(Path(self._kv), identity(revision, self._caching().kv))
        except UserError as error:
            if self._worker == 1 and not self._late:
                raise
            _log.warning("%s: items are computed: %s", self._kv_field, error)
            return
        _log.info("%s: %d items that were computed ahead, in %s", self._kv_field, len(self._folder), self._kv)

    def _leave(self) -> None:
        if self._node is not None:
            node, self._node = self._node, None
            node.close()

    def _key(self, engine: Engine[ServedDecoder]) -> str:
        info, caching = engine.info, self._caching()
        revision = info.version.rpartition("@")[2]
        return f"{identity(revision, caching.kv)} {info.catalog_version}"

    def _caching(self) -> Caching:
        assert self._engine is not None and self._engine.served.caching is not None
        return self._engine.served.caching

    def _items(self) -> SharedItems:
        items = self._caching().items
        assert items is not None
        return items

    def _block_bytes(self, row: int) -> int:
        return self._cells(row) * self._caching().kv.cells.words * WORD

    def _cells(self, row: int) -> int:
        caching = self._caching()
        assert caching.segments is not None
        return -(-int(caching.segments.item_lengths[row]) // caching.kv.tokens) * caching.kv.parts

    def _reads_items(
        self,
        engine: Engine[ServedDecoder],
        caching: Caching,
        hint: Hint,
        rows: Sequence[int],
        user_tokens: int,
    ) -> bool:
        """Whether the request is likely to be planned to read items."""
        assert caching.segments is not None
        tokens = int(caching.segments.item_lengths[rows].sum())
        grouping = caching.planner("rank")
        return grouping.would_read_items(hint.layout, hint.user, user_tokens, tokens, engine.clock())

    def _sources(
        self, node: Node | None, caching: Caching, missing: Iterable[int]
    ) -> dict[int | str, list[int]]:
        """Who has the missing rows that nobody fetches yet."""
        assert caching.segments is not None
        found: dict[int | str, list[int]] = {}
        for row in missing:
            if row in self._arriving:
                continue
            owner = None if node is None else node.owner(row)
            if owner is not None:
                found.setdefault(owner, []).append(row)
            elif self._folder is not None and self._folder.has(caching.segments.content(row).digest):
                found.setdefault(FOLDER, []).append(row)
        return found

    def _begin(
        self,
        engine: Engine[ServedDecoder],
        node: Node | None,
        of: Any,
        rows: Sequence[int],
        until_s: float,
    ) -> asyncio.Future[None]:
        """Reserve, fetch, publish, in a task that goes on where the request does not wait for it any more."""
        items = self._items()
        reserved = {row: entry for row in rows if (entry := items.reserve(row)) is not None}
        arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not reserved:
            arrived.set_result(None)
            return arrived
        self._arriving |= dict.fromkeys(reserved, arrived)
        task = asyncio.create_task(self._arrive(engine, node, of, reserved, until_s, arrived))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return arrived

    async def _arrive(
        self,
        engine: Engine[ServedDecoder],
        node: Node | None,
        of: Any,
        reserved: dict[int, Entry],
        until_s: float,
        arrived: asyncio.Future[None],
    ) -> None:
        items, begun_ns = self._items(), engine.clock()
        blocks: dict[int, Block] = {}
        try:
            blocks = await self._read(node, of, list(reserved), until_s)
            nbytes = sum(block.nbytes for block in blocks.values())
            if nbytes:
                self._links.observe(of, nbytes, engine.clock() - begun_ns)
            self._count(engine, node, of, nbytes, "request")
        except TransportError as error:
            _log.warning("items of node %s are computed: %s", of, error)
            self._links.failed(of, engine.clock())
        except Exception:
            _log.exception("items of node %s are computed", of)
            self._links.failed(of, engine.clock())
        finally:
            for row, entry in reserved.items():
                self._arriving.pop(row, None)
                if row not in blocks:
                    items.give_up(entry)
                    continue
                try:
                    items.publish(entry, blocks[row])
                except ValueError as error:
                    _log.warning("items: %s", error)
            arrived.set_result(None)

    async def _read(
        self, node: Node | None, of: Any, rows: Sequence[int], until_s: float
    ) -> dict[int, Block]:
        """Blocks from the folder, or from a node. TransportError as of Transport."""
        segments, loop = self._caching().segments, asyncio.get_running_loop()
        assert segments is not None
        digests = {row: segments.content(row).digest for row in rows}
        if of == FOLDER:
            assert self._folder is not None
            return await loop.run_in_executor(self._threads, from_folder, self._folder, digests)
        assert node is not None
        peer = node.peers.get(of)
        if peer is None:
            raise TransportError("it is gone")
        wanted = {row: (digest, self._cells(row)) for row, digest in digests.items()}
        return await loop.run_in_executor(
            self._threads, from_peer, node.transport, Peer(*peer), wanted, until_s
        )

    def _count(
        self, engine: Engine[ServedDecoder], node: Node | None, of: Any, nbytes: int, purpose: str
    ) -> None:
        if of != FOLDER and node is not None:
            engine.metrics.item_bytes.labels(str(of), str(node.number), purpose).inc(nbytes)

    async def _copy(
        self,
        engine: Engine[ServedDecoder],
        node: Node,
        items: SharedItems,
        rows: Sequence[int],
        source: int | None,
    ) -> bool:
        items.give_up_placing()  # of a step whose end nobody heard of
        tries = TRIES
        while (to_fill := items.copy(rows)) is None:
            tries -= 1
            if not tries:
                _log.warning("items that are to be held here: there is no room yet")
                return False
            await asyncio.sleep(
                BUSY_S
            )  # somebody still reads what was dropped, or has just fetched one of these
        if self._node is not node:
            return False
        try:
            async for found in self._gather(engine, node, to_fill, source):
                for row, block in found.items():
                    items.place(row, block)
                    to_fill.remove(row)
                host = items.host
                await asyncio.to_thread(host.catch_up)
        except RequestError as error:  # the engine drains, or others leave it no time
            _log.warning("items that are to be held here: %s", error)
        except Exception:  # the pool was lost, or a block is of another size
            _log.exception("items that are to be held here")
        if not to_fill and self._node is node:
            return True
        if self._node is node:
            items.give_up_placing()
        return False

    async def _gather(
        self, engine: Engine[ServedDecoder], node: Node, rows: Sequence[int], source: int | None
    ) -> Any:
        """The blocks of rows, some at a time: those that are on files, those of `source`, and computed ones."""
        left = list(rows)
        for of in (FOLDER, source):
            if not left or of is None or (of == FOLDER and self._folder is None):
                continue
            try:
                found = await self._read(node, of, left, time.monotonic() + STEP_S)
            except (TransportError, OSError) as error:  # the network, or the disk
                _log.warning("items of node %s are computed: %s", of, error)
                continue
            self._count(engine, node, of, sum(block.nbytes for block in found.values()), "placement")
            yield found
            left = [row for row in left if row not in found]
        for part in portions(engine, left) if left else ():
            async with self._computing:
                yield await compute(engine, part)


def _count_on(before: Engine[ServedDecoder], after: Engine[ServedDecoder]) -> None:
    """What was asked for of one catalog counts for the next one, by the items' ids; new ones begin with nothing."""
    old, new = before.served.caching, after.served.caching
    if old is None or new is None or old.frequencies is None or new.frequencies is None:
        return
    rows = old.frequencies.hottest(MOST_COUNTED, 0)[0]
    ids = [before.catalog.item_ids[row] for row in rows.tolist()]
    here, unknown = after.catalog.rows(ids)
    gone = set(unknown)
    new.frequencies.count_on(old.frequencies, rows[[item not in gone for item in ids]], here)
