# SPDX-License-Identifier: Apache-2.0
"""What a memory controller is told of an epoch, and that the border goes where it says (HLEM-3, HLEM-9)."""

from __future__ import annotations

import asyncio
import math
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest

from jgr.cache.border import Border
from jgr.cache.memory import Memory
from jgr.cache.pages import Pages
from jgr.catalog.catalog import save_catalog
from jgr.config import MemoryConfig, UserError
from jgr.models import scorers
from jgr.serving.engine.engine import Engine
from jgr.serving.engine.metrics import Metrics
from jgr.serving.engine.ticket import ClientGone
from jgr.serving.errors import RequestError
from jgr.serving.policies.jobs import Rejected
from jgr.serving.policies.memory_control import Controller, Pid
from jgr.serving.policies.memory_signals import Limits, Signals
from jgr.serving.prefill import Prefill
from jgr.serving.scorers.border_control import BorderControl, HotUsers
from jgr.serving.scorers.serve import ServedScorer
from jgr.serving.versions.deployment import Deployment
from jgr.serving.versions.loading import load_any
from tests.serving.scorer_fakes import CATALOG, HSTU, ITEMS, ScorerServer, draw, fake_engine
from tests.serving.scorers.test_paging import answers, asked, folder_of, settings
from tests.serving.scorers.test_serve import request

MS = 10**6


class To:
    """A controller that goes where it is told, and remembers what it was told."""

    def __init__(self, *splits: float) -> None:
        self.splits, self.told, self.held = list(splits), list[Signals | None](), list[float]()
        self.learnt = 0

    def decide(self, signals: Signals | None) -> float:
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


def control(of: Controller, border: FakeBorder) -> tuple[BorderControl, list[int], dict[str, int]]:
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
    learnt(made)


def lose(made: BorderControl, now: list[int], at_ms: int, user: str | None) -> None:
    now[0] = at_ms * MS
    made.lost(user)
    learnt(made)


def learnt(made: BorderControl) -> None:
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
    assert first is not None
    assert (first.hot_share, first.user_hits, first.row_hits, first.mean_events) == (0.0, 2 / 3, 0.9, 6.0)
    assert (first.late, first.requests) == (1 / 3, 3) and first.p99_ms == pytest.approx(20 + 0.98 * 30)
    assert (border.wanted, of.held, of.learnt) == (60, [], 1)
    ask(made, now, 2100, "a", 20, 6, True)
    second = of.told[1]
    assert second is not None and second.requests == 1 and math.isnan(second.row_hits), (
        "of rows that nobody asked for nothing is known"
    )
    assert (border.wanted, of.held) == (90, [0.9]), "held back, and told so"


def test_an_epoch_without_requests_has_no_signals() -> None:
    made, _, _ = control(To(), FakeBorder())
    found = made.signals()
    assert found is not None and found.requests == 0 and math.isnan(found.p99_ms)


def test_requests_that_were_lost_count_as_late() -> None:
    made, now, rows = control(of := To(0.5), FakeBorder())
    made._users._hot = frozenset("b")
    for at_ms in (100, 200, 300):
        ask(made, now, at_ms, "a", 10, 4, at_ms == 100)
    rows |= {"hits": 8, "misses": 6}
    lose(made, now, 1000, "b")
    (told,) = of.told
    assert told is not None and told.whole
    assert (told.requests, told.late, told.hot_share) == (4, 0.25, 0.25)
    assert (told.user_hits, told.mean_events, told.row_hits) == (1 / 3, 4.0, 0.75), "of those with an answer"
    assert told.p99_ms == pytest.approx(10 + 0.97 * (4 * 30 - 10)), "a lost one is four limits late"


def test_an_epoch_whose_requests_were_all_lost_has_no_signals_and_leads_to_the_safe_split() -> None:
    of, border = Pid(Limits(safe=0.4), 0.5), FakeBorder()
    made, now, _ = control(of, border)
    lose(made, now, 100, "a")
    assert made.signals() is None and border.wanted == 50
    for at_ms, wanted in ((1000, 46), (2000, 42), (3000, 40), (4000, 40)):
        lose(made, now, at_ms, None)
        assert border.wanted == wanted


def test_an_epoch_without_look_ups_leads_to_the_safe_split() -> None:
    made, now, _ = control(Pid(Limits(safe=0.6), 0.5), border := FakeBorder())
    ask(made, now, 1000, "a", 10, 4, False)
    assert border.wanted == 54, "users are missed, but of rows nothing is known"


def told_by(engine: Engine[ServedScorer]) -> list[Any]:
    """Who was lost, as the engine's control is told."""
    found: list[Any] = []
    engine.served.control = Mock(lost=found.append)
    return found


def test_an_engine_tells_of_requests_that_fail_expire_and_are_refused() -> None:
    async def scenario() -> None:
        engine, executors = fake_engine("batching.max_queue=3", "batching.order=edf")
        await engine.start()
        lost = told_by(engine)
        executors.fail(ArithmeticError("a dead shard"))
        with pytest.raises(RequestError, match="the model failed"):
            await engine.answer(request(user_id="failed"))
        assert lost == ["failed"]
        executors.hold()
        running = [engine.submit(request()) for _ in range(3)]  # as many as there are streams
        await asyncio.sleep(0)
        for _ in running:
            executors.wait_entered()
        waiting = [engine.submit(request(user_id="expired", deadline_ms=0.001))]
        waiting += [engine.submit(request(user_id="gone")) for _ in range(3)]
        with pytest.raises(RequestError, match="too many"):
            engine.submit(request(user_id="full"))
        with pytest.raises(RequestError, match="deadline"):
            await waiting[0].answer
        engine.served.lost(Prefill(user_id="hint", history=[*ITEMS[:3]]))
        for ticket in waiting[1:]:
            engine.cancel(ticket)
            with pytest.raises(ClientGone):
                await ticket.answer
        executors.release()
        for ticket in running:
            await ticket.answer
        assert lost == ["failed", "full", "expired"], "nobody waited for the others"
        assert await engine.drain(30.0)
        assert engine.join(30.0)

    asyncio.run(scenario())


