# SPDX-License-Identifier: Apache-2.0
"""What the live drivers share: the clock, the futures that callers wait for, and the turns in which a policy plans.

The one idea: the event loop decides, by a pure policy, and other threads wait for the device. A driver does what its
policy plans once per turn of the loop, so that requests that arrived together travel together, and again when time
alone changes the plan. All state belongs to the loop.

Invariants (of every driver's `check`): a ticket exists exactly for each live job, and its future is pending; nothing
accepted is lost: every future ends with an Answer, a RequestError or ClientGone.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

from jgr.serving.api import Answer, Request, RequestError
from jgr.serving.engine.contract import ClientGone, Progress, Status
from jgr.serving.engine.metrics import Metrics
from jgr.serving.policies.batching import Reason

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class BaseTicket:
    """A request on its way. Times are the driver's clock, in ns."""

    job_id: int
    request_id: str
    answer: asyncio.Future[Answer]
    arrival_ns: int
    submitted_ns: int


T = TypeVar("T", bound=BaseTicket)


class Policy(Protocol):
    """What a driver asks of its policy besides plans; see `policies.batching` and `policies.orchestration`."""

    @property
    def queued(self) -> int: ...

    @property
    def full(self) -> bool: ...

    @property
    def in_flight(self) -> int: ...

    def cancel(self, job_id: int, now_ns: int) -> bool: ...

    def next_wakeup_ns(self) -> int | None: ...

    def drain(self) -> None: ...


