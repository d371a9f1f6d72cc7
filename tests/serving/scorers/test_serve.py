# SPDX-License-Identifier: Apache-2.0
"""The ranking engine around executors that are held and broken: answers by hand, refusals, deadlines, faults,
features, entries of users. No model, no clock that is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from jgr.config import FeaturesConfig
from jgr.features.cache import FeatureCache
from jgr.features.schema import Schema
from jgr.features.stores import StoreError
from jgr.serving.api import Answer, RankRequest, RecommendRequest
from jgr.serving.engine.engine import Engine
from jgr.serving.engine.ticket import ClientGone
from jgr.serving.errors import RequestError
from jgr.serving.scorers.serve import ServedScorer
from tests.serving.scorer_fakes import CATALOG, DAY, ITEMS, MONDAY, FakeExecutors, fake_engine

SCHEMA = Schema.parse("x:float32")


def request(count: int = 3, **given: Any) -> RankRequest:
    """Candidates B059 downwards after three events."""
    fields: dict[str, Any] = {
        "history": ITEMS[:3],
        "history_times": [MONDAY, MONDAY + DAY, MONDAY + 3 * DAY],
        "time": MONDAY + 4 * DAY,
        "candidates": ITEMS[::-1][:count],
    }
    return RankRequest(**(fields | given))


def run(
    scenario: Callable[[Engine[ServedScorer], FakeExecutors], Coroutine[Any, Any, None]],
    *settings: str,
    **given: Any,
) -> None:
    """Start, do, drain; then nothing is left, and every executor is idle again (FLAME-15.6)."""

    async def whole() -> None:
        engine, executors = fake_engine(*settings, **given)
        await engine.start()
        try:
            await scenario(engine, executors)
        finally:
            executors.release()
            assert await engine.drain(30.0)
        engine.check()
        assert engine.queued == 0
        idle = {size: executors.sizes.count(size) for size in executors.sizes}
        assert {size: engine._policy.idle(size) for size in idle} == idle
        assert engine.join(30.0)

    asyncio.run(whole())


def by_item(answer: Answer) -> dict[str, float]:
    return {item.item_id: item.score for item in answer.items}


@pytest.mark.parametrize("reads", [False, True])
def test_parts_are_joined_in_the_callers_order_and_ordered_by_score(reads: bool) -> None:
    async def scenario(engine: Engine[ServedScorer], executors: FakeExecutors) -> None:
        answer = await engine.answer(request(60, include_metadata=True, top_k=2), "r")
        assert (answer.usage.parts, answer.usage.candidates) == (8, 60)  # seven eights and a four
        assert by_item(answer) == {"B059": 62.0, "B058": 61.0}
        assert answer.items[0].scores == {"click": 62.0, "like": -62.0}
        assert (answer.items[0].metadata, answer.items[1].rank) == ({"title": "Item 59"}, 2)
        assert (answer.id, answer.model, answer.catalog_version) == ("r", "fake", CATALOG.version)
        weighed = await engine.answer(request(60, task_weights={"like": 2.0, "click": 0.5}, top_k=1))
        assert by_item(weighed) == {"B000": -1.5 * 3}
        assert len(executors.works) == 2 * (8 + reads)

    run(scenario, reads=reads)


def test_what_the_model_cannot_use_or_the_catalog_lacks_is_refused_by_name() -> None:
    wrong: dict[str, dict[str, Any]] = {
        "history_times": {"history_times": None},
        "history_times[1]": {"history_times": [MONDAY, MONDAY - 1, MONDAY]},
        "time": {"time": MONDAY},
        "history_actions": {"history_actions": [1]},
        "history_actions[2]": {"history_actions": [1, 7, 8]},
        "context.slot7": {"context": {"slot7": 0}},
        "context.slot1": {"context": {"slot0": 3, "slot1": 2}},
        "scenario": {"scenario": 3},
        "task_weights.finish": {"task_weights": {"finish": 1.0}},
        "task_weights.like": {"task_weights": {"like": float("inf")}},
        "task_weights": {"task_weights": {"like": 0.0}},
        "layout": {"layout": "user_prefix"},
        "candidates[1]": {"candidates": ["B001", "nothing"]},
        "candidates[2]": {"candidates": ["B001", "B002", "B001"]},
        "candidates": {"candidates": ITEMS[:31]},
        "top_k": {"top_k": 4},
        "history": {"history": ["nothing", "nor this"], "history_times": [MONDAY, MONDAY]},
    }

    async def scenario(engine: Engine[ServedScorer], executors: FakeExecutors) -> None:
        for field, given in wrong.items():
            with pytest.raises(RequestError) as refused:
                engine.submit(request(**given))
            assert (refused.value.type, refused.value.field) == ("invalid_request", field)
        with pytest.raises(RequestError, match=r"'like'") as refused:
            engine.submit(request(task_weights={"lik": 1.0}))
        with pytest.raises(RequestError, match="other than 0"):
            engine.submit(request(task_weights={}))
        with pytest.raises(RequestError, match="has 2 values, the history 3 items"):
            engine.submit(request(history_times=[MONDAY, MONDAY]))
        with pytest.raises(RequestError, match="68 years"):
            engine.submit(request(history_times=[0, 1, 2], time=1 << 33))
        with pytest.raises(RequestError, match="ask /v1/rank"):
            engine.submit(RecommendRequest(history=["B001"]))

    run(scenario, "server.max_candidates=30")


def test_the_block_has_what_the_model_reads_of_the_known_items() -> None:
    """Of eight events five are kept, and of those the unknown ones are left out with their times and actions."""

    async def scenario(engine: Engine[ServedScorer], executors: FakeExecutors) -> None:
        history = [*ITEMS[:6], "unknown", ITEMS[6]]
        times = [MONDAY + 3 * DAY + at for at in range(8)]
        given = request(
            history=history, history_times=times, time=times[-1] + 5, history_actions=[1, 2, 3, 4, 5, 6, 7, 0],
            context={"slot1": 1}, scenario=2,
        )  # fmt: skip
        answer = await engine.answer(given)
        (work,) = executors.works
        views = engine.served.translator._layout.views(work.user)  # type: ignore[union-attr]
        thursday = 1_700_697_600  # weeks count from the epoch's, a Thursday
        assert thursday % (7 * DAY) == 0
        assert views["rows"].tolist() == [2, 3, 4, 5, 6]
        assert views["times"].tolist() == [t - thursday for t in (*times[2:6], times[7])]
        assert views["actions"].tolist() == [3, 4, 5, 6, 0]
        assert (views["now"].tolist(), views["scenario"].tolist()) == ([times[-1] + 5 - thursday], [2])
        assert views["context"].tolist() == [-1, 1]
        usage = answer.usage
        assert (usage.history_items, usage.unknown_items, usage.unknown_item_ids) == (5, 1, ["unknown"])
        assert usage.prompt_tokens == usage.computed_tokens == 7
        late = await engine.answer(request(time=None))  # the wall's clock
        assert late.usage.history_items == 3
        now = engine.served.translator._layout.views(executors.works[-1].user)["now"]  # type: ignore[union-attr]
        assert now.tolist() == [MONDAY + 10 * DAY - MONDAY // (7 * DAY) * 7 * DAY]

    run(scenario)


def test_a_fault_fails_its_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(engine: Engine[ServedScorer], executors: FakeExecutors) -> None:
        executors.hold()
        executors.fail(ArithmeticError("out of memory"))
        broken, well = engine.submit(request(20), "r1"), engine.submit(request(20), "r2")
        await asyncio.sleep(0)
        executors.wait_entered()
        executors.release()
        with pytest.raises(RequestError, match="the model failed"):
            await broken.answer
        assert len((await well.answer).items) == 20
        engine.check()

    run(scenario)
    assert "the executor failed; requests: r1\n" in caplog.text


def test_a_run_costs_what_it_takes_to_reach_its_thread_beside_its_work() -> None:
    async def scenario(engine: Engine[ServedScorer], executors: FakeExecutors) -> None:
        parts = engine.served.measured().parts
        beside = {size: parts[size] - seconds for size, seconds in executors.costs.items()}
        assert beside[4] > 1e-7 and beside[4] == pytest.approx(beside[8])
        assert engine._policy.costs.ns(8) == round(parts[8] * 1e9)

    run(scenario)


def test_a_score_that_is_no_number_is_a_fault() -> None:
    async def scenario(engine: Engine[ServedScorer], executors: FakeExecutors) -> None:
        executors.costs = {4: 1.0, 8: 1.5}
        ticket = engine.submit(request())
        ticket.task.scores[:] = np.nan
        engine.served.take = lambda *given: None  # type: ignore[method-assign]
        with pytest.raises(RequestError, match="the model failed"):
            await ticket.answer

    run(scenario)


def test_overload_deadlines_and_clients_that_leave() -> None:
    async def scenario(engine: Engine[ServedScorer], executors: FakeExecutors) -> None:
        executors.hold()
        running = [engine.submit(request()) for _ in range(3)]  # as many as there are streams
        await asyncio.sleep(0)
        for _ in running:
            executors.wait_entered()
        waiting = [engine.submit(request(deadline_ms=deadline)) for deadline in (0.001, *3 * [None])]
        with pytest.raises(RequestError) as refused:
            engine.submit(request())
        assert refused.value.type == "overloaded"
        with pytest.raises(RequestError) as late:
            await waiting[0].answer
        assert late.value.type == "deadline_exceeded"
        for gone in (*waiting[1:], running[0]):
            engine.cancel(gone)
            with pytest.raises(ClientGone):
                await gone.answer
        engine.check()
        executors.release()
        assert [len((await ticket.answer).items) for ticket in running[1:]] == [3, 3]
        assert len(executors.works) == 3  # who waited was never run

    run(scenario, "batching.max_queue=3", "batching.order=edf")


def test_a_drain_finishes_what_was_accepted_or_says_that_it_could_not() -> None:
    async def scenario(engine: Engine[ServedScorer], executors: FakeExecutors) -> None:
        executors.hold()
        ticket = engine.submit(request())
        await asyncio.sleep(0)
        executors.wait_entered()
        assert not await engine.drain(0)
        with pytest.raises(RequestError, match="stopped before"):
            await ticket.answer
        with pytest.raises(RequestError, match="draining"):
            engine.submit(request())
        executors.release()
        while engine._policy.in_flight:
            await asyncio.sleep(0)

    run(scenario)


class Store:
    """Feature x of an item is its row; answers wait until it is opened, and fail while it is broken."""

    def __init__(self) -> None:
        self.broken = False

    def get_many(self, item_ids: Any) -> list[bytes | None]:
        if self.broken:
            raise StoreError("the store is down")
        return [SCHEMA.pack({"x": np.array([[ITEMS.index(item)]])})[0] for item in item_ids]

    def close(self) -> None: ...


def test_parts_are_given_features_and_the_answer_says_which_were_missing() -> None:
    store: Any = Store()
    features = FeatureCache(store, SCHEMA, ITEMS, FeaturesConfig(max_wait_ms=30_000))

    async def scenario(engine: Engine[ServedScorer], executors: FakeExecutors) -> None:
        answer = await engine.answer(request(12))
        assert (answer.usage.feature_missing, answer.usage.feature_stale) == (0, 0)
        assert by_item(answer) == {ITEMS[row]: 1001.0 * row + 3 for row in range(48, 60)}
        store.broken = True
        answer = await engine.answer(request(14))  # two of them were never fetched
        assert (answer.usage.feature_missing, answer.usage.feature_stale) == (2, 0)
        missing = {"B047": 47 + 3, "B046": 46 + 3}
        assert by_item(answer).items() >= missing.items()
        ticket = engine.submit(request(20))
        engine.cancel(ticket)
        assert engine.metrics.feature_counts == features.counts

        features.get_many_async = broken  # type: ignore[method-assign]
        with pytest.raises(RequestError, match="the model failed"):
            await engine.answer(request())

    async def broken(*given: Any) -> Any:
        raise ArithmeticError("no store's fault")

    run(scenario, features=features, reads=True)
    assert features.counts().missing >= 2


def test_users_entries_are_found_again_go_stale_and_are_forgotten() -> None:
    async def scenario(engine: Engine[ServedScorer], executors: FakeExecutors) -> None:
        async def cached(**given: Any) -> int:
            answer = await engine.answer(request(user_id="u", explain=True, **given))
            engine.check()
            assert isinstance(answer.explain, list)
            assert answer.usage.cached_tokens + answer.usage.computed_tokens == answer.usage.prompt_tokens
            assert answer.explain[0].cached_tokens == answer.usage.cached_tokens
            return answer.usage.cached_tokens

        meta = engine.meta
        assert meta is not None
        assert [await cached(), await cached(), await cached(candidates=["B001"])] == [0, 5, 5]
        changed: list[dict[str, Any]] = [
            {"time": MONDAY + 5 * DAY},
            {"history": ITEMS[1:4]},
            {"history_actions": [1, 0, 0]},
            {"context": {"slot0": 1}},
            {"scenario": 1},
        ]
        for given in changed:
            assert [await cached(**given), await cached(**given)] == [0, 5]
        assert (meta.counts["user_stale"], meta.number("user"), meta.pages.free) == (len(changed), 1, 2)
        assert (engine.forget("u"), engine.forget("u"), meta.pages.free) == (1, 0, 3)
        assert await cached() == 0
        await engine.answer(request())  # nobody's: known by what it is
        assert (await engine.answer(request())).usage.cached_tokens == 5
        for user in ("v", "w"):  # no room: the longest unused goes
            await engine.answer(request(user_id=user))
        assert (await cached(), meta.counts["user_evicted"]) == (0, 2)

    run(scenario, reads=True, pages=3)


def test_a_user_that_is_being_written_is_computed_again_and_a_fault_leaves_no_entry() -> None:
    async def scenario(engine: Engine[ServedScorer], executors: FakeExecutors) -> None:
        meta = engine.meta
        assert meta is not None
        executors.hold()
        first = engine.submit(request(user_id="u"))
        second = engine.submit(request(user_id="u"))
        await asyncio.sleep(0)
        assert meta.pinned == 1
        executors.release()
        assert [(await ticket.answer).usage.cached_tokens for ticket in (first, second)] == [0, 0]
        assert (await engine.answer(request(user_id="u"))).usage.cached_tokens == 5
        executors.fail(ArithmeticError("lost"))
        with pytest.raises(RequestError, match="the model failed"):
            await engine.answer(request(user_id="v"))
        assert (meta.number("user"), meta.pinned) == (1, 0)

    run(scenario, reads=True, pages=3)
