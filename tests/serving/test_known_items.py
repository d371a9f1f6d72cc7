# SPDX-License-Identifier: Apache-2.0
"""Which items a request asks to be ranked: named ones or the whole catalog, with or without the history's."""

from __future__ import annotations

from typing import Any

import pytest

from jgr.serving.api import RankRequest
from jgr.serving.errors import RequestError
from jgr.serving.known_items import known_candidates
from tests.serving.scorer_fakes import CATALOG, ITEMS, N_ITEMS


def rows(limit: int = N_ITEMS, **fields: Any) -> list[int]:
    request = RankRequest(**{"history": ["B003", "gone", "B001", "B003"], **fields})
    return known_candidates(request, CATALOG, limit).tolist()


def test_all_is_the_catalog_in_its_order() -> None:
    assert rows(candidates="all") == rows(candidates=ITEMS) == list(range(N_ITEMS))
    assert rows(candidates="all", top_k=N_ITEMS) == list(range(N_ITEMS))


def test_the_historys_items_are_left_out_where_that_is_asked() -> None:
    assert rows(candidates="all", exclude_history=True) == [0, 2, *range(4, N_ITEMS)]
    assert rows(candidates=["B005", "B003", "B000"], exclude_history=True) == [5, 0]
    # As many may be asked for as are named: the answer is shorter then.
    assert rows(candidates=["B005", "B003", "B000"], exclude_history=True, top_k=3) == [5, 0]


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        (
            {"limit": 59, "candidates": "all"},
            "candidates",
            "60 items, all items of the catalog; the limit is 59",
        ),
        ({"candidates": "all", "top_k": 61}, "top_k", "only 60 candidates"),
        ({"candidates": ["B001", "B003"], "exclude_history": True}, "exclude_history", "every candidate"),
    ],
)
def test_what_cannot_be_ranked_is_refused(fields: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as error:
        rows(**fields)
    assert (error.value.type, error.value.field) == ("invalid_request", field)
