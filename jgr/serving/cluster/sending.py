# SPDX-License-Identifier: Apache-2.0
"""An attempt at a request, on its way from the front to a replica: counted, and a span of its own in traces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from jgr.serving.cluster.attempts import ATTEMPTS
from jgr.serving.cluster.hints import Hint
from jgr.serving.cluster.relay import Answered, Asked
from jgr.serving.cluster.series import Series
from jgr.serving.engine.tracing import Tracing

Send = Callable[[Hint, Asked], Coroutine[Any, Any, Answered]]


class Sending:
    """Sends attempts, which stand in ATTEMPTS. send: to the replica that the router chooses. traces: None: there are
    none."""

    def __init__(self, send: Send, series: Series, rule: str, traces: Tracing | None) -> None:
        self._send, self._series, self._rule, self._traces = send, series, rule, traces

    async def answer(self, hint: Hint, asked: Asked) -> Answered:
        """Send it: the answer, or the error, of `send`."""
        attempt = ATTEMPTS[hint.attempt]
        self._series.began(attempt.number)
        span = None
        if self._traces is not None and asked.method == "POST":
            span = self._traces.passed_on("route", asked.headers)
            asked = asked._replace(headers=span.headers)
        status, outcome = 0, "lost"
        try:
            answered = await self._send(hint, asked)
            status, outcome = answered.status, "answered"
            return answered
        except asyncio.CancelledError:
            outcome = "late"
            raise
        finally:
            attempt.end()
            self._series.ended(outcome)
            if span is not None:
                told = {
                    "jgr.replica": attempt.node,
                    "jgr.score": attempt.score,
                    "jgr.attempt": attempt.number,
                    "jgr.rule": self._rule,
                    "jgr.front": self._series.front,
                }
                span.end(told, status)
