# SPDX-License-Identifier: Apache-2.0
"""The parts of a measured fleet: those of `jgr cluster`, each with a method more, by which runs follow each other.

The caches are emptied, the rule is another one, reports are as old as they shall be.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID

from benchmarks.fleet_clock import Counts, clocked
from jgr.config import Config
from jgr.serving.cluster.attempts import SENDER
from jgr.serving.cluster.front import Front
from jgr.serving.cluster.hints import Hint
from jgr.serving.cluster.replica import Replica, Source
from jgr.serving.cluster.router import FleetRouter
from jgr.serving.policies.routing import Ask, Router
from jgr.serving.policies.routing_terms import Rule
from jgr.serving.versions.sources import Loaded


class ClockedReplica(Replica):
    """A replica that waits, and that begins anew when it is told."""

    def load(self, source: Source, configs: Sequence[Config], places: Sequence[str] = ()) -> list[Loaded]:
        self._report_s, self._told, self._told_s = 0.0, dict[str, Any](), 0.0
        loaded = super().load(source, configs, places)
        return [one._replace(engine=clocked(one.engine), load=None) for one in loaded]

    async def begin(self, report_s: float) -> None:
        """The caches are empty, and reports are told so often from now on."""
        for deployment in self.models.deployments:
            assert deployment.engine.meta is not None
            deployment.engine.meta.clear()
        self._report_s, self._told_s = report_s, 0.0

    async def counts(self) -> Counts:
        found = Counts()
        for deployment in self.models.deployments:
            found = found.plus(deployment.engine.served.executors.counts)
        return found

    async def record_routing_stats(self) -> dict[str, Any]:
        """The last report again until the next one is due: Ray tells only what has changed."""
        now_s = time.monotonic()
        if now_s - self._told_s >= self._report_s:
            self._told, self._told_s = await super().record_routing_stats(), now_s
        return self._told


class MeasuredRouter(FleetRouter):
    """Sums up what it predicts to be in flight at each replica, in token seconds."""

    def initialize_state(self, **settings: Any) -> None:
        super().initialize_state(**{**settings, "rule": BEGUN.get("rule", settings["rule"])})
        self._bits = settings["bits"]
        self.flown: dict[str, float] = {}
        self._flying: dict[tuple[str, str], tuple[int, float]] = {}
        ROUTERS.append(self)

    def begin(self, rule: Rule) -> None:
        """Know nothing, and route by this rule from now on."""
        nodes = self._policy.nodes
        self._policy = Router(SENDER, rule, self._bits)
        self._policy.become(nodes)
        self._heard.clear()

    def _send(self, hint: Hint, ask: Ask, name: str, now_ns: int) -> int:
        work = super()._send(hint, ask, name, now_ns)
        self._flying.setdefault((ask.id, name), (work, time.monotonic()))
        return work

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        request_id = pending_request.metadata.internal_request_id
        for key in [key for key in self._flying if key[0] == request_id and key[1] != replica_id.unique_id]:
            del self._flying[key]
        super().on_request_routed(pending_request, replica_id, result)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        super().on_request_completed(replica_id, internal_request_id)
        name = replica_id.unique_id
        work, begun_s = self._flying.pop((internal_request_id, name), (0, 0.0))
        self.flown[name] = self.flown.get(name, 0.0) + work * (time.monotonic() - begun_s)


ROUTERS: list[MeasuredRouter] = []
"""Those of this process."""
BEGUN: dict[str, Rule] = {}
"""The `rule` that was begun last: Ray makes a process's router when it sends its first request, which may be later."""


_Base: Any = Front  # what Ray made of it: its `__init__` is asynchronous


class MeasuredFront(_Base):  # type: ignore[misc]
    """A front that tells of its router."""

    async def __init__(self, *given: Any) -> None:  # type: ignore[misc]
        await super().__init__(*given)

    async def begin(self, rule: Rule) -> None:
        BEGUN["rule"] = rule
        for router in ROUTERS:
            router.begin(rule)

    async def flown(self) -> dict[str, float]:
        """Token seconds that were predicted to be in flight, by replica; forgotten then."""
        found: dict[str, float] = {}
        for router in ROUTERS:
            for name, sum in router.flown.items():
                found[name] = found.get(name, 0.0) + sum
            router.flown = {}
        return found
