# SPDX-License-Identifier: Apache-2.0
"""Item vectors: read from a file, or computed from which items occur near each other.

The one idea of the computed vectors: items that occur near the same items in training sequences are alike. The
matrix of shifted positive pointwise mutual information

    M[i, j] = max(0, log(c_ij * sum(c) / (c_i * c_j)) - log(shift)),    c_ij: how often i and j are near

is symmetric and sparse; its best approximation of rank e is found by Lanczos's method, and item i becomes row i of
U sqrt|L|, scaled to length 1. Only training sequences are read: with the test targets' neighbours the vectors would
leak the targets into the ids.

Letters: n items, e dimensions, p pairs.
"""

from __future__ import annotations

import tokenize
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from jgr.config import UserError
from jgr.data.interactions import Ragged

if TYPE_CHECKING:
    from scipy.sparse import csr_array

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

MAX_DIMENSIONS = 16_384
MAX_VALUE = 1e15  # its square, and sums of squares, still fit float32
MAX_BYTES = 1 << 34
UNPLACED_LENGTH = 0.3
_NEGLIGIBLE = 1e-3
_PAIRS_PER_BATCH = 1 << 22
FEW = 512
"""Up to so many items, all eigenvalues are found; for more, Lanczos's method finds the largest ones."""


class VectorError(UserError):
    """Item vectors that cannot be used; the message names the file, and the row or the shape."""


def load_vectors(path: str | Path, n_items: int) -> Float32:
    """Read a `.npy` of [n_items, e] floats, row i for item i of the dataset, as float32.

    The file may hold float16, float32 or float64; 1 <= e <= 16,384; every value must be finite in float32. Raises
    VectorError otherwise.
    """
    path = Path(path)
    try:
        # Memory-mapped, so that shape and size are checked before the data is read; numpy refuses pickles.
        mapped = np.load(path, mmap_mode="r")
    except OSError as cause:
        raise VectorError(f"{path}: cannot be read: {cause.strerror or cause}") from None
    except (
        ValueError,
        EOFError,
        SyntaxError,
        tokenize.TokenError,
    ) as cause:  # of its header, which numpy parses
        raise VectorError(f"{path}: not a .npy file of plain numbers: {cause}") from None
    if not isinstance(mapped, np.ndarray):
        mapped.close()
        raise VectorError(f"{path}: an .npz archive; save the one array with numpy.save")
    if mapped.dtype.kind != "f" or mapped.dtype.itemsize > 8:
        raise VectorError(f"{path}: vectors must be float16, float32 or float64, found {mapped.dtype}")
    if mapped.ndim != 2 or len(mapped) != n_items:
        raise VectorError(f"{path}: expected shape [{n_items} items, dimensions], found {list(mapped.shape)}")
    if not 1 <= mapped.shape[1] <= MAX_DIMENSIONS:
        raise VectorError(f"{path}: vectors have 1 to {MAX_DIMENSIONS} dimensions, found {mapped.shape[1]}")
    if mapped.size * 4 > MAX_BYTES:
        raise VectorError(f"{path}: {list(mapped.shape)} takes more than {MAX_BYTES >> 30} GiB in float32")
    with np.errstate(over="ignore"):
        vectors = np.array(mapped, np.float32)
    unusable = ~(np.abs(vectors) <= MAX_VALUE).all(axis=1)
    if unusable.any():
        row = int(np.argmax(unusable))
        raise VectorError(
            f"{path}: row {row} holds NaN or a value beyond {MAX_VALUE:g} ({int(unusable.sum())} such rows)"
        )
    return vectors


def read_vectors(paths: str, n_items: int) -> Float32:
    """The vectors of several .npy files side by side, [n, e]. paths: separated by commas. Raises VectorError."""
    return np.concatenate([load_vectors(path.strip(), n_items) for path in paths.split(",")], axis=1)


def unit_rows(vectors: Float32) -> Float32:
    """Each row scaled to length 1; zero rows stay zero."""
    length = np.sqrt(np.square(vectors, dtype=np.float64).sum(axis=1, keepdims=True))
    return (vectors / np.where(length > 0, length, 1)).astype(np.float32)


class CoOccurrence(NamedTuple):
    """vectors: [n, e] float32. placed: [n] bool, whether the training sequences determine the item's vector."""

    vectors: Float32
    placed: Bool


