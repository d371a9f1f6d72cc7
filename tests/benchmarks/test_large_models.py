# SPDX-License-Identifier: Apache-2.0
"""Large models served: the catalogs hold each other, wrong answers are found, and ratios are those of one round."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import harness
from benchmarks import large_models as bench
from benchmarks import large_models_world as world
from benchmarks.large_models_world import Asked, Server, Taken, WrongAnswer
from benchmarks.titles import title
from jgr.catalog.catalog import load_catalog
from jgr.catalog.item_filters import catalog_segments
from jgr.ops import native


def test_the_small_catalog_is_the_beginning_of_the_large_one(tmp_path: Path) -> None:
    codes = world.draw_codes(500, 16)
    assert len(np.unique(codes, axis=0)) == 500 and codes.min() >= 0 and codes.max() < 16
    found = []
    for items in (45, 500):
        world.save(tmp_path / f"{items}.catalog", codes[:items], 3, 16, 100)
        catalog = load_catalog(tmp_path / f"{items}.catalog")
        tokens = [np.array(level)[catalog.codes[:, at]] for at, level in enumerate(catalog.symbols)]
        assert np.array_equal(np.stack(tokens, axis=1), codes[:items] + 100 + 16 * np.arange(3))
        (segment,) = catalog_segments(catalog, "segments").items()
        assert segment[0] == world.SEGMENT and segment[1].tolist() == list(range(0, items, 10))
        found.append(list(catalog.item_ids))
    assert found[1] == [f"{row:03}" for row in range(500)] and found[0] == found[1][:45]


def test_a_wrong_answer_is_found() -> None:
    good = [("010", -1.0), ("020", -1.0), ("000", -2.0)]
    asked = Asked(24, 16, 3, "segment")
    asked.check(good, 30)
    Asked(24, 16, 3, "exclude", frozenset({7})).check(good, 30)
    wrong: list[tuple[Asked, list[tuple[str, float]], str]] = [
        (asked, good[:2], "2 items"),
        (asked, [good[0], good[0], good[2]], "2 of them different"),
        (asked, good[::-1], "do not descend"),
        (asked, [*good[:2], ("000", float("nan"))], "do not descend"),
        (asked, [*good[:2], ("021", -2.0)], r"\[21\]"),
        (asked, [*good[:2], ("030", -2.0)], r"\[30\]"),
        (Asked(24, 16, 3, "exclude", frozenset({20})), good, r"\[20\]"),
    ]
    for request, found, words in wrong:
        with pytest.raises(WrongAnswer, match=words):
            request.check(found, 30)


def test_a_server_is_measured_from_outside() -> None:
    """One without a model, whose items are numbered and whose process is as real."""
    with Server(["--null"], 10_000, 1) as server:
        asked = Asked(6, 16, 3)
        assert 0 < server.ask(asked, [1, 2]) < 1e3 * server.since_start_s
        assert server.growth(asked, [[1], [2], [3]]) >= 0
        assert 20 << 20 < server.warm.pss <= server.warm.rss <= server.peak < 1 << 30
        assert server.kernels in ("xla", native.describe()) and server.parts() == {}


def test_variants_of_a_round_ask_for_the_same_history() -> None:
    asked: list[tuple[str, int]] = []

    def run(name: str) -> Any:
        return lambda history: asked.append((name, history)) or float(history)

    turns = bench._in_turns({"a": run("a"), "b": run("b")}, [7, 8, 9])  # type: ignore[list-item]
    for _ in range(2):
        assert turns["a"]() == turns["b"]()
    assert asked == [("a", 7), ("b", 7), ("a", 8), ("b", 8)]


def test_the_interval_of_a_median() -> None:
    assert harness.interval_of_median(np.full(15, 1.5)) == (1.5, 1.5)
    low, high = harness.interval_of_median(np.arange(1.0, 100.0))
    assert 38 < low < 46 and 54 < high < 62


def test_claims_are_judged_by_their_intervals_and_have_titles() -> None:
    point = {"model": "qwen3-0.6b", "prompt_tokens": 512, "beam_width": 32}
    near, far = ({"median": 1.05, "interval": [1.0, high]} for high in (1.09, 1.2))
    big = {**point, "items": 10_000_000}
    rows: list[dict[str, Any]] = [
        {"model": "qwen3-0.6b", "start": "cold", "first_answer_s": 130.0},
        {"model": "qwen3-0.6b", "start": "warm", "first_answer_s": 20.0},
        {
            "model": "qwen3-0.6b",
            "unexplained": 1,
            "unexplained_share_of_weights_and_catalog": 0.2,
            "peak_rss": 4 << 30,
        },
        *(
            {**point, "in_flight": n, "growth_share_of_weights_and_catalog": 0.01 * n, "growth_bytes": n}
            for n in (1, 8)
        ),
        {"model": "qwen3-0.6b", "score_difference_from_rank": 1e-5},
        {**point, "items": 12_000, "filter": "segment", "over_no_filter": far},
        {**big, "filter": "none", "over_small_catalog": near},
        {**big, "filter": "segment", "over_small_catalog": far, "over_no_filter": far},
        {**big, "filter": "exclude", "over_no_filter": near},
        {**point, "left_out": "about 900 s were needed, 100 s were left"},
    ]
    found = {claim.id: claim for claim in bench.claims(rows)}
    end = "qwen3-0.6b-512-tokens-32-beams"
    assert {id: (claim.value, claim.holds) for id, claim in found.items()} == {
        "first-answer-large-model-cold-qwen3-0.6b": (130.0, False),
        "first-answer-large-model-warm-qwen3-0.6b": (20.0, True),
        "unexplained-memory-share-qwen3-0.6b": (0.2, False),
        "peak-memory-qwen3-0.6b": (4.0, True),
        "memory-growth-share-8-in-flight-qwen3-0.6b": (0.08, True),
        "large-model-score-difference-from-rank-qwen3-0.6b": (1e-5, True),
        f"large-catalog-over-small-{end}": (1.05, True),
        f"filter-segment-over-none-{end}": (1.05, False),
        f"filter-exclude-over-none-{end}": (1.05, True),
        "large-model-points-left-out": (1, False),
    }
    titles = [title(claim.to_json()) for claim in found.values()]
    assert all(words and 25 <= len(words) <= 150 for words in titles) and len(set(titles)) == len(titles)
    assert "Qwen3-0.6B" in (title(found[f"filter-exclude-over-none-{end}"].to_json()) or "")


def test_memory_is_told_by_the_kernel() -> None:
    found = world.taken(os.getpid())
    assert isinstance(found, Taken) and 0 < found.pss <= found.rss
    assert abs(found.rss - world._resident(os.getpid())) < 64 << 20
