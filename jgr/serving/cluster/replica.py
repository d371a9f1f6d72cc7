# SPDX-License-Identifier: Apache-2.0
"""One replica: the models and the HTTP application of `jgr serve`, asked by Ray in place of a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import msgspec

from jgr.config import Config
from jgr.serving.api import RankRequest, RecommendRequest, Request
from jgr.serving.cluster.hints import Hint
from jgr.serving.cluster.places import own_node, place
from jgr.serving.cluster.relay import Answered, Asked, ask
from jgr.serving.cluster.reports import Shape, Work, ask_of
from jgr.serving.engine.engine import AnyEngine
from jgr.serving.engine.journal import of_replica
from jgr.serving.errors import RequestError
from jgr.serving.fleet_api import ReplicaInfo, ServedVersion
from jgr.serving.http.server import App
from jgr.serving.policies.digests import digest
from jgr.serving.versions.deployment import Deployment
from jgr.serving.versions.served_models import Models, serves
from jgr.serving.versions.sources import configurations, load_all

FILL = 8
"""A digest names at most one entry for so many bits: the entries that were used last."""


@dataclass(frozen=True)
class Source:
    """What is served, as for `jgr serve`: folders, configuration files, and single fields."""

    folders: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    assignments: tuple[str, ...] = ()
    null: bool = False

    def configs(self) -> list[Config]:
        """Raises ConfigError for what cannot be served."""
        return configurations(self.files, self.assignments, self.folders, loaded=not self.null)


class Replica:
    """The deployment that Ray starts several times. name: this replica's own, as routers know it. node: the machine
    that it runs on."""

    def __init__(self, source: Source, name: str = "", node: str = "") -> None:
        self.name, self.node = name or _own_name(), node or own_node()
        configs = [_with_own_journal(config, self.name) for config in source.configs()]
        loaded = load_all(source.folders, source.assignments, configs, source.null)
        self._config = configs[0]
        self.models = Models([Deployment(engine, config.catalog, load) for engine, load, config in loaded])
        self._app = App(self.models, self._config.server, place(self.name, self.node))
        self._starting: asyncio.Task[None] | None = None
        self._work = Work()
        self._shape: Shape = {}

    async def reconfigure(self, user_config: Any) -> None:
        """Ray calls it before the first request: the replica is there once its programs are compiled."""
        await self.start()

    async def start(self) -> None:
        """Compile. Raises what a warm-up raises."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        await self.models.start(lambda done, total, label: None)
        self._shape = shape(self.models)

    async def answer(self, hint: Hint, asked: Asked) -> Answered:
        """The answer of the HTTP application."""
        tokens = ask_of(hint, self._shape).tokens
        self._work.begin(hint.sender, tokens, self._now_ns())
        try:
            return await ask(
                self._app, asked, **{"jgr.waited_ns": round(hint.waited_ms * 1e6), "jgr.charged": True}
            )
        finally:
            self._work.end(hint.sender, tokens, self._now_ns())

    async def about(self) -> dict[str, Any]:
        """Name, status and versions: what a rollout and the whole view ask for. info: as /v1/models tells it."""
        return {
            "info": msgspec.to_builtins(self._info()),
            "name": self.name,
            "status": self.models.status,
            "waiting": self.models.waiting,
            "models": {info.id: (info.version, info.reload, info.reload_error) for info in self.models.infos},
        }

    def _info(self) -> ReplicaInfo:
        of = ("id", "version", "catalog_version", "state", "reload", "reload_error")
        served = [ServedVersion(**{name: getattr(info, name) for name in of}) for info in self.models.infos]
        return ReplicaInfo(name=self.name, node=self.node, state=self.models.status, models=served)

    async def metrics(self) -> tuple[str, str]:
        """Name, and the series of all models as text."""
        return self.name, self.models.render_metrics().decode()

    async def record_routing_stats(self) -> dict[str, Any]:
        """What routers are told; Ray asks for it every so often."""
        bits = self._config.fleet.digest_bits
        most = (1 << bits) // FILL
        return {
            "users": digest(islice(self._held("user"), most), bits),
            "items": digest(islice(self._held("item"), most), bits),
            "sent": self._work.mean(self._now_ns()),
            **self._shape,
        }

    async def check_health(self) -> None:
        """Raises where Ray is to replace this replica."""
        if self.models.status == "failed":
            raise RuntimeError(f"a model of replica {self.name} failed")

    async def __del__(self) -> None:
        """Ray calls it, and waits for it, when the requests that it has sent are answered."""
        await self.models.drain(self._config.server.drain_timeout_s)
        self.models.join(1.0)

    def _held(self, kind: str) -> Iterator[str]:
        """The names of what is cached, of all models, the last used first."""
        for deployment in self.models.deployments:
            meta, catalog = deployment.engine.meta, deployment.engine.served.catalog
            if meta is None or kind not in meta.kinds:
                continue
            for name in meta.names(kind):
                yield catalog.item_ids[name.id] if kind == "item" else str(name.id)

    def _now_ns(self) -> int:
        return self.models.deployments[0].engine.clock()


def shape(models: Models) -> Shape:
    """Tokens of a prompt: of an event of the history, of a candidate, and of all else. Of the first model that ranks,
    else of the first, by its first items, which stand for the others."""
    engines: list[AnyEngine] = [deployment.engine for deployment in models.deployments]
    engine = next((one for one in engines if serves(one.info, "rank")), engines[0])
    ids = list(islice(engine.served.catalog.item_ids, 8))

    def tokens(events: int, candidates: int) -> int:
        request: Request = RecommendRequest(history=ids[:events], top_k=1)
        if serves(engine.info, "rank"):
            request = RankRequest(history=ids[:events], candidates=ids[:candidates])
        return int(engine.served.prepare(request, "").usage.prompt_tokens)

    some = len(ids)
    if some < 2:
        return {}
    try:
        one = tokens(1, 1)
        event, item = (tokens(some, 1) - one) / (some - 1), (tokens(1, some) - one) / (some - 1)
    except RequestError:  # it needs more of a request, such as times
        return {}
    return {"event_tokens": event, "item_tokens": item, "other_tokens": max(0.0, one - event - item)}


def _with_own_journal(config: Config, name: str) -> Config:
    """The configuration with a journal of this replica's own: two processes cannot write to one file."""
    own = of_replica(config.server.journal, name)
    return replace(config, server=replace(config.server, journal=own))


def _own_name() -> str:
    from ray import serve

    name: str = serve.get_replica_context().replica_id.unique_id
    return name
