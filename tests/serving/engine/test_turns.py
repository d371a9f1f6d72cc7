# SPDX-License-Identifier: Apache-2.0
"""Turns on the event loop: how many go on at once, in which order, and how long one waits."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

import pytest

from jgr.serving.api import RecommendRequest
from jgr.serving.engine.turns import LEAST, MOST, TURN_NS, Turns
from jgr.serving.errors import RequestError
from jgr.serving.policies.jobs import Sort
from tests.serving.fakes import PATIENCE_S, make_config, make_engine


class Clock:
    """Time goes on by a step with each turn of the loop."""

    def __init__(self, step_ns: int) -> None:
        self.now_ns, self.turn, self._step_ns = 0, 0, step_ns

    def __call__(self) -> int:
        return self.now_ns

    def go_on(self) -> None:
        self.turn += 1
        self.now_ns += self._step_ns
        asyncio.get_running_loop().call_soon(self.go_on)


async def begun(sorts: list[Sort], each_ns: int) -> list[tuple[int, int]]:
    """The turn and the number of each request, in the order in which they went on. All come at once, and each is
    translated in so long."""
    clock = Clock(0)
    turns, order = Turns(clock), list[tuple[int, int]]()

    async def request(number: int, sort: Sort) -> None:
        await turns.take(sort)
        order.append((clock.turn, number))
        clock.now_ns += each_ns

    clock.go_on()
    await asyncio.gather(*(request(number, sort) for number, sort in enumerate(sorts)))
    return order


@pytest.mark.parametrize(
    ("each_ns", "most"), [(10_000, MOST), (TURN_NS // 10 + 10_000, 9), (5_000_000, LEAST)]
)
def test_a_turn_begins_what_fits_into_its_time_in_the_order_in_which_they_came(
    each_ns: int, most: int
) -> None:
    order = asyncio.run(begun(["dated"] * 600, each_ns))
    assert [number for _, number in order] == list(range(600))
    in_turn = [sum(turn == each for turn, _ in order) for each in sorted({turn for turn, _ in order})]
    assert in_turn[0] == LEAST, "nothing is known of how long it takes"
    assert max(in_turn) == most and all(count == most for count in in_turn[len(in_turn) // 2 : -1])


def test_those_with_a_deadline_and_those_without_go_on_alternately_and_batches_last() -> None:
    first: list[Sort] = ["dated"] * LEAST  # they have this turn
    waiting: list[Sort] = ["batch", "batch", "dated", "dated", "dated", "dated", "undated", "undated"]
    order = [number - LEAST for _, number in asyncio.run(begun([*first, *waiting], TURN_NS))[LEAST:]]
    assert order == [2, 6, 3, 7, 4, 5, 0, 1]


def test_a_request_whose_client_left_takes_no_turn() -> None:
    async def run() -> None:
        turns = Turns(Clock(0))
        for _ in range(LEAST):
            await turns.take("dated")
        left = [asyncio.ensure_future(turns.take("dated")) for _ in range(50)]
        stays = asyncio.ensure_future(turns.take("undated"))
        await asyncio.sleep(0)
        for each in left:
            each.cancel()
        for _ in range(3):
            await asyncio.sleep(0)
        assert stays.done()
        assert turns.wait_ns("dated") == 0

    asyncio.run(run())


def test_a_batch_request_whose_line_stands_still_ends_with_its_deadline_and_leaves_the_line() -> None:
    async def run() -> None:
        engine = make_engine(make_config("batching.order=edf"))
        await engine.start()
        turns, ended = engine._host.turns, asyncio.Event()

        async def others() -> None:
            """They take every turn."""
            while not ended.is_set():
                await turns.take("undated")

        request = RecommendRequest(history=["a"], top_k=1, priority="batch", deadline_ms=20)
        answers = [asyncio.ensure_future(engine.answer(request))]  # which will be the first in any line
        rivals = [asyncio.ensure_future(others()) for _ in range(3 * MOST)]
        for _ in range(LEAST):
            await turns.take("undated")
        await asyncio.sleep(0)
        answers += [asyncio.ensure_future(engine.answer(request)) for _ in range(100)]
        errors = await asyncio.wait_for(asyncio.gather(*answers, return_exceptions=True), PATIENCE_S)
        assert {getattr(error, "type", error) for error in errors} == {"deadline_exceeded"}
        assert turns.waiting <= len(rivals)
        ended.set()
        await asyncio.gather(*rivals)
        assert turns.waiting == 0
        await engine.drain(None)
        assert engine.join(10)

    asyncio.run(run())


def test_a_wait_is_predicted_from_the_time_of_turns() -> None:
    async def run() -> None:
        clock = Clock(8_000_000)
        turns = Turns(clock)
        clock.go_on()
        rest = 20 * LEAST
        early = [asyncio.ensure_future(turns.take("dated")) for _ in range(60 * LEAST + rest)]
        for _ in range(60):
            await asyncio.sleep(0)
        left = sum(not each.done() for each in early)
        assert abs(turns.wait_ns("dated") - 8_000_000 * left / LEAST) < 0.1 * turns.wait_ns("dated")
        alone_ns = turns.wait_ns("undated")
        assert alone_ns < 2 * 2 * 8_000_000 / LEAST, "its line is empty, and every second one is from it"
        undated = asyncio.ensure_future(turns.take("undated"))
        await asyncio.sleep(0)
        assert turns.wait_ns("dated") > 1.5 * 8_000_000 * left / LEAST
        await asyncio.gather(undated, *early)
        assert turns.wait_ns("dated") == 0

    asyncio.run(run())


@pytest.mark.parametrize("requests", [1, LEAST + 1, LEAST + 3, 2 * LEAST + 1, 10 * MOST])
@pytest.mark.parametrize("turns", range(1, 5))
def test_an_engine_that_is_replaced_answers_those_that_wait_for_their_turn(requests: int, turns: int) -> None:
    async def run() -> None:
        engine = make_engine(make_config())
        await engine.start()
        answers = [
            asyncio.ensure_future(engine.answer(RecommendRequest(history=["a"], top_k=1)))
            for _ in range(requests)
        ]
        for _ in range(turns):  # all have come, and some wait, or were told to go on in this turn of the loop
            await asyncio.sleep(0)
        assert await engine.drain(None)
        assert all(len(answer.items) == 1 for answer in await asyncio.gather(*answers))
        assert engine.join(10)

    asyncio.run(run())


def test_a_run_that_has_ended_is_seen_before_the_next_request_is_translated() -> None:
    async def run() -> None:
        engine, request = make_engine(make_config()), RecommendRequest(history=["a"], top_k=1)
        await engine.start()
        first = engine.submit(request)
        await asyncio.sleep(0)  # its run is on its lane
        until_s = time.monotonic() + PATIENCE_S
        while not first.answer.done() and time.monotonic() < until_s:  # the loop has no turn meanwhile
            with suppress(RequestError):  # the queue may become full
                engine.submit(request)
        assert first.answer.done()
        await engine.drain(None)
        assert engine.join(10)

    asyncio.run(run())


def test_those_that_wait_for_their_turn_count_against_the_bound_of_the_queue() -> None:
    async def run() -> None:
        engine = make_engine(make_config("batching.max_queue=8"))
        await engine.start()
        calls = [engine.answer(RecommendRequest(history=["a"], top_k=1)) for _ in range(50)]
        ends = await asyncio.gather(*calls, return_exceptions=True)
        refused = [end for end in ends if isinstance(end, RequestError) and end.type == "overloaded"]
        assert len(refused) == 50 - 8 and not any(isinstance(end, RequestError) for end in ends[:8])
        await engine.drain(None)
        assert engine.join(10)

    asyncio.run(run())


def test_a_request_that_comes_under_load_sees_to_it_that_what_has_ended_is_answered() -> None:
    """Whatever becomes of it: one that is refused is never submitted."""

    async def run() -> None:
        engine = make_engine(make_config())
        await engine.start()
        request = RecommendRequest(history=["a"], top_k=1)
        ticket = engine.submit(request)
        await asyncio.sleep(0)  # the run starts
        until_s = time.monotonic() + PATIENCE_S
        while not engine._lanes._ended:  # the loop stands still
            assert time.monotonic() < until_s
        assert not ticket.answer.done()
        engine._host.turns.waiting = 1
        entering = engine.enter(request, engine.clock())
        entering.send(None)  # it waits for its turn
        assert ticket.answer.done()
        entering.close()
        engine._host.turns.waiting = 0
        await engine.drain(None)
        assert engine.join(10)

    asyncio.run(run())


def test_what_waits_before_its_turn_is_waited_for() -> None:
    async def run() -> list[str]:
        turns, told, may = Turns(Clock(0)), list[str](), asyncio.Event()

        async def request() -> None:
            with turns.coming():
                await may.wait()
                await turns.take("dated")
            told.append("it went on")

        async def over() -> None:
            await turns.over()
            told.append("over")

        await turns.over()  # nobody comes
        asking, waiting = asyncio.create_task(request()), asyncio.create_task(over())
        for _ in range(5):
            await asyncio.sleep(0)
        assert told == []
        may.set()
        await asyncio.gather(asking, waiting)
        return told

    assert asyncio.run(run()) == ["it went on", "over"]


def test_an_engine_that_is_replaced_answers_those_that_still_fetch_what_they_need() -> None:
    async def run() -> int:
        engine, may = make_engine(make_config()), asyncio.Event()

        async def before(request: object) -> None:
            del request
            await may.wait()

        engine.before = before
        await engine.start(lambda done, total, label: None)
        asking = asyncio.create_task(engine.answer(RecommendRequest(history=["a"], top_k=1)))
        await asyncio.sleep(0)
        replacing = asyncio.create_task(engine.drain(None))
        for _ in range(5):
            await asyncio.sleep(0)
        may.set()
        answer = await asking
        await replacing
        return len(answer.items)

    assert asyncio.run(run()) == 1


def test_an_engine_that_is_drained_as_its_start_ends_stays_drained() -> None:
    async def run() -> str:
        engine = make_engine(make_config())
        lanes = engine._lanes
        measure = lanes.handover_s

        async def meanwhile() -> float:
            found = await measure()
            await engine.drain(0)
            return found

        lanes.handover_s = meanwhile  # type: ignore[method-assign]
        await engine.start()
        assert engine.join(10)
        return engine.status

    assert asyncio.run(run()) == "draining"


def test_the_place_of_a_request_whose_client_left_is_given_away_at_once() -> None:
    async def run() -> tuple[int, int]:
        engine = make_engine(make_config("batching.max_wait_ms=60000"))
        await engine.start()
        ticket = engine.submit(RecommendRequest(history=["a"], top_k=1))
        for _ in range(3):
            await asyncio.sleep(0)
        plan, planned = engine._policy.plan, list[int]()

        def counted(now_ns: int) -> Any:
            planned.append(now_ns)
            return plan(now_ns)

        engine._policy.plan = counted  # type: ignore[method-assign]
        engine.cancel(ticket)
        before = len(planned)
        for _ in range(3):
            await asyncio.sleep(0)
        with suppress(Exception):
            await ticket.answer
        await engine.drain(0)
        assert engine.join(10)
        return before, len(planned)

    before, after = asyncio.run(run())
    assert (before, after > 0) == (0, True)