class Driver(ABC, Generic[T]):
    """See jgr.serving.engine.contract.AnyEngine for the public methods. clock: nanoseconds that never go back."""

    def __init__(self, metrics: Metrics, clock: Callable[[], int], default_deadline_ms: float | None) -> None:
        self.metrics = metrics
        self.clock = clock
        self.status: Status = "starting"
        self._default_deadline_ms = default_deadline_ms
        self._tickets: dict[int, T] = {}
        self._job_ids = itertools.count()
        self._loop: asyncio.AbstractEventLoop
        self._pump_due = False
        self._wakeup: tuple[int, asyncio.TimerHandle] | None = None
        self._drained: asyncio.Future[None] | None = None

    @property
    @abstractmethod
    def _policy(self) -> Policy: ...

    @abstractmethod
    async def _warm_up(self, progress: Progress) -> None:
        """Start the threads and compile."""

    @abstractmethod
    def _do_planned(self, now_ns: int) -> None:
        """Start what the policy plans now, and `_expire` what it gives up."""

    @abstractmethod
    def _stop(self) -> None:
        """Let the threads end. Called once or more often, after the last answer."""

    @abstractmethod
    def submit(self, request: Request, request_id: str = "", arrival_ns: int | None = None) -> T:
        """See AnyEngine."""

    @property
    def queued(self) -> int:
        """Requests waiting for the device."""
        return self._policy.queued

    async def start(self, progress: Progress = lambda done, total, label: None) -> None:
        """Compile; `progress` is called in another thread. Raises what warm-up raises."""
        self._loop = asyncio.get_running_loop()
        try:
            await self._warm_up(progress)
        except Exception:
            if self.status == "draining":
                return
            self.status = "failed"
            raise
        if self.status == "starting":
            self.status = "ready"

    def cancel(self, ticket: T) -> None:
        """Nobody waits any more: queued work never runs. Does nothing where the ticket has already ended."""
        if self._policy.cancel(ticket.job_id, self.clock()):
            self.metrics.cancelled.inc()
            self._end([ticket.job_id], ClientGone)

    async def answer(self, request: Request, request_id: str = "") -> Answer:
        """Submit and wait. RequestError as in `submit` and for failures; a cancelled caller cancels it."""
        ticket = self.submit(request, request_id)
        try:
            return await ticket.answer
        finally:
            self.cancel(ticket)

    async def drain(self, timeout_s: float | None) -> bool:
        """Refuse new work and finish what was accepted. False: time ran out, and the rest got errors.

        None: there is no limit. An engine that nobody else holds is freed afterwards, its device memory too.
        """
        self.status = "draining"
        self._policy.drain()
        self._pump()
        if self._live() or self._policy.in_flight:
            self._drained = self._loop.create_future()
            await asyncio.wait([self._drained], timeout=timeout_s)
        left = self._live()
        for job_id in left:
            self._policy.cancel(job_id, self.clock())
        self._end(left, partial(RequestError, "unavailable", "the server stopped before it had the answer"))
        self._stop()
        if self._wakeup is not None:
            self._wakeup[1].cancel()  # the loop would hold the engine until the last deadline has passed
            self._wakeup = None
        return not self._policy.in_flight

    def _admit(self, request: Request, arrival_ns: int | None) -> tuple[int, int | None]:
        """When the request came in and its deadline, on the clock; RequestError where nothing is taken."""
        if self.status != "ready":
            raise RequestError("unavailable", f"the server is {self.status}")
        if self._policy.full:
            raise refusal("queue_full")  # before it is translated, which costs the loop milliseconds
        arrival_ns = self.clock() if arrival_ns is None else arrival_ns
        deadline_ms = request.deadline_ms or self._default_deadline_ms
        return arrival_ns, None if deadline_ms is None else arrival_ns + round(deadline_ms * 1e6)

    def _live(self) -> list[int]:
        """Jobs that have not ended."""
        return list(self._tickets)

    def _pump_soon(self) -> None:
        if not self._pump_due:
            self._pump_due = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Do what the policy plans now, and wake up when time alone changes the plan."""
        self._pump_due = False
        now_ns = self.clock()
        self._do_planned(now_ns)
        wakeup_ns = self._policy.next_wakeup_ns()
        if self._wakeup is not None and self._wakeup[0] != wakeup_ns:
            self._wakeup[1].cancel()
            self._wakeup = None
        if self._wakeup is None and wakeup_ns is not None:
            delay_s = max(0, wakeup_ns - now_ns) / 1e9
            self._wakeup = (wakeup_ns, self._loop.call_later(delay_s, self._wake))

    def _wake(self) -> None:
        self._wakeup = None
        self._pump()

    def _fail(self, job_ids: Sequence[int], error: Exception) -> None:
        """A run broke: one traceback in the log, an error for each of its requests, and the engine goes on."""
        self.metrics.executor_failures.inc()
        waited = [job_id for job_id in job_ids if job_id in self._tickets]
        request_ids = ", ".join(self._tickets[job_id].request_id for job_id in waited)
        _log.error("the executor failed; requests: %s", request_ids, exc_info=error)
        self._end(job_ids, partial(RequestError, "internal", "the model failed; see the server's log"))

    def _expire(self, job_ids: Sequence[int]) -> None:
        if job_ids:
            self.metrics.deadline_expired.inc(len(job_ids))
            self._end(job_ids, partial(RequestError, "deadline_exceeded", "the deadline has passed"))

    def _end(self, job_ids: Sequence[int], error: Callable[[], Exception]) -> None:
        """Live requests end without an answer, each with an error of its own."""
        for job_id in job_ids:
            answer = self._close(job_id)
            if answer is not None and not answer.done():
                answer.set_exception(error())
        self._check_drained()

    def _close(self, job_id: int) -> asyncio.Future[Answer] | None:
        """The job has ended; what its caller waits for, if there is one."""
        return self._tickets.pop(job_id).answer

    def _check_drained(self) -> None:
        if self._drained and not (self._drained.done() or self._live() or self._policy.in_flight):
            self._drained.set_result(None)


def refusal(reason: Reason) -> RequestError:
    """Why a job was not taken, where no size is to blame."""
    if reason == "draining":
        return RequestError("unavailable", "the server is draining")
    return RequestError("overloaded", "too many requests are waiting; try again later")