def co_occurrence_vectors(
    sequences: Ragged, n_items: int, *, dims: int = 64, window: int = 5, shift: float = 1.0, seed: int = 0
) -> CoOccurrence:
    """Vectors of length 1 from training sequences of rows.

    dims: e, at least 1; dimensions beyond the matrix's rank are zeros. window: two items are near if they are at most
    this many steps apart in one sequence; an item is not near itself. shift: a larger one keeps only stronger ties.

    An item that is near no other item (it is not in training, or always alone), or only near items that the e largest
    dimensions do not describe, cannot be placed. It gets seeded noise of length UNPLACED_LENGTH around zero: near
    other such items, away from all others, but not all in one point.
    """
    if dims < 1 or window < 1 or not shift > 0:
        raise VectorError(
            f"dims and window are at least 1, shift above 0; found {dims}, {window} and {shift}"
        )
    if dims > MAX_DIMENSIONS:
        raise VectorError(f"dims: at most {MAX_DIMENSIONS}, not {dims}")
    matrix = _ppmi(*near_pairs(sequences, n_items, window), n_items, shift)
    rng = np.random.default_rng(seed)
    vectors = _low_rank(matrix, dims, rng)
    length = np.sqrt(np.square(vectors).sum(axis=1))
    # A vector shorter than this is rounding, which must not be scaled up to length 1.
    placed = length > _NEGLIGIBLE * length.max(initial=0)
    noise = UNPLACED_LENGTH * unit_rows(rng.standard_normal((n_items, dims)).astype(np.float32))
    return CoOccurrence(np.where(placed[:, None], unit_rows(vectors), noise), placed)


def near_pairs(sequences: Ragged, n_items: int, window: int) -> tuple[Int64, Int64]:
    """Pairs of different items that are near, as cells i * n + j with i < j, [p], and how often each occurs, [p]."""
    rows, owner = sequences.flatten()
    rows = rows.astype(np.int64)
    cells, times = np.zeros(0, np.int64), np.zeros(0, np.int64)
    for apart in range(1, min(window, max(len(rows) - 1, 0)) + 1):
        for at in range(0, len(rows) - apart, _PAIRS_PER_BATCH):
            a = slice(at, min(at + _PAIRS_PER_BATCH, len(rows) - apart))
            b = slice(a.start + apart, a.stop + apart)
            left, right = rows[a], rows[b]
            kept = (owner[a] == owner[b]) & (left != right)
            pairs = (np.minimum(left, right) * n_items + np.maximum(left, right))[kept]
            new, found = np.unique(pairs, return_counts=True)
            cells, inverse = np.unique(np.concatenate([cells, new]), return_inverse=True)
            times = np.bincount(inverse, np.concatenate([times, found]), minlength=len(cells)).astype(
                np.int64
            )
    return cells, times


def _ppmi(cells: Int64, times: Int64, n_items: int, shift: float) -> csr_array:
    """The symmetric shifted positive PMI of pairs i < j, both triangles, [n, n] float32."""
    left, right = np.divmod(cells, n_items)
    count = np.bincount(left, times, n_items) + np.bincount(right, times, n_items)
    with np.errstate(divide="ignore"):
        log = np.log(count)
    value = np.log(times * count.sum()) - log[left] - log[right] - np.log(shift)
    left, right, value = left[value > 0], right[value > 0], value[value > 0].astype(np.float32)
    from scipy.sparse import csr_array  # slow to import, and trainings only read vectors

    upper = csr_array((value, (left, right)), shape=(n_items, n_items))
    return upper + upper.T


def _low_rank(matrix: csr_array, dims: int, rng: np.random.Generator) -> Float32:
    """U sqrt|L| of the `dims` largest eigenvalues L by magnitude, [n, dims]; zeros beyond rank n."""
    n = matrix.shape[0]
    found = np.zeros((n, dims), np.float32)
    if not matrix.nnz:  # Lanczos's method finds nothing there, and fails
        return found
    if n > FEW and dims < n - 1:
        from scipy.sparse.linalg import eigsh

        values, turned = eigsh(matrix, dims, which="LM", v0=rng.standard_normal(n).astype(np.float32))
    else:
        values, turned = np.linalg.eigh(matrix.toarray())
    values[np.abs(values) < 1e-5 * np.abs(values).max(initial=0)] = 0.0
    largest = np.argsort(-np.abs(values), kind="stable")[:dims]
    found[:, : len(largest)] = turned[:, largest] * np.sqrt(np.abs(values[largest]))
    return found
