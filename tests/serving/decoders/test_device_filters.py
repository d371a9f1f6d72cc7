# SPDX-License-Identifier: Apache-2.0
"""Filters on their way to the device: what the programs get is what was listed, and no more than that is uploaded."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from jgr.catalog.item_filters import NO_FILTER, ItemFilter, ItemFilters
from jgr.catalog.prefix_tree import PrefixTree
from jgr.models.beam import catalog_tables
from jgr.models.decoder import DecoderParams
from jgr.serving.decoders import device_filters
from jgr.serving.decoders.device_filters import DeviceFilters

BATCH, DEPTH, CAPACITY = 8, 3, 8192


TREE = PrefixTree.build(np.random.default_rng(0).integers(0, 9, (50, DEPTH)).astype(np.int32))


def make_filters(segment_rows: int = 0) -> DeviceFilters:
    rows = DecoderParams(np.zeros((9, 2), np.float32), None, None)
    tables = catalog_tables(TREE, (np.arange(9, dtype=np.int32),) * DEPTH, rows)
    return DeviceFilters(tables, CAPACITY, segment_rows)


def listing(rng: np.random.Generator, *sizes: int) -> ItemFilter:
    children = tuple(np.sort(rng.integers(0, 1 << 20, n)).astype(np.int32) for n in sizes)
    return ItemFilter(children, tuple(x // 7 for x in children), only=bool(sizes[0] % 2))


def spelt_out(filters: list[ItemFilter]) -> list[Any]:
    """children, parents, counts and only, entry by entry."""
    children, parents = np.zeros((2, BATCH, DEPTH, CAPACITY), np.int32)
    counts, only = np.zeros((BATCH, DEPTH), np.int32), np.zeros(BATCH, bool)
    for row, one in enumerate(filters):
        only[row] = one.only
        for level, nodes in enumerate(one.children):
            counts[row, level] = len(nodes)
            for place, node in enumerate(nodes):
                children[row, level, place], parents[row, level, place] = node, one.parents[level][place]
    return [children, parents, counts, only]


@pytest.mark.parametrize("segment_rows", [0, 3])
def test_what_stands_on_the_device_is_told_before_it_does(segment_rows: int) -> None:
    filters = make_filters(segment_rows)
    told = filters.buffer_bytes({1, BATCH})
    for batch in (1, BATCH):
        filters.lay_out(batch, [NO_FILTER])
    arrays = {id(x): x.nbytes for x in jax.tree.leaves(list(filters.nothing.values()))}
    assert told == sum(arrays.values())


@pytest.mark.parametrize(
    ("sizes", "uploaded"),
    [
        ([(1, 1, 1)], 64),
        ([(20, 40, 50), None, (3, 0, 9)], 512),
        ([None, (9, CAPACITY, CAPACITY)], 32_768),
        ([(CAPACITY,) * DEPTH] * BATCH, BATCH * DEPTH * CAPACITY),
    ],
)
def test_only_what_is_listed_is_uploaded(
    sizes: list[Any], uploaded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 8 requests that may list 8192 nodes in each of 3 levels: 1.6 MB, of which a short list needs 512 bytes."""
    rng, ours = np.random.default_rng(1), make_filters()
    filters = [NO_FILTER if size is None else listing(rng, *size) for size in sizes]
    ours.lay_out(BATCH, [])
    shapes, spread = [], device_filters._spread

    def watched(listed: Any, counts: Any, *, capacity: int) -> Any:
        assert spread._cache_size() == compiled  # type: ignore[attr-defined]
        shapes.append(listed.shape)
        return spread(listed, counts, capacity=capacity)

    compiled = spread._cache_size()  # type: ignore[attr-defined]
    monkeypatch.setattr(device_filters, "_spread", watched)
    got = ours.lay_out(BATCH, filters)
    assert spread._cache_size() == compiled  # type: ignore[attr-defined]
    for found, want in zip(got, spelt_out(filters), strict=False):
        np.testing.assert_array_equal(found, want)
    assert shapes == [(2, uploaded)]


def test_a_segment_alone_uploads_no_list(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = make_filters()
    nothing = ours.lay_out(BATCH, [NO_FILTER])
    monkeypatch.setattr(device_filters, "_spread", None)
    got = ours.lay_out(BATCH, [ItemFilter(only=True)])
    assert got.children is nothing.children and got.parents is nothing.parents
    assert got.only.tolist() == [True] + [False] * (BATCH - 1)


def test_a_batch_without_filters_is_given_the_segments_as_they_are_now() -> None:
    """A combination that is uploaded takes the rows' memory for good, so what was given before cannot be read again."""
    ours, rows = make_filters(segment_rows=1), np.arange(7, dtype=np.int32)
    named = ItemFilters(TREE, {"few": rows}).choose(rows[:0], None, ["few"])
    ours.lay_out(BATCH, [])
    given = ours.lay_out(BATCH, [named])
    for level, now in zip(given.segments or (), ours.nothing[BATCH].segments or (), strict=True):
        np.testing.assert_array_equal(now, level)
        assert np.all(np.asarray(now)[0] == 2**32 - 1)
    assert len(given.segments or ()) == DEPTH
