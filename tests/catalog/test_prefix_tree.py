# SPDX-License-Identifier: Apache-2.0
"""PrefixTree against a dictionary of prefixes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jgr.catalog.prefix_tree import PrefixTree

CODES = st.integers(1, 8).flatmap(
    lambda depth: st.lists(
        st.tuples(*[st.integers(0, 3) | st.sampled_from([7, 1000])] * depth), min_size=1, max_size=40
    )
)


@given(CODES)
def test_tree_equals_a_dictionary_of_prefixes(paths: list[tuple[int, ...]]) -> None:
    depth = len(paths[0])
    tree = PrefixTree.build(np.array(paths, np.int32))
    # The nodes of a depth are its distinct prefixes in sorted order.
    nodes = [sorted({path[:level] for path in paths}) for level in range(depth + 1)]

    assert tree.depth == depth and tree.n_leaves == len(nodes[depth])
    for level in range(depth):
        starts = tree.offsets[level]
        assert starts.dtype == np.int32 and tree.codes[level].dtype == np.int32
        children = [
            [(*prefix, int(code)) for code in tree.codes[level][starts[i] : starts[i + 1]]]
            for i, prefix in enumerate(nodes[level])
        ]
        assert [child for group in children for child in group] == nodes[level + 1]
        assert tree.max_degrees[level] == max(map(len, children))
        assert len(tree.codes[level]) == starts[-1]
    for leaf, path in enumerate(nodes[depth]):
        assert [nodes[level + 1][tree.paths[leaf, level]] for level in range(depth)] == [
            path[: level + 1] for level in range(depth)
        ]
        assert tree.rows_of(leaf).tolist() == [row for row, other in enumerate(paths) if other == path]
    every = np.arange(len(nodes[depth]), dtype=np.int32)[::-1]
    assert tree.rows_of_each(every) == [tree.rows_of(leaf).tolist() for leaf in every]
    assert [nodes[depth][leaf] for leaf in tree.leaf_of_row] == paths
    # An offset for each node but leaves, and for each level's end; a code for each; a path and rows for each leaf.
    leaves = len(nodes[depth])
    inner = sum(map(len, nodes[:depth])) + depth
    assert tree.nbytes == 4 * (
        inner + sum(map(len, nodes[1:])) + leaves * depth + leaves + 1 + 2 * len(paths)
    )


def test_a_small_tree_by_hand() -> None:
    tree = PrefixTree.build(np.array([[2, 0], [0, 5], [2, 0], [0, 1]], np.int32))
    assert [o.tolist() for o in tree.offsets] == [[0, 2], [0, 2, 3]]
    assert [c.tolist() for c in tree.codes] == [[0, 2], [1, 5, 0]]
    assert tree.paths.tolist() == [[0, 0], [0, 1], [1, 2]]
    assert tree.leaf_of_row.tolist() == [2, 1, 2, 0]
    assert tree.leaf_rows.tolist() == [3, 1, 0, 2] and tree.leaf_offsets.tolist() == [0, 1, 2, 4]


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (3,)])
def test_empty_and_flat_codes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="codes must be"):
        PrefixTree.build(np.zeros(shape, np.int32))
