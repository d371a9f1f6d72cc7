# SPDX-License-Identifier: Apache-2.0
"""Which nodes a filter leaves, on random catalogs, against the sets of items below every node."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from jgr.catalog.catalog import Catalog, CatalogError
from jgr.catalog.item_filters import MAX_COMBINATIONS, NO_FILTER, ItemFilters, catalog_segments, pack_bits
from jgr.catalog.prefix_tree import PrefixTree


@st.composite
def trees(draw: st.DrawFn) -> PrefixTree:
    depth = draw(st.integers(1, 4))
    codes = draw(st.lists(st.tuples(*[st.integers(0, 2)] * depth), min_size=1, max_size=40))
    return PrefixTree.build(np.array(codes, np.int32))


def bits(words: np.ndarray, n: int) -> np.ndarray:
    return np.unpackbits(words.view(np.uint8), bitorder="little")[:n].astype(bool)


@settings(max_examples=120, deadline=None)
@given(tree=trees(), data=st.data())
def test_the_nodes_left_are_those_with_an_item_left(tree: PrefixTree, data: st.DataObject) -> None:
    n = len(tree.leaf_of_row)
    rows = st.lists(st.integers(0, n - 1), max_size=2 * n)
    sets = {name: np.unique(data.draw(rows)).astype(np.int32) for name in "xyz"}
    filters = ItemFilters(tree, sets)
    denied = data.draw(rows)
    allowed = data.draw(st.none() | rows)
    names = data.draw(st.lists(st.sampled_from("xyz"), max_size=3))
    left = set(range(n)) - set(denied)
    if allowed is not None:
        left &= set(allowed)
    for name in names:
        left &= set(sets[name].tolist())

    chosen = filters.choose(
        np.array(denied, np.int32), None if allowed is None else np.array(allowed, np.int32), names
    )
    assert chosen.n_items == len(left)
    assert set(np.flatnonzero(chosen.keeps(np.arange(n)))) == left
    paths = tree.paths[tree.leaf_of_row]
    for level in range(tree.depth):
        nodes = len(tree.codes[level])
        listed = np.zeros(nodes, bool)
        if chosen.children:
            children = chosen.children[level]
            assert (np.diff(children) > 0).all()
            assert len(children) <= len(set(denied) if allowed is None else set(allowed))
            listed[children] = True
            for child, parent in zip(children, chosen.parents[level], strict=True):
                first, last = tree.offsets[level][parent : parent + 2]
                assert first <= child < last
        entered = listed == chosen.only
        if chosen.segment is not None:
            entered &= bits(chosen.segment.node_words[level], nodes)
        assert set(np.flatnonzero(entered)) == {int(paths[row, level]) for row in left}
    leaves = np.arange(tree.n_leaves, dtype=np.int32)
    assert set(leaves[chosen.enters(leaves)]) == {int(tree.leaf_of_row[row]) for row in left}


def test_nothing_chosen_is_no_filter() -> None:
    filters = ItemFilters(PrefixTree.build(np.array([[0], [1]], np.int32)))
    assert filters.choose(np.zeros(0, np.int32), None, ()).is_empty
    assert NO_FILTER.is_empty and NO_FILTER.keeps(np.array([7])).all()
    assert not filters.choose(np.zeros(0, np.int32), np.zeros(0, np.int32), ()).is_empty
    with pytest.raises(KeyError):
        filters.choose(np.zeros(0, np.int32), None, ["x"])


def test_combinations_are_kept_and_bounded() -> None:
    tree = PrefixTree.build(np.arange(9, dtype=np.int32)[:, None])
    every = np.arange(9, dtype=np.int32)
    filters = ItemFilters(tree, {f"s{i:02}": every for i in range(14)})
    first = filters.combination(["s01", "s00", "s01"])
    assert first is not None and first.key == ("s00", "s01") and first.n_items == 9
    assert filters.combination(["s00", "s01"]) is first
    pairs = [(f"s{i:02}", f"s{j:02}") for i in range(14) for j in range(i)]
    for pair in pairs[1 : MAX_COMBINATIONS + 1]:
        filters.combination(pair)
    assert filters.combination(["s00", "s01"]) is not first


@pytest.mark.parametrize("n", [0, 1, 31, 32, 33, 64])
def test_packed_bits_end_in_a_word_of_their_own(n: int) -> None:
    given_bits = np.arange(n) % 3 == 0
    words = pack_bits(given_bits)
    assert words.dtype == np.uint32 and len(words) > -(-n // 32)
    np.testing.assert_array_equal(bits(words, n), given_bits)


def test_segments_come_from_the_metadata() -> None:
    metadata = [{"segments": ["eu", "stock"]}, {}, {"segments": "eu"}, {"segments": []}]
    catalog = Catalog.build(list("abcd"), [(i,) for i in range(4)], metadata)
    found = catalog_segments(catalog, "segments")
    assert {name: rows.tolist() for name, rows in found.items()} == {"eu": [0, 2], "stock": [0]}
    assert catalog_segments(catalog, "region") == {}
    longest = Catalog.build(["a"], [(0,)], [{"segments": "x" * 512}])
    assert list(catalog_segments(longest, "segments")) == ["x" * 512]


@pytest.mark.parametrize("bad", [7, ["eu", 7], [""], {"eu": True}, None, "x" * 513])
def test_other_metadata_in_the_field_is_refused(bad: object) -> None:
    catalog = Catalog.build(["a", "b"], [(0,), (1,)], [{}, {"segments": bad}])
    with pytest.raises(CatalogError, match=r"item 'b': metadata.segments must be a list of segment names"):
        catalog_segments(catalog, "segments")


@settings(max_examples=300)
@given(st.sets(st.text("abc", max_size=6), max_size=8), st.text("abc", max_size=6))
def test_the_nearest_segment_is_one_of_those_that_begin_most_like_the_name(
    names: set[str], name: str
) -> None:
    filters = ItemFilters(
        PrefixTree.build(np.array([[0]], np.int32)), {one: np.array([0], np.int32) for one in names}
    )
    alike = {one: max(n for n in range(min(len(one), len(name)) + 1) if one[:n] == name[:n]) for one in names}
    near = filters.nearest(name)
    assert (near is None) == (not names)
    assert near is None or alike[near] == max(alike.values())
