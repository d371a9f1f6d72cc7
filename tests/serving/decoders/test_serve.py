# SPDX-License-Identifier: Apache-2.0
"""The engine in process: timings on a clock that tests move, and executors that misbehave."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import NoReturn

import numpy as np
import pytest

from jgr.prompt.tokens import PromptBuilder, semantic_id_tokenizer
from jgr.serving.api import RankRequest, RecommendRequest
from jgr.serving.decoders.null import NullExecutor
from jgr.serving.decoders.serve import ServedDecoder, decoder_engine
from jgr.serving.decoders.work import Outcome, RankOutcome, Work
from jgr.serving.engine.engine import Engine
from jgr.serving.errors import RequestError
from jgr.serving.policies.batching import make_profiles
from jgr.serving.policies.jobs import Profile
from tests.serving.fakes import CATALOG, PATIENCE_S, TREE, FakeExecutor, make_config

RECOMMEND = RecommendRequest(history=["a"], top_k=2)
RANK = RankRequest(history=["a"], candidates=["b", "a"])


class Clock:
    """Nanoseconds that stand still until a test moves them."""

    def __init__(self) -> None:
        self.now_ns = 1000

    def __call__(self) -> int:
        return self.now_ns


def make(
    *settings: str, executor: NullExecutor | None = None, clock: Callable[[], int] | None = None
) -> tuple[Engine[ServedDecoder], FakeExecutor]:
    config = make_config(*settings)
    fake = FakeExecutor(make_profiles(config.profiles))
    prompts = PromptBuilder(config.prompt, semantic_id_tokenizer(CATALOG), CATALOG)
    engine = decoder_engine("m", CATALOG, TREE, prompts, executor or fake, config, clock=clock or Clock())
    return engine, fake


def run(engine: Engine[ServedDecoder], scenario: Callable[[], Awaitable[None]]) -> None:
    """Start the engine, play the scenario, drain, and audit."""

    async def play() -> None:
        await engine.start()
        assert engine.status == "ready"
        await asyncio.wait_for(scenario(), PATIENCE_S)
        engine.check()
        assert await engine.drain(PATIENCE_S)
        engine.check()

    asyncio.run(play())
    assert engine.join(PATIENCE_S)


def test_timings_are_the_clocks() -> None:
    clock = Clock()

    class Slow(NullExecutor):
        def run(self, profile: Profile, works: Sequence[Work]) -> list[Outcome]:
            clock.now_ns += 5_000_000
            return super().run(profile, works)

    engine, _ = make(executor=Slow(make_profiles(make_config().profiles), TREE.n_leaves), clock=clock)

    async def scenario() -> None:
        clock.now_ns = 3_000_000
        ticket = engine.submit(RECOMMEND, "me", arrival_ns=1_000_000)
        clock.now_ns = 10_000_000
        answer = await ticket.answer
        timing = answer.timing_ms
        assert (timing.prepare, timing.queue, timing.device, timing.total) == (2.0, 7.0, 5.0, 14.0)
        assert answer.id == "me"

    run(engine, scenario)


def test_requests_of_one_turn_of_the_loop_travel_together() -> None:
    engine, fake = make()

    async def scenario() -> None:
        answers = await asyncio.gather(*(engine.answer(RECOMMEND) for _ in range(3)), engine.answer(RANK))
        assert [[item.item_id for item in answer.items] for answer in answers] == 3 * [["c", "d"]] + [
            ["a", "b"]
        ]

    run(engine, scenario)
    assert fake.batches == [3, 1]


def test_waiting_for_company_ends_when_the_time_is_over() -> None:
    clock = Clock()
    engine, fake = make("batching.max_wait_ms=1", clock=clock)

    async def scenario() -> None:
        first = engine.submit(RECOMMEND)
        await asyncio.sleep(0)
        clock.now_ns += 999_999
        second = engine.submit(RECOMMEND)
        await asyncio.sleep(0)
        assert fake.batches == []
        clock.now_ns += 1
        await asyncio.gather(first.answer, second.answer)

    run(engine, scenario)
    assert fake.batches == [2]


def test_a_cancelled_caller_cancels_its_work() -> None:
    engine, fake = make()

    async def scenario() -> None:
        fake.hold()
        running = asyncio.create_task(engine.answer(RECOMMEND))
        await asyncio.to_thread(fake.wait_entered)  # the warm-up
        await asyncio.to_thread(fake.wait_entered)
        queued = asyncio.create_task(engine.answer(RECOMMEND))
        await asyncio.sleep(0)
        engine.check()
        for task in (queued, running):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            engine.check()
        fake.release()
        await engine.answer(RANK)

    run(engine, scenario)
    assert fake.batches == [1, 1]


@pytest.mark.parametrize("fault", ["too few outcomes", "a score that is not finite", "an error"])
def test_a_faulty_executor_fails_requests_and_the_engine_goes_on(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Faulty(NullExecutor):
        def run(self, profile: Profile, works: Sequence[Work]) -> list[Outcome]:
            if profile.kind == "recommend":
                return super().run(profile, works)
            if fault == "too few outcomes":
                return []
            if fault == "an error":
                raise RuntimeError("the device fell off")
            return [RankOutcome(np.array([0.0, np.nan], np.float32)) for _ in works]

    engine, _ = make(executor=Faulty(make_profiles(make_config().profiles), TREE.n_leaves))

    async def scenario() -> None:
        ended = await asyncio.gather(
            *(engine.answer(RANK, f"r{i}") for i in range(2)), return_exceptions=True
        )
        errors = [error for error in ended if isinstance(error, RequestError)]
        assert [error.type for error in errors] == ["internal", "internal"]
        assert errors[0] is not errors[1]
        assert (await engine.answer(RECOMMEND)).items[0].item_id == "c"

    with caplog.at_level(logging.ERROR):
        run(engine, scenario)
    told = " ".join(record.getMessage() for record in caplog.records)
    assert "r0" in told and "r1" in told
    assert all(record.exc_info for record in caplog.records)


def test_an_engine_refuses_before_its_start_and_after_its_drain() -> None:
    engine, _ = make()
    for status in ("starting", "draining"):
        with pytest.raises(RequestError, match=status):
            engine.submit(RECOMMEND)
        if status == "starting":
            asyncio.run(drain_without_start(engine))
    assert engine.join(PATIENCE_S)


async def drain_without_start(engine: Engine) -> None:
    assert await engine.drain(0)


def test_a_warm_up_that_fails_is_told_to_whoever_starts_the_engine() -> None:
    engine, fake = make()
    fake.errors.append(MemoryError("no room"))

    async def start() -> None:
        with pytest.raises(MemoryError, match="no room"):
            await engine.start()
        assert engine.status == "failed"
        await engine.drain(0)

    asyncio.run(start())
    assert engine.join(PATIENCE_S)


def test_progress_is_shown_for_every_profile() -> None:
    engine, _ = make()
    shown: list[tuple[int, int]] = []

    async def start() -> None:
        await engine.start(lambda done, total, label: shown.append((done, total)))
        await engine.drain(0)

    asyncio.run(start())
    assert shown == [(n, 4) for n in (1, 2, 3, 4)]
    assert engine.join(PATIENCE_S)


@pytest.mark.parametrize("what", ["take", "items", "explain"])
def test_what_breaks_after_a_run_ends_its_requests_and_no_other(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ends of runs are also seen while another request is being accepted, which is not to blame."""

    def breaks(*given: object) -> NoReturn:
        raise FloatingPointError("out of luck")

    async def scenario() -> None:
        engine, _ = make("batching.max_queue=4", clock=time.monotonic_ns)
        request = RecommendRequest(history=["a"], top_k=1, explain=True)
        tickets = []
        await engine.start()
        with monkeypatch.context() as broken:
            broken.setattr(engine.served, what, breaks)
            doomed = engine.submit(request)
            until_s = time.monotonic() + PATIENCE_S
            await asyncio.sleep(0)  # its run is on its lane, and the loop has no turn until it ended
            while not doomed.answer.done() and time.monotonic() < until_s:
                with suppress(RequestError):  # the queue may become full
                    tickets.append(engine.submit(request))
            with pytest.raises(RequestError, match="the model failed"):
                await doomed.answer
        await asyncio.gather(*(ticket.answer for ticket in tickets), return_exceptions=True)
        assert len((await engine.answer(request)).items) == 1
        engine.check()
        assert await engine.drain(30.0) and engine.join(30.0)

    asyncio.run(scenario())
