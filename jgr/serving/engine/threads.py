# SPDX-License-Identifier: Apache-2.0
"""The threads that talk to the device.

The one idea: calls go in through a queue and results come back as callbacks on the event loop, so nothing but these
threads ever waits for a device. A lane has two of them: one launches its runs, the other collects them, both in their
order. So the next run is packed and dispatched while the device is busy (XGR-12, 16). One thread launches them all
because a CPU's device runs what one thread has launched in that order, but what two have launched at the same time: of
two runs in flight the first would then end when both do. A lane that has one run at a time needs one thread.

The threads are daemons: a device call cannot be interrupted, and must not keep a process alive whose time to drain ran
out.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

from jgr import stopping
from jgr.cache.pool import PoolLost
from jgr.config import UserError
from jgr.serving.engine.contract import Executors, Progress
from jgr.serving.errors import RequestError
from jgr.serving.policies.jobs import Start

HANDOVERS = 20
"""Times that a call to a lane's thread and back is timed."""


@dataclass(frozen=True, eq=False)
class Run:
    """How a run ended. outcomes: one for each work of the start; empty where `error` is set. Times are in ns;
    launched_ns: when it had been handed to the device; begin_ns: when it had its lane for itself, which is its start or
    the end of the run before it."""

    outcomes: Sequence[Any]
    error: Exception | None
    start_ns: int
    launched_ns: int
    begin_ns: int
    end_ns: int


class Abandoned(Exception):
    """Nobody wanted a run any more when its turn came, so it was not launched."""


NOT_THE_DEVICE = (PoolLost, Abandoned, UserError, RequestError)
"""Errors of runs that say nothing of the device: nothing has run, or what the request needs is not there."""


class Calls:
    """A daemon thread that makes calls, first in first out, and tells the event loop what came of them."""

    def __init__(self, name: str) -> None:
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._loop: asyncio.AbstractEventLoop

    def start(self) -> None:
        """Called on the event loop that callbacks go to."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def call(self, call: Callable[[], None]) -> None:
        """Queue a call, which must not raise."""
        self._inbox.put(call)

    def post(self, call: Callable[[], object]) -> None:
        """From the thread: have the event loop make a call."""
        # Where a drain ran out of time the loop is closed, and nobody waits for the result.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call)

    def stop(self) -> None:
        """End the thread once what was queued is done."""
        self._inbox.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end. False where the device still holds it."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        while True:
            call = self._inbox.get()
            if call is None:
                return
            call()
            del call  # it may hold what the device gave, until the next one comes


class Lanes:
    """The threads of each lane of some executors. A lane is given no more runs at a time than `in_flight`. failed: the
    runs that have failed on the device since the last good one."""

    def __init__(self, executors: Executors, clock: Callable[[], int]) -> None:
        self._executors, self._clock = executors, clock
        lanes = range(executors.lanes)
        self._launching = [Calls(f"jgr-lane-{lane}") for lane in lanes]
        self._collecting = self._launching
        if executors.in_flight > 1:
            self._collecting = [Calls(f"jgr-lane-{lane}-ends") for lane in lanes]
        self._threads = list(dict.fromkeys([*self._launching, *self._collecting]))
        self._free_ns = [0 for _ in lanes]  # when the last run of each lane ended
        self._stopping = False
        self.failed = 0
        self._ended: deque[tuple[Callable[[Run], None], Run]] = deque()

    async def start(self, progress: Progress) -> None:
        """Start the threads, and warm up in the first one, which calls `progress` too. Raises what that raises;
        `stop` ends it after its current step."""
        for thread in self._threads:
            thread.start()
            thread.call(self._executors.bind)
        ended: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self._threads[0].call(partial(stopping.carried(self._warm_up), progress, ended))
        if error := await ended:
            raise error

    async def handover_s(self) -> float:
        """Seconds that a call takes to a lane's thread and back to the event loop, at least: what each run costs beside
        its work."""
        loop, thread, found = asyncio.get_running_loop(), self._threads[0], list[int]()
        for _ in range(HANDOVERS):
            if self._stopping:  # the thread may take no more calls
                break
            back: asyncio.Future[Exception | None] = loop.create_future()
            began_ns = self._clock()
            thread.call(partial(thread.post, partial(_resolve, back, None)))
            await back
            found.append(self._clock() - began_ns)
        stopping.check()  # the last time: what follows makes the engine one that serves
        return min(found, default=0) / 1e9

    def run(
        self, start: Start, work: Any, done: Callable[[Run], None], wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """Queue a run on its lane; `done` is called on the event loop. wanted: asked from the lane's thread before it
        launches the run; where nobody wants it any more, it ends as Abandoned."""
        self._launching[start.lane].call(partial(self._launch, start, work, done, wanted))

    def reap(self) -> None:
        """On the event loop: call `done` for the runs that have ended. It is called where a turn of the loop may take
        long, so that the device does not wait for the turn's end."""
        while self._ended:
            done, ended = self._ended.popleft()
            if ended.error is None:
                self.failed = 0
            elif not isinstance(ended.error, NOT_THE_DEVICE):
                self.failed += 1
            done(ended)

    def stop(self) -> None:
        """End the threads once what was queued is done."""
        self._stopping = True
        for launching, collecting in zip(self._launching, self._collecting, strict=True):
            launching.call(collecting.stop)  # after all that it still launches
            if collecting is not launching:
                launching.stop()

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads' end, for each so long. False where the device still holds one."""
        return all([thread.join(timeout_s) for thread in self._threads])

    def _launch(
        self, start: Start, work: Any, done: Callable[[Run], None], wanted: Callable[[], bool]
    ) -> None:
        start_ns, pending = self._clock(), None
        error: Exception | None = None
        try:
            if wanted():
                pending = self._executors.launch(start, work)
            else:
                error = Abandoned()  # not raised: its traceback would hold this frame, which holds it
        except Exception as cause:
            error = cause
        span_ns = start_ns, self._clock()
        self._collecting[start.lane].call(partial(self._collect, start, pending, error, span_ns, done))

    def _collect(
        self,
        start: Start,
        pending: Any,
        error: Exception | None,
        span_ns: tuple[int, int],
        done: Callable[[Run], None],
    ) -> None:
        """span_ns: when the launch began and ended."""
        begin_ns = max(span_ns[0], self._free_ns[start.lane])
        outcomes: Sequence[Any] = ()
        try:
            if error is None:
                outcomes = self._executors.collect(start, pending)
                if len(outcomes) != len(start.work):
                    raise RuntimeError(
                        f"the executor gave {len(outcomes)} outcomes for {len(start.work)} works"
                    )
        except Exception as cause:
            outcomes, error = (), cause
        end_ns = self._free_ns[start.lane] = self._clock()
        self._ended.append((done, Run(outcomes, error, *span_ns, begin_ns, end_ns)))
        self._collecting[start.lane].post(self.reap)

    def _warm_up(self, progress: Progress, ended: asyncio.Future[Exception | None]) -> None:
        def step(done: int, total: int, label: str) -> None:
            if self._stopping:
                raise InterruptedError("the warm-up was interrupted")
            stopping.check()
            progress(done, total, label)

        error: Exception | None = None
        try:
            self._executors.warm_up(step)
        except Exception as cause:
            error = cause
        self._threads[0].post(partial(_resolve, ended, error))


def _resolve(future: asyncio.Future[Exception | None], result: Exception | None) -> None:
    if not future.done():  # whoever waited may have been cancelled
        future.set_result(result)
