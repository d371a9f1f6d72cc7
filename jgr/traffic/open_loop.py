# SPDX-License-Identifier: Apache-2.0
"""An open-loop load client: requests are sent at their times, whether or not earlier ones were answered.

The one idea: latency counts from the time a request was *scheduled*, so that a server that stalls is charged for
everything that should have been sent meanwhile (no coordinated omission). A request that finds all connections busy
waits, and its wait counts. `began_s` is when the client turned to a request: how late that is, is the client's own
part of the latency.
"""

from __future__ import annotations

import asyncio
import gc
import select
import selectors
import ssl
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jgr.client.address import unreached
from jgr.traffic.http_client import DISCONNECTED, TIMEOUT, Connection, HttpConnection, Target, Verdict
from jgr.traffic.schedule import Float64, Int32, LoadError, Schedule

Progress = Callable[[int, int, str], None]
"""Called with (answered, all, "") about ten times a second."""

_BURST = 32  # requests that are sent before answers are read again
_PROGRESS_S = 0.1


@dataclass(frozen=True, eq=False)
class Results:
    """How the requests of a schedule ended, in its order; times in seconds from the start, [n] each.

    due_s: when a request was scheduled; began_s: when the client turned to it; sent_s: when it went out; end_s: when
    its answer was there. ended: [n] index into `verdicts`.
    """

    due_s: Float64
    began_s: Float64
    sent_s: Float64
    end_s: Float64
    ended: Int32
    verdicts: Sequence[Verdict]

    def __len__(self) -> int:
        return len(self.due_s)


async def drive(
    schedule: Schedule,
    wires: Sequence[bytes],
    connect: Callable[[], Awaitable[Connection]],
    *,
    max_connections: int,
    timeout_s: float,
    progress: Progress,
    start_s: float | None = None,
) -> Results:
    """Send every request at its time, and wait for all answers.

    wires: the bytes of each of the schedule's requests. timeout_s: how long a request may take from when it was sent,
    or a connection from when it was asked for. start_s: the loop's time that the schedule begins at; None: now.
    Connections are opened when needed, and kept.
    """
    loop = asyncio.get_running_loop()
    run = _Run(schedule, wires, connect, max_connections, timeout_s, progress, start_s)
    loop.set_exception_handler(run.on_defect)
    try:
        await run.finished
    finally:
        loop.set_exception_handler(None)
        run.close()
    return run.results()


