# SPDX-License-Identifier: Apache-2.0
"""Metrics against the golden file (agreed between ranx, pytrec_eval and RecBole) and against a naive loop."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jgr.evaluation.metrics import (
    Hits,
    hr,
    mean_all,
    mean_with_truth,
    ndcg,
    per_query,
    rank_candidates,
    recall,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "metrics" / "metrics.json").read_text())
KEYS: list[str] = GOLDEN["metric_keys"]
NAMES = [f"{metric}@{k}" for metric in ("recall", "hr", "ndcg", "mrr") for k in (1, 3, 10, 10**12)]


def hits_of_lists(ranked: Sequence[Sequence[int]], relevant: Sequence[Collection[int]]) -> Hits:
    """Any number of relevant items a query, any number of ranked ones."""
    table = np.zeros((len(ranked), max(map(len, ranked), default=0)), bool)
    for i, items in enumerate(ranked):
        table[i, : len(items)] = [item in relevant[i] for item in items]
    return Hits(table, np.array([len(set(items)) for items in relevant], np.int64))


def hits_of(case: dict[str, Any]) -> Hits:
    queries = case["queries"]
    return hits_of_lists([q["ranked"] for q in queries], [q["relevant"] for q in queries])


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["name"])
def test_golden_values_per_query_and_on_average(case: dict[str, Any]) -> None:
    hits = hits_of(case)
    found = per_query(hits, KEYS)
    for key in KEYS:
        expected = [query["metrics"][key] for query in case["queries"]]
        np.testing.assert_allclose(found[key], expected, atol=1e-15, rtol=0)
    assert mean_all(hits, KEYS) == pytest.approx(case["mean_all"], abs=1e-14)
    assert mean_with_truth(hits, KEYS) == pytest.approx(case["mean_with_ground_truth"], abs=1e-14)


def test_golden_ties_keep_the_candidates_order() -> None:
    queries = [q for case in GOLDEN["cases"] for q in case["queries"] if "candidates" in q]
    assert len(queries) > 10
    for query in queries:
        order = rank_candidates(query["scores"])
        assert [query["candidates"][i] for i in order][: len(query["ranked"])] == query["ranked"]


def test_the_one_target_form_equals_the_general_form() -> None:
    case = next(case for case in GOLDEN["cases"] if case["name"] == "single_relevant")
    ranked = np.array([q["ranked"] for q in case["queries"]], np.int32)
    targets = np.array([q["relevant"][0] for q in case["queries"]], np.int32)
    found, general = per_query(Hits.of_targets(ranked, targets), KEYS), per_query(hits_of(case), KEYS)
    for key in KEYS:
        assert found[key].tolist() == general[key].tolist()
    short = np.where(np.arange(25) < 4, ranked, -1).astype(np.int32)
    cut = hits_of_lists([row[:4].tolist() for row in ranked], targets[:, None].tolist())
    for key, values in per_query(Hits.of_targets(short, targets), KEYS).items():
        assert values.tolist() == per_query(cut, [key])[key].tolist()


def naive(name: str, ranked: list[int], relevant: set[int]) -> float:
    metric, k = name.split("@")
    top = ranked[: int(k)]
    places = [place for place, item in enumerate(top, 1) if item in relevant]
    if not relevant:
        return 0.0
    ideal = sum(1 / math.log2(place + 1) for place in range(1, min(int(k), len(relevant)) + 1))
    return {
        "recall": len(places) / len(relevant),
        "hr": float(bool(places)),
        "mrr": 1 / places[0] if places else 0.0,
        "ndcg": sum(1 / math.log2(place + 1) for place in places) / ideal,
    }[metric]


ITEMS = st.integers(0, 12)


@given(st.lists(st.tuples(st.lists(ITEMS, unique=True, max_size=12), st.sets(ITEMS)), min_size=1, max_size=6))
def test_metrics_equal_a_naive_loop(queries: list[tuple[list[int], set[int]]]) -> None:
    ranked, relevant = zip(*queries, strict=True)
    for name, values in per_query(hits_of_lists(ranked, relevant), NAMES).items():
        np.testing.assert_allclose(values, [naive(name, *query) for query in queries], atol=1e-15)


def test_no_ranking_at_all_scores_zero() -> None:
    hits = hits_of_lists([[], []], [[1], []])
    assert mean_all(hits, NAMES) == dict.fromkeys(NAMES, 0.0)
    assert mean_with_truth(hits_of_lists([[1], [1]], [[1], []]), ["hr@1"]) == {"hr@1": 1.0}
    nobody = Hits.of_targets(np.full((2, 0), -1, np.int32), np.array([1, 2], np.int32))
    assert recall(nobody, 5).tolist() == hr(nobody, 5).tolist() == ndcg(nobody, 5).tolist() == [0, 0]


def test_wrong_input_is_refused() -> None:
    with pytest.raises(ValueError, match="query 1: an item is ranked twice"):
        Hits.of_targets(np.array([[1, 2], [3, 3]], np.int32), np.array([1, 3], np.int32))
    with pytest.raises(ValueError, match="targets"):
        Hits.of_targets(np.zeros((2, 3), np.int32), np.zeros(3, np.int32))
    with pytest.raises(ValueError, match="query 1: the target is a negative row"):
        Hits.of_targets(np.full((2, 3), -1, np.int32), np.array([1, -1], np.int32))
    with pytest.raises(ValueError, match="NaN"):
        rank_candidates([1.0, math.nan])
    for name in ("auc@10", "hr", "hr@", "hr@0", "hr@x", "hr@-1"):
        with pytest.raises(ValueError, match=f"unknown metric {name!r}"):
            per_query(hits_of_lists([[1]], [[1]]), [name])
