# SPDX-License-Identifier: Apache-2.0
"""Kept users that grow (MODEL-12, MODEL-14): what is computed from fewer events gives the scores of the whole."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jgr.cache import entries
from jgr.cache.entries import Entry, Name
from jgr.config import Config, ConfigError, override
from jgr.models import climber, scorers
from jgr.models.hstu import HstuConfig
from jgr.models.sasrec import SasrecConfig
from jgr.models.scorers import Candidates, ScorerConfig, Users
from jgr.models.stu_scorer import HistoryIsWhole
from jgr.serving.api import Answer, RankRequest
from jgr.serving.engine.engine import Engine
from jgr.serving.errors import RequestError
from jgr.serving.scorers.serve import ServedScorer
from jgr.serving.scorers.user_block import UserContent, new_block, user_layout
from jgr.serving.versions.loading import load_any
from tests.serving.scorer_fakes import DAY, HSTU, ITEMS, MONDAY, N_ITEMS, STU, ScorerServer, draw, make_folder
from tests.serving.scorers.test_server import directly

UNTIMED = dataclasses.replace(HSTU, bias="positions")
GROWING_STU = dataclasses.replace(
    STU, stack=dataclasses.replace(STU.stack, contextual=0), slots=(), position_rows=0, time_rows=0
)
CANDIDATES = Candidates(np.arange(N_ITEMS, dtype=np.int32)[None].repeat(3, axis=0), {})  # type: ignore[arg-type]


def draw_users(events: np.ndarray, now: int) -> Users:
    """Three users with so many events each, of the same six."""
    rng = np.random.default_rng(3)
    rows, actions = rng.integers(0, N_ITEMS, (3, 6)), rng.integers(0, 8, (3, 6))
    times = np.sort(rng.integers(0, 5 * DAY, (3, 6)))
    there = np.arange(6) < events[:, None]
    arrays = (np.where(there, x, fill).astype(np.int32) for x, fill in ((rows, -1), (actions, 0), (times, 0)))
    return Users(*arrays, np.full(3, now, np.int32), np.zeros((3, 0), np.int32), np.zeros(3, np.int32))  # type: ignore[arg-type]


@pytest.mark.parametrize("cfg", [HSTU, UNTIMED, GROWING_STU], ids=["hstu-times", "hstu", "stu"])
def test_a_user_that_grew_is_the_user_computed_whole(cfg: ScorerConfig) -> None:
    params, model, growing = draw(cfg), scorers.scorer(cfg), scorers.growing(cfg)
    begin = jax.jit(lambda users: growing.begin(params, cfg, users))
    grow = jax.jit(lambda kept, users: growing.grow(params, cfg, kept, users, 3))

    @jax.jit
    def whole(users: Users) -> jax.Array:
        return model.score(params, cfg, model.read(params, cfg, users), CANDIDATES)

    @jax.jit
    def read(kept: Any, users: Users) -> jax.Array:
        return model.score(params, cfg, growing.state(params, cfg, kept, users), CANDIDATES)

    counts = np.array([0, 2, 4])
    kept = begin(draw_users(counts, 6 * DAY))
    for more in ([0, 0, 0], [3, 0, 1], [1, 3, 1], [2, 1, 0]):  # the last user's window is full
        counts = counts + more
        users = draw_users(counts, 7 * DAY + 60 * int(counts.sum()))
        kept = grow(kept, users)
        scores = read(kept, users)
        np.testing.assert_allclose(scores, whole(users), atol=2e-5)
    assert np.abs(scores - whole(draw_users(counts - [1, 1, 1], 8 * DAY))).max() > 1e-3


@pytest.mark.parametrize(
    ("cfg", "why"),
    [
        (STU, "contextual slots, which see the history both ways; positions that count back"),
        (dataclasses.replace(GROWING_STU, time_rows=8), "times that count back from now"),
        (climber.BASE, "only histories of HSTU and of the STU"),
        (SasrecConfig(n_items=9, max_items=6, hidden=8, layers=1, heads=1, mlp=8, items="v"), "only histories of HSTU"),
    ],
    ids=["slots", "times", "climber", "sasrec"],
)  # fmt: skip
def test_a_ranker_whose_events_depend_on_later_ones_is_refused(cfg: ScorerConfig, why: str) -> None:
    with pytest.raises(HistoryIsWhole, match=why):
        scorers.growing(cfg)


def test_growth_is_refused_at_the_start_where_it_cannot_be(tmp_path: Path) -> None:
    config = make_folder(tmp_path / "stu", STU, "executors.share_user=cache", "executors.growth=2")
    with pytest.raises(ConfigError, match=r"executors\.growth: .*contextual slots"):
        load_any(config)
    with pytest.raises(ConfigError, match="share_user=cache"):
        override(Config(), "executors.growth=2", "executors.share_user=request")


@pytest.mark.parametrize("grows", [True, False])
def test_which_blocks_a_kept_user_serves(grows: bool) -> None:
    needs = scorers.Needs(5, timed=True, actions=2, slots=(3,), scenarios=2)
    layout = user_layout(needs)

    def content(rows: list[int], **given: Any) -> UserContent:
        made, views = new_block(layout)
        views["rows"][: len(rows)] = rows
        views["times"][: len(rows)] = np.arange(len(rows)) + 1
        for name, value in given.items():
            views[name][0] = value
        return UserContent(layout, 0, 4, grows, made.tobytes())

    def serves(known: list[int], other: UserContent) -> bool:
        valid = content(known)
        return entries.serves(Entry(Name("user", "u", ""), len(valid), valid.digest, ()), other)

    assert [len(content(rows)) for rows in ([], [4], [4, 5, 6, 7, 8])] == [0, 1, 4]
    assert len(UserContent(layout, 1, 9, grows, new_block(layout)[0].tobytes())) == 1
    assert serves([4, 5, 6], content([4, 5, 6]))
    for more in ([4, 5, 6, 4], [4, 5, 6, 9]):
        assert serves([4, 5, 6], content(more)) == grows
    assert content([4, 5, 6, 7]).prefix(3) == (content([4, 5, 6]).digest if grows else b"")
    for rows in ([4, 5], [5, 6, 7], [4, 6, 6, 1], []):
        assert not serves([4, 5, 6], content(rows))
    for given in ({"actions": 1}, {"times": 0}, {"context": 1}, {"scenario": 1}, {"now": 1}):
        assert not serves([4, 5, 6], content([4, 5, 6, 7], **given))
        assert not serves([4, 5, 6], content([4, 5, 6], **given))


def run(
    folder: Path,
    cfg: ScorerConfig,
    scenario: Callable[[Engine[ServedScorer]], Awaitable[None]],
    *settings: str,
) -> None:
    config = make_folder(
        folder, cfg, "executors.share_user=cache", "executors.growth=2", "cache.device_mb=0.01", *settings
    )

    async def main() -> None:
        engine = load_any(config)
        assert isinstance(engine.served, ServedScorer)
        await engine.start()
        try:
            await scenario(engine)
        finally:
            await engine.drain(None)
        engine.check()

    asyncio.run(main())


def asked(events: int, user: str = "u", later: int = 0, timed: bool = True) -> RankRequest:
    """The first so many events of a user; each asks for all candidates, some time after the last one."""
    rng = np.random.default_rng(ord(user))
    history: list[str | int] = [ITEMS[row] for row in rng.choice(N_ITEMS, 8, replace=False)][:events]
    times = (MONDAY + np.cumsum(rng.integers(1, DAY, 8)))[:events].tolist()
    when = {"history_times": times, "time": times[-1] + 60 + later} if timed else {}
    return RankRequest(history=history, candidates=list(ITEMS), user_id=user, **when)  # type: ignore[arg-type]


def compare(answer: Answer, cfg: ScorerConfig, request: RankRequest) -> None:
    body = {"history_times": [0] * len(request.history), "time": 0}
    body |= {
        name: getattr(request, name)
        for name in ("history", "history_times", "time")
        if getattr(request, name)
    }
    expected = directly(cfg, body)
    for item in answer.items:
        assert item.score == pytest.approx(expected[ITEMS.index(item.item_id), 0], abs=1e-4)


@pytest.mark.parametrize("cfg", [HSTU, UNTIMED], ids=["times", "positions"])
def test_the_server_computes_what_is_new_and_scores_as_if_all_were(tmp_path: Path, cfg: HstuConfig) -> None:
    async def scenario(engine: Engine[ServedScorer]) -> None:
        async def reused(events: int, later: int = 0) -> tuple[int, int]:
            request = asked(events, later=later, timed=cfg.timed)
            answer = await engine.answer(request)
            compare(answer, cfg, request)
            engine.check()
            return answer.usage.cached_tokens, answer.usage.computed_tokens

        # One event, three more, which is one too many; grown by two; asked again later; fewer than are kept; a window
        # that slides.
        visits = [(1, 0), (4, 0), (6, 0), (6, 9), (3, 0), (5, 0), (6, 0), (7, 0), (2, 0), (3, 0)]
        found = [await reused(*visit) for visit in visits]
        grown = [(0, 1), (0, 4), (4, 2), (6, 0), (3, 0), (5, 0), (6, 0), (0, 6), (0, 2), (2, 1)]
        assert found == grown
        meta = engine.meta
        assert meta is not None and meta.number("user") == 1 and meta.pinned == 0
        assert meta.counts["user_stale"] == 2  # of the window that slid, and of what came before that

    run(tmp_path / "model", cfg, scenario)


def test_users_grow_at_once_in_any_order_and_company_and_some_runs_fail(tmp_path: Path) -> None:
    """Also where there is no room for all users, where a run fails once it has written, and where the pool is lost."""

    async def scenario(engine: Engine[ServedScorer]) -> None:
        rng, failed, cached = np.random.default_rng(0), 0, 0
        executors, pool = engine.served.executors, engine.served.pool
        assert pool is not None
        collect, calls = executors.collect, itertools.count(1)

        def failing(start: Any, pending: Any) -> Any:
            found = collect(start, pending)
            if next(calls) % 41 == 0:
                raise ArithmeticError("failed on purpose")
            return found

        executors.collect = failing  # type: ignore[method-assign]
        for turn in range(16):
            requests = [asked(int(rng.integers(1, 8)), str(rng.choice(list("abc")))) for _ in range(6)]
            answers = await asyncio.gather(*map(engine.answer, requests), return_exceptions=True)
            for answer, request in zip(answers, requests, strict=True):
                if isinstance(answer, BaseException):
                    assert isinstance(answer, RequestError) and answer.type == "internal"
                    failed += 1
                else:
                    compare(answer, HSTU, request)
                    cached += answer.usage.cached_tokens
            if turn == 9:
                pool.lose(pool.epoch, ArithmeticError("lost on purpose"))
            engine.check()
            check_lengths(engine)
        assert engine.meta is not None and engine.meta.counts["user_evicted"] > 0 and engine.meta.pinned == 0
        assert 0 < failed < 48 and cached > 0

    run(
        tmp_path / "model",
        HSTU,
        scenario,
        "executors.streams=4",
        "executors.number=3",
        "executors.sizes=8",
        "executors.history_lengths=2,4",
        "cache.cell_tokens=1",
        "cache.device_mb=0.002",  # two pages, each of eight events
    )


def check_lengths(engine: Engine[ServedScorer]) -> None:
    """No entry has more cells than its user has events, one to a cell here."""
    assert engine.meta is not None
    assert [len(entry.cells) for entry in engine.meta._all("user")] == [
        entry.tokens for entry in engine.meta._all("user")
    ]


def test_kept_users_take_pages_by_their_length_over_http(tmp_path: Path) -> None:
    """Records of 128 bytes, eight in a page of 1 KB; a window is six."""
    config = make_folder(
        tmp_path / "model", HSTU, "executors.share_user=cache", "executors.growth=2", "executors.sizes=8",
        "executors.number=1", "cache.device_mb=0.02", "cache.page_kb=1", "cache.cell_tokens=1",
    )  # fmt: skip
    users = "abcdef"
    with ScorerServer(config) as server:

        def visit(events: int) -> tuple[int, int, float, float]:
            used = [0, 0]
            for user in users:
                given = asked(events, user)
                body = {"history": given.history, "history_times": given.history_times, "time": given.time}
                answer = server.rank(candidates=ITEMS, user_id=user, **body)
                usage = answer["usage"]
                used = [used[0] + usage["cached_tokens"], used[1] + usage["computed_tokens"]]
                expected = directly(HSTU, body)
                for item in answer["items"]:
                    wanted = expected[ITEMS.index(item["item_id"]), 0]
                    assert item["score"] == pytest.approx(wanted, abs=1e-4)
            pages = server.metric('jgr_cache_pages{holder="user"}')
            return used[0], used[1], pages, server.metric('jgr_cache_entries{kind="user"}')

        assert visit(1) == (0, 6, 1, 6)
        assert visit(3) == (6, 12, 3, 6)  # 18 records
        assert visit(5) == (18, 12, 4, 6)  # 30
        assert visit(2) == (12, 0, 4, 6)
        for user in users[1:]:
            assert server.call(f"/v1/users/{user}/cache", method="DELETE") == (200, {"entries": 1})
        assert server.metric('jgr_cache_entries{kind="user"}') == 1
        assert (
            1 <= server.metric('jgr_cache_pages{holder="user"}') <= 3
        )  # five records, written in three visits
