# SPDX-License-Identifier: Apache-2.0
"""The one place through which every change of a fleet goes, and which a replica that starts asks what to serve."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from typing import Any

import msgspec
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from jgr.config import FleetConfig
from jgr.logs import set_up_unless_done
from jgr.serving.cluster.placements import Placements
from jgr.serving.cluster.protocol import Spoken, received, require
from jgr.serving.cluster.record import Record, States, latest, plain
from jgr.serving.cluster.relay import Answered, Asked, refusal
from jgr.serving.cluster.replicas import Replicas
from jgr.serving.cluster.rollout import Rollouts
from jgr.serving.errors import RequestError

COORDINATOR, REPLICA = "Coordinator", "Replica"
"""Names of deployments."""
LOOK_S = 0.2
FIND_S = 60.0
"""So long a coordinator that starts again looks for the replicas that serve already."""

_log = logging.getLogger(__name__)


class Coordinator:
    """The deployment, of one replica. source: the key of what is deployed. kept: catalogs of each model. fleet: how
    items are placed."""

    def __init__(
        self, spoken: Spoken, replicas: DeploymentHandle, source: str, kept: int, fleet: FleetConfig
    ) -> None:
        set_up_unless_done()
        require(spoken)
        self._replicas, self._source = Replicas(replicas), source
        self._rollouts = Rollouts(self._replicas, record=Record(source), most=kept)
        self._finding: asyncio.Task[None] | None = None
        self._placements = Placements(self._replicas, fleet)
        self._placing: asyncio.Task[None] | None = None

    async def reconfigure(self, user_config: Any) -> None:
        """Ray calls it at the start."""
        if self._placing is None and self._placements.wanted:
            self._placing = asyncio.create_task(self._placements.go_on())

    async def roll(self, path: str, asked: Asked) -> Answered:
        """See Rollouts; a refusal is an answer, since Ray logs what is raised as a fault of this process."""
        await self._found()
        asked = received(Asked, asked)
        try:
            return await self._rollouts.roll(path, asked)
        except RequestError as error:
            given = [value for name, value in asked.headers if name == b"x-request-id"]
            return refusal(error, given[-1].decode() if given else "", path)

    async def last(self) -> dict[str, Any]:
        """The last change, a `Rollout` as plain data."""
        plain: dict[str, Any] = msgspec.to_builtins(self._rollouts.last)
        return plain

    async def record(self, spoken: Spoken, source: str) -> Record:
        """What a replica of that source is to serve. An empty record: what is configured."""
        require(spoken)
        await self._found()
        return self._rollouts.record if source == self._source else Record(source)

    async def joins(self, spoken: Spoken, source: str, name: str, states: States) -> Record | None:
        """What the others serve, without the bodies, where the replica that has started serves that too; else None."""
        await self._found()
        require(spoken)
        if source != self._source:
            return Record(source)
        states = plain(states)
        return self._rollouts.record._replace(bodies={}) if self._rollouts.joins(name, states) else None

    async def _found(self) -> None:
        """Wait until it is known what an earlier coordinator kept. Raises what `_find` does; the next one who asks has
        it looked for again."""
        if self._finding is None or _failed(self._finding):
            # In no request's context: the calls of one whose caller leaves are cancelled, and others wait for this.
            self._finding = asyncio.create_task(self._find(), context=contextvars.Context())
        await asyncio.shield(self._finding)

    async def _find(self) -> None:
        """Raises the last error where replicas serve and none of them can be asked: to go on as if there were none
        would part the fleet."""
        waited_s = 0.0
        while True:
            try:
                if await asyncio.to_thread(_running):
                    await self._rollouts.resume(latest(await self._replicas.records(), self._source))
                return
            except (RayError, RayServeException, TimeoutError) as error:
                if waited_s >= FIND_S:
                    raise
                _log.info("no replica can be asked yet: %s", error)
            await asyncio.sleep(LOOK_S)
            waited_s += LOOK_S


def _failed(task: asyncio.Task[None]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _running() -> bool:
    """Whether a replica serves already."""
    application = serve.status().applications.get(serve.get_replica_context().app_name)
    deployment = None if application is None else application.deployments.get(REPLICA)
    return deployment is not None and deployment.replica_states.get("RUNNING", 0) > 0
