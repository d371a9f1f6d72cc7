# SPDX-License-Identifier: Apache-2.0
"""A replica as a node that holds items for others: who it is, what it knows of who holds what, how blocks are lent.

`lend` is called in the threads of those who read here: the event loop pins, the thread copies.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jgr.placement.kv_folder import KvFolder
from jgr.placement.landing import TransportError
from jgr.placement.shared_items import Block, SharedItems
from jgr.placement.transport import ItemServer, Peer, Transport

STEP_S = 60.0
"""How long a node may take to give the items of a step."""


class View(NamedTuple):
    """Who holds what. peers: the nodes by number. nodes: how many there may be. published: the rows that are held at
    home, bits, the lowest first. homes: the node of each row, int16; empty: row r is at home on node r % nodes."""

    peers: Mapping[int, Peer]
    nodes: int
    published: bytes
    homes: bytes = b""


class Node:
    """A replica that has joined: its number, and what it fetches by. rows: of the catalog."""

    def __init__(self, number: int, server: ItemServer, transport: Transport, rows: int) -> None:
        self.number, self.server, self.transport, self._rows = number, server, transport, rows
        self.peers: Mapping[int, Peer] = {}
        self._nodes, self._published = 1, np.zeros(rows, bool)
        self._homes = np.zeros(0, np.int16)

    def see(self, view: View) -> None:
        self.peers, self._nodes = view.peers, view.nodes
        # One that is replaced has another port, so that nobody would ask for what is open to it.
        self.transport.keep(Peer(*peer) for peer in view.peers.values())
        self._homes = np.frombuffer(view.homes, np.int16)
        bits = np.unpackbits(np.frombuffer(view.published, np.uint8), bitorder="little")
        self._published = np.zeros(self._rows, bool)
        self._published[: min(self._rows, len(bits))] = bits[: self._rows]

    def owner(self, row: int) -> int | None:
        """The other node that holds a row at home; None: none does."""
        node = int(self._homes[row]) if row < len(self._homes) else row % self._nodes
        return node if node != self.number and self._published[row] and node in self.peers else None

    def close(self) -> None:
        self.server.close()
        self.transport.close()


@contextlib.contextmanager
def lend(
    loop: asyncio.AbstractEventLoop, items: SharedItems, rows: Sequence[int], digests: Sequence[bytes]
) -> Iterator[list[Block | None]]:
    """The blocks of rows, pinned by the event loop and copied by the thread that asks."""
    pinned = _on(loop, partial(items.pin, rows, digests))
    try:
        yield [None if entry is None else items.stored(entry) for entry in pinned]
    finally:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(items.unpin, pinned)


def _on(loop: asyncio.AbstractEventLoop, call: Callable[[], Any]) -> Any:
    async def run() -> Any:
        return call()

    try:
        return asyncio.run_coroutine_threadsafe(run(), loop).result(STEP_S)
    except RuntimeError as error:
        raise ConnectionError("the replica has ended") from error


def from_folder(folder: KvFolder, digests: Mapping[int, bytes]) -> dict[int, Block]:
    """The blocks of rows, by their digests, that are in the folder."""
    found = {row: folder.read(digest) for row, digest in digests.items()}
    return {row: block for row, block in found.items() if block is not None}


def from_peer(
    transport: Transport, peer: Peer, wanted: Mapping[int, tuple[bytes, int]], until_s: float
) -> dict[int, Block]:
    """The blocks of rows that the peer has; see Transport.fetch. until_s: on the monotonic clock."""
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TransportError("no time is left")
    return transport.fetch(peer, wanted, left_s)
