# SPDX-License-Identifier: Apache-2.0
"""Scorers with weights for the history's items, over HTTP: scores are those of a loop in NumPy, whether parts compute
the user or find it kept, whether embeddings are resident or paged, and however the candidates are split."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jgr.models import retrievers
from jgr.models.retrievers import items_digest
from jgr.models.sasrec import SasrecConfig
from jgr.models.scorers import ScorerConfig
from jgr.serving.scorers.user_block import part_layout
from tests.models.test_repeats import added_by_hand
from tests.serving.scorer_fakes import HSTU, ITEMS, ScorerServer, draw
from tests.serving.scorers.test_paging import folder_of, settings
from tests.serving.scorers.test_server import asked, by_item, directly
from tests.training.test_trainer import sasrec_by_hand

SASREC = SasrecConfig(len(ITEMS), 6, 16, 2, 2, 32, items_digest(ITEMS), repeats=True)
REPEATING_HSTU = dataclasses.replace(HSTU, repeats=True)
SHARES = {
    "part": ("executors.share_user=part",),
    "request": ("executors.share_user=request",),
    "cache": ("executors.share_user=cache", "cache.device_mb=0.1"),
    "paged": ("embeddings.tables=paged", "cache.device_mb=0.016"),
}


def requests(cfg: ScorerConfig) -> list[dict[str, Any]]:
    """Histories longer and shorter than the window, with items that come again, and all items as candidates."""
    bodies = []
    for seed in range(4):
        body = asked(seed, len(ITEMS), user_id=f"u{seed % 2}")
        history = body["history"]
        history[-1] = history[0]
        if cfg == SASREC:
            del body["history_times"], body["time"]
        bodies += [body, body]  # again, and then the user may be kept
    return bodies


def by_hand(cfg: ScorerConfig, body: dict[str, Any]) -> np.ndarray:
    """[60]: SASRec's scores in NumPy; HSTU's by the model without weights; and what the last six events add."""
    params = draw(cfg)
    history = [ITEMS.index(item) for item in body["history"]][-6:]
    added = added_by_hand(np.asarray(params.repeats), history, len(ITEMS))
    if isinstance(cfg, SasrecConfig):
        return np.asarray(sasrec_by_hand(params, history) + added)
    return np.asarray(directly(HSTU, body)[:, 0] + added)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("cfg", [SASREC, REPEATING_HSTU], ids=["sasrec", "hstu"])
def test_scores_over_http_are_those_of_a_loop(tmp_path: Path, cfg: Any, share: str) -> None:
    folder = folder_of(tmp_path / "model", cfg)
    with ScorerServer(settings(folder, "executors.sizes=8,32", *SHARES[share])) as server:
        compiled = server.metric('jgr_compilations_total{phase="request"}')
        bodies = requests(cfg)
        answers = [server.rank(**body) for body in bodies]
        assert server.metric('jgr_compilations_total{phase="request"}') == compiled
    for body, answer in zip(bodies, answers, strict=True):
        found, wanted = by_item(answer), by_hand(cfg, body)
        np.testing.assert_allclose([found[item] for item in ITEMS], wanted, atol=2e-4)
        if cfg == SASREC:
            rows = np.array([[ITEMS.index(item) for item in body["history"]][-6:]], np.int32)
            rows = np.pad(rows, ((0, 0), (0, 6 - rows.shape[1])), constant_values=-1)
            model = np.asarray(retrievers.scores_after(draw(cfg), rows, cfg=cfg))[0]
            np.testing.assert_allclose([found[item] for item in ITEMS], model, atol=2e-5)
    if share == "cache":
        assert [answer["usage"]["cached_tokens"] > 0 for answer in answers] == [False, True] * 4


def test_a_grown_users_weights_are_those_of_its_new_history(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", REPEATING_HSTU)
    kept = (*SHARES["cache"], "executors.growth=3")
    body = asked(11, len(ITEMS))
    body["history"] = [ITEMS[row] for row in (7, 8, 7)]
    start = body["history_times"][0]
    body |= {"history_times": [start, start + 1, start + 2], "time": start + 9}
    grown = body | {
        "history": [*body["history"], ITEMS[8], ITEMS[3]],
        "history_times": [*body["history_times"], start + 3, start + 5],
    }
    with ScorerServer(settings(folder, *kept)) as server:
        server.rank(**body)
        answer = server.rank(**grown)
    assert answer["usage"]["cached_tokens"] == 3
    found = by_item(answer)
    np.testing.assert_allclose([found[item] for item in ITEMS], by_hand(REPEATING_HSTU, grown), atol=2e-4)


def test_without_weights_a_part_has_no_room_for_ages() -> None:
    plain, aged = (part_layout(None, None, 8, repeats) for repeats in (False, True))
    assert plain.size < aged.size == 2 * plain.size
