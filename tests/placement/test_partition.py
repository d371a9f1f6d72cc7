# SPDX-License-Identifier: Apache-2.0
"""Partitions of planted graphs, and the balances of any (RCLLM-7, RCLLM-16)."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_matrix

from jgr.placement.partition import By, _State, cut, imbalance_of, partition, refine

WAYS: list[By] = ["numpy", "metis"]


def drawn(parts: int, size: int, inner: int, outer: int, seed: int = 0) -> tuple[Any, npt.NDArray[np.int32]]:
    """A graph of communities of shuffled vertices, each with so many neighbours in its own and anywhere."""
    rng, n = np.random.default_rng(seed), parts * size
    of = rng.permutation(np.repeat(np.arange(parts), size)).astype(np.int32)
    members = [np.flatnonzero(of == part) for part in range(parts)]
    one = np.repeat(np.arange(n), inner + outer)
    other = np.concatenate([np.append(rng.choice(members[c], inner), rng.integers(0, n, outer)) for c in of])
    loops = one == other
    edges = csr_matrix((np.ones((~loops).sum()), (one[~loops], other[~loops])), shape=(n, n))
    return (edges + edges.T).tocsr(), of


@pytest.mark.parametrize("by", WAYS)
@pytest.mark.parametrize(
    ("parts", "size", "inner", "outer"), [(2, 60, 10, 2), (8, 60, 10, 2), (20, 60, 10, 2), (40, 100, 4, 2)]
)
def test_a_planted_partition_is_found(by: By, parts: int, size: int, inner: int, outer: int) -> None:
    edges, of = drawn(parts, size, inner, outer)
    part = partition(edges, np.ones((len(of), 2)), parts, by)
    random = cut(edges, np.random.default_rng(1).integers(0, parts, len(of)).astype(np.int32))
    assert cut(edges, part) <= 1.1 * cut(edges, of)
    assert cut(edges, part) <= random / (1.9 if parts == 2 else 2.5)
    assert imbalance_of(np.ones((len(of), 1)), part, parts).max() <= 0.05 + 1e-9
    assert (part == partition(edges, np.ones((len(of), 2)), parts, by)).all(), "the same each time"


def test_the_cut_counts_each_edge_once() -> None:
    edges = csr_matrix(np.array([[0, 2, 3], [2, 0, 5], [3, 5, 0]], float))
    assert cut(edges, np.array([0, 0, 0], np.int32)) == 0
    assert cut(edges, np.array([0, 1, 0], np.int32)) == 7
    assert imbalance_of(np.array([[1.0, 0], [1, 0], [2, 0]]), np.array([0, 1, 1], np.int32), 2).tolist() == [
        0.5,
        0,
    ]


@pytest.mark.parametrize("by", WAYS)
@settings(max_examples=12, deadline=None)
@given(
    parts=st.integers(2, 6),
    seed=st.integers(0, 1000),
    spread=st.sampled_from([1.0, 4.0, 10.0]),
    linked=st.booleans(),
)
def test_both_balances_hold_and_no_vertex_is_lost(
    by: By, parts: int, seed: int, spread: float, linked: bool
) -> None:
    """Where no vertex alone is more than a few hundredths of a part."""
    rng = np.random.default_rng(seed)
    edges, _ = drawn(parts, 120, 5, 3, seed)
    n = edges.shape[0]
    edges = edges if linked else csr_matrix((n, n))
    loads = np.stack([rng.uniform(1, spread, n), rng.uniform(1, spread, n)], axis=1)
    part = partition(edges, loads, parts, by)
    assert part.shape == (n,) and part.min() >= 0 and part.max() < parts
    assert imbalance_of(loads, part, parts).max() <= 0.05 + 1e-9


def test_refining_balances_what_no_single_move_can() -> None:
    """Each part is full of one load alone, so that only exchanges help."""
    loads = np.repeat(np.array([[10.0, 1.0], [1.0, 10.0]]), 30, axis=0)
    part = np.repeat(np.array([0, 1], np.int32), 30)
    refined = refine(csr_matrix((60, 60)), loads, part, 2)
    assert imbalance_of(loads, part, 2).min() > 0.8 and imbalance_of(loads, refined, 2).max() <= 0.05
    assert (part == np.repeat([0, 1], 30)).all(), "what was given stays"


def test_a_vertex_heavier_than_a_part_breaks_its_own_bound_alone() -> None:
    loads = np.ones((101, 1))
    loads[7] = 500
    part = partition(csr_matrix((101, 101)), loads, 4, "numpy")
    others = np.bincount(part[np.arange(101) != 7], minlength=4)
    assert np.delete(others, part[7]).max() <= 1.05 * 600 / 4


def heavy(parts: int, steep: float, seed: int, linked: bool) -> tuple[Any, npt.NDArray[np.float64]]:
    """A graph, and loads of which the first falls as a power does, so that some vertices are heavier than a part."""
    edges, _ = drawn(parts, 100, 5, 3, seed)
    rng, n = np.random.default_rng(seed), edges.shape[0]
    often = rng.permutation(np.arange(1, n + 1.0) ** -steep)
    return edges if linked else csr_matrix((n, n)), np.stack([often, rng.uniform(5, 40, n)], axis=1)


@pytest.mark.parametrize("by", WAYS)
@pytest.mark.parametrize(("parts", "steep"), [(16, 1.4), (20, 1.2), (30, 1.1)])
@pytest.mark.parametrize("linked", [False, True])
def test_vertices_heavier_than_a_part_leave_the_other_load_even(
    by: By, parts: int, steep: float, linked: bool
) -> None:
    """And no part has more of their load than the heaviest and 5 % of a part."""
    edges, loads = heavy(parts, steep, 1, linked)
    heaviest = loads[:, 0].max() / (loads[:, 0].sum() / parts)
    accesses, sizes = imbalance_of(loads, partition(edges, loads, parts, by), parts)
    assert heaviest > 2
    assert accesses <= heaviest - 1 + 0.05 + 1e-9
    assert sizes <= 0.051


@settings(max_examples=20, deadline=None)
@given(
    parts=st.integers(2, 12),
    steep=st.floats(0.5, 1.5),
    seed=st.integers(0, 1000),
    linked=st.booleans(),
)
def test_what_a_heavy_vertex_allows_never_makes_parts_fuller(
    parts: int, steep: float, seed: int, linked: bool
) -> None:
    """Above the bounds that it allows there is never more than with the tight ones alone."""

    def above(part: npt.NDArray[np.int32]) -> float:
        of = np.stack([np.bincount(part, load, parts) for load in relative.T], axis=1)
        return float(np.maximum(of - np.maximum(1, relative.max(0)) - 0.05, 0).sum())

    edges, loads = heavy(parts, steep, seed, linked)
    relative = loads / (loads.sum(0) / parts)
    begun = np.random.default_rng(seed).integers(0, parts, len(loads)).astype(np.int32)
    with mock.patch.object(_State, "allow"):
        tight = above(refine(edges, loads, begun, parts))
    assert above(refine(edges, loads, begun, parts)) <= tight + 1e-9


def test_many_vertices_without_edges_are_dealt_evenly() -> None:
    n, rng = 100_000, np.random.default_rng(0)
    loads = np.stack([rng.zipf(1.6, n).clip(max=500).astype(float), rng.integers(5, 40, n)], axis=1)
    part = partition(csr_matrix((n, n)), loads, 7, "numpy")
    sums = np.stack([loads[part == number].sum(0) for number in range(7)])
    assert (sums.max(0) <= 1.05 * loads.sum(0) / 7).all() and np.bincount(part).sum() == n


def test_one_part_and_none() -> None:
    assert partition(csr_matrix((3, 3)), np.ones((3, 2)), 1).tolist() == [0, 0, 0]
    assert len(partition(csr_matrix((0, 0)), np.ones((0, 2)), 4)) == 0
    assert sorted(partition(csr_matrix((3, 3)), np.ones((3, 2)), 3, "numpy").tolist()) == [0, 1, 2]
    with pytest.raises(ValueError, match="do not fit"):
        partition(csr_matrix((3, 3)), np.ones((4, 2)), 2)
