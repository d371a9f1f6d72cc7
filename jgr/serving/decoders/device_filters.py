# SPDX-License-Identifier: Apache-2.0
"""The item filters of a batch as the compiled programs take them.

The one idea: a batch without filters is handed arrays that are on the device already and say so; one with filters
uploads the nodes that it lists, one list after the other, and the device spreads them over arrays as large as compiled
for. The upload is padded to one of a few sizes, each compiled before the first request. Segments stand on the device as
rows of bits, a fixed number of them: a combination is uploaded when a request first names it, in the place of the one
that was not named for longest.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jgr.cache.memory import tree_bytes
from jgr.catalog.item_filters import ItemFilter, Segment
from jgr.models.beam import CatalogTables, Filters
from jgr.models.devices import ONE, Devices

Words = tuple[jax.Array, ...]
SMALLEST, GROWTH = 64, 8
"""Nodes of the smallest upload, and how many times larger the next size is."""


@partial(jax.jit, static_argnames="capacity")
def _spread(listed: Any, counts: Any, *, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Children and parents, [B, depth, capacity] each, of listed [2, n]: counts [B, depth], one list after the
    other."""
    ends = jnp.cumsum(counts).reshape(counts.shape)[..., None]
    place = jnp.arange(capacity, dtype=jnp.int32)
    at = jnp.minimum(ends - counts[..., None] + place, listed.shape[1] - 1)
    children, parents = jnp.where(place < counts[..., None], listed[:, at], 0)
    return children, parents


def upload_size(listed: int, most: int) -> int:
    """Nodes that an upload of so many is padded to; most: what the compiled arrays hold."""
    size = SMALLEST
    while size < listed:
        size *= GROWTH
    return min(size, most)


@partial(jax.jit, donate_argnums=0)
def _put(rows: Words, at: int, words: tuple[Any, ...]) -> Words:
    return tuple(level.at[at].set(new) for level, new in zip(rows, words, strict=True))


class DeviceFilters:
    """Filters over one catalog. Where lanes share them, `guard` is held from `lay_out` until the program is dispatched.

    capacity: the most nodes that a request lists in a level. segment_rows: combinations of segments on the device, at
    least as many as a batch has requests; 0 where the catalog has no segments. devices: those that share the model,
    each of which has all of this.
    """

    def __init__(
        self, tables: CatalogTables, capacity: int, segment_rows: int, devices: Devices = ONE
    ) -> None:
        self._depth, self._capacity, self._devices = tables.depth, capacity, devices
        self._rows = segment_rows
        self._row_of: OrderedDict[tuple[str, ...], int] = OrderedDict()
        self.nothing: dict[int, Filters] = {}
        """What a batch of so many requests is given where none has a filter; made by `lay_out`."""
        self._segments: Words | None = None
        # An upload is given the array of segments for good, so nobody may be about to dispatch a program with it.
        self.guard: AbstractContextManager[Any] = threading.Lock() if segment_rows else nullcontext()
        if segment_rows:
            sizes = [
                codes.shape[0] // 32 + 2 for codes in tables.codes
            ]  # as jgr.catalog.item_filters.pack_bits has it
            every = tuple(np.full(size, 2**32 - 1, np.uint32) for size in sizes)
            none = tuple(np.zeros((1 + segment_rows, size), np.uint32) for size in sizes)
            self._segments = _put(devices.place(none), 0, every)

    def buffer_bytes(self, batches: Collection[int]) -> int:
        """Bytes that stand on the device for good, where batches are of these numbers of requests."""
        lists = self._depth * (2 * self._capacity + 1)  # int32: nodes, their parents, and how many
        return sum(batch * (4 * lists + 5) for batch in batches) + tree_bytes(self._segments)

    def lay_out(self, batch: int, filters: Sequence[ItemFilter]) -> Filters:
        """The filters of the first rows of a batch; the others have none."""
        if batch not in self.nothing:  # before the first request: the engine compiles its programs with this
            nothing = self._devices.place(self._prepare(batch))
            self.nothing[batch] = nothing._replace(segments=self._segments)
        if all(one.is_empty for one in filters):
            return self.nothing[batch]
        counts = np.zeros((batch, self._depth), np.int32)
        only, segment = np.zeros(batch, bool), np.zeros(batch, np.int32)
        rows = self._upload([one.segment for one in filters if one.segment is not None])
        for row, one in enumerate(filters):
            only[row] = one.only
            if one.segment is not None:
                segment[row] = rows[one.segment.key]
            if one.children:
                counts[row] = [len(nodes) for nodes in one.children]
        total = int(counts.sum())
        children, parents = self.nothing[batch][:2]
        if total:
            # What is beyond the lists is not read.
            listed = np.empty((2, upload_size(total, counts.size * self._capacity)), np.int32)
            given = [one for one in filters if one.children]
            for of_all, out in zip(("children", "parents"), listed, strict=True):
                lists = itertools.chain.from_iterable(getattr(one, of_all) for one in given)
                np.concatenate(list(lists), out=out[:total])
            children, parents = self._spread(listed, counts)
        return Filters(children, parents, counts, only, segment, self._segments)

    def _spread(
        self, listed: npt.NDArray[np.int32], counts: npt.NDArray[np.int32]
    ) -> tuple[jax.Array, jax.Array]:
        given = (listed, counts) if self._devices.count == 1 else self._devices.place((listed, counts))
        spread: tuple[jax.Array, jax.Array] = _spread(*given, capacity=self._capacity)
        return spread

    def _prepare(self, batch: int) -> Filters:
        """What a batch without filters is given; compiles the uploads of one with filters."""
        counts = np.zeros((batch, self._depth), np.int32)
        most = counts.size * self._capacity
        sizes, size = [min(SMALLEST, most)], SMALLEST
        while size < most:
            size *= GROWTH
            sizes.append(min(size, most))
        for size in reversed(sizes):
            children, parents = self._spread(np.zeros((2, size), np.int32), counts)
        return Filters(
            children, parents, jnp.asarray(counts), jnp.zeros(batch, bool), jnp.zeros(batch, jnp.int32)
        )

    def _upload(self, segments: Sequence[Segment]) -> dict[tuple[str, ...], int]:
        """The rows of all these combinations, none of which takes the place of another."""
        wanted = {segment.key: segment for segment in segments}
        for key in wanted:
            if key in self._row_of:
                self._row_of.move_to_end(key)
        for key in wanted.keys() - self._row_of.keys():
            free = len(self._row_of) + 1
            row = free if free <= self._rows else self._row_of.popitem(last=False)[1]
            assert self._segments is not None
            words = tuple(
                np.pad(new, (0, level.shape[1] - len(new)))  # where the tables are larger than the tree
                for new, level in zip(wanted[key].node_words, self._segments, strict=True)
            )
            self._segments = _put(self._segments, row, words)
            self.nothing = {
                batch: one._replace(segments=self._segments) for batch, one in self.nothing.items()
            }
            self._row_of[key] = row
        return {key: self._row_of[key] for key in wanted}
