# SPDX-License-Identifier: Apache-2.0
"""Item vectors from the words of the items' metadata: TF-IDF, and the directions in which items differ most.

The one idea: what two items are called tells how alike they are, where nobody has taken both yet. Each text field is a
block of its own, scaled so that all fields count alike, however long they are:

    M[i, w] = (1 + log(times of w in the field)) * (1 + log((1 + n) / (1 + items with w))),   rows scaled to length 1

w: a word, or two words that follow each other; one that a single item has, or more than MOST of them, is left out. Item
i becomes row i of U S of the best approximation of rank e of all blocks side by side (latent semantic analysis,
Deerwester et al. 1990), scaled to length 1. It reads no user's events, so it can tell nothing of held-out ones.

Letters: n items, e dimensions, w words.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array, hstack
from scipy.sparse.linalg import svds

from jgr.training.item_vectors import MAX_DIMENSIONS, VectorError, unit_rows

Float32 = npt.NDArray[np.float32]

LEAST = 2
"""Words of fewer items are left out."""
MOST = 0.3
"""Words of a larger share of the items are left out."""
MAX_WORDS = 2000
"""So many words of a text are read."""
_WORD = re.compile(r"\w+")
_NEGLIGIBLE = 1e-6


def text_fields(metadata: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of the fields that hold text, or lists of texts, in any item; in order."""
    return sorted({name for fields in metadata for name, value in fields.items() if _texts(value)})


def text_vectors(
    metadata: Sequence[Mapping[str, Any]], *, fields: Sequence[str] = (), dims: int = 256, seed: int = 0
) -> Float32:
    """Vectors of length 1 from the texts of the items' metadata, [n, e] float32; zeros for an item without known words.

    fields: names of metadata's fields; none: all that hold text. dims: e; dimensions beyond the texts' rank are zeros.
    Raises VectorError where there is no such field, or no word is shared.
    """
    if not 1 <= dims <= MAX_DIMENSIONS:
        raise VectorError(f"dims: 1 to {MAX_DIMENSIONS}, not {dims}")
    known = text_fields(metadata)
    unknown = sorted(set(fields) - set(known))
    if unknown:
        raise VectorError(
            f"no item's metadata has a text {unknown[0]!r}; there are: {', '.join(known) or 'none'}"
        )
    blocks = [_tf_idf([_words(item.get(name)) for item in metadata]) for name in fields or known]
    blocks = [block for block in blocks if block.nnz]
    if not blocks:
        raise VectorError("the items' metadata has no words that several items share")
    matrix = csr_array(hstack(blocks))
    vectors = np.zeros((len(metadata), dims), np.float32)
    found = _scaled_left(matrix, dims, np.random.default_rng(seed))
    vectors[:, : found.shape[1]] = found
    length = np.sqrt(np.square(vectors).sum(axis=1, keepdims=True))
    return unit_rows(np.where(length > _NEGLIGIBLE, vectors, 0).astype(np.float32))


def _texts(value: Any) -> list[str]:
    return [
        text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str) and text
    ]


def _words(value: Any) -> list[str]:
    """The words of a field, and each two that follow each other."""
    found: list[str] = []
    for text in _texts(value):
        words = _WORD.findall(text.lower())[:MAX_WORDS]
        found += words
        found += [f"{a} {b}" for a, b in pairwise(words)]
    return found


def _tf_idf(words: Sequence[Sequence[str]]) -> csr_array:
    """[n, w] float32; rows of length 1, or empty."""
    n = len(words)
    counts = [Counter(of) for of in words]
    items_with = Counter(word for of in counts for word in of)
    kept = sorted(word for word, items in items_with.items() if LEAST <= items <= MOST * n)
    column = {word: i for i, word in enumerate(kept)}
    weight = 1 + np.log((1 + n) / (1 + np.array([items_with[word] for word in kept], np.float64)))
    rows, columns, values = [], [], []
    for row, of in enumerate(counts):
        for word, times in of.items():
            if word in column:
                rows.append(row)
                columns.append(column[word])
                values.append((1 + np.log(times)) * weight[column[word]])
    matrix = csr_array((values, (rows, columns)), shape=(n, len(kept)))
    length = np.sqrt(matrix.multiply(matrix).sum(axis=1))
    scale = csr_array((1 / np.where(length > 0, length, 1), (np.arange(n), np.arange(n))), shape=(n, n))
    return csr_array(scale @ matrix).astype(np.float32)


def _scaled_left(matrix: csr_array, dims: int, rng: np.random.Generator) -> Float32:
    """U S of the largest singular values, [n, at most dims], the largest first; each column's sign is set."""
    least = min(matrix.shape)
    if dims < least:
        u, s, _ = svds(
            matrix, dims, v0=rng.standard_normal(least).astype(np.float32), return_singular_vectors="u"
        )
    else:
        u, s, _ = np.linalg.svd(matrix.toarray(), full_matrices=False)
    order = np.argsort(-s, kind="stable")[:dims]
    found = u[:, order] * s[order]
    signs = np.sign(found[np.abs(found).argmax(axis=0), np.arange(found.shape[1])])
    return np.asarray(found * np.where(signs == 0, 1, signs), np.float32)
