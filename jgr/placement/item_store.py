# SPDX-License-Identifier: Apache-2.0
"""Items' KV over the devices of a mesh: hot items on every device, cold ones on one, read inside a program (BAT-7, 11).

The host knows the placement, so it knows before a batch runs which device wants which cells of which other device. It
gives every device two lists: the cells to send to each other device, and where to find the cells that arrive. The
program is a gather, an all_to_all and another gather. All lists have the same length, Q, so that shapes are fixed;
the padding in them is moved as well, and is counted apart. The arrays are filled once, for one placement (BAT-11).

Letters: D devices, H cells of replicated items, C cells of sharded items on a device, Q cells for a pair of devices, M
cells that a device wants, E numbers of a cell.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jgr.models.replicated import exchange
from jgr.placement.items import ItemPlacement

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
AXIS = "cache"
EVERYWHERE, NOBODY = -1, -2


class Where(NamedTuple):
    """Where each cell stands. The cells of all items are numbered in the order of the items' rows.

    owner: [cells] int32, the device that has the cell, or EVERYWHERE or NOBODY. slot: [cells] int32, the cell's number
    among the replicated cells, or among those of its device. ends: [n] int64, the number after each item's last cell.
    """

    owner: Int32
    slot: Int32
    ends: Int64

    def cells(self, rows: Int32) -> Int32:
        """The numbers of the items' cells, item by item."""
        starts = np.concatenate([[0], self.ends[:-1]])[rows]
        counts = self.ends[rows] - starts
        first = np.repeat(starts - (np.cumsum(counts) - counts), counts)
        cells: Int32 = (first + np.arange(len(first))).astype(np.int32)
        return cells

    def on(self, owner: int) -> Int32:
        """The cells of a device, or the replicated ones, in order of their slots: what the arrays must hold."""
        return np.flatnonzero(self.owner == owner).astype(np.int32)


def lay_out(placement: ItemPlacement) -> Where:
    """Give each cell of a placement its place; the placement's workers are the devices."""
    items = placement.items
    counts = items.room_bytes // (items.cell_tokens * items.bytes_per_token)
    sharded_or_not = np.where(placement.replicated, EVERYWHERE, NOBODY)
    owner = np.repeat(np.where(placement.owner >= 0, placement.owner, sharded_or_not), counts)
    where = Where(owner.astype(np.int32), np.zeros(len(owner), np.int32), np.cumsum(counts))
    for device in range(EVERYWHERE, placement.workers.count):
        cells = where.on(device)
        where.slot[cells] = np.arange(len(cells))
    return where


class Exchange(NamedTuple):
    """The reads of one batch.

    send: [D, D, Q] int32, the slots that each device sends to each other one. take: [D, M] int32, where each wanted
    cell is found: below H among the replicated cells, from H on among the received ones, sender after sender.
    useful: [D, D] int64, how many of the sent cells are wanted.
    """

    send: Int32
    take: Int32
    useful: Int64


def plan_exchange(where: Where, wanted: Sequence[Int32], pair: int, most: int, replicated: int) -> Exchange:
    """Plan the reads of a batch.

    wanted: the cells that each device wants, in any order, at most `most` (M). pair: Q. replicated: H.
    ValueError where the cells do not fit, or where no device has one of them.
    """
    devices = len(wanted)
    send = np.zeros((devices, devices, pair), np.int32)
    take = np.zeros((devices, most), np.int32)
    useful = np.zeros((devices, devices), np.int64)
    for to, cells in enumerate(wanted):
        if len(cells) > most:
            raise ValueError(f"device {to} wants {len(cells)} cells, there is room for {most}")
        owners, slots = where.owner[cells], where.slot[cells]
        if (owners == NOBODY).any():
            raise ValueError(f"device {to} wants a cell that no device has")
        take[to, : len(cells)] = slots
        for source in range(devices):
            mine = np.flatnonzero(owners == source)
            if len(mine) > pair:
                raise ValueError(
                    f"device {to} wants {len(mine)} cells of device {source}, a pair has room for {pair}"
                )
            send[source, to, : len(mine)] = slots[mine]
            take[to, mine] = replicated + source * pair + np.arange(len(mine))
            useful[source, to] = len(mine)
    return Exchange(send, take, useful)


class ItemStore:
    """The cells on the devices of a mesh. hot: [H, E], copied to each device; cold: [D, C, E], one part a device."""

    def __init__(self, mesh: Mesh, hot: npt.NDArray[np.floating], cold: npt.NDArray[np.floating]) -> None:
        self._mesh = mesh
        self._spread = NamedSharding(mesh, PartitionSpec(AXIS))
        self.hot = jax.device_put(hot, NamedSharding(mesh, PartitionSpec()))
        self.cold = jax.device_put(cold, self._spread)
        self._read = jax.jit(
            functools.partial(
                jax.shard_map,
                mesh=mesh,
                in_specs=(PartitionSpec(), *[PartitionSpec(AXIS)] * 3),
                out_specs=PartitionSpec(AXIS),
            )(read)
        )

    def read(self, exchange: Exchange) -> jax.Array:
        """Read the cells that each device wants, [D, M, E]. Rows beyond a device's own number hold anything."""
        send, take = (jax.device_put(x, self._spread) for x in (exchange.send, exchange.take))
        out: jax.Array = self._read(self.hot, self.cold, send, take)
        return out

    def moved_bytes(self, exchange: Exchange) -> tuple[int, int]:
        """Bytes that go over links between devices: those of wanted cells, and all that the program sends."""
        devices, _, pair = exchange.send.shape
        cell = self.hot.shape[-1] * self.hot.dtype.itemsize
        between = ~np.eye(devices, dtype=bool)
        return int(exchange.useful[between].sum()) * cell, devices * (devices - 1) * pair * cell


def read(hot: jax.Array, cold: jax.Array, send: jax.Array, take: jax.Array) -> jax.Array:
    """What one device does in a read (shard_map over AXIS): hot [H, E], cold [1, C, E], send [1, D, Q], take [1, M]."""
    received = exchange(cold[0][send[0]], AXIS)
    everything = jnp.concatenate([hot, received.reshape(-1, hot.shape[-1])])
    return everything[take[0]][None]
