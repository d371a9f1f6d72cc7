# SPDX-License-Identifier: Apache-2.0
"""When a device counts as broken although its process lives: its runs fail, or one of them does not come back.

Neither mends itself: a program that fails on a device fails again, and a call that hangs holds its thread for good.
Who asks replaces the process, so a run that failed for its request's sake must not be told of here.

Pure: time is an argument, in ns.
"""

from __future__ import annotations

from collections.abc import Iterable

MOST_FAILED = 5
"""So many runs in a row fail on a device that is broken. Fewer may be of one request that nobody has thought of."""
LEAST_NS = 60_000_000_000
"""A run may take so long, whatever was predicted: another model may compile, and machines pause."""
TIMES = 20
"""The same as a multiple of what was predicted."""


def broken(failed: int, flights: Iterable[tuple[int, int]], now_ns: int) -> str:
    """Why a device counts as broken; "": it does not. failed: the runs that have failed since the last good one.
    flights: since when each run is in flight, and what it should take."""
    if failed >= MOST_FAILED:
        return f"{failed} runs in a row have failed"
    since_ns, needed_ns = now_ns, 0
    for at_ns, predicted_ns in flights:  # the lanes share the device, so the oldest may wait for all others
        since_ns, needed_ns = min(since_ns, at_ns), needed_ns + predicted_ns
    if now_ns - since_ns > max(LEAST_NS, TIMES * needed_ns):
        return f"a run has not come back for {(now_ns - since_ns) // 1_000_000_000} s"
    return ""
