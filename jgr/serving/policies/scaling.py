# SPDX-License-Identifier: Apache-2.0
"""How many replicas a fleet should have, by how long a request would wait there for its turn.

Requests in flight are no measure of that: twenty small ones may be done in a moment, and one large one may not. The
work of all replicas together stays the same where one comes or goes, so what another number of them would wait is known
before it is tried. One goes only where the others would still wait much less than they may; so what has gone is not
asked for again at once.

Pure: who asks says how often, and for how long the answer must be the same.
"""

from __future__ import annotations

from collections.abc import Sequence

CALM = 0.5
"""A replica goes where the others would wait at most so much of what they may."""


def wanted(replicas: int, waits_ms: Sequence[float], target_ms: float) -> int:
    """How many replicas there should be, at least 1.

    replicas: how many there are, those that start included; waits_ms: of each that has told, the wait that is predicted
    there; target_ms: how long it may be. One more is wanted for each time that the mean wait has the target in it.
    """
    replicas = max(1, replicas)
    total_ms = sum(waits_ms)
    wait_ms = total_ms / replicas
    if wait_ms > target_ms:
        return replicas + int(wait_ms // target_ms)
    if replicas > 1 and len(waits_ms) >= replicas and total_ms / (replicas - 1) <= CALM * target_ms:
        return replicas - 1
    return replicas
