# SPDX-License-Identifier: Apache-2.0
"""Co-occurrence vectors against dense loops and a full eigendecomposition, and every refusal of a .npy file."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jgr.data.interactions import Ragged, leave_one_out
from jgr.training import item_vectors
from jgr.training.item_vectors import (
    UNPLACED_LENGTH,
    VectorError,
    co_occurrence_vectors,
    load_vectors,
    near_pairs,
    unit_rows,
)

N = 7
SEQUENCES = st.lists(st.lists(st.integers(0, N - 1), max_size=7), min_size=1, max_size=8)


def counted(sequences: list[list[int]], window: int) -> Counter[tuple[int, int]]:
    pairs: Counter[tuple[int, int]] = Counter()
    for sequence in sequences:
        for i, left in enumerate(sequence):
            for right in sequence[i + 1 : i + 1 + window]:
                if left != right:
                    pairs[min(left, right), max(left, right)] += 1
    return pairs


def dense_ppmi(sequences: list[list[int]], window: int, shift: float, n: int = N) -> np.ndarray:
    count = np.zeros((n, n))
    for (i, j), times in counted(sequences, window).items():
        count[i, j] = count[j, i] = times
    of, total = count.sum(axis=1), count.sum()
    found = np.zeros((n, n))
    for i, j in zip(*np.nonzero(count), strict=True):
        found[i, j] = max(0.0, math.log(count[i, j] * total / (of[i] * of[j])) - math.log(shift))
    return found


@given(SEQUENCES, st.integers(1, 9), st.sampled_from([1, 3, 1 << 22]))
def test_pairs_equal_a_naive_loop(sequences: list[list[int]], window: int, batch: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(item_vectors, "_PAIRS_PER_BATCH", batch)
        cells, times = near_pairs(Ragged.of(sequences), N, window)
    found = {divmod(cell, N): count for cell, count in zip(cells.tolist(), times.tolist(), strict=True)}
    assert found == counted(sequences, window)


@given(SEQUENCES, st.integers(1, 4), st.sampled_from([0.5, 1.0, 2.0]))
def test_the_matrix(sequences: list[list[int]], window: int, shift: float) -> None:
    matrix = item_vectors._ppmi(*near_pairs(Ragged.of(sequences), N, window), N, shift)
    np.testing.assert_allclose(matrix.toarray(), dense_ppmi(sequences, window, shift), atol=1e-5)


def random_sequences(n: int, users: int) -> list[list[int]]:
    """Users who mostly stay in one of five groups of items."""
    rng = np.random.default_rng(0)
    size = n // 5
    return [
        (rng.integers(5) * size + rng.integers(0, size, 12)).tolist() + rng.integers(0, n, 2).tolist()
        for _ in range(users)
    ]


@pytest.mark.parametrize("n", [60, 200, item_vectors.FEW + 100])
def test_the_vectors_are_the_largest_eigenvectors(n: int) -> None:
    sequences = random_sequences(n, 10 * n)
    found = co_occurrence_vectors(Ragged.of(sequences), n, dims=5, window=3)
    values, vectors = np.linalg.eigh(dense_ppmi(sequences, 3, 1.0, n))
    largest = np.argsort(-np.abs(values))[:5]
    expected = vectors[:, largest] * np.sqrt(np.abs(values[largest]))
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    assert found.placed.all() and found.vectors.dtype == np.float32
    # Eigenvectors have no sign, so compare what does not depend on it: all inner products.
    np.testing.assert_allclose(found.vectors @ found.vectors.T, expected @ expected.T, atol=1e-3)


def test_items_of_one_group_are_alike() -> None:
    found = co_occurrence_vectors(Ragged.of(random_sequences(50, 400)), 50, dims=8)
    group = np.arange(50) // 10
    cosine = found.vectors @ found.vectors.T
    same = group[:, None] == group
    assert cosine[same].mean() > 0.8 > 0.3 > cosine[~same].mean()


def test_an_item_without_company_gets_a_short_vector_of_its_own() -> None:
    found = co_occurrence_vectors(Ragged.of([[0, 1, 2], [1, 2, 0], [3], [4, 4]]), 6, dims=4)
    assert found.placed.tolist() == [True, True, True, False, False, False]
    lengths = np.linalg.norm(found.vectors, axis=1)
    np.testing.assert_allclose(lengths, [1, 1, 1] + [UNPLACED_LENGTH] * 3, atol=1e-6)
    assert len(np.unique(found.vectors[3:], axis=0)) == 3


@pytest.mark.parametrize("n", [3, item_vectors.FEW + 1])
def test_nobody_has_company(n: int) -> None:
    found = co_occurrence_vectors(Ragged.of([[0], [1], [2, 2]]), n, dims=2)
    assert found.vectors.shape == (n, 2) and not found.placed.any()
    np.testing.assert_allclose(np.linalg.norm(found.vectors, axis=1), UNPLACED_LENGTH, atol=1e-6)
    assert len(np.unique(found.vectors, axis=0)) == n


def test_more_dimensions_than_items_are_zeros() -> None:
    found = co_occurrence_vectors(Ragged.of([[0, 1, 2], [0, 1], [2, 3]]), 4, dims=10)
    assert found.vectors.shape == (4, 10)
    assert not found.vectors[:, 4:].any()


def test_held_out_items_leave_no_trace() -> None:
    one, other = [[0, 1, 2, 3, 4], [2, 1, 0, 5, 6]], [[0, 1, 2, 6, 3], [2, 1, 0, 4, 5]]
    first, second = (co_occurrence_vectors(leave_one_out(s).sequences, 7, dims=3) for s in (one, other))
    np.testing.assert_array_equal(first.vectors, second.vectors)


def test_the_seed_decides() -> None:
    sequences = Ragged.of(random_sequences(100, 50))
    first, again = (co_occurrence_vectors(sequences, 101, dims=4, seed=1).vectors for _ in range(2))
    np.testing.assert_array_equal(first, again)
    other = co_occurrence_vectors(sequences, 101, dims=4, seed=2).vectors
    assert (first[100] != other[100]).any()


@pytest.mark.parametrize("wrong", [{"dims": 0}, {"window": 0}, {"shift": 0.0}, {"dims": 20_000}])
def test_impossible_settings(wrong: dict[str, Any]) -> None:
    with pytest.raises(VectorError, match="dims"):
        co_occurrence_vectors(Ragged.of([[0, 1]]), 2, **wrong)


def test_unit_rows() -> None:
    rows = np.array([[3, 4], [0, 0], [1e30, 0]], np.float32)
    np.testing.assert_allclose(unit_rows(rows), [[0.6, 0.8], [0, 0], [1, 0]], rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ">f4"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_users_file_is_read(tmp_path: Path, dtype: Any, order: Any) -> None:
    values = np.arange(12).reshape(4, 3)
    np.save(tmp_path / "v.npy", np.array(values, dtype, order=order))
    found = load_vectors(tmp_path / "v.npy", 4)
    assert found.dtype == np.float32 and isinstance(found, np.ndarray)
    np.testing.assert_array_equal(found, values)


GOOD = np.ones((4, 3), np.float32)
WITH_NAN = np.where(np.arange(12).reshape(4, 3) == 7, np.nan, GOOD)


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.ones((3, 3)), r"\[4 items, dimensions\], found \[3, 3\]"),
        (np.ones(4), r"found \[4\]"),
        (np.ones((4, 3, 1)), r"found \[4, 3, 1\]"),
        (np.ones((4, 0)), "1 to 16384 dimensions, found 0"),
        (np.ones((4, 20_000), np.float16), "1 to 16384 dimensions, found 20000"),
        (np.ones((4, 3), np.int64), "float16, float32 or float64, found int64"),
        (np.ones((4, 3), np.complex64), "found complex64"),
        (WITH_NAN, r"row 2 holds NaN or a value beyond 1e.15 .1 such rows"),
        (np.where(np.isnan(WITH_NAN), -np.inf, 1), "row 2 holds"),
        (np.full((4, 3), 1e16), r"row 0 holds NaN or a value beyond 1e.15 .4 such rows"),
        (np.full((4, 3), 1e300), r"row 0 holds NaN or a value beyond 1e.15 .4 such rows"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, array: np.ndarray, words: str) -> None:
    np.save(tmp_path / "v.npy", array)
    with pytest.raises(VectorError, match=words):
        load_vectors(tmp_path / "v.npy", 4)


def saved(path: Path) -> bytes:
    np.save(path / "good.npy", GOOD)
    return (path / "good.npy").read_bytes()


@pytest.mark.parametrize("kind", ["objects", "text", "empty", "short", "folder", "missing", "archive"])
def test_what_is_no_plain_array_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "v.npy"
    if kind == "objects":
        np.save(path, np.array([[{}, 1.0, 2.0]] * 4, object))
    elif kind == "folder":
        path.mkdir()
    elif kind == "archive":
        with path.open("wb") as stream:
            np.savez(stream, vectors=GOOD)
    elif kind != "missing":
        content = {"text": b"1 2 3\n", "empty": b"", "short": saved(tmp_path)[:-4]}[kind]
        path.write_bytes(content)
    with pytest.raises(VectorError, match=r"v\.npy: "):
        load_vectors(path, 4)


def test_a_damaged_header_is_refused_or_read(tmp_path: Path) -> None:
    good, path, refused = saved(tmp_path), tmp_path / "v.npy", 0
    for at in range(10, good.index(b"\n")):
        for byte in (0, ord("("), ord("'"), ord("x")):
            path.write_bytes(good[:at] + bytes([byte]) + good[at + 1 :])
            try:
                load_vectors(path, 4)
            except VectorError:
                refused += 1
    assert refused > 100


def test_a_huge_file_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_vectors, "MAX_BYTES", 47)
    saved(tmp_path)
    with pytest.raises(VectorError, match="takes more than"):
        load_vectors(tmp_path / "good.npy", 4)
