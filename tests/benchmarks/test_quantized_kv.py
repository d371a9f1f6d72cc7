# SPDX-License-Identifier: Apache-2.0
"""What is compared with what, and the trace's replay: a user who comes again reads all but what is new."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import quantized_kv as bench
from benchmarks.titles import title
from jgr.cache.meta import CacheMeta
from jgr.cache.pages import Pages, Room


def test_claims_are_ratios_over_float32_of_the_same_run() -> None:
    rows: list[bench.Row] = [
        {
            "quality": kind,
            "first_overlap@10": 1.0,
            "overlap@10": overlap,
            "ndcg_ratio": [ndcg, ndcg - 0.01, ndcg + 0.01],
            "token_bytes": size,
        }
        for kind, overlap, ndcg, size in (
            ("float32", 1.0, 1.0, 128),
            ("int8", 0.97, 1.0, 32),
            ("fp8", 0.8, 0.9, 64),
        )
    ]
    for kind, ms in (
        ("float32", [10.0, 20.0, 30.0]),
        ("int8", [9.0, 18.0, 27.0]),
        ("fp8", [12.0, 24.0, 36.0]),
    ):
        rows.append({"model": kind, "cached_tokens": 129, "all_ms": ms})
    rows += [{"trace": "float32", "reused": 0.25}, {"trace": "int8", "reused": 0.5}]
    found = {claim.id: claim for claim in bench.claims(rows)}
    assert len(found) == 8 + 2 + 1
    assert not found["overlap@10-of-kept-fp8-with-float32"].holds
    ndcg = found["ndcg@10-of-kept-int8-over-float32"]
    assert (ndcg.value, ndcg.interval, ndcg.holds) == (1.0, (0.99, 1.01), True)
    assert found["bytes-of-kept-int8-over-float32"].value == 0.25
    assert not found["bytes-of-kept-fp8-over-float32"].holds
    assert found["hit-time-of-kept-int8-over-float32-129-tokens"].value == 0.9
    assert found["hit-time-of-kept-fp8-over-float32-129-tokens"].interval == (1.2, 1.2)
    assert found["reused-tokens-of-kept-int8-over-float32-kuairand"].value == 2
    titles = [title(claim.to_json()) for claim in found.values()]
    assert None not in titles and len(set(titles)) == len(titles)


def test_a_ratio_of_means_is_paired_by_query() -> None:
    other = np.random.default_rng(0).random(50)
    assert bench.ratio(0.5 * other, other) == [0.5, 0.5, 0.5]


@pytest.mark.parametrize(("pages", "reused"), [(20, 0 + 0 + 3 + 3 + 6 + 9), (3, 0 + 0 + 0 + 0 + 6 + 6)])
def test_a_replay_reuses_what_the_pool_still_holds(pages: int, reused: int) -> None:
    """Two tokens a page: three pages hold one user's first six tokens."""
    users, videos = np.array([1, 2, 1, 2, 2, 2], np.int32), np.arange(6, dtype=np.int32)
    room = Room(2, step=2)
    meta = CacheMeta(Pages(pages, 2), {"user": room, "item": room})
    meta.set_limit("item", 0)
    found, computed = bench.replay(meta, users, videos, np.arange(6.0))
    assert found == reused and found + computed == 3 * (1 + 1 + 2 + 2 + 3 + 4) + 6
