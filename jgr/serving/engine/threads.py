# SPDX-License-Identifier: Apache-2.0
"""The threads that talk to the device.

The one idea: calls go in through a queue and results come back as callbacks on the event loop, so nothing but these
threads ever waits for a device, and a lane, which has one of them, is never entered twice. They are daemons: a device
call cannot be interrupted, and must not keep a process alive whose time to drain ran out.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

from jgr.serving.engine.contract import Executors, Progress
from jgr.serving.policies.jobs import Start


@dataclass(frozen=True, eq=False)
class Run:
    """How a run ended. outcomes: one for each work of the start; empty where `error` is set. Times are in ns."""

    outcomes: Sequence[Any]
    error: Exception | None
    start_ns: int
    end_ns: int


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
        while (call := self._inbox.get()) is not None:
            call()


class Lanes:
    """A thread for each lane of some executors."""

    def __init__(self, executors: Executors, clock: Callable[[], int]) -> None:
        self._executors, self._clock = executors, clock
        self._threads = [Calls(f"jgr-lane-{number}") for number in range(executors.lanes)]
        self._stopping = False

    async def start(self, progress: Progress) -> None:
        """Start the threads, and warm up in the first one, which calls `progress` too. Raises what that raises;
        `stop` ends it after its current step."""
        for thread in self._threads:
            thread.start()
            thread.call(self._executors.bind)
        ended: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self._threads[0].call(partial(self._warm_up, progress, ended))
        if error := await ended:
            raise error

    def run(self, start: Start, work: Any, done: Callable[[Run], None]) -> None:
        """Queue a run on its lane; `done` is called on the event loop."""
        self._threads[start.lane].call(partial(self._run, start, work, done))

    def stop(self) -> None:
        """End the threads once what was queued is done."""
        self._stopping = True
        for thread in self._threads:
            thread.stop()

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads' end, for each so long. False where the device still holds one."""
        return all([thread.join(timeout_s) for thread in self._threads])

    def _run(self, start: Start, work: Any, done: Callable[[Run], None]) -> None:
        start_ns = self._clock()
        outcomes: Sequence[Any] = ()
        error: Exception | None = None
        try:
            outcomes = self._executors.collect(start, self._executors.launch(start, work))
            if len(outcomes) != len(start.work):
                raise RuntimeError(f"the executor gave {len(outcomes)} outcomes for {len(start.work)} works")
        except Exception as cause:
            outcomes, error = (), cause
        self._threads[start.lane].post(partial(done, Run(outcomes, error, start_ns, self._clock())))

    def _warm_up(self, progress: Progress, ended: asyncio.Future[Exception | None]) -> None:
        def step(done: int, total: int, label: str) -> None:
            if self._stopping:
                raise InterruptedError("the warm-up was interrupted")
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