def test_an_engine_tells_of_requests_that_are_refused_as_late() -> None:
    async def scenario() -> None:
        engine, _ = fake_engine()
        await engine.start()
        lost = told_by(engine)

        async def refused(user: str, ago_ms: int) -> str:
            with pytest.raises(RequestError) as found:
                asked_for = request(user_id=user, deadline_ms=5_000.0)
                engine.submit(asked_for, arrival_ns=engine.clock() - ago_ms * MS)
            return found.value.type

        assert await refused("before it was translated", 10_000) == "overloaded"
        engine._policy.submit = lambda job, now_ns: Rejected("too_late", now_ns)  # type: ignore[method-assign]
        assert await refused("by the policy", 0) == "overloaded"
        engine._policy.submit = lambda job, now_ns: Rejected("too_large")  # type: ignore[method-assign]
        assert await refused("of no fault of ours", 0) == "invalid_request"
        with pytest.raises(RequestError, match="deadline"):
            for _ in range(1000):  # more than one turn begins
                await engine._take_until(request(user_id="in its line"), engine.clock() - 1)
        assert lost == ["before it was translated", "by the policy", "in its line"]
        assert await engine.drain(30.0)
        assert engine.join(30.0)

    asyncio.run(scenario())


KEPT = ("executors.share_user=cache", "executors.growth=2", "cache.device_mb=0.06", "embeddings.tables=paged")


def test_another_catalog_and_the_same_weights_leave_the_border_and_its_control_as_they_are(
    tmp_path: Path,
) -> None:
    config = settings(folder_of(tmp_path / "m", HSTU), *KEPT, "memory.controller=pid", "memory.least=0.3")
    memory = Memory.of(config)
    first: Any = load_any(config, memory=memory)
    first.served.starting()
    control, border = first.served.control, first.served.paging.border
    control._controller.moved(0.7)
    border.set_limit(42)
    for second in (first.rebuild.engine(CATALOG), load_any(config, memory=memory)):
        served: Any = second.served
        served.starting()
        assert served.control is control and served.paging.border is border
        assert (border.wanted, border.rows.owned, control._controller.split) == (42, 42, 0.7)
        served.close(True)
    control._counts = lambda: {"hits": 1, "misses": 1}  # as many as users are missed: the border stays
    control._begun_ns -= 10**12
    control.answered("a", control._clock(), 1, False)
    control.answered("b", control._clock(), 1, False)
    learnt(control)
    assert abs(border.wanted - 42) <= 0.04 * border.total + 1
    first.served.close(True)
    assert memory.pages.free == memory.pages.count and border.control is None


class Threads(Pages):
    """Remembers who gave pages out and took them back."""

    def __init__(self, *given: int) -> None:
        super().__init__(*given)
        self.by = Counter[str]()

    def _count(self) -> None:
        self.by[threading.current_thread().name] += 1

    def take(self, name: str, cells: int) -> tuple[int, ...] | None:
        self._count()
        return super().take(name, cells)

    def take_pages(self, name: str, count: int) -> list[int]:
        self._count()
        return super().take_pages(name, count)

    def give_pages(self, name: str, pages: list[int]) -> None:
        if pages:
            self._count()
        super().give_pages(name, pages)

    def give_back(self, name: str, cells: tuple[int, ...]) -> None:
        self._count()
        super().give_back(name, cells)


def test_a_reload_takes_and_gives_pages_on_the_event_loop_alone(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    config = settings(folder_of(folder, HSTU), *KEPT, "memory.split=0.4")
    memory = Memory.of(config)
    pages = Threads(memory.pages.count, memory.pages.page_bytes)
    memory.__dict__["pages_of"] = (pages,)

    async def changed(deployment: Deployment, *, well: bool) -> None:
        deployment.reload()
        await deployment.settled()
        assert deployment.changes["model"].state == ("done" if well else "failed")

    async def scenario() -> None:
        def load(metrics: Metrics) -> Any:
            assert threading.current_thread().name == "jgr-load"
            return load_any(config, metrics=metrics, memory=memory)

        def broken(metrics: Metrics) -> Any:
            load(metrics).served.close(True)
            raise UserError("it is of no use")

        first = load_any(config, memory=memory)
        deployment = Deployment(first, config.catalog, load)
        await deployment.start(lambda done, total, label: None)
        await first.answer(request(user_id="a"))
        before = dict(pages.by)
        beside = partial(save_catalog, CATALOG)
        scorers.save(folder, HSTU, draw(HSTU, 1), lambda to: beside(to / "catalog.jsonl"), "float32")
        deployment._load = broken
        await changed(deployment, well=False)
        assert dict(pages.by) == before, "what a load that fails has is nothing"
        deployment._load = load
        await changed(deployment, well=True)
        second: Any = deployment.engine
        assert second.info.version != first.info.version
        await second.answer(request(user_id="a"))
        assert second.served.paging.border.rows.owned == second.served.paging.border.wanted > 0
        assert pages.by.total() > sum(before.values())
        assert await deployment.drain(30.0)
        assert deployment.join(30.0)

    asyncio.run(scenario())
    assert set(pages.by) == {threading.main_thread().name}
    assert pages.free == pages.count


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
            r"memory\.file: .*none\.npz: not a controller's file",
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
