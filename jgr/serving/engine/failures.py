# SPDX-License-Identifier: Apache-2.0
"""What is said of a run that failed: to the log, and to the requests that were in it."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

from jgr.fields import UserError
from jgr.serving.errors import RETRY_AFTER_S, RequestError

QUIET_NS = 5_000_000_000
"""Between two lines of the log about the same that is not there, such as a dead shard: it fails many runs alike."""
MOST_KINDS = 8
"""So many different lines there are in that time."""

_log = logging.getLogger(__name__)


class Failures:
    """Tells of the failed runs of one engine. clock: in ns.

    A UserError says that what the model needs is not there, which is nobody's fault here and may be over soon. Anything
    else is a fault: a traceback each.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock, self._since_ns, self._untold = clock, -QUIET_NS, 0
        self._told: set[str] = set()  # since then, without their numbers, which are those of rows

    def tell(self, error: Exception, request_ids: str) -> None:
        """Log a failed run of these requests."""
        if not isinstance(error, UserError):
            _log.error("the executor failed; requests: %s", request_ids, exc_info=error)
            return
        now_ns, kind = self._clock(), re.sub(r"\d+", "", str(error))
        if now_ns - self._since_ns >= QUIET_NS:
            self._since_ns, self._told = now_ns, set()
        if kind in self._told or len(self._told) == MOST_KINDS:
            self._untold += 1
            return
        self._told.add(kind)
        more = f"; {self._untold} runs before it failed as well" if self._untold else ""
        _log.error("what a run needs is not there: %s; requests: %s%s", error, request_ids, more)
        self._untold = 0


def answer(error: Exception) -> RequestError:
    """What a request is told whose run failed."""
    if isinstance(error, UserError):
        said = "what the model reads is not there now; see the server's log"
        return RequestError("unavailable", said, retry_after_s=RETRY_AFTER_S)
    return RequestError("internal", "the model failed; see the server's log")


def late(deadline_ns: int | None, now_ns: int) -> RequestError:
    """What a request is told that the policy has given up: since no answer comes in time, or since it waited for too
    long, which with the order codel needs no deadline."""
    passed = deadline_ns is not None and deadline_ns <= now_ns
    return RequestError(
        "deadline_exceeded", "the deadline has passed" if passed else "it has waited for too long"
    )
