# SPDX-License-Identifier: Apache-2.0
"""What the benchmark of placements counts, on a small world."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import rcllm_placement
from benchmarks.rcllm_placement import CANDIDATES, cut_rows, hit_row, planted
from benchmarks.titles import title


def test_planted_requests_find_their_candidates_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rcllm_placement, "WAYS", ("numpy",))
    monkeypatch.setattr(rcllm_placement, "BAR", 4)
    partition = rcllm_placement.homes

    def by_numpy(*arguments: object, by: str) -> object:
        return partition(*arguments, by="numpy")  # type: ignore[arg-type]

    monkeypatch.setattr(rcllm_placement, "homes", by_numpy)
    world, of = planted(4, 5 * CANDIDATES, 400, 50)
    inside = [np.bincount(of[rows]).max() / len(rows) for rows in world.test]
    assert 0.85 < np.mean(inside) < 0.97
    (cuts,) = cut_rows(world, 4, of)
    assert cuts["random_over_cut"] > 3
    hits = hit_row(world, 4)
    assert (
        hits["hit_share_numpy"] == pytest.approx(np.mean(inside), abs=0.05) and hits["hit_share_hash"] < 0.5
    )
    assert hit_row(world, 1)["hit_share_hash"] == 1
    assert all(title({"id": claim.id}) for claim in rcllm_placement.claims([cuts], [hits]))
