# SPDX-License-Identifier: Apache-2.0
"""Users kept by scorers that read times, over HTTP: who asks again later is the same user, and is scored for then.

The scores that answers are compared with are the models' own, of `read` and `score` called for all items at once.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jgr.config import ConfigError
from jgr.models import scorers
from jgr.models.climber import ClimberConfig
from jgr.models.retrievers import items_digest
from jgr.models.sasrec import SasrecConfig
from jgr.models.scorers import ScorerConfig
from jgr.serving.scorers.loading import load_scorer_engine
from jgr.serving.scorers.user_block import known_by, new_block, user_layout
from tests.serving.scorer_fakes import DAY, HSTU, ITEMS, MONDAY, STU, ScorerServer, make_folder
from tests.serving.scorers.test_server import directly

UNDATED_STU = dataclasses.replace(STU, time_rows=0)
CLIMBER = ClimberConfig(
    n_items=len(ITEMS), max_items=6, blocks=2, layers=2, hidden=8, heads=2, mlp=8, tasks=("click", "like"),
    items=items_digest(ITEMS), experts=2, actions=3,
)  # fmt: skip
SASREC = SasrecConfig(
    n_items=len(ITEMS), max_items=6, hidden=8, layers=1, heads=2, mlp=8, items=items_digest(ITEMS)
)
LATER = (0, 1, 60, 3 * DAY)
ONE_SIZE = ("executors.sizes=8",)


def body(cfg: ScorerConfig, events: int = 5, **given: Any) -> dict[str, Any]:
    rng = np.random.default_rng(events)
    asked: dict[str, Any] = {
        "history": [ITEMS[row] for row in range(7, 7 + events)],
        "history_times": (MONDAY + np.arange(events) * 7_000).tolist(),
        "time": MONDAY + DAY,
        "candidates": ITEMS[20:40],
        "user_id": "u",
    }
    if cfg != HSTU:
        asked["history_actions"] = rng.integers(0, 8, events).tolist()
    return asked | given


def compare(answer: Any, cfg: ScorerConfig, asked: dict[str, Any]) -> None:
    expected = directly(cfg, asked)
    for item in answer["items"]:
        scores = list(item["scores"].values()) if "scores" in item else [item["score"]]
        np.testing.assert_allclose(scores, expected[ITEMS.index(item["item_id"])], atol=1e-4)


@pytest.mark.parametrize("cfg", [HSTU, UNDATED_STU, CLIMBER], ids=["hstu", "stu", "climber"])
def test_who_asks_again_later_is_the_same_user_and_is_scored_for_then(
    tmp_path: Path, cfg: ScorerConfig
) -> None:
    config = make_folder(
        tmp_path / "model",
        cfg,
        "executors.share_user=cache",
        "cache.device_mb=0.1",
        "executors.number=1",
        "executors.history_lengths=2",
        *ONE_SIZE,
    )
    with ScorerServer(config) as server:
        bodies = [body(cfg, time=MONDAY + DAY + later) for later in LATER]
        before = server.metric('jgr_compilations_total{phase="request"}')
        answers = [server.rank(**asked) for asked in bodies]
        short = [body(cfg, 2, user_id="short", time=MONDAY + DAY * days) for days in (1, 2)]
        quick = [server.rank(**asked) for asked in short]
        assert server.metric('jgr_compilations_total{phase="request"}') == before
        assert [answer["usage"]["computed_tokens"] > 0 for answer in quick] == [True, False]
        for asked, answer in zip([*bodies, *short], [*answers, *quick], strict=True):
            compare(answer, cfg, asked)
        prompt = answers[0]["usage"]["prompt_tokens"]
        assert [answer["usage"]["cached_tokens"] for answer in answers] == [0, prompt, prompt, prompt]
        assert [answer["usage"]["computed_tokens"] for answer in answers] == [prompt, 0, 0, 0]
        scores = [{item["item_id"]: item["score"] for item in answer["items"]} for answer in answers]
        assert scores[0] != scores[-1]  # when one asks does matter
        nameless = body(cfg, user_id=None)  # known by what it is, and not by when it asks
        assert server.rank(**nameless)["usage"]["cached_tokens"] == 0
        assert server.rank(**nameless | {"time": nameless["time"] + 1})["usage"]["cached_tokens"] == prompt
        for other in (
            body(cfg, 4),
            body(cfg, history=ITEMS[8:13]),
            body(cfg, history_times=[MONDAY + at * 7_001 for at in range(5)]),
        ):
            answer = server.rank(**other)
            assert answer["usage"]["cached_tokens"] == 0
            compare(answer, cfg, other)


def test_users_kept_in_8_bits_are_scored_nearly_as_they_are(tmp_path: Path) -> None:
    """Who is not kept yet is scored exactly; SASRec, which keeps one vector of a user, is refused."""
    kept = ("executors.share_user=cache", "cache.device_mb=0.1", "executors.number=1", "cache.quantize=int8")
    with ScorerServer(make_folder(tmp_path / "model", HSTU, *kept, *ONE_SIZE)) as server:
        asked = body(HSTU)
        cold, warm = (server.rank(**asked) for _ in range(2))
        assert (cold["usage"]["cached_tokens"], warm["usage"]["computed_tokens"]) == (0, 0)
        compare(cold, HSTU, asked)
        expected = directly(HSTU, asked)
        off = [abs(item["score"] - expected[ITEMS.index(item["item_id"])][0]) for item in warm["items"]]
        assert 1e-6 < max(off) < 0.05 * np.abs(expected).max()
    with pytest.raises(ConfigError, match=r"cache\.quantize: this model keeps one state of a user"):
        load_scorer_engine(make_folder(tmp_path / "sasrec", SASREC, *kept, *ONE_SIZE))


def test_where_every_event_depends_on_now_the_log_says_so_and_only_the_same_second_is_a_hit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_folder(
        tmp_path / "model", STU, "executors.share_user=cache", "cache.device_mb=0.1", *ONE_SIZE
    )
    with ScorerServer(config) as server:
        for time, cached in ((0, 0), (0, 7), (1, 0)):
            asked = body(STU, time=MONDAY + DAY + time)
            answer = server.rank(**asked)
            assert answer["usage"]["cached_tokens"] == cached
            compare(answer, STU, asked)
    assert "every event of this model depends on how long before the request it was" in caplog.text


def test_the_key_has_what_the_kept_part_depends_on() -> None:
    needs = scorers.Needs(4, timed=True, actions=2, slots=(3,), scenarios=2)
    layout = user_layout(needs)
    block, views = new_block(layout)
    key = known_by(layout, needs, block)
    for name, view in views.items():
        view[0] += 1
        changed = known_by(layout, needs, block)
        assert (changed == key).all() == (name == "now"), name
        dated = known_by(layout, dataclasses.replace(needs, dated=True), block)
        assert (dated == block).all()
        view[0] -= 1
    assert views["now"][0] == 0
