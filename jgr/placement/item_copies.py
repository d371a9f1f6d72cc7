# SPDX-License-Identifier: Apache-2.0
"""The reads of jgr.placement.item_store without a collective: each cell goes from its device to the one that wants it.

The all_to_all of `ItemStore` is one program, which moves equally much between all pairs of devices, as much as the
fullest pair may need. Here a pair that has nothing to say costs nothing, and one that has little costs little: on the
device that has the cells a program gathers them, a copy goes over the link between the two, and on the device that
wants them a program puts them in their places. The price is dispatches: three for each pair with cells, and one for
each device.

Numbers of cells are padded to a power of two, so that few programs are compiled. Letters as in item_store.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jgr.placement.item_store import EVERYWHERE, NOBODY, Where

Int32 = npt.NDArray[np.int32]
FEWEST = 8
"""The fewest cells of a copy, padding included."""


class Copy(NamedTuple):
    """Cells that one device has and another wants, or a device itself.

    slots: [n] int32, where they stand on the source; places: [n] int32, where they are wanted, M for padding. useful:
    how many of them are no padding.
    """

    source: int
    to: int
    slots: Int32
    places: Int32
    useful: int


class Copies(NamedTuple):
    """The reads of one batch. hot: [D, M] int32, the slot of each wanted cell that is replicated; others: any."""

    hot: Int32
    pairs: tuple[Copy, ...]


def plan_copies(where: Where, wanted: Sequence[Int32], most: int) -> Copies:
    """Plan the reads of a batch. wanted: the cells that each device wants, at most `most` (M).

    ValueError where the cells do not fit, or where no device has one of them.
    """
    hot, pairs = np.zeros((len(wanted), most), np.int32), list[Copy]()
    for to, cells in enumerate(wanted):
        if len(cells) > most:
            raise ValueError(f"device {to} wants {len(cells)} cells, there is room for {most}")
        owners, slots = where.owner[cells], where.slot[cells]
        if (owners == NOBODY).any():
            raise ValueError(f"device {to} wants a cell that no device has")
        everywhere = owners == EVERYWHERE
        hot[to, : len(cells)][everywhere] = slots[everywhere]
        for source in np.unique(owners[~everywhere]):
            mine = np.flatnonzero(owners == source).astype(np.int32)
            padding = (0, max(FEWEST, 1 << (len(mine) - 1).bit_length()) - len(mine))
            places = np.pad(mine, padding, constant_values=most)
            pairs.append(Copy(int(source), to, np.pad(slots[mine], padding), places, len(mine)))
    return Copies(hot, tuple(pairs))


class CopyStore:
    """The cells on some devices. hot: [H, E], copied to each device; cold: [D, C, E], one part a device."""

    def __init__(
        self, devices: Sequence[jax.Device], hot: npt.NDArray[np.floating], cold: npt.NDArray[np.floating]
    ) -> None:
        self._devices = devices
        self._hot = [jax.device_put(hot, device) for device in devices]
        self._cold = [jax.device_put(part, device) for part, device in zip(cold, devices, strict=True)]
        self._cell_bytes = hot.shape[-1] * hot.dtype.itemsize

    def read(self, copies: Copies) -> list[jax.Array]:
        """Read the cells that each device wants: [M, E] on each. Rows beyond a device's own number hold anything.

        All of it is dispatched and nothing is waited for.
        """
        sent = [
            _gather(self._cold[copy.source], jax.device_put(copy.slots, self._devices[copy.source]))
            for copy in copies.pairs
        ]
        out = [
            _gather(hot, jax.device_put(slots, device))
            for hot, slots, device in zip(self._hot, copies.hot, self._devices, strict=True)
        ]
        for copy, cells in zip(copies.pairs, sent, strict=True):
            device = self._devices[copy.to]
            arrived = jax.device_put(cells, device)
            out[copy.to] = _put(out[copy.to], arrived, jax.device_put(copy.places, device))
        return out

    def moved_bytes(self, copies: Copies) -> tuple[int, int]:
        """Bytes that go over links between devices: those of wanted cells, and all that is copied."""
        between = [copy for copy in copies.pairs if copy.source != copy.to]
        useful, sent = sum(copy.useful for copy in between), sum(len(copy.slots) for copy in between)
        return useful * self._cell_bytes, sent * self._cell_bytes


@jax.jit
def _gather(cells: jax.Array, slots: jax.Array) -> jax.Array:
    """[H, E] or [C, E] -> [n, E]; 0 where there is no cell at all."""
    if not len(cells):
        return jnp.zeros((len(slots), cells.shape[-1]), cells.dtype)
    return cells[slots]


@partial(jax.jit, donate_argnums=0)
def _put(out: jax.Array, cells: jax.Array, places: jax.Array) -> jax.Array:
    """Cells [n, E] in their places of [M, E]; those of padding are dropped."""
    return out.at[places].set(cells, mode="drop")
