# SPDX-License-Identifier: Apache-2.0
"""The routing policy as the request router of Ray Serve, which calls it in each process that sends to replicas.

What Ray tells of requests' ends is told for refused attempts too, and not in order: that a replica has taken a request
is mostly told after its end. So bookings go by Ray's id of the request, and by the replica, and what has ended is not
booked again. Of a request that is given up before it is sent, Ray tells no end: the attempt itself does. Ray keeps no
score, so each replica is a rank of its own. It may ask for no request at all.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from functools import partial
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from jgr.serving.cluster.attempts import ATTEMPTS, SENDER
from jgr.serving.cluster.hearing import Hearing
from jgr.serving.cluster.hints import Hint
from jgr.serving.cluster.reports import ask_of
from jgr.serving.cluster.series import Series
from jgr.serving.policies.routing import Ask, Router

SERIES = Series(SENDER)
"""What the router of this process does."""
TRIES = 3
"""So many of the best replicas are tried before all are ranked anew."""
ENDED = 4096
"""So many of the last ends are remembered."""


class FleetRouter(RequestRouter):  # type: ignore[misc]
    """All is called on one event loop, that of Ray's router."""

    def initialize_state(self, **settings: Any) -> None:
        self._policy = Router(SENDER, **settings)
        self._rule = str(settings.get("rule", "joint"))
        self._hearing = Hearing(self._policy, SERIES)
        self._ended: OrderedDict[tuple[str, str], None] = (
            OrderedDict()
        )  # requests and replicas, the last one last

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        by_name = {replica.replica_id.unique_id: replica for replica in replicas}
        self._policy.become(by_name)
        SERIES.become(by_name)
        self._hearing.become(by_name)
        for name, replica in by_name.items():
            self._hearing.hear(name, replica.routing_stats)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._policy.become(name for name in self._policy.nodes if name != replica_id.unique_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        hint = _hint(pending_request)
        strangers = self._hearing.strangers
        if strangers and (known := by_name.keys() - strangers):
            by_name = {name: by_name[name] for name in known}
        if pending_request is None or (hint.to and hint.to not in by_name):
            return [[replica] for replica in candidate_replicas]
        if hint.to:
            return [[by_name[hint.to]]]
        if by_name.keys() != set(self._policy.nodes):
            self._policy.become(by_name)
        now_ns = time.monotonic_ns()
        ask = ask_of(hint, self._hearing.shape, pending_request.metadata.internal_request_id)
        best = self._policy.rank(ask, now_ns)[:TRIES]
        hint = hint._replace(expected=tuple(self._policy.expected(ask, best).items()))
        pending_request.args[0] = hint  # what Ray sends when one of them has been found
        for name in best:
            self._ended.pop((ask.id, name), None)  # that attempt was refused
        # Before it has arrived: what is chosen until then must know of it.
        self._send(hint, ask, best[0], now_ns)
        SERIES.decided((time.monotonic_ns() - now_ns) / 1e9)
        if (attempt := ATTEMPTS.get(hint.attempt)) is not None:
            attempt.score = self._policy.best_score
            # Ray may run its router on a thread of its own.
            loop = asyncio.get_running_loop()
            attempt.on_end = partial(loop.call_soon_threadsafe, self._attempt_ended, ask.id)
            if attempt.over:
                self._attempt_ended(ask.id)
        return [[by_name[name]] for name in best]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult
    ) -> None:
        hint, name = _hint(pending_request), replica_id.unique_id
        request_id = pending_request.metadata.internal_request_id
        at = self._policy.booked(request_id)
        if at is not None and at != name:  # it was not the first choice that took it
            if (request_id, name) in self._ended:
                self._policy.ended(request_id)
            else:
                self._send(hint, ask_of(hint, self._hearing.shape, request_id), name, time.monotonic_ns())
            SERIES.flies(at, self._policy.in_flight(at))
        if hint.attempt in ATTEMPTS:
            SERIES.routed(name, self._rule)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        name = replica_id.unique_id
        self._policy.ended(internal_request_id, name)
        SERIES.flies(name, self._policy.in_flight(name))
        self._ended[internal_request_id, name] = None
        if len(self._ended) > ENDED:
            self._ended.popitem(last=False)

    def _attempt_ended(self, request_id: str) -> None:
        """Nobody waits for the request any more, whether it was sent or not."""
        name = self._policy.booked(request_id)
        if name is not None:
            self._policy.ended(request_id)
            SERIES.flies(name, self._policy.in_flight(name))

    def _send(self, hint: Hint, ask: Ask, name: str, now_ns: int) -> int:
        """The request goes to that replica: the tokens that it should compute there."""
        work = self._policy.sent(ask, name, now_ns, dict(hint.expected).get(name))
        SERIES.flies(name, self._policy.in_flight(name))
        attempt = ATTEMPTS.get(hint.attempt)
        if attempt is not None:
            attempt.node, attempt.predicted_ns = name, self._policy.busy_ns(name)
        return work


def _hint(pending: PendingRequest | None) -> Hint:
    """The hint that a Front has put before the request."""
    first = pending.args[0] if pending is not None and pending.args else None
    return first if isinstance(first, Hint) else Hint()
