# SPDX-License-Identifier: Apache-2.0
"""A lane's threads: one launches all runs and one collects them, both in the runs' order."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jgr import stopping
from jgr.cache.pool import PoolLost
from jgr.embeddings.shards import ShardError
from jgr.serving.engine.contract import Progress
from jgr.serving.engine.threads import Lanes, Run
from jgr.serving.errors import RequestError
from jgr.serving.policies.jobs import Candidates, Start
from tests.serving.fakes import PATIENCE_S


class Watched:
    """Executors of one lane that note who calls them, in which order. held: runs whose collect waits until `release`.
    fails: runs that cannot be launched."""

    lanes = 1

    def __init__(self, in_flight: int, held: Sequence[int] = (), fails: Sequence[int] = ()) -> None:
        self.in_flight, self._fails = in_flight, fails
        self.calls: list[tuple[str, int]] = []
        self.thread: dict[tuple[str, int], int] = {}
        self.bound: set[int] = set()
        self._gates = {run: threading.Event() for run in held}
        self._called = threading.Condition()

    def warm_up(self, progress: Progress) -> None:
        progress(1, 1, "nothing")

    def bind(self) -> None:
        self.bound.add(threading.get_ident())

    def launch(self, start: Start, work: Any) -> int:
        self._note("launch", start.run)
        if start.run in self._fails:
            raise RuntimeError("no launch")
        return start.run

    def collect(self, start: Start, pending: int) -> list[int]:
        self._note("collect", pending)
        if pending in self._gates:
            assert self._gates[pending].wait(PATIENCE_S)
        return [pending]

    def release(self, run: int) -> None:
        self._gates[run].set()

    def wait_for(self, what: str, run: int) -> None:
        with self._called:
            assert self._called.wait_for(lambda: (what, run) in self.calls, PATIENCE_S)

    def _note(self, what: str, run: int) -> None:
        with self._called:
            self.calls.append((what, run))
            self.thread[what, run] = threading.get_ident()
            self._called.notify_all()


class Runs:
    """Lanes on an event loop, and the runs that ended."""

    def __init__(self, executors: Watched) -> None:
        self.lanes, self.ended = Lanes(executors, time.monotonic_ns), list[int]()
        self.errors: dict[int, Exception] = {}
        self.results: dict[int, Run] = {}

    def begin(self, run: int) -> asyncio.Future[None]:
        end = asyncio.get_running_loop().create_future()

        def done(result: Run) -> None:
            self.ended.append(run)
            self.results[run] = result
            if result.error is not None:
                self.errors[run] = result.error
            end.set_result(None)

        self.lanes.run(Start(run, 0, 1, (Candidates(run, 0, 1),)), None, done)
        return end

    def end(self) -> None:
        self.lanes.stop()
        assert self.lanes.join(PATIENCE_S)


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_one_thread_launches_all_runs_and_one_collects_them(in_flight: int) -> None:
    executors = Watched(in_flight)

    async def one_after_the_other() -> None:
        runs = Runs(executors)
        await runs.lanes.start(lambda done, total, label: None)
        for run in range(20):
            await runs.begin(run)
        runs.end()

    asyncio.run(one_after_the_other())
    launching = {thread for (what, _), thread in executors.thread.items() if what == "launch"}
    collecting = {thread for (what, _), thread in executors.thread.items() if what == "collect"}
    assert (len(launching), len(collecting)) == (1, 1)
    assert executors.bound == launching | collecting and (launching == collecting) == (in_flight == 1)


def test_a_run_is_launched_while_the_one_before_it_is_collected_and_ends_after_it() -> None:
    executors = Watched(2, held=[0])

    async def two() -> Runs:
        runs = Runs(executors)
        await runs.lanes.start(lambda done, total, label: None)
        first = runs.begin(0)
        await asyncio.to_thread(executors.wait_for, "collect", 0)
        second = runs.begin(1)
        await asyncio.to_thread(executors.wait_for, "launch", 1)
        assert not runs.ended and ("collect", 1) not in executors.calls
        executors.release(0)
        await asyncio.wait_for(asyncio.gather(first, second), PATIENCE_S)
        runs.end()
        return runs

    runs = asyncio.run(two())
    assert runs.ended == [0, 1]
    first, second = runs.results[0], runs.results[1]
    assert first.begin_ns == first.start_ns
    assert second.launched_ns < first.end_ns == second.begin_ns, "the lane is one run's at a time"
    assert executors.calls == [("launch", 0), ("collect", 0), ("launch", 1), ("collect", 1)]


def test_many_runs_keep_their_order_and_one_that_cannot_be_launched_keeps_nobody_waiting() -> None:
    executors = Watched(3, fails=[5])

    async def many() -> Runs:
        runs = Runs(executors)
        await runs.lanes.start(lambda done, total, label: None)
        flights = asyncio.Semaphore(executors.in_flight)

        async def one(run: int) -> None:
            async with flights:
                await runs.begin(run)

        await asyncio.wait_for(asyncio.gather(*map(one, range(300))), PATIENCE_S)
        runs.end()
        return runs

    runs = asyncio.run(many())
    assert runs.ended == [*range(300)] and str(runs.errors) == "{5: RuntimeError('no launch')}"
    assert [run for what, run in executors.calls if what == "launch"] == [*range(300)]
    assert [run for what, run in executors.calls if what == "collect"] == [*range(5), *range(6, 300)]


def test_runs_that_fail_on_the_device_are_counted_until_one_ends_well() -> None:
    class Failing(Watched):
        def launch(self, start: Start, work: Any) -> int:
            if start.run in errors:
                raise errors[start.run]
            return super().launch(start, work)

        def collect(self, start: Start, pending: int) -> list[int]:
            return [] if pending == 3 else super().collect(start, pending)

    errors: dict[int, Exception] = {
        0: RuntimeError("broken"),
        1: ShardError("its rows are not there"),
        2: PoolLost("another run failed"),
        4: RequestError("invalid_request", "it is of no use"),
        6: RuntimeError("broken"),
    }

    async def counted() -> list[int]:
        runs, found = Runs(Failing(1)), list[int]()
        await runs.lanes.start(lambda done, total, label: None)
        for run in range(7):
            await runs.begin(run)
            found.append(runs.lanes.failed)
        runs.lanes.run(Start(7, 0, 1, (Candidates(7, 0, 1),)), None, (end := Ended()), lambda: False)
        await end.came.wait()
        runs.end()
        return [*found, runs.lanes.failed]

    class Ended:
        """Nobody wants a run."""

        def __init__(self) -> None:
            self.came = asyncio.Event()

        def __call__(self, run: Run) -> None:
            self.came.set()

    assert asyncio.run(counted()) == [1, 1, 1, 2, 2, 0, 1, 1]


def test_a_stop_ends_the_threads_once_what_was_queued_is_collected() -> None:
    executors = Watched(2, held=[0])

    async def stopped() -> Runs:
        runs = Runs(executors)
        await runs.lanes.start(lambda done, total, label: None)
        both = runs.begin(0), runs.begin(1)
        runs.lanes.stop()
        executors.release(0)
        await asyncio.wait_for(asyncio.gather(*both), PATIENCE_S)
        assert runs.lanes.join(PATIENCE_S)
        return runs

    assert asyncio.run(stopped()).ended == [0, 1]


def test_a_short_run_behind_a_long_one_does_not_run_beside_it() -> None:
    """The device runs programs of two threads at the same time, so that the first one takes longer."""
    long = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda _, y: jnp.tanh(y @ y), x))
    short = jax.jit(lambda x: x + 1)
    x = jnp.ones((256, 256)) / 256
    jax.block_until_ready((long(x), short(x)))
    launched = list[jax.Array]()
    long_had_ended = list[bool]()

    class Two(Watched):
        def launch(self, start: Start, work: Any) -> Any:
            launched.append((long, short)[start.run](x))
            if start.run == 1:
                launched[1].block_until_ready()
                long_had_ended.append(launched[0].is_ready())
            return launched[start.run]

        def collect(self, start: Start, pending: Any) -> list[Any]:
            return [pending.block_until_ready()]

    async def both() -> None:
        runs = Runs(Two(2))
        await runs.lanes.start(lambda done, total, label: None)
        await asyncio.wait_for(asyncio.gather(runs.begin(0), runs.begin(1)), PATIENCE_S)
        runs.end()

    asyncio.run(both())
    assert long_had_ended == [True]


def test_a_start_that_is_told_to_stop_while_its_threads_are_timed_stops() -> None:
    """After that the engine would count as one that serves."""

    async def run() -> None:
        lanes, told = Lanes(Watched(1), time.monotonic_ns), False
        with stopping.stoppable(lambda: told):
            await lanes.start(lambda done, total, label: None)
            assert await lanes.handover_s() > 0
            told = True
            with pytest.raises(stopping.Stopped):
                await lanes.handover_s()
        lanes.stop()

    asyncio.run(run())
