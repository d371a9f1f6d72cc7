# SPDX-License-Identifier: Apache-2.0
"""What the host needs for a request beside its runs: averages of what it needed lately.

A deadline is the client's, and the policy promises the end of the last run. Between them lie the answer's items, its
JSON, and the turns of the event loop; and before them the turn in which the request was read. A server whose host is
the bottleneck must know that, and must refuse what comes too late without translating it, which is most of its work: a
request like one whose job was refused is judged by that job.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from msgspec.structs import replace

from jgr.serving.api import RankRequest, Request
from jgr.serving.degrading import shrinks
from jgr.serving.engine.turns import Turns
from jgr.serving.errors import RequestError
from jgr.serving.policies.jobs import Job, Rejected
from jgr.serving.policies.policy import Policy

RATE = 1 / 16
"""The weight of one figure in an average."""
HINTS_YIELD = 4
"""Where more interactive requests wait than this, hints are refused."""
WAITS = 4
"""A request may wait for its turn for one part in so many of the time that it has."""
MOST_REFUSED = 64
"""So many sorts of refused requests are remembered."""


class Host:
    """after_ns: from the end of a request's last run to its encoded answer. lag_ns: how long a callback waits for its
    turn on the event loop. clock: nanoseconds that never go back."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self.after_ns = self.lag_ns = 0
        self.turns = Turns(clock)
        self._refused: dict[Hashable, _Refused] = {}  # the last one of each sort, since a run ended

    def answered(self, ns: int) -> None:
        self.after_ns += round(RATE * (ns - self.after_ns))

    def turned(self, ns: int) -> None:
        self.lag_ns += round(RATE * (ns - self.lag_ns))

    @property
    def part_ns(self) -> int:
        """What a request needs of the host: it waits for the loop before it is read, and its answer waits again."""
        return self.after_ns + 2 * self.lag_ns

    def reserve_ns(self, left_ns: int) -> int:
        """What a deadline must leave for the host, of the time until it: never more than half of that."""
        return min(self.part_ns, left_ns // 2)

    def known_late(
        self,
        request: Request,
        policy: Policy[Any],
        arrival_ns: int,
        deadline_ns: int,
        now_ns: int,
        wait_ns: int = 0,
    ) -> Rejected | None:
        """How a request is refused that is known to be late before it is translated; None: it is not known.

        deadline_ns: when its last run must end. wait_ns: how long it waits for its turn; WAITS times as long must be
        left, so that its runs have room. Their time is not known yet, so the end of such a request is not predicted.
        """
        by_ns = deadline_ns - WAITS * wait_ns
        if by_ns <= now_ns:
            return Rejected("too_late", None if wait_ns else now_ns)
        before = self._refused.get(_alike(request))
        if before is None or shrinks(request) or not before.at_most(request):
            return None
        return policy.refuses(replace(before.job, arrival_ns=arrival_ns, deadline_ns=by_ns), now_ns)

    def refused(self, request: Request, job: Job) -> None:
        """The policy refused the job of a request."""
        if len(self._refused) < MOST_REFUSED:
            self._refused[_alike(request)] = _Refused(_sizes(request), job)

    def ran(self) -> None:
        """A run has ended: what is refused is found out anew, since requests of one size are not all alike."""
        self._refused.clear()


class _Refused(NamedTuple):
    sizes: tuple[int, int]
    job: Job

    def at_most(self, request: Request) -> bool:
        """Whether it was no larger than this one."""
        history, candidates = _sizes(request)
        return self.sizes[0] <= history and self.sizes[1] <= candidates


def _sizes(request: Request) -> tuple[int, int]:
    """Items of the history, and candidates, that a request names."""
    candidates = request.candidates if isinstance(request, RankRequest) else ()
    return len(request.history), 0 if candidates == "all" else len(candidates)


def _alike(request: Request) -> Hashable:
    """Requests with the same have the same order, and sizes that differ by less than a factor of two."""
    width = request.candidates == "all" if isinstance(request, RankRequest) else request.beam_width
    return type(request), request.priority, width, *(size.bit_length() for size in _sizes(request))


def refusal(
    verdict: Rejected,
    arrival_ns: int = 0,
    deadline_ns: int | None = None,
    host_ns: int = 0,
    given_ms: float | None = None,
) -> RequestError:
    """Why a job was not taken, where no size is to blame. deadline_ns: when its last run must end. host_ns: what it
    would have needed of the host. given_ms: its deadline, as its caller knows it or the server gives it."""
    if verdict.reason == "draining":
        return RequestError("unavailable", "the server is draining")
    if verdict.predicted_ns is None or deadline_ns is None or verdict.reason != "too_late":
        return RequestError("overloaded", "too many requests are waiting; try again later")
    late_s = max(0, verdict.predicted_ns - deadline_ns) / 1e9
    predicted_ms = math.ceil((verdict.predicted_ns + host_ns - arrival_ns) / 1e5) / 10
    why = (
        "would make others late, which were accepted before it"
        if verdict.for_others
        else "is past its deadline" + ("" if given_ms is None else f" of {round(given_ms, 2):g} ms")
    )
    return RequestError(
        "overloaded",
        f"the answer may take {predicted_ms} ms, which {why}",
        predicted_ms=predicted_ms,
        retry_after_s=max(1, math.ceil(late_s)),
    )
