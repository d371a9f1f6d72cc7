# SPDX-License-Identifier: Apache-2.0
"""Item vectors from texts: TF-IDF and its best approximation, against scikit-learn's."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.feature_extraction.text import TfidfVectorizer

from jgr.training.item_vectors import VectorError
from jgr.training.text_vectors import text_fields, text_vectors

WORDS = [f"word{i}" for i in range(40)]
RNG = np.random.default_rng(3)
ITEMS = [
    {
        "title": " ".join(RNG.choice(WORDS[at : at + 12], 6)).title(),
        "tags": [str(tag) for tag in RNG.choice(WORDS[at : at + 12], 3)],
        "price": 3.5,
        "brand": "",
    }
    for at in np.repeat(np.arange(0, 28, 4), 6)
]


def of_sklearn(texts: list[str]) -> np.ndarray:
    """The same weights, with bigrams that do not reach over the end of a text of a list."""
    made = TfidfVectorizer(
        sublinear_tf=True,
        min_df=2,
        max_df=0.3,
        ngram_range=(1, 2),
        token_pattern=r"(?u)\w+",
        stop_words=["|"],
    )
    return made.fit_transform(texts).toarray()


def test_products_of_vectors_are_those_of_the_best_approximation_of_tf_idf() -> None:
    titles = [str(item["title"]) for item in ITEMS]
    weights = of_sklearn(titles)
    for dims in (8, len(ITEMS)):
        u, s, _ = np.linalg.svd(weights, full_matrices=False)
        expected = (u * s)[:, :dims]
        expected /= np.linalg.norm(expected, axis=1, keepdims=True)
        found = text_vectors(ITEMS, fields=["title"], dims=dims)
        assert found.shape == (len(ITEMS), dims)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found @ found.T, expected @ expected.T, atol=1e-4)


def test_fields_count_alike_and_lists_are_texts_of_their_own() -> None:
    assert text_fields(ITEMS) == ["tags", "title"]
    both = text_vectors(ITEMS, dims=len(ITEMS))
    np.testing.assert_array_equal(both, text_vectors(ITEMS, fields=["tags", "title"], dims=len(ITEMS)))
    apart = [text_vectors(ITEMS, fields=[name], dims=len(ITEMS)) for name in ("tags", "title")]
    mean = (apart[0] @ apart[0].T + apart[1] @ apart[1].T) / 2
    np.testing.assert_allclose(both @ both.T, mean, atol=1e-4)
    split = [
        {"a": ["x y", "z w"]},
        {"a": ["x y", "z w"]},
        {"a": "y z"},
        {"a": "y z"},
        *({} for _ in range(10)),
    ]
    found = text_vectors(split, dims=4)
    # y and z are of both, "y z" of the latter alone: a bigram over the end of a text would make it of all.
    assert 0 < found[0] @ found[2] < 0.6
    np.testing.assert_array_equal(found[4:], 0)


def test_what_has_no_words_is_refused_and_named() -> None:
    with pytest.raises(VectorError, match="no item's metadata has a text 'colour'; there are: tags, title"):
        text_vectors(ITEMS, fields=["colour"])
    with pytest.raises(VectorError, match="no words that several items share"):
        text_vectors([{"title": "one"}, {"title": "two"}])
    with pytest.raises(VectorError, match="no words"):
        text_vectors([{"price": 3}, {}])
