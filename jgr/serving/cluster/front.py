# SPDX-License-Identifier: Apache-2.0
"""What stands between Ray's proxy and the replicas: it reads a request whole, and sends it to a replica, or to all.

A replica answers as `jgr serve` does, and its answer is passed on as it is. Where a replica dies with a request, or is
silent, the request is sent to another one, under the same id, as long as its deadline allows (`attempts`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Receive, Scope, Send

from jgr.config import Config
from jgr.logs import set_up_unless_done
from jgr.serving.cluster import ways
from jgr.serving.cluster.attempts import SENDER, Attempts
from jgr.serving.cluster.hints import USERS, glance, works
from jgr.serving.cluster.places import own_node, place
from jgr.serving.cluster.protocol import Incompatible, Spoken, received, require
from jgr.serving.cluster.relay import Answered, Asked, Uploads, head, read, refusal, reply
from jgr.serving.cluster.replicas import Replicas, begun, soon
from jgr.serving.cluster.router import SERIES
from jgr.serving.cluster.sending import Sending
from jgr.serving.cluster.ways import ARRIVED, Stamp
from jgr.serving.cluster.whole import Shared, best, erased, metrics, models, readiness, scraped_by
from jgr.serving.engine.tracing import tracing
from jgr.serving.errors import RequestError
from jgr.serving.http.bounds import READ_TIMEOUT_S, REQUEST_ID
from jgr.serving.http.cold import ADMIN_METHODS, ADMIN_PATHS, UPLOAD_PATH
from jgr.serving.http.connection import UPLOAD_TIMEOUT_S
from jgr.serving.http.front import below, own_path
from jgr.serving.http.keys import Keys
from jgr.serving.http.operations import open_paths
from jgr.serving.http.server import who
from jgr.serving.policies.hedging import Hedging
from jgr.serving.policies.window import HELD_NS, held_up

HEALTH, READY = ("/health/", "/v2/health/"), "/health/ready"
HEALTH_S = 0.5
"""So long all replicas have to say how they are: who asks may wait for a second alone, such as Kubernetes."""
NOT_SPOKEN = 1003
"""The code of a websocket that is closed since its data are of no use."""
CHANGE_S = 300.0
"""So long the first replica has to answer to a change: it reads a catalog that is uploaded, and Ray may have to start
another coordinator before."""
DRAIN_LOOK_S = 0.02
GRACE_S = 0.25
"""So long after a request's deadline the front still waits for what its replica says of that."""

_log = logging.getLogger(__name__)


