# SPDX-License-Identifier: Apache-2.0
"""Residual k-means, collision policies and the report against naive loops and cases worked out by hand."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from jgr.catalog.catalog import CatalogError, load_catalog, save_catalog
from jgr.training import semantic_ids
from jgr.training.semantic_ids import (
    POLICIES,
    Quantized,
    SemanticIdError,
    format_report,
    id_catalog,
    kmeans,
    nearest,
    nearest_balanced,
    quantize,
    reassign,
    report,
    residual_kmeans,
    resolve_collisions,
    sinkhorn,
)


def gaussian(n: int, e: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, e)).astype(np.float32)


def distances(points: np.ndarray, codebook: np.ndarray) -> np.ndarray:
    return np.square(points[:, None].astype(np.float64) - codebook[None]).sum(axis=2)


# Small integers: every distance is exact in float32, so ties are ties, for the reference as well.
GRIDS = st.tuples(st.integers(1, 12), st.integers(1, 5), st.integers(1, 3)).flatmap(
    lambda s: st.tuples(
        arrays(np.float32, (s[0], s[2]), elements=st.integers(-4, 4)),
        arrays(np.float32, (s[1], s[2]), elements=st.integers(-4, 4)),
    )
)


@given(GRIDS, st.sampled_from([1, 7, 1 << 22]))
def test_nearest_is_the_argmin_whatever_the_block(grid: tuple[np.ndarray, np.ndarray], block: int) -> None:
    points, codebook = grid
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(semantic_ids, "BLOCK", block)
        found = nearest(points, codebook)
    assert found.dtype == np.int32
    assert found.tolist() == distances(points, codebook).argmin(axis=1).tolist()


def one_by_one(points: np.ndarray, codebook: np.ndarray) -> list[int]:
    cost = distances(points, codebook)
    room = [math.ceil(len(points) / len(codebook))] * len(codebook)
    codes = [-1] * len(points)
    for i in np.argsort(cost.min(axis=1), kind="stable"):
        codes[i] = min((k for k in range(len(room)) if room[k]), key=lambda k: cost[i, k])
        room[codes[i]] -= 1
    return codes


@given(GRIDS)
def test_balanced_is_the_greedy_loop_and_keeps_the_capacity(grid: tuple[np.ndarray, np.ndarray]) -> None:
    points, codebook = grid
    found = nearest_balanced(points, codebook)
    assert found.tolist() == one_by_one(points, codebook)
    assert max(Counter(found.tolist()).values()) <= math.ceil(len(points) / len(codebook))


def test_kmeans_ends_where_lloyd_changes_nothing() -> None:
    points = gaussian(200, 3)
    codebook, codes = kmeans(points, 6, np.random.default_rng(1), iterations=100)
    np.testing.assert_array_equal(codes, distances(points, codebook).argmin(axis=1))
    for code in range(6):
        np.testing.assert_allclose(codebook[code], points[codes == code].mean(axis=0), atol=1e-5)


def test_kmeans_finds_separate_clusters() -> None:
    centres = 100 * np.array([[0, 0], [1, 0], [0, 1], [1, 1], [3, 3]], np.float32)
    points = np.repeat(centres, 20, axis=0) + gaussian(100, 2)
    _, codes = kmeans(points, 5, np.random.default_rng(0))
    assert [len(set(codes[i : i + 20].tolist())) for i in range(0, 100, 20)] == [1] * 5
    assert len(set(codes.tolist())) == 5


def test_a_codeword_that_no_point_took_moves_to_the_farthest_points() -> None:
    points = np.array([[0], [1], [10], [11], [50]], np.float32)
    book = np.array([[5], [60], [-100]], np.float32)
    codes = nearest(points, book)
    assert codes.tolist() == [0, 0, 0, 0, 1]
    moved = semantic_ids._means(points, codes, book)
    assert moved.ravel().tolist() == [5.5, 50.0, 0.0]  # 0 and 11 are equally far from 5.5: the first of them


@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 9), st.booleans())
def test_few_distinct_points_are_coded_exactly(distinct: int, copies: int, size: int, balanced: bool) -> None:
    points = np.repeat(np.arange(distinct, dtype=np.float32)[:, None], copies, axis=0)
    found = residual_kmeans(points, (size, 2), seed=3, balanced=balanced)
    assert found.codes.min() >= 0 and (found.codes < [size, 2]).all()
    if size >= distinct and not balanced:
        np.testing.assert_array_equal(found.residual(1), 0)


@settings(max_examples=30)
@given(
    st.integers(1, 60),
    st.lists(st.integers(1, 7), min_size=1, max_size=8),
    st.integers(0, 3),
    st.booleans(),
)
def test_a_point_is_its_codewords_and_what_is_left(
    n: int, sizes: list[int], seed: int, balanced: bool
) -> None:
    points = gaussian(n, 4, seed)
    found = residual_kmeans(points, sizes, seed=seed, balanced=balanced, iterations=4)
    assert found.codes.shape == (n, len(sizes)) and found.codes.dtype == np.int32
    assert [len(book) for book in found.codebooks] == sizes
    words = sum(book[codes] for book, codes in zip(found.codebooks, found.codes.T, strict=True))
    np.testing.assert_allclose(words + found.residual(len(sizes)), points, atol=1e-5)
    for level, size in enumerate(sizes):
        if balanced:
            assert max(Counter(found.codes[:, level].tolist()).values()) <= math.ceil(n / size)
        else:
            best = distances(found.residual(level), found.codebooks[level])
            taken = best[np.arange(n), found.codes[:, level]]
            np.testing.assert_allclose(taken, best.min(axis=1), atol=1e-5)


def test_each_level_lowers_the_error() -> None:
    points = gaussian(500, 8)
    errors = [residual_kmeans(points, (8,) * depth, seed=0).error for depth in (1, 2, 3, 4)]
    assert errors == sorted(errors, reverse=True) and errors[3] < 0.5 * errors[0]
    mean = residual_kmeans(points, (1,), seed=0)
    assert mean.error == pytest.approx(1.0)
    by_hand = np.square(mean.residual(1)).sum() / np.square(points - points.mean(axis=0)).sum()
    assert mean.error == pytest.approx(by_hand)


@pytest.mark.parametrize("balanced", [False, True])
def test_the_seed_decides(balanced: bool) -> None:
    points = gaussian(300, 5)
    first, again, other = (residual_kmeans(points, (9, 7), seed=s, balanced=balanced) for s in (0, 0, 1))
    np.testing.assert_array_equal(first.codes, again.codes)
    assert (first.codes != other.codes).any()


def test_codebooks_code_other_points_by_the_nearest() -> None:
    trained = residual_kmeans(gaussian(200, 4), (8, 8), seed=0)
    np.testing.assert_array_equal(quantize(trained.points, trained.codebooks).codes, trained.codes)
    other = quantize(gaussian(50, 4, 9), trained.codebooks)
    np.testing.assert_array_equal(other.codes[:, 0], distances(other.points, trained.codebooks[0]).argmin(1))


def test_progress_counts_levels() -> None:
    seen: list[tuple[int, int]] = []
    residual_kmeans(
        gaussian(9, 2), (2, 2), seed=0, progress=lambda done, total, _: seen.append((done, total))
    )
    assert seen == [(1, 2), (2, 2)]


@pytest.mark.parametrize("sizes", [(), (2,) * 9, (4, 0), (70_000,)])
def test_impossible_sizes(sizes: tuple[int, ...]) -> None:
    with pytest.raises(SemanticIdError, match="sizes: "):
        residual_kmeans(gaussian(5, 2), sizes, seed=0)


def line(positions: list[float], words: list[float], codes: list[int]) -> Quantized:
    """Points on a line below one prefix, and their codes at the last level."""
    book = np.array(words, np.float32)[:, None]
    points = np.array(positions, np.float32)[:, None]
    pairs = np.array([[0, code] for code in codes], np.int32)
    return Quantized(points, (np.zeros((1, 1), np.float32), book), pairs)


def test_share_leaves_ids_as_they_are() -> None:
    given_codes = line([0, 0.1, 5], [0, 5], [0, 0, 1])
    assert resolve_collisions(given_codes, "share").tolist() == [[0, 0], [0, 0], [0, 1]]


def test_extra_numbers_the_items_of_an_id_in_row_order() -> None:
    given_codes = line([0, 5, 0.1, 5, 0], [0, 5], [0, 1, 0, 1, 0])
    found = resolve_collisions(given_codes, "extra")
    assert found.tolist() == [[0, 0, 0], [0, 1, 0], [0, 0, 1], [0, 1, 1], [0, 0, 2]]
    assert found.dtype == np.int32


def test_item_adds_each_items_own_code() -> None:
    found = resolve_collisions(line([0, 5, 0.1], [0, 5], [0, 1, 0]), "item")
    assert found.tolist() == [[0, 0, 0], [0, 1, 1], [0, 0, 2]]
    assert found.dtype == np.int32


def test_extra_needs_a_free_level() -> None:
    full = residual_kmeans(gaussian(4, 2), (1,) * 8, seed=0)
    with pytest.raises(SemanticIdError, match="more than 8"):
        resolve_collisions(full, "extra")


def test_reassign_moves_who_can_move_at_the_least_cost() -> None:
    # Both stand at code 0 (word 0). The first comes first, being nearer; but its way to word 2 is the shorter.
    crowded = line([0.9, -0.95, 9], [0, 2, 9], [0, 0, 2])
    assert resolve_collisions(crowded, "reassign")[:, 1].tolist() == [1, 0, 2]
    # A code that stays within its share is left alone, even where others are free.
    assert reassign(line([0, 1, 2], [0, 1, 2, 3], [3, 2, 0]))[:, 1].tolist() == [3, 2, 0]


def test_reassign_fills_up_evenly_where_there_are_more_items_than_codes() -> None:
    found = reassign(line([0, 0, 0, 0, 0], [0, 1], [0, 0, 0, 0, 0]))
    assert sorted(Counter(found[:, 1].tolist()).values()) == [2, 3]


def test_reassign_looks_below_each_prefix_alone() -> None:
    codes = np.array([[0, 0], [1, 0], [1, 0]], np.int32)
    books = (np.array([[0], [10]], np.float32), np.array([[0], [1]], np.float32))
    found = reassign(Quantized(np.array([[0], [10], [11]], np.float32), books, codes))
    assert found.tolist() == [[0, 0], [1, 0], [1, 1]]


@settings(max_examples=40)
@given(st.integers(1, 60), st.integers(1, 4), st.integers(1, 9), st.integers(0, 5))
def test_reassign_keeps_prefixes_and_the_bound(n: int, first: int, last: int, seed: int) -> None:
    points = np.round(gaussian(n, 2, seed))  # many items in one point
    before = residual_kmeans(points, (first, last), seed=seed)
    after = reassign(before)
    np.testing.assert_array_equal(after[:, 0], before.codes[:, 0])
    below = Counter(after[:, 0].tolist())
    for (prefix, _), items in Counter(map(tuple, after.tolist())).items():
        assert items <= math.ceil(below[prefix] / last)
    held = Counter(map(tuple, before.codes.tolist()))
    for old, new in zip(before.codes.tolist(), after.tolist(), strict=True):
        if held[tuple(old)] <= math.ceil(below[old[0]] / last):
            assert old == new


def test_reassign_refuses_what_would_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(semantic_ids, "_MAX_PLAN", 3)
    with pytest.raises(SemanticIdError, match="2 items compete for 2 codes"):
        reassign(line([0, 0], [0, 1], [0, 0]))


@given(arrays(np.float64, (4, 4), elements=st.integers(0, 20)))
def test_sinkhorn_keeps_the_marginals(cost: np.ndarray) -> None:
    plan = np.exp(sinkhorn(cost, np.array([1, 2, 1, 3]), epsilon=0.5))
    np.testing.assert_allclose(plan.sum(axis=1), 1, atol=1e-9)
    assert (plan.sum(axis=0) <= np.array([1, 2, 1, 3]) + 1e-2).all()


def test_sinkhorn_finds_the_cheapest_matching() -> None:
    rng = np.random.default_rng(4)
    for _ in range(10):
        cost = rng.random((5, 6))
        best = min(
            itertools.permutations(range(6), 5), key=lambda p: sum(c[k] for c, k in zip(cost, p, strict=True))
        )
        plan = np.exp(sinkhorn(cost, np.ones(6, np.int64), epsilon=0.01))
        spent = (plan * cost).sum()
        assert spent == pytest.approx(sum(c[k] for c, k in zip(cost, best, strict=True)), abs=0.05)


def test_the_report_by_hand() -> None:
    codes = np.array([[0, 0], [0, 0], [0, 0], [1, 2], [1, 2], [3, 1], [3, 2], [3, 3]], np.int32)
    found = report(codes, (4, 4))
    assert found == {
        "items": 8,
        "ids": 5,
        "collision_rate": pytest.approx(3 / 8),
        "shared_items": 5 / 8,
        "max_items_per_id": 3,
        "items_per_id": {"1": 3, "2": 1, "3": 1},
        "levels": [
            {
                "size": 4,
                "used": 3,
                "utilisation": 0.75,
                "entropy_bits": pytest.approx(-(6 / 8) * math.log2(3 / 8) - (2 / 8) * math.log2(2 / 8)),
            },
            {
                "size": 4,
                "used": 4,
                "utilisation": 1.0,
                "entropy_bits": pytest.approx(
                    -2 * (3 / 8) * math.log2(3 / 8) - 2 * (1 / 8) * math.log2(1 / 8)
                ),
            },
        ],
    }
    assert format_report(found).splitlines() == [
        "level    size    used    use %  entropy   (max)",
        "    0       4       3     75.0    1.561   2.000",
        "    1       4       4    100.0    1.811   2.000",
        "items 8, ids 5, collision rate 0.3750",
        "items that share their id 62.5 %, at most 3 to an id",
        "items to an id        1      2      3      4    5-9  10-49    50+",
        "ids                   3      1      1      0      0      0      0",
    ]


def test_the_histogram_puts_each_id_into_its_bin() -> None:
    sizes = [1, 4, 5, 9, 10, 49, 50, 60]
    codes = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)[:, None]
    shown = format_report(report(codes, (len(sizes),))).splitlines()[-1]
    assert shown.split() == ["ids", "1", "0", "0", "1", "2", "2", "2"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_catalog_comes_back_from_its_file(policy: str, tmp_path: object) -> None:
    quantized = residual_kmeans(np.round(gaussian(30, 2)), (3, 12), seed=0)
    codes = resolve_collisions(quantized, policy)
    names = [f"item {i}" for i in range(30)]
    catalog = id_catalog(names, codes, [{"title": name} for name in names])
    path = f"{tmp_path}/catalog.jsonl"
    save_catalog(catalog, path)
    loaded = load_catalog(path)
    assert loaded.version == catalog.version and loaded.item_ids == tuple(names)
    for row, own in enumerate(codes.tolist()):
        named = [loaded.symbols[level][code] for level, code in enumerate(loaded.codes[row])]
        assert named == [f"<{letter}_{code}>" for letter, code in zip("abc", own, strict=False)]


def test_a_catalog_of_too_many_levels() -> None:
    with pytest.raises(CatalogError, match="9 levels"):
        id_catalog(["x"], np.zeros((1, 9), np.int32), [{}])


def test_an_unknown_policy() -> None:
    with pytest.raises(SemanticIdError, match="share, extra, reassign, item, not 'none'"):
        resolve_collisions(line([0], [0], [0]), "none")


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([[0, 0], [0, 1], [1, 0], [1, 1]], ""),
        ([[5]], ""),
        ([[5], [7]], ""),
        ([[3, 3], [3, 3]], "no level tells items apart: all 2 vectors are alike"),
        (
            [[0, 0], [1, 0], [2, 0]],
            "level 1 tells nothing apart .* they give 3 items 3 ids; sizes that fit are 4",
        ),
        (
            [[0, 0], [0, 1], [0, 1]],
            "level 0 tells nothing apart .* they give 3 items 2 ids; sizes that fit are 2",
        ),
        ([[i, 0, 0] for i in range(65)], "levels 1, 2 tell .* 65 items 65 ids; sizes that fit are 8,8,8"),
    ],
)
def test_levels_of_no_use_are_named(rows: list[list[int]], said: str) -> None:
    found = semantic_ids.useless_levels(np.array(rows, np.int32))
    assert re.fullmatch(said, found), found
