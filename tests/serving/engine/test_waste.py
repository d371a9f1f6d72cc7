# SPDX-License-Identifier: Apache-2.0
"""Device time of which nobody had anything, as the metrics count it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from jgr.serving.api import RankRequest
from jgr.serving.engine.engine import Engine
from jgr.serving.engine.ticket import ClientGone
from jgr.serving.errors import RequestError
from jgr.serving.policies.jobs import Start
from jgr.serving.scorers.executors import PartWork, ReadWork
from jgr.serving.scorers.serve import ServedScorer
from tests.serving.fakes import PATIENCE_S
from tests.serving.scorer_fakes import ITEMS, MONDAY, FakeExecutors, fake_engine

Scenario = Callable[[Engine[ServedScorer], FakeExecutors], Coroutine[Any, Any, None]]


def request(count: int) -> RankRequest:
    return RankRequest(history=ITEMS[:1], history_times=[MONDAY], time=MONDAY, candidates=ITEMS[:count])


def device_and_wasted(scenario: Scenario) -> tuple[float, float]:
    """The seconds that a scenario takes of the lanes, and those of them that are wasted."""

    async def whole() -> Engine[ServedScorer]:
        engine, executors = fake_engine(reads=True)
        await engine.start()
        await scenario(engine, executors)
        executors.release()
        assert await engine.drain(30.0)
        engine.check()
        return engine

    value = asyncio.run(whole()).metrics.registry.get_sample_value
    return value("jgr_device_seconds_total") or 0.0, value("jgr_wasted_device_seconds_total") or 0.0


async def answered(engine: Engine[ServedScorer], executors: FakeExecutors) -> None:
    await engine.answer(request(60))


async def failed(engine: Engine[ServedScorer], executors: FakeExecutors) -> None:
    executors.fail(RuntimeError("the device broke"))
    with pytest.raises(RequestError):
        await engine.answer(request(4))


async def left_after_its_user(engine: Engine[ServedScorer], executors: FakeExecutors) -> None:
    """The user's part has been computed, and the caller leaves while its candidates run."""
    launch, entered, left = executors.launch, threading.Event(), threading.Event()

    def held(start: Start, work: ReadWork | PartWork) -> Any:
        if isinstance(work, PartWork):
            entered.set()
            assert left.wait(PATIENCE_S)
        return launch(start, work)

    executors.launch = held  # type: ignore[method-assign]
    ticket = engine.submit(request(4))
    assert await asyncio.to_thread(entered.wait, PATIENCE_S)
    engine.cancel(ticket)
    assert isinstance(ticket.answer.exception(), ClientGone)
    left.set()


def test_nothing_is_wasted_of_what_is_answered() -> None:
    device, wasted = device_and_wasted(answered)
    assert device > 0 and wasted == 0


@pytest.mark.parametrize("scenario", [failed, left_after_its_user])
def test_all_is_wasted_of_what_is_not_answered(scenario: Scenario) -> None:
    device, wasted = device_and_wasted(scenario)
    assert device > 0 and wasted == pytest.approx(device)