@serve.ingress()
class Front:
    """The deployment that Ray's proxies send to.

    spoken: of who deploys. max_upload_bytes: of a catalog's body. replicas, rollouts: handles of the other deployments.
    """

    def __init__(
        self,
        spoken: Spoken,
        config: Config,
        max_upload_bytes: int,
        replicas: DeploymentHandle,
        rollouts: DeploymentHandle,
    ) -> None:
        set_up_unless_done()
        require(spoken)
        self._config, self._max_upload_bytes = config, max_upload_bytes
        self._replicas, self._rollouts = Replicas(begun(replicas)), begun(rollouts)
        own = serve.get_replica_context()
        # Not when it is asked for: to take a handle asks the head, as `begun` does.
        self._fronts = begun(serve.get_deployment_handle(own.deployment, own.app_name))
        self._keys, self._open = Keys(config.server, config.fleet.fronts), open_paths(config.server)
        traces = tracing(config.server, time.monotonic_ns, place(SENDER, own_node()))
        self._scrapes, self._uploads = Shared(), Uploads()
        self._default_ms = config.server.default_deadline_ms
        self._back = ways.Way()
        self._inside, self._draining = 0, False
        fleet = config.fleet
        self._wanted = fleet.min_replicas if fleet.max_replicas else fleet.replicas
        self._attempts = Attempts(
            Sending(self._replicas.answer, SERIES, fleet.routing, traces).answer,
            (RayActorError, RayServeException, Incompatible),
            fleet.attempts,
            Hedging(fleet.hedge if max(fleet.replicas, fleet.max_replicas) > 1 else 0),
            SERIES.nodes,
        )

    def __serve_build_asgi_app__(self) -> ASGIApp:
        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "websocket":  # nothing here speaks it: the proxy answers 403
                await send({"type": "websocket.close", "code": NOT_SPOKEN})
            else:
                await (self._http if scope["type"] == "http" else _lifespan)(scope, receive, send)

        return application  # a function: uvicorn takes a method for an application of ASGI 2

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._inside += 1
        try:
            await self._one(scope, receive, send)
        finally:
            self._inside -= 1

    async def _one(self, scope: Scope, receive: Receive, send: Send) -> None:
        timing, request_id = _Timing(), ""
        for name, value in scope["headers"]:
            if name == b"x-request-id" and REQUEST_ID.fullmatch(value):
                request_id = value.decode()
            elif name == ARRIVED:
                timing.read(value)
        request_id = request_id or os.urandom(16).hex()
        path = own_path(scope["path"], self._config.server.base_path)
        try:
            if self._draining:
                raise RequestError("unavailable", "the fleet is draining")
            tenant = self._charge(scope, path)
            upload = path == UPLOAD_PATH and scope["method"] == "POST"
            with self._uploads.one() if upload else nullcontext():
                # Of who may not ask no body is read: a replica refuses by the head alone.
                asked = head(scope) if tenant is None else await self._read(scope, receive, upload)
                headers = [each for each in asked.headers if each[0] not in (b"x-request-id", ARRIVED)]
                # A replica knows no base path.
                asked = asked._replace(
                    path=below(asked.path, self._config.server.base_path),
                    headers=[*headers, (b"x-request-id", request_id.encode())],
                )
                answered = await self._answer(path, asked, timing, tenant or "")
        except ConnectionError:
            return
        except RequestError as error:  # one that Ray brings from the coordinator is one too
            answered = refusal(error, request_id, path)
        except (RayError, RayServeException, TimeoutError) as error:
            _log.warning("%s: not all replicas answered: %s", path, error)
            answered = refusal(
                RequestError("unavailable", "not all replicas answered; try again"), request_id, path
            )
        headers = [each for each in answered.headers if each[0] != b"x-request-id"]  # which Ray's proxy sends
        if timing.tells:
            headers.append((ways.LEFT, ways.written(ways.stamp(), timing.told)))
        if self._draining:
            headers.append((b"connection", b"close"))
        await reply(send, answered._replace(headers=headers))

    async def _read(self, scope: Scope, receive: Receive, upload: bool) -> Asked:
        """The request, within the times of `jgr serve`: Ray's proxy waits for a body as long as the client likes."""
        if upload:
            return await read(scope, receive, self._max_upload_bytes, UPLOAD_TIMEOUT_S, READ_TIMEOUT_S)
        return await read(scope, receive, self._config.server.max_body_bytes, READ_TIMEOUT_S)

    async def _answer(self, path: str, asked: Asked, timing: _Timing, tenant: str) -> Answered:
        if changes(asked.method, path):
            return await self._change(path, asked)
        if asked.method == "DELETE" and path.startswith(USERS):
            return erased(await self._replicas.ask_all(asked))
        if asked.method in ("GET", "HEAD") and path.startswith(HEALTH):
            found = await self._replicas.answers(asked, HEALTH_S)
            return readiness(found, self._wanted) if path == READY else best(found)
        if asked.method in ("GET", "HEAD") and path == "/metrics":
            return await self._scrapes.answer(scraped_by(asked), partial(self._scrape, asked))
        if asked.method == "GET" and path == "/v1/models":
            found, about, last = await asyncio.gather(
                self._replicas.answers(asked), self._replicas.about_soon(), self._last()
            )
            return models(best(found), about, last, self._wanted)
        return await self._ask_one(path, asked, timing, tenant)

    async def _change(self, path: str, asked: Asked) -> Answered:
        """What the first replica answers to a change. Raises RequestError where that does not come in time."""
        response = self._rollouts.roll.remote(path, asked)
        try:
            async with asyncio.timeout(CHANGE_S):
                answered = received(Answered, await response)
        except TimeoutError:
            response.cancel()  # else one that waits for a coordinator would begin when nobody waits for it any more
            raise RequestError(
                "unavailable", "the change was not answered in time; /v1/models tells whether it goes on"
            ) from None
        # Where the replica tells of its own change stands nothing of the others'.
        told_at = f"{self._config.server.base_path}/v1/models".encode()
        return answered._replace(
            headers=[(name, told_at if name == b"location" else value) for name, value in answered.headers]
        )

    async def _scrape(self, asked: Asked) -> Answered:
        told, fronts = await asyncio.gather(self._replicas.metrics(asked), soon(self._fronts, "series"))
        return metrics(told, fronts or [SERIES.text()])

    async def _last(self) -> dict[str, Any] | None:
        """The last change of the fleet; None where the coordinator does not answer soon."""
        with suppress(RayError, RayServeException, TimeoutError):
            return next(iter(await soon(self._rollouts, "last")), None)
        return None

    async def _ask_one(self, path: str, asked: Asked, timing: _Timing, tenant: str) -> Answered:
        """One replica's answer; another's where it dies or is silent. Raises RequestError at once where an answer would
        be too late however soon a replica has it."""
        hint = glance(path, asked.body, tenant, profiled=self._config.fleet.routing == "hlem")
        left_ms = hint.left_ms or (self._default_ms if works(path) else None)
        hint, until_ns, most_ns = hint._replace(left_ms=left_ms), None, math.inf
        there_ns = time.monotonic_ns() - timing.arrival_ns
        if left_ms is not None:
            most_ns = left_ms * 1e6
            until_ns = timing.arrival_ns + round(most_ns + GRACE_S * 1e9)
            back_ns = self._back.mean_ns + timing.back_ns
            timing.told = float(held_up(timing.there_ns + back_ns, most_ns))
            ways.refuse_late(there_ns, back_ns, most_ns)
        answered = await self._attempts.answer(hint, asked, timing.arrival_ns, until_ns)
        back = ways.since_ns(Stamp(*answered.ended))
        self._back.took(back)
        way_ns = timing.there_ns + answered.came_ns + (back or 0) + timing.back_ns
        # Without a deadline only that nobody was held up is known.
        if left_ms is not None or way_ns <= HELD_NS:
            timing.told = float(held_up(way_ns, most_ns))
        return answered

    def _charge(self, scope: Scope, path: str) -> str | None:
        """Take a token of the caller's rate, which no replica does; returns what the names of the caller's users begin
        with, or None for who may not ask at all: a replica refuses these. Raises RequestError where the rate is used
        up."""
        if path in self._open:
            return ""
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        try:
            caller = who(self._keys, scope["method"], path)(given[-1] if given else b"")
        except RequestError:
            if changes(scope["method"], path):
                raise
            return None
        try:
            caller.charge(time.monotonic_ns())
        except RequestError:
            SERIES.refused()
            raise
        return caller.tenant

    async def check_health(self) -> None:
        """Ray asks every fleet.health_s. A front that can be asked is well; changed keys are read now."""
        self._keys.refresh()

    async def drain(self, timeout_s: float) -> int:
        """Refuse new requests, and wait until those that are here have their answers; how many have none in time."""
        self._draining = True
        until_s = time.monotonic() + timeout_s
        while self._inside and time.monotonic() < until_s:
            await asyncio.sleep(DRAIN_LOOK_S)
        return self._inside

    async def series(self) -> str:
        """This front's own series."""
        return SERIES.text()