class _Run:
    """The state of `drive`, all on one event loop."""

    def __init__(
        self,
        schedule: Schedule,
        wires: Sequence[bytes],
        connect: Callable[[], Awaitable[Connection]],
        max_connections: int,
        timeout_s: float,
        progress: Progress,
        start_s: float | None,
    ) -> None:
        n = len(schedule)
        self._loop = asyncio.get_running_loop()
        self._connect, self._max, self._timeout_s = connect, max_connections, timeout_s
        self._progress, self._shown_s = progress, 0.0
        self._wires, self._which = wires, schedule.which.tolist()
        self._due: list[float] = schedule.at_s.tolist()
        self._began, self._sent, self._end = [0.0] * n, [0.0] * n, [0.0] * n
        self._verdicts: list[Verdict | None] = [None] * n
        self._next = self._answered = self._connections = 0
        self._idle: list[Connection] = []
        self._busy: dict[int, Connection] = {}
        self._waiting: deque[int] = deque()
        self._sent_order: deque[int] = deque()  # equal timeouts: those that were sent first end first
        self._watch: asyncio.TimerHandle | None = None
        self._opening: set[asyncio.Task[None]] = set()
        self.finished: asyncio.Future[None] = self._loop.create_future()
        self._start_s = self._loop.time() if start_s is None else start_s
        if n == 0:
            self._finish()
        self._tick()

    def _now(self) -> float:
        return self._loop.time() - self._start_s

    def _tick(self) -> None:
        """Begin what is due, and come back for the next."""
        due, n = self._due, len(self._due)
        for _ in range(_BURST):
            if self._next == n:
                return
            now = self._now()
            if due[self._next] > now:
                self._loop.call_at(self._start_s + due[self._next], self._tick)
                return
            self._began[self._next] = now
            self._waiting.append(self._next)
            self._next += 1
            self._serve_waiting()
        self._loop.call_soon(self._tick)

    def _serve_waiting(self) -> None:
        """Send the requests that wait, as far as there are connections, and open one for each other."""
        while self._waiting and self._idle:
            connection = self._idle.pop()
            if connection.usable:
                self._send(self._waiting.popleft(), connection)
            else:
                self._connections -= 1
        while len(self._opening) < len(self._waiting) and self._connections < self._max:
            self._connections += 1
            task = self._loop.create_task(self._open())
            self._opening.add(task)
            task.add_done_callback(self._opened)

    async def _open(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = await self._connect()
        except (TimeoutError, OSError) as error:
            self._connections -= 1
            if self._waiting:
                verdict = TIMEOUT if isinstance(error, TimeoutError) else DISCONNECTED
                request = self._waiting.popleft()
                self._sent[request] = self._now()
                self._record(request, verdict)
        else:
            self._idle.append(connection)

    def _opened(self, task: asyncio.Task[None]) -> None:
        self._opening.discard(task)
        if not task.cancelled():
            if error := task.exception():
                self._fail(error)
            self._serve_waiting()

    def _send(self, request: int, connection: Connection) -> None:
        self._sent[request] = self._now()
        self._busy[request] = connection
        self._sent_order.append(request)
        if self._watch is None:
            self._watch = self._loop.call_later(self._timeout_s, self._expire)
        connection.send(
            self._wires[self._which[request]], lambda verdict: self._on_end(request, connection, verdict)
        )

    def _on_end(self, request: int, connection: Connection, verdict: Verdict) -> None:
        del self._busy[request]
        if connection.usable:
            self._idle.append(connection)
        else:
            self._connections -= 1
        self._record(request, verdict)
        if self._waiting:
            self._serve_waiting()

    def _expire(self) -> None:
        """End the requests that were sent too long ago; come back for the oldest of the others."""
        now, self._watch = self._now(), None
        while self._sent_order:
            request = self._sent_order[0]
            if self._verdicts[request] is None:
                if self._sent[request] + self._timeout_s > now:
                    at_s = self._start_s + self._sent[request] + self._timeout_s
                    self._watch = self._loop.call_at(at_s, self._expire)
                    return
                connection = self._busy[request]
                connection.close()
                self._on_end(request, connection, TIMEOUT)
            self._sent_order.popleft()

    def _record(self, request: int, verdict: Verdict) -> None:
        now = self._end[request] = self._now()
        self._verdicts[request] = verdict
        self._answered += 1
        if now >= self._shown_s + _PROGRESS_S:
            self._shown_s = now
            self._progress(self._answered, len(self._due), "")
        if self._answered == len(self._due):
            self._finish()

    def _finish(self) -> None:
        self._progress(self._answered, len(self._due), "")
        if not self.finished.done():
            self.finished.set_result(None)

    def on_defect(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """End the run with the error of a callback: what is wrong in the client is no verdict on the server."""
        error = context.get("exception")
        if error is None:
            loop.default_exception_handler(context)
        else:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self.finished.done():
            self.finished.set_exception(error)

    def close(self) -> None:
        """Close all connections, and wait for nothing."""
        if self._watch is not None:
            self._watch.cancel()
        for task in self._opening:
            task.cancel()
        for connection in [*self._idle, *self._busy.values()]:
            connection.close()

    def results(self) -> Results:
        kinds = list(dict.fromkeys(verdict for verdict in self._verdicts if verdict is not None))
        number = {verdict: index for index, verdict in enumerate(kinds)}
        ended = np.array([number[verdict] for verdict in self._verdicts if verdict is not None], np.int32)
        due_s, began_s, sent_s, end_s = np.array([self._due, self._began, self._sent, self._end], np.float64)
        return Results(due_s, began_s, sent_s, end_s, ended, kinds)


class _PreciseSelector(selectors.DefaultSelector):
    """Waits to the microsecond: epoll alone counts in milliseconds, which would make every request a little late."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and 0 < timeout and hasattr(self, "fileno"):
            select.select([self.fileno()], [], [], timeout)
            timeout = 0
        return super().select(timeout)


def new_loop() -> asyncio.AbstractEventLoop:
    """An event loop with exact timers. Its clock is time.monotonic, which all processes of a machine share."""
    return asyncio.SelectorEventLoop(_PreciseSelector())


async def reach(target: Target, timeout_s: float) -> None:
    """Open a connection, and close it. Raises LoadError if the server cannot be reached."""
    try:
        async with asyncio.timeout(timeout_s):
            (await HttpConnection.open(target)).close()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        where = f"{target.host} port {target.port}"
        if isinstance(error, ssl.SSLCertVerificationError):
            raise LoadError(
                f"{where}: certificate verify failed: {error.verify_message}; --ca_file may name its authority"
            ) from None
        raise LoadError(unreached(where, reason)) from None


def run(
    schedule: Schedule,
    target: Target,
    *,
    max_connections: int,
    timeout_s: float,
    progress: Progress,
    start: Callable[[], float] = time.monotonic,
) -> Results:
    """Run `drive` against a server, on a new event loop. Raises LoadError if the server cannot be reached at all.

    start: called once all is ready to be sent; tells the time.monotonic() at which the schedule begins.
    """

    async def main() -> Results:
        await reach(target, timeout_s)
        wires = [target.render(request) for request in schedule.requests]

        def connect() -> Awaitable[HttpConnection]:
            return HttpConnection.open(target)

        return await drive(
            schedule,
            wires,
            connect,
            max_connections=max_connections,
            timeout_s=timeout_s,
            progress=progress,
            start_s=start(),
        )

    # A full round of the garbage collector over all that was there before would make requests late.
    gc.freeze()
    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            return runner.run(main())
    finally:
        gc.unfreeze()
