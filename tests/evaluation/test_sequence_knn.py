# SPDX-License-Identifier: Apache-2.0
"""Sequence-kNN and the Markov chain against naive loops, whatever the batch sizes."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jgr.data.interactions import Ragged
from jgr.evaluation import sequence_knn
from jgr.evaluation.baselines import SequentialRules
from jgr.evaluation.sequence_knn import SequenceKNN

N = 7
SEQUENCES = st.lists(st.lists(st.integers(0, N - 1), max_size=6), min_size=1, max_size=8)


def by_neighbours(
    train: list[list[int]], history: list[int], neighbours: int, recency: float, spread: float
) -> list[float]:
    """The score of every item, by the formula."""
    weight = {item: math.exp(-ago / recency) for ago, item in reversed(list(enumerate(history[::-1])))}
    similar = []
    for number, sequence in enumerate(train):
        shared = set(sequence) & set(history)
        if shared:
            total = sum(weight[item] for item in shared) / math.sqrt(len(set(sequence)))
            similar.append((-round(total, 12), number))
    scores = [0.0] * N
    for negated, number in sorted(similar)[:neighbours]:
        sequence = train[number]
        newest = max(set(sequence) & set(history), key=lambda item: weight[item])
        anchor = max(at for at, item in enumerate(sequence) if item == newest)
        for at, item in enumerate(sequence):
            if at != anchor:
                scores[item] += -negated * math.exp(-abs(at - anchor) / spread)
    return scores


# All sequences are neighbours: which of two similarities is larger in its last bit decides nothing.
@given(
    SEQUENCES,
    SEQUENCES,
    st.sampled_from([(2.0, 2.0), (1.0, 3.0)]),
    st.booleans(),
    st.sampled_from([1, 9, 999]),
)
def test_sequence_knn_equals_a_naive_loop(
    train: list[list[int]],
    histories: list[list[int]],
    scales: tuple[float, float],
    exclude_seen: bool,
    batch: int,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequence_knn, "_SHARED_PER_BATCH", batch)
        model = SequenceKNN(Ragged.of(train), N, len(train), *scales)
        found = model.top_k(Ragged.of(histories), N, exclude_seen=exclude_seen).tolist()
    counts = Counter(row for sequence in train for row in sequence)
    for history, top in zip(histories, found, strict=True):
        score = by_neighbours(train, history, len(train), *scales)
        allowed = [row for row in range(N) if not (exclude_seen and row in history)]
        kept = [row for row in top if row >= 0]
        assert sorted(kept) == allowed
        assert [score[row] for row in kept] == pytest.approx(
            sorted((score[r] for r in allowed), reverse=True)
        )
        zeros = [row for row in kept if score[row] == 0]
        assert zeros == sorted(zeros, key=lambda row: (-counts[row], row))


def test_only_the_nearest_sequences_count() -> None:
    train = Ragged.of([[0, 1, 5], [0, 1, 6], [1, 2], [3, 4]])
    # The history 0, 1 shares both items with the first two, which are equal: the earlier one is taken.
    one = SequenceKNN(train, 7, neighbours=1).top_k(Ragged.of([[0, 1], [3], []]), 2, exclude_seen=True)
    assert one.tolist() == [[5, 2], [4, 1], [1, 0]]
    two = SequenceKNN(train, 7, neighbours=2).top_k(Ragged.of([[0, 1]]), 3, exclude_seen=True)
    assert two.tolist() == [[5, 6, 2]]


@given(SEQUENCES, SEQUENCES)
def test_rules_of_window_one_are_a_markov_chain(train: list[list[int]], histories: list[list[int]]) -> None:
    pairs = Counter(pair for sequence in train for pair in itertools.pairwise(sequence))
    counts = Counter(row for sequence in train for row in sequence)
    found = SequentialRules(Ragged.of(train), N, window=1).top_k(Ragged.of(histories), N, exclude_seen=False)
    for history, top in zip(histories, found.tolist(), strict=True):
        last = history[-1] if history else -1
        assert top == sorted(range(N), key=lambda row: (-pairs[last, row], -counts[row], row))
