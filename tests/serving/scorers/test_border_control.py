# SPDX-License-Identifier: Apache-2.0
"""What a memory controller is told of an epoch, and that the border goes where it says (HLEM-3, HLEM-9)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import pytest

from jgr.cache.border import Border
from jgr.config import MemoryConfig, UserError
from jgr.serving.policies.memory_signals import Signals
from jgr.serving.scorers.border_control import BorderControl, HotUsers
from jgr.serving.versions.loading import load_any
from tests.serving.scorer_fakes import HSTU, ScorerServer
from tests.serving.scorers.test_paging import answers, asked, folder_of, settings

MS = 10**6


class To:
    """A controller that goes where it is told, and remembers what it was told."""

    def __init__(self, *splits: float) -> None:
        self.splits, self.told, self.held = list(splits), list[Signals](), list[float]()
        self.learnt = 0

    def decide(self, signals: Signals | None) -> float:
        assert signals is not None
        self.told.append(signals)
        return self.splits.pop(0)

    def learn(self) -> None:
        self.learnt += 1

    def moved(self, split: float) -> None:
        self.held.append(split)


class FakeBorder:
    least, most, total, wanted = 20, 90, 100, 50

    def set_limit(self, pages: int) -> int:
        assert self.least <= pages <= self.most
        self.wanted = pages
        return 0


def control(of: To, border: FakeBorder) -> tuple[BorderControl, list[int], dict[str, int]]:
    """One with epochs of 1 s and a limit of 30 ms, its clock, and the counts of its rows."""
    now, rows = [0], {"hits": 5, "misses": 5, "past": 0}
    config = MemoryConfig(epoch_s=1.0, limit_ms=30.0)
    made = BorderControl(of, cast(Border, border), config, lambda: rows, lambda: now[0])
    return made, now, rows


def ask(
    made: BorderControl, now: list[int], at_ms: int, user: str, took_ms: int, events: int, cached: bool
) -> None:
    now[0] = at_ms * MS
    made.answered(user, (at_ms - took_ms) * MS, events, cached)
    if made._learning is not None:
        made._learning.join()


def test_an_epoch_is_told_as_it_was_and_the_border_follows() -> None:
    of, border = To(0.6, 0.99), FakeBorder()
    made, now, rows = control(of, border)
    ask(made, now, 100, "a", 10, 4, False)
    ask(made, now, 300, "b", 50, 8, True)
    assert not of.told
    rows |= {"hits": 14, "misses": 6}
    ask(made, now, 1000, "a", 20, 6, True)
    (first,) = of.told
    assert (first.hot_share, first.user_hits, first.row_hits, first.mean_events) == (0.0, 2 / 3, 0.9, 6.0)
    assert (first.late, first.requests) == (1 / 3, 3) and first.p99_ms == pytest.approx(20 + 0.98 * 30)
    assert (border.wanted, of.held, of.learnt) == (60, [], 1)
    ask(made, now, 2100, "a", 20, 6, True)
    assert of.told[1].requests == 1 and of.told[1].row_hits == 1.0, (
        "rows that nobody asked for were not missed"
    )
    assert (border.wanted, of.held) == (90, [0.9]), "held back, and told so"


def test_an_epoch_without_requests_has_no_signals() -> None:
    made, _, _ = control(To(), FakeBorder())
    assert made.signals().requests == 0 and math.isnan(made.signals().p99_ms)


def test_hot_users_are_the_twentieth_part_that_asked_most_in_the_last_hour() -> None:
    users = HotUsers()
    for number in range(40):
        assert not users.asked(f"u{number}")
    assert not users.asked("u7") and not users.asked("u7") and not users.asked("u9")
    users.choose(1)
    assert [users.asked(f"u{number}") for number in (7, 9, 11)] == [True, True, False]
    half = 1800 * 10**9
    users.choose(half + 2)
    assert users.asked("u7"), "of the half hour before"
    for number in range(20):
        users.asked(f"v{number}")
    for _ in range(3):
        users.asked("v3")
    users.choose(2 * half + 4)
    assert users.asked("v3") and not users.asked("u7"), "one of 21, and u7 asked once in the last half hour"


@pytest.mark.parametrize("controller", ["pid", "full"])
def test_a_server_moves_its_border_and_its_scores_stay(tmp_path: Path, controller: str) -> None:
    folder = folder_of(tmp_path / "m", HSTU)
    kept = ("executors.share_user=cache", "executors.growth=2", "cache.device_mb=0.06")
    bodies = [asked(HSTU, seed) for seed in range(30)]
    resident, _ = answers(settings(folder, *kept), bodies)
    memory = (
        f"memory.controller={controller}",
        "memory.epoch_s=0.001",
        "memory.limit_ms=0.001",
        "memory.least=0.3",
    )
    with ScorerServer(settings(folder, *kept, "embeddings.tables=paged", *memory)) as server:
        found = [server.rank(**each)["items"] for each in bodies]
        moves = server.metric('jgr_border_moves_total{of="moves"}')
        held: Any = {name: server.metric(f'jgr_border_pages{{of="{name}"}}') for name in ("wanted", "total")}
    assert moves > 1, "one is the start's"
    assert 0.3 * held["total"] - 1 <= held["wanted"] <= 0.9 * held["total"] + 1
    for one, other in zip(found, resident, strict=True):
        assert [item["item_id"] for item in one] == [item["item_id"] for item in other]
        assert [item["score"] for item in one] == pytest.approx([item["score"] for item in other], abs=1e-5)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("memory.controller=pid",), r"memory.controller \(pid\).* needs embeddings.tables=paged"),
        (
            (
                "embeddings.tables=paged",
                "executors.share_user=cache",
                "memory.controller=ppo",
                "memory.file={}",
            ),
            "not a controller's file",
        ),
        (
            (
                "embeddings.tables=paged",
                "executors.share_user=cache",
                "memory.controller=pid",
                "memory.most=0.99",
            ),
            r"memory.most \(0.99\): it leaves kept users",
        ),
    ],
)
def test_a_controller_that_cannot_be_is_refused_at_start(
    tmp_path: Path, more: tuple[str, ...], message: str
) -> None:
    folder = folder_of(tmp_path / "m", HSTU)
    (tmp_path / "none.npz").write_bytes(b"none")
    given = [each.format(tmp_path / "none.npz") for each in more]
    with pytest.raises(UserError, match=message):
        load_any(settings(folder, "cache.device_mb=0.06", *given))
