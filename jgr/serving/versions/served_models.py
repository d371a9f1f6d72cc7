# SPDX-License-Identifier: Apache-2.0
"""The models of one server: which one a request means, and what is done to all of them.

The one idea: models share a process and its cache memory. Each is a deployment with an engine, a catalog, threads, a
share of the cache memory, and series of its own; here they only have names. A request names one, or takes the first
that serves its kind.

What takes memory and time is done to one after the other: the first warm-up, and the reloads of a signal.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from functools import partial

from jgr.fields import distinct
from jgr.serving.api import ModelInfo
from jgr.serving.engine import metrics
from jgr.serving.engine.contract import Progress, Status
from jgr.serving.engine.engine import AnyEngine
from jgr.serving.engine.turns import Inside
from jgr.serving.errors import RequestError, invalid, quoted
from jgr.serving.policies.jobs import Kind
from jgr.serving.versions.deployment import Deployment

_log = logging.getLogger(__name__)


class Models:
    """All models of a server, by their names. All state belongs to the event loop.

    deployments: at least one, in the configured order. draining: whether the server is about to end. Raises ConfigError
    where two models have the same name.
    """

    def __init__(self, deployments: Sequence[Deployment]) -> None:
        distinct("model.name", [deployment.name for deployment in deployments])
        self.deployments = tuple(deployments)
        self.draining = False
        self.reranking = Inside()
        """The calls whose second half is still owed: a stop accepts it."""
        self._by_name = {deployment.name: deployment for deployment in deployments}
        self._reloads: asyncio.Task[None] | None = None
        self._reload_again = False
        self.chosen: dict[tuple[str | None, Kind], AnyEngine] = {}
        """What `engine` has returned, until any deployment has another engine."""
        for deployment in deployments:
            deployment.swapped.append(self.chosen.clear)

    @property
    def status(self) -> Status:
        """The status of the first model that is not ready; "ready" where all are."""
        return next((d.status for d in self.deployments if d.status != "ready"), "ready")

    @property
    def broken(self) -> str:
        """Why the server is to be started anew, as in "broken: model 'm': 5 runs in a row have failed"; "" where it is
        not."""
        found = next((d for d in self.deployments if d.broken), None)
        return "" if found is None else f"broken: model {found.name!r}: {found.broken}"

    @property
    def waiting(self) -> str:
        """Why the server is not ready, as in "starting: 3 of 12 shapes are compiled"; "" where it is."""
        late = next((d for d in self.deployments if d.status != "ready"), None)
        if late is None:
            return self.broken
        named = f"model {late.name!r}: " if len(self.deployments) > 1 else ""
        return (
            f"{late.status}: {named}{late.warming}"
            if late.status == "starting" and late.warming
            else late.status
        )

    @property
    def infos(self) -> list[ModelInfo]:
        return [deployment.info for deployment in self.deployments]

    def engine(self, model: str | None, kind: Kind) -> AnyEngine:
        """The engine for a request that names `model`; None: the first that serves the kind.

        RequestError where there is no such model, or it does not serve the kind.
        """
        if model is None:
            served = (one.engine for one in self.deployments if serves(one.engine.info, kind))
            engine = next(served, None)
            if engine is None:
                raise invalid("model", f"no model of this server serves {kind}")
        else:
            engine = self.find(model).engine
            if not serves(engine.info, kind):
                others = [repr(info.id) for info in self.infos if serves(info, kind)]
                hint = f"; {', '.join(others)} can be asked" if others else ""
                raise invalid("model", f"model {engine.info.id!r} does not serve {kind}{hint}")
        self.chosen[model, kind] = engine
        return engine

    def hinted(self, model: str | None) -> AnyEngine:
        """The engine for a hint that names `model`; None: the first that ranks, else the first.

        RequestError where there is no such model.
        """
        if model is not None:
            return self.find(model).engine
        engines = [deployment.engine for deployment in self.deployments]
        return next((engine for engine in engines if serves(engine.info, "rank")), engines[0])

    def find(self, model: str) -> Deployment:
        """The deployment whose name or exact version `model` is. Raises RequestError where there is none."""
        found = self._by_name.get(model)
        if found is not None:
            return found
        for deployment in self.deployments:
            if deployment.engine.info.version == model:
                return deployment
        there = "; ".join(f"there is {info.id!r}, now {info.version!r}" for info in self.infos)
        raise RequestError("not_found", f"there is no model {quoted(model)}; {there}", "model")

    def choose(self, model: str | None) -> Deployment:
        """The deployment that `model` names, see `find`; None: the only one.

        Raises RequestError where there is none of that name, or where several are there to choose from.
        """
        if model is not None:
            return self.find(model)
        if len(self.deployments) > 1:
            names = ", ".join(map(repr, self._by_name))
            raise invalid("model", f"this server has several models: add ?model= with one of {names}")
        return self.deployments[0]

    def forget(self, user_id: str, tenant: str = "") -> int:
        """Erase the cache entries of a tenant's user in every model; how many there were."""
        return sum(deployment.forget(user_id, tenant) for deployment in self.deployments)

    def render_metrics(self) -> bytes:
        """The series of all models as text of the type metrics.CONTENT_TYPE."""
        return metrics.render({deployment.name: deployment.metrics for deployment in self.deployments})

    async def start(self, progress: Progress) -> None:
        """Compile one model after the other; `progress` is called in their threads. Raises what a warm-up raises.

        A model serves from the moment it is compiled.
        """
        several = len(self.deployments) > 1
        for deployment in self.deployments:
            if deployment.status == "starting":
                await deployment.start(
                    partial(_with_name, progress, deployment.name) if several else progress
                )

    def reload_all(self) -> None:
        """Begin to reload one model after the other, each when the change that it may be in is over.

        It is for a signal, which no refusal can be sent to, so refusals are logged. Where reloads are going on already,
        all models are reloaded once more after them.
        """
        self._reload_again = True
        if self._reloads is None or self._reloads.done():
            self._reloads = asyncio.create_task(self._reload_each())

    async def _reload_each(self) -> None:
        while self._reload_again:
            self._reload_again = False
            for deployment in self.deployments:
                await deployment.settled()
                try:
                    deployment.reload()
                except RequestError as error:
                    _log.warning("SIGHUP has no effect on model %r: %s", deployment.name, error)
                await deployment.settled()

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new work, finish what was accepted. False: time ran out for one of them; the rest got errors."""
        self.draining = True
        for deployment in self.deployments:
            deployment.ending = True
        if self._reloads is not None:
            self._reloads.cancel()
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(end_s):
                await self.reranking.over()
        left_s = max(0.0, end_s - loop.time())
        return all(await asyncio.gather(*(deployment.drain(left_s) for deployment in self.deployments)))

    def require_open(self) -> None:
        """Raise RequestError where no more requests are taken."""
        if self.draining:
            raise RequestError("unavailable", "the server is draining")

    def join(self, timeout_s: float) -> bool:
        """After `drain`: wait for every thread, each so long. False where a load or the device still holds one."""
        return all(deployment.join(timeout_s) for deployment in self.deployments)

    def check(self) -> None:
        """Audit the invariants of every engine; AssertionError names the broken one."""
        for deployment in self.deployments:
            deployment.check()


def serves(info: ModelInfo, kind: Kind) -> bool:
    """Whether a model answers requests of that kind."""
    return (info.max_beam_width if kind == "recommend" else info.max_candidates) > 0


def _with_name(progress: Progress, name: str, done: int, total: int, label: str) -> None:
    progress(done, total, f"{name}: {label}")
