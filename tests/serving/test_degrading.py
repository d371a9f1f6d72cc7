# SPDX-License-Identifier: Apache-2.0
"""What is left out of a request that allows it, step by step."""

from __future__ import annotations

import pytest

from jgr.serving.api import RankRequest, RecommendRequest, Request
from jgr.serving.degrading import shrinks, smaller


def steps(request: Request, size: int, sizes: list[int] | None) -> list[int]:
    """The sizes that are tried one after the other."""
    found = []
    while (less := smaller(request, size, sizes)) is not None:
        request = less
        size = len(request.candidates) if isinstance(request, RankRequest) else request.beam_width or 0
        found.append(size)
    return found


def rank(count: int, least: int | None) -> RankRequest:
    return RankRequest(history=["a"], candidates=[str(at) for at in range(count)], min_candidates=least)


@pytest.mark.parametrize(
    ("least", "sizes", "tried"),
    [
        (10, [16, 64, 128], [64, 16, 10]),
        (16, [16, 64, 128], [64, 16]),
        (10, [128], [10]),
        (10, None, [50, 25, 12, 10]),
        (None, None, []),
        (100, None, []),
    ],
)
def test_rankings_are_cut_to_sizes_that_cost_less(
    least: int | None, sizes: list[int] | None, tried: list[int]
) -> None:
    assert steps(rank(100, least), 100, sizes) == tried


def test_the_first_candidates_are_kept_and_no_more_are_asked_for_than_there_are() -> None:
    asked = RankRequest(history=["a"], candidates=["c", "b", "d", "a"], min_candidates=2, top_k=3)
    less = smaller(asked, 4, None)
    assert isinstance(less, RankRequest) and (less.candidates, less.top_k) == (["c", "b"], 2)


def test_a_ranking_of_all_items_is_all_or_nothing() -> None:
    every = RankRequest(history=["a"], candidates="all", min_candidates=2)
    assert not shrinks(every) and smaller(every, 100, [16, 128]) is None
    assert shrinks(rank(100, 2)) and not shrinks(rank(100, None))
    assert shrinks(RecommendRequest(history=["a"], min_beam_width=2))


def test_a_search_has_the_next_smaller_width() -> None:
    asked = RecommendRequest(history=["a"], top_k=20, min_beam_width=4)
    assert steps(asked, 32, [8, 32]) == [8, 4]
    less = smaller(asked, 32, [8, 32])
    assert isinstance(less, RecommendRequest) and less.top_k == 8


@pytest.mark.parametrize("history", [["c", "b"], ["c", 7, "b"]])
def test_candidates_of_the_history_that_are_left_out_count_for_none(history: list[str | int]) -> None:
    asked = RankRequest(
        history=history,
        candidates=["b", "7", "c", "d", "e", "f", "g"],
        exclude_history=True,
        min_candidates=2,
    )
    left = 7 - len(history)
    less = smaller(asked, left, None)
    assert isinstance(less, RankRequest)
    whole = [each for each in asked.candidates if each not in map(str, history)]
    assert less.candidates == whole[: max(2, left // 2)]
