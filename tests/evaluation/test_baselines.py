# SPDX-License-Identifier: Apache-2.0
"""Popularity, item-kNN and sequential rules against naive loops, whatever the batch sizes."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jgr.catalog.catalog import load_catalog
from jgr.data.interactions import Ragged, leave_one_out, load_minionerec
from jgr.data.shop import make_shop
from jgr.evaluation import baselines
from jgr.evaluation.baselines import ItemKNN, Popularity, SequentialRules
from jgr.evaluation.metrics import Hits, mean_all

N = 8
SEQUENCES = st.lists(st.lists(st.integers(0, N - 1), max_size=6), min_size=1, max_size=10)
Case = tuple[list[list[int]], list[list[int]], int, bool]
CASES = st.tuples(SEQUENCES, SEQUENCES, st.integers(1, N + 2), st.booleans())


def padded(rows: list[int], k: int) -> list[int]:
    return (rows + [-1] * k)[:k]


@given(CASES)
def test_popularity_equals_counting(case: Case) -> None:
    train, histories, k, exclude_seen = case
    counts = Counter(row for sequence in train for row in sequence)
    order = sorted(range(N), key=lambda row: (-counts[row], row))
    found = Popularity(Ragged.of(train), N).top_k(Ragged.of(histories), k, exclude_seen=exclude_seen)
    assert found.dtype == np.int32
    assert found.tolist() == [
        padded([row for row in order if not (exclude_seen and row in history)], k) for history in histories
    ]


def cosine(train: list[list[int]], i: int, j: int) -> float:
    users_i = {user for user, sequence in enumerate(train) if i in sequence}
    users_j = {user for user, sequence in enumerate(train) if j in sequence}
    if i == j or not users_i & users_j:
        return 0.0
    return len(users_i & users_j) / math.sqrt(len(users_i) * len(users_j))


@given(CASES, st.sampled_from([(1, 1), (20, 3), (1 << 22, 1 << 22)]))
def test_item_knn_equals_a_naive_loop(case: Case, batches: tuple[int, int]) -> None:
    train, histories, k, exclude_seen = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(baselines, "_SCORES_PER_BATCH", batches[0])
        patch.setattr(baselines, "_PAIRS_PER_BATCH", batches[1])
        knn = ItemKNN(Ragged.of(train), N)
        found = knn.top_k(Ragged.of(histories), k, exclude_seen=exclude_seen).tolist()
    for i in range(N):
        neighbours, similarity = knn.similarity(i)
        expected = {j: cosine(train, i, j) for j in range(N) if cosine(train, i, j) > 0}
        assert dict(zip(neighbours.tolist(), similarity.tolist(), strict=True)) == pytest.approx(expected)
    counts = Counter(row for sequence in train for row in sequence)
    for history, top in zip(histories, found, strict=True):
        allowed = [row for row in range(N) if not (exclude_seen and row in history)]
        score = {row: sum(cosine(train, item, row) for item in set(history)) for row in allowed}
        kept = top[: len(allowed)]
        assert len(set(kept)) == len(kept) == min(k, len(allowed)) and set(kept) <= set(allowed)
        assert top[len(kept) :] == [-1] * (k - len(kept))
        # Sums taken in another order may differ in the last bit, so compare the scores, not the rows.
        best = sorted(score.values(), reverse=True)[: len(kept)]
        assert [score[row] for row in kept] == pytest.approx(best)
        zeros = [row for row in kept if score[row] == 0]
        assert zeros == sorted(zeros, key=lambda row: (-counts[row], row))


def test_item_knn_by_hand() -> None:
    knn = ItemKNN(Ragged.of([[0, 1], [0, 1, 2], [0, 3], [3, 3]]), 5)
    # 0 has 3 users, 1 two, 2 one, 3 two; 4 nobody.
    neighbours, similarity = knn.similarity(0)
    assert neighbours.tolist() == [1, 2, 3]
    assert similarity.tolist() == pytest.approx([2 / math.sqrt(6), 1 / math.sqrt(3), 1 / math.sqrt(6)])
    histories = Ragged.of([[0, 0], [2], []])
    assert knn.top_k(histories, 3, exclude_seen=True).tolist() == [[1, 2, 3], [1, 0, 3], [0, 3, 1]]
    assert knn.top_k(histories, 5, exclude_seen=True)[0].tolist() == [1, 2, 3, 4, -1]
    assert knn.top_k(histories, 5, exclude_seen=False)[0].tolist() == [1, 2, 3, 0, 4]


def by_rules(train: list[list[int]], history: list[int], window: int, decay: float) -> list[float]:
    """The score of every item, by the formula."""
    scores = [0.0] * N
    for ago, item in enumerate(reversed(history[-window:]), 1):
        for sequence in train:
            for at, first in enumerate(sequence):
                for distance, then in enumerate(sequence[at + 1 : at + 1 + window], 1):
                    if first == item:
                        scores[then] += ago**-decay * distance**-decay
    return scores


@given(CASES, st.integers(1, 4), st.sampled_from([0.0, 1.0, 2.0]), st.sampled_from([1, 20, 1 << 22]))
def test_sequential_rules_equal_a_naive_loop(case: Case, window: int, decay: float, batch: int) -> None:
    train, histories, k, exclude_seen = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(baselines, "_SCORES_PER_BATCH", batch)
        rules = SequentialRules(Ragged.of(train), N, window, decay)
        found = rules.top_k(Ragged.of(histories), k, exclude_seen=exclude_seen).tolist()
    counts = Counter(row for sequence in train for row in sequence)
    for history, top in zip(histories, found, strict=True):
        score = by_rules(train, history, window, decay)
        allowed = [row for row in range(N) if not (exclude_seen and row in history)]
        kept = top[: len(allowed)]
        assert len(set(kept)) == len(kept) == min(k, len(allowed)) and set(kept) <= set(allowed)
        assert top[len(kept) :] == [-1] * (k - len(kept))
        # Sums taken in another order may differ in the last bit, so compare the scores, not the rows.
        best = sorted((score[row] for row in allowed), reverse=True)[: len(kept)]
        assert [score[row] for row in kept] == pytest.approx(best)
        zeros = [row for row in kept if score[row] == 0]
        assert zeros == sorted(zeros, key=lambda row: (-counts[row], row))


def test_sequential_rules_by_hand() -> None:
    train = Ragged.of([[0, 1, 2], [0, 1], [1, 1], []])
    # After 0: 1 twice at distance 1, 2 at distance 2. After 1: 2 and 1, once each.
    histories = Ragged.of([[0], [0, 1], [2], []])
    found = SequentialRules(train, 4).top_k(histories, 4, exclude_seen=False)
    # 0, 1: 1 has 1 + 2 / 2, 2 has 1 + .5 / 2.
    assert found.tolist() == [[1, 2, 0, 3], [1, 2, 0, 3], [1, 0, 2, 3], [1, 0, 2, 3]]
    near = SequentialRules(train, 4, window=1).top_k(histories, 2, exclude_seen=True)
    assert near.tolist() == [[1, 2], [2, 3], [1, 0], [1, 0]]
    assert SequentialRules(Ragged.of([]), 2).top_k(Ragged.of([[1]]), 2, exclude_seen=False).tolist() == [
        [0, 1]
    ]


def test_the_shop_needs_the_order_of_the_history() -> None:
    shop = make_shop()
    data, n = leave_one_out(shop.sequences), shop.catalog.n_items
    asked = data.test.select(slice(0, 2000))
    rates = {
        model: mean_all(
            Hits.of_targets(
                model(data.sequences, n).top_k(asked.histories, 10, exclude_seen=True), asked.targets
            ),
            ["hr@10"],
        )["hr@10"]
        for model in (Popularity, ItemKNN, SequentialRules)
    }
    assert rates[ItemKNN] < rates[SequentialRules]
    assert 0.03 < rates[Popularity] < 0.08
    best = (shop.oracle_top_k(asked, 10) == asked.targets[:, None]).any(axis=1).mean()
    assert rates[SequentialRules] < best
    assert 2 * rates[Popularity] < rates[ItemKNN] < best / 2


@pytest.mark.data("amazon-industrial-minionerec")
def test_baselines_on_amazon_industrial(dataset: Path) -> None:
    catalog = load_catalog(dataset / "index.json.gz")
    data = load_minionerec(dataset, catalog, counts=(36259, 4532, 4533))
    found = {}
    for model in (Popularity, ItemKNN, SequentialRules):
        fitted = model(data.sequences, catalog.n_items)
        for exclude_seen in (False, True):
            top = fitted.top_k(data.test.histories, 10, exclude_seen=exclude_seen)
            found[model, exclude_seen] = mean_all(Hits.of_targets(top, data.test.targets), ["hr@10"])["hr@10"]
    # Pinned, so that a change of a baseline does not go unseen.
    assert found == pytest.approx(
        {
            (Popularity, False): 0.0538,
            (Popularity, True): 0.0362,
            (ItemKNN, False): 0.1039,
            (ItemKNN, True): 0.1072,
            (SequentialRules, False): 0.1410,
            (SequentialRules, True): 0.1193,
        },
        abs=1e-4,
    )
