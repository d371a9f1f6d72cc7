# SPDX-License-Identifier: Apache-2.0
"""The peers' side of the conversation: a JSON object a line on stdin, one on stdout; nothing but the standard library.

The first line out says that the peer is ready and of which versions it is made. A call is timed here, where it is
made, so that neither the pipe nor JSON counts.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, TypeVar

T = TypeVar("T")
Message = dict[str, Any]


def timed(
    run: Callable[[], T], at_least_s: float, before: Callable[[], object] = lambda: None
) -> tuple[float, T]:
    """The median time in ms of calls that together take at_least_s, and what the last call gave; see harness.timed.

    before: runs before every call and does not count.
    """
    calls_ms: list[float] = []
    while True:
        before()
        start = time.perf_counter()
        result = run()
        calls_ms.append((time.perf_counter() - start) * 1e3)
        if sum(calls_ms) >= at_least_s * 1e3:
            return statistics.median(calls_ms), result


def number_type() -> str:
    """What the command line asks to compute in: "float32" or "bfloat16"."""
    return sys.argv[2] if len(sys.argv) > 2 else "float32"


def serve(load: Callable[[str], Callable[[Message], Message]], packages: tuple[str, ...]) -> None:
    """Load from the folder that the command line names, then answer until stdin ends.

    load: makes, from the folder, the function that answers a request.
    """
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not get between the replies
    answer = load(sys.argv[1])
    _say(replies, {"ready": {name: version(name) for name in packages}})
    for line in sys.stdin:
        _say(replies, answer(json.loads(line)))


def _say(replies: Any, message: Message) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()
