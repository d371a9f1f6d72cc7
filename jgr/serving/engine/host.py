# SPDX-License-Identifier: Apache-2.0
"""What the host needs for a request beside its runs: averages of what it needed lately.

A deadline is the client's, and the policy promises the end of the last run. Between them lie the answer's items, its
JSON, and the turns of the event loop; and before them the turn in which the request was read. A server whose host is
the bottleneck must know that, and must refuse what comes too late without translating it, which is most of its work.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from jgr.serving.api import RankRequest, Request
from jgr.serving.degrading import shrinks
from jgr.serving.engine.turns import Turns
from jgr.serving.errors import RequestError
from jgr.serving.policies.jobs import Rejected
from jgr.serving.prefill import Asked

RATE = 1 / 16
"""The weight of one figure in an average."""
WAITS = 4
"""A request may wait for its turn for one part in so many of the time that it has."""


class Host:
    """after_ns: from the end of a request's last run to its encoded answer. lag_ns: how long a callback waits for its
    turn on the event loop. clock: nanoseconds that never go back."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self.after_ns = self.lag_ns = 0
        self.turns = Turns(clock)
        self._hopeless: Hopeless | None = None

    def answered(self, ns: int) -> None:
        self.after_ns += round(RATE * (ns - self.after_ns))

    def turned(self, ns: int) -> None:
        self.lag_ns += round(RATE * (ns - self.lag_ns))

    def reserve_ns(self, left_ns: int) -> int:
        """What a deadline must leave for the host, of the time until it: never more than half of that. A request waits
        for the loop before it is read, and its answer waits again."""
        return min(self.after_ns + 2 * self.lag_ns, left_ns // 2)

    def known_late(self, request: Request, deadline_ns: int, now_ns: int, wait_ns: int) -> Rejected | None:
        """How a request is refused that is known to be late before it is translated; None: it is not known.

        deadline_ns: when its last run must end. wait_ns: how long it waits for its turn; WAITS times as long must be
        left, so that its runs have room. Their time is not known yet, so the end of such a request is not predicted.
        """
        left_ns = deadline_ns - now_ns - WAITS * wait_ns
        if left_ns <= 0:
            return Rejected("too_late", None if wait_ns else now_ns)
        before = self._hopeless
        if before is None or shrinks(request) or not before.holds(request, left_ns, now_ns):
            return None
        return Rejected("too_late", deadline_ns + before.late_ns)

    def refused(self, request: Request, left_ns: int, late_ns: int, now_ns: int) -> None:
        """The policy refused a request, which would have been late by so much."""
        self._hopeless = Hopeless(now_ns, size(request), left_ns, late_ns)

    def ran(self) -> None:
        """A run has ended, so what was refused may be accepted now."""
        self._hopeless = None


@dataclass(frozen=True)
class Hopeless:
    """A request that was refused: what is as large and has no more time is refused too, until a run ends.

    at_ns: when; left_ns: the time that it had; late_ns: what it lacked.
    """

    at_ns: int
    size: int
    left_ns: int
    late_ns: int

    def holds(self, request: Request, left_ns: int, now_ns: int) -> bool:
        return size(request) >= self.size and left_ns <= self.left_ns - (now_ns - self.at_ns)


def size(request: Asked) -> int:
    """Items that a request names."""
    candidates = request.candidates if isinstance(request, RankRequest) else ()
    return len(request.history) + (0 if candidates == "all" else len(candidates))


def refusal(
    verdict: Rejected, arrival_ns: int = 0, deadline_ns: int | None = None, after_ns: int = 0
) -> RequestError:
    """Why a job was not taken, where no size is to blame. after_ns: the host's time after its last run."""
    if verdict.reason == "draining":
        return RequestError("unavailable", "the server is draining")
    if verdict.predicted_ns is None or deadline_ns is None or verdict.reason != "too_late":
        return RequestError("overloaded", "too many requests are waiting; try again later")
    late_s = max(0, verdict.predicted_ns - deadline_ns) / 1e9
    predicted_ms = round((verdict.predicted_ns + after_ns - arrival_ns) / 1e6, 1)
    return RequestError(
        "overloaded",
        f"the answer would take {predicted_ms} ms, which is past the deadline or would make others late",
        predicted_ms=predicted_ms,
        retry_after_s=max(1, math.ceil(late_s)),
    )
