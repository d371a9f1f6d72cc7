# SPDX-License-Identifier: Apache-2.0
"""The comparison table: rows from any rankings, intervals and paired differences, as text."""

from __future__ import annotations

import numpy as np
import pytest

from jgr.data.interactions import Examples, Ragged
from jgr.evaluation import bootstrap
from jgr.evaluation.metrics import Hits, mean_all, per_query
from jgr.evaluation.report import compare, format_comparison, format_sweep, format_table, metric_names

N = 40


def examples() -> Examples:
    targets = (np.arange(N) % 7).astype(np.int32)
    return Examples(Ragged.of([[0]] * N), targets, np.zeros(N, np.int32))


def ranking(seed: int, places: int = 5) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(7)[:places] for _ in range(N)]).astype(np.int32)


def test_metrics_of_every_k() -> None:
    assert metric_names([1, 20]) == (
        "recall@1", "hr@1", "ndcg@1", "mrr@1", "recall@20", "hr@20", "ndcg@20", "mrr@20",
    )  # fmt: skip


def test_rows_are_means_over_all_examples() -> None:
    rankings = {"model": ranking(0), "given by the caller": ranking(1, places=3)}
    found = compare(rankings, examples(), [1, 5])
    for name, ranked in rankings.items():
        want = mean_all(Hits.of_targets(ranked, examples().targets), metric_names([1, 5]))
        assert found.rows[name] == pytest.approx(want, abs=1e-15)
        assert found.rows[name]["recall@5"] == found.rows[name]["hr@5"]  # one target each
    assert (found.intervals, found.differences) == ({}, {})


def test_intervals_and_differences_come_from_the_same_resamples() -> None:
    rankings = {"a": ranking(0), "model": ranking(1), "b": ranking(0)}
    found = compare(rankings, examples(), [5], model="model", resamples=100, seed=3)
    assert list(found.rows) == list(found.intervals) == ["a", "model", "b"]
    assert list(found.differences) == ["a", "b"]
    for metric, of in found.differences["a"].items():
        # A product of matrices may round each of its columns in another order, as its processor has it.
        same = found.differences["b"][metric]
        assert (same.mean, same.low, same.high) == pytest.approx((of.mean, of.low, of.high), abs=1e-12)
    for metric in metric_names([5]):
        a, model = (
            per_query(Hits.of_targets(rankings[name], examples().targets), [metric])[metric]
            for name in ("a", "model")
        )
        means = bootstrap.resampled_means(np.stack([a, model, model - a], axis=1), 100, 3)
        low, high = bootstrap.interval(means)
        assert found.intervals["a"][metric] == pytest.approx((low[0], high[0]), abs=1e-12)
        assert found.intervals["model"][metric] == pytest.approx((low[1], high[1]), abs=1e-12)
        of = found.differences["a"][metric]
        want = (model.mean() - a.mean(), low[2], high[2])
        assert (of.mean, of.low, of.high) == pytest.approx(want, abs=1e-12)
    assert compare(rankings, examples(), [5], resamples=100).differences == {}


def test_an_invalid_item_keeps_its_place() -> None:
    ranked = np.array([[-1, -1, 4]], np.int32)
    one = Examples(Ragged.of([[0]]), np.array([4], np.int32), np.zeros(1, np.int32))
    row = compare({"model": ranked}, one, [2, 3]).rows["model"]
    assert (row["hr@2"], row["hr@3"], row["mrr@3"], row["ndcg@3"]) == (0, 1, 1 / 3, 0.5)


def test_tables() -> None:
    rows = {"popularity": {"hr@5": 0.25}, "m": {"hr@5": 1.0, "ndcg@5": 0.123449}}
    assert format_table(rows, ("hr@5", "ndcg@5")) == (
        "              hr@5  ndcg@5\n"
        "popularity  0.2500\n"
        "m           1.0000  0.1234"
    )  # fmt: skip
    found = compare({"x": ranking(0), "m": ranking(0)}, examples(), [1, 5], model="m", resamples=20)
    blocks = format_comparison(found, [1, 5], "m").split("\n\n")
    assert [block.split()[0] for block in blocks] == ["recall@1", "recall@5"]
    header, x, m, difference = blocks[1].splitlines()
    assert header.split() == list(metric_names([5]))
    low, high = found.intervals["m"]["hr@5"]
    assert f"{found.rows['m']['hr@5']:.4f} [{low:.4f}, {high:.4f}]" in m
    assert x.split()[1:] == m.split()[1:]
    assert difference.startswith("m - x ") and difference.count("+0.0000 [+0.0000, +0.0000]") == 4
    assert "[" not in format_comparison(compare({"m": ranking(0)}, examples(), [5]), [5])
    # In 80 characters a block takes two of four such columns; where not even one fits, each has a block of its own.
    narrow = format_comparison(found, [1, 5], "m", width=80).split("\n\n")
    assert max(len(line) for block in narrow for line in block.splitlines()) <= 80
    assert [block.splitlines()[0].split() for block in narrow] == [
        [f"{kind}@{k}" for kind in kinds] for k in (1, 5) for kinds in (("recall", "hr"), ("ndcg", "mrr"))
    ]
    for at in range(len(header.split())):
        assert [line.split("  ")[0] for line in narrow[2 + at // 2].splitlines()] == ["", "x", "m", "m - x"]
    assert len(format_comparison(found, [5], "m", width=1).split("\n\n")) == 4
    assert format_comparison(found, [5], "m", width=1000) == blocks[1]


def test_the_curve_as_text() -> None:
    point = {
        "value": "8",
        "metrics": {"hr@5": 0.5, "ndcg@5": 0.25},
        "intervals": {"hr@5": (0.4, 0.6), "ndcg@5": (0.2, 0.3)},
        "latency_ms": {"p50": 1.234, "p99": 9.0},
        "requests_per_s": 100.0,
    }
    header, line = format_sweep("beam.width", [point], 5).splitlines()
    assert header.split() == ["beam.width", "p50", "ms", "p99", "ms", "requests/s", "hr@5", "ndcg@5"]
    cells = ["8", "1.23", "9.00", "100.0", "0.5000", "[0.4000,", "0.6000]", "0.2500", "[0.2000,", "0.3000]"]
    assert line.split() == cells
