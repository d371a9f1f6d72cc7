# SPDX-License-Identifier: Apache-2.0
"""One request at one replica or several: at another one where the first is lost, and at a second where it is silent.

All that a replica is asked for may be asked for twice, so the first answer counts, and what is still under way then is
cancelled. What the router of this process chose for an attempt is told to who waits for it by `ATTEMPTS`.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import os
import socket
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any
from weakref import WeakValueDictionary

from jgr.serving.cluster.hints import Hint
from jgr.serving.cluster.relay import Answered
from jgr.serving.cluster.ways import stamp
from jgr.serving.errors import RequestError
from jgr.serving.policies.hedging import Hedging

_log = logging.getLogger(__name__)

TRY_ELSEWHERE = (429, 500, 503)
"""The status of an answer that counts only where nobody else is asked any more."""
FAILED = 500
"""The status of an answer for which one other replica is asked, since the device of this one may be broken."""
UNWELL = (500, 504)
"""The status of answers that do not take a replica off the suspects: one whose device fails or hangs gives them too."""


class Attempt:
    """A request on its way to a replica. number: of the attempts at this request before. node: which replica the router
    has chosen; "": none yet. score: what that got. predicted_ns: how long it should take there, 0 where that is not
    known. sent_ns: since when. over: whether it has ended. on_end: what is called then, by the thread that ends it."""

    def __init__(self, sent_ns: int = 0, number: int = 0) -> None:
        self.node, self.score, self.predicted_ns = "", 0.0, 0.0
        self.sent_ns, self.number = sent_ns, number
        self.over = False
        self.on_end: Callable[[], object] | None = None

    def end(self) -> None:
        """Note that it has ended, however it did. Who sets `on_end` on another thread looks at `over` after that."""
        self.over = True
        if self.on_end is not None:
            self.on_end()


SENDER = f"{socket.gethostname()}:{os.getpid()}"
"""This process, as replicas name it in their reports."""
ATTEMPTS: WeakValueDictionary[str, Attempt] = WeakValueDictionary()
"""Those under way in this process, by the `attempt` of their hints."""
_numbers = itertools.count()


class Attempts:
    """Sends requests. send: to the replica that the router chooses for a hint; raises one of `lost` where the replica
    is gone. most: attempts of one request. nodes: the names of the replicas that are there. clock: nanoseconds that
    never go back."""

    def __init__(
        self,
        send: Callable[[Hint, Any], Coroutine[Any, Any, Answered]],
        lost: tuple[type[Exception], ...],
        most: int,
        hedging: Hedging,
        nodes: Callable[[], Collection[str]],
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._send, self._lost, self._most, self._nodes = send, lost, most, nodes
        self._hedging, self._clock = hedging, clock

    async def answer(self, hint: Hint, asked: Any, arrival_ns: int, until_ns: int | None) -> Answered:
        """The first answer. Raises RequestError where the time is over or all that were asked were lost, and what
        `send` raises besides."""
        self._hedging.came()
        request = _Request(hint, asked, arrival_ns)
        try:
            return await self._first(request, until_ns)
        finally:
            for task in request.running:
                task.cancel()

    async def _first(self, request: _Request, until_ns: int | None) -> Answered:
        refused: Answered | None = None
        failures = 0
        self._begin(request, self._hedging.left_out(self._clock()))
        while True:
            done = await self._wait(request, until_ns)
            for task in done:
                attempt = request.running.pop(task)
                try:
                    answered = task.result()
                except self._lost as error:
                    _log.warning("a replica was lost with a request (attempt %d): %s", request.begun, error)
                    self._hedging.lost(attempt.node)
                    continue
                self._heard(attempt, answered.status)
                if answered.status not in TRY_ELSEWHERE:
                    return answered
                refused, failures = answered, failures + (answered.status == FAILED)
            if not request.running:
                again = failures == 1 and request.begun < self._most and self._has_another(request)
                if refused is not None and not (refused.status == FAILED and again):
                    return refused
                if request.begun >= self._most:
                    raise RequestError("unavailable", "the replicas that were asked were lost; try again")
                self._begin(request, self._hedging.suspects)

    def _heard(self, attempt: Attempt, status: int) -> None:
        """A replica has answered."""
        now_ns = self._clock()
        if status not in UNWELL:
            self._hedging.answered(attempt.node, now_ns - attempt.sent_ns, attempt.predicted_ns, now_ns)
        elif attempt.node:
            self._hedging.late(attempt.node, attempt.sent_ns, now_ns)

    async def _wait(self, request: _Request, until_ns: int | None) -> set[asyncio.Task[Answered]]:
        """Until an attempt ends; another one may begin meanwhile. Raises RequestError where the time is over."""
        while True:
            times = [each for each in (self._look_ns(request), until_ns) if each is not None]
            done, _ = await asyncio.wait(
                request.running,
                timeout=max(0, min(times) - self._clock()) / 1e9 if times else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if done:
                return done
            now_ns, look_ns = self._clock(), self._look_ns(request)  # the router may have chosen meanwhile
            if until_ns is not None and now_ns >= until_ns:
                for attempt in request.running.values():
                    if attempt.node:
                        self._hedging.late(attempt.node, attempt.sent_ns, now_ns)
                raise RequestError("deadline_exceeded", "the deadline has passed")
            if look_ns is not None and now_ns >= look_ns:
                request.looked_ns = now_ns
                (attempt,) = request.running.values()
                if not attempt.node:
                    continue
                if not self._has_another(request):
                    self._hedging.late(attempt.node, attempt.sent_ns, now_ns)
                elif self._hedging.silent(attempt.node, attempt.sent_ns, now_ns):
                    _log.info("replica %s is silent: another one is asked too", attempt.node)
                    self._begin(request, self._hedging.suspects)

    def _has_another(self, request: _Request) -> bool:
        """Whether a replica was not tried: a silent or broken one that is asked again only has more to do."""
        tried = {attempt.node for attempt in request.attempts}
        return any(node not in tried for node in self._nodes())

    def _look_ns(self, request: _Request) -> int | None:
        """When the only attempt will have been silent for too long, again where nothing could be done then."""
        if len(request.running) != 1 or request.begun >= self._most:
            return None
        (attempt,) = request.running.values()
        wait_ns = self._hedging.wait_ns(attempt.predicted_ns)
        return None if wait_ns is None else max(attempt.sent_ns, request.looked_ns) + wait_ns

    def _begin(self, request: _Request, left_out: Sequence[str]) -> None:
        now_ns = self._clock()
        nodes = dict.fromkeys((*left_out, *(each.node for each in request.attempts)))
        tried = tuple(filter(None, nodes))
        name = str(next(_numbers))
        attempt = ATTEMPTS[name] = Attempt(now_ns, request.begun)
        hint = request.hint._replace(
            sender=SENDER,
            attempt=name,
            tried=tried,
            waited_ms=(now_ns - request.arrival_ns) / 1e6,
            sent=stamp(),
        )
        # Ray takes all calls in the context of a request for one; here each attempt has an end of its own.
        task = asyncio.create_task(self._send(hint, request.asked), context=contextvars.Context())
        request.running[task] = attempt
        request.attempts.append(attempt)


class _Request:
    """attempts: all that were begun; running: those that have not ended, the first one first. looked_ns: when it was
    last thought of sending it to another one."""

    def __init__(self, hint: Hint, asked: Any, arrival_ns: int) -> None:
        self.hint, self.asked, self.arrival_ns = hint, asked, arrival_ns
        self.running: dict[asyncio.Task[Answered], Attempt] = {}
        self.attempts: list[Attempt] = []
        self.looked_ns = 0

    @property
    def begun(self) -> int:
        return len(self.attempts)
