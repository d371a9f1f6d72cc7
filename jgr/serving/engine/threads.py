# SPDX-License-Identifier: Apache-2.0
"""The threads that talk to the device.

The one idea: calls go in through a queue and results come back as callbacks on the event loop, so nothing but
these threads ever waits for a device, and an executor, which has one of them, is never entered twice. They are daemons:
a device call cannot be interrupted, and must not keep a process alive whose time to drain ran out.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

from jgr.serving.engine.contract import Progress


class Calls:
    """A daemon thread that makes calls, first in first out, and tells the event loop what came of them."""

    def __init__(self, name: str) -> None:
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._loop: asyncio.AbstractEventLoop
        self._stopping = False

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
        self._stopping = True
        self._inbox.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end. False where the device still holds it."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        while (call := self._inbox.get()) is not None:
            call()

    async def warm_up(self, warm_up: Callable[[Progress], None], progress: Progress) -> None:
        """Call it in the thread, and `progress` too. Raises what it raises; `stop` ends it after its current step."""
        ended: asyncio.Future[Exception | None] = self._loop.create_future()
        self.call(partial(self._warm_up, warm_up, progress, ended))
        if error := await ended:
            raise error

    def _warm_up(
        self,
        warm_up: Callable[[Progress], None],
        progress: Progress,
        ended: asyncio.Future[Exception | None],
    ) -> None:
        def step(done: int, total: int, label: str) -> None:
            if self._stopping:
                raise InterruptedError("the warm-up was interrupted")
            progress(done, total, label)

        error: Exception | None = None
        try:
            warm_up(step)
        except Exception as cause:
            error = cause
        self.post(partial(_resolve, ended, error))


def _resolve(future: asyncio.Future[Exception | None], result: Exception | None) -> None:
    if not future.done():  # whoever waited may have been cancelled
        future.set_result(result)