class _Timing:
    """arrival_ns: when the request came to the fleet. there_ns: how long it was on its way here, without what its
    client takes to send the body. back_ns: how long its answer will be with Ray's proxy. tells: whether that has said
    so. told: whether the request was held up, which the proxy is to be told; see `ways.UNTOLD`."""

    def __init__(self) -> None:
        self.arrival_ns, self.there_ns, self.back_ns = time.monotonic_ns(), 0, 0.0
        self.told, self.tells = ways.UNTOLD, False

    def read(self, value: bytes) -> None:
        """Read what the proxy says."""
        arrived, self.back_ns, held_off = ways.read(value)
        self.there_ns, self.tells = ways.since_ns(arrived) or 0, True
        self.arrival_ns -= self.there_ns
        if held_off > 0:
            SERIES.held_off(held_off)


def changes(method: str, path: str) -> bool:
    """Whether a request changes what the fleet serves, which only an admin may."""
    return method in ADMIN_METHODS and path.startswith(ADMIN_PATHS)


async def _lifespan(scope: Scope, receive: Receive, send: Send) -> None:
    """Nothing is to be done at the start and the end; Ray asks."""
    while True:
        said = (await receive())["type"]
        await send({"type": f"{said}.complete"})
        if said == "lifespan.shutdown":
            return
