# SPDX-License-Identifier: Apache-2.0
"""One replica: the models and the HTTP application of `jgr serve`, asked by Ray in place of a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from jgr.config import Config, ConfigError
from jgr.serving.api import RankRequest, RecommendRequest, Request
from jgr.serving.cluster.hints import Hint
from jgr.serving.cluster.relay import Answered, Asked, ask
from jgr.serving.cluster.reports import Shape, Work, ask_of
from jgr.serving.engine.engine import AnyEngine
from jgr.serving.errors import RequestError
from jgr.serving.http.server import App
from jgr.serving.policies.digests import digest
from jgr.serving.versions.deployment import Deployment, Load
from jgr.serving.versions.served_models import Models, serves
from jgr.serving.versions.sources import configurations, load_all

RATE = 1 / 16
"""The weight of one request in the means."""
MOST = 512
"""A request counts as one of so many events and candidates at most."""
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
        found = configurations(self.files, self.assignments, self.folders, loaded=not self.null)
        gpus, shared = found[0].fleet.gpus, max(config.model.tensor_parallel for config in found)
        if 0 < gpus < shared:
            raise ConfigError(
                f"fleet.gpus: a replica sees {gpus:g}, and model.tensor_parallel needs {shared}"
            )
        return found


class Replica:
    """The deployment that Ray starts several times. name: this replica's own, as routers know it."""

    def __init__(self, source: Source, name: str = "") -> None:
        configs = source.configs()
        loaded = self.load(source, configs)
        self._config = configs[0]
        self.name = name or _own_name()
        self.models = Models([Deployment(engine, config.catalog, load) for engine, load, config in loaded])
        self._app = App(self.models, self._config.server)
        self._starting: asyncio.Task[None] | None = None
        self._work, self._waiting = Work(), Work()
        self._shape: Shape = {}
        self._events = self._items = 8.0  # of a request, in the mean of the last ones

    def load(self, source: Source, configs: Sequence[Config]) -> list[tuple[AnyEngine, Load | None, Config]]:
        """See `load_all`."""
        return load_all(source.folders, source.assignments, configs, source.null)

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
        if hint.events:
            self._events += RATE * (min(hint.events, MOST) - self._events)
            self._items += RATE * (min(len(hint.items), MOST) - self._items)
        for work in (self._work, self._waiting):
            work.begin(hint.sender, tokens, self._now_ns())
        try:
            return await ask(self._app, asked, **{"jgr.waited_ns": round(hint.waited_ms * 1e6)})
        finally:
            for work in (self._work, self._waiting):
                work.end(hint.sender, tokens, self._now_ns())

    async def about(self) -> dict[str, Any]:
        """Name, status and versions: what a rollout and the whole view ask for."""
        return {
            "name": self.name,
            "status": self.models.status,
            "waiting": self.models.waiting,
            "models": {info.id: (info.version, info.reload, info.reload_error) for info in self.models.infos},
        }

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
            "ns_per_token": self._ns_per_token(),
            **self._shape,
        }

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What the number of replicas is decided by; Ray asks for it every so often where that is not fixed. The wait
        is that of the work in flight, in the mean since the last time, as if nothing of it were cached."""
        tokens = sum(self._waiting.mean(self._now_ns()).values())
        return {"wait_ms": tokens * self._ns_per_token() / 1e6}

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

    def _ns_per_token(self) -> float:
        return ns_per_token(self.models, round(self._events), round(self._items))

    def _now_ns(self) -> int:
        return self.models.deployments[0].engine.clock()


def shape(models: Models) -> Shape:
    """Tokens of a prompt: of an event of the history, of a candidate, and of all else. Of the first model that ranks,
    else of the first, by its first items, which stand for the others."""
    engine = _typical(models)
    some = min(8, len(engine.served.catalog.item_ids))
    if some < 2:
        return {}
    try:
        one, events, items = (
            _tokens(_prepared(engine, *counts)) for counts in ((1, 1), (some, 1), (1, some))
        )
    except RequestError:  # it needs more of a request, such as times
        return {}
    event, item = (events - one) / (some - 1), (items - one) / (some - 1)
    return {"event_tokens": event, "item_tokens": item, "other_tokens": max(0.0, one - event - item)}


def ns_per_token(models: Models, events: int, candidates: int) -> float:
    """What a token of such a request takes now where many wait; 0 where that is not known. Of the same model as the
    shape."""
    engine = _typical(models)
    try:
        task = _prepared(engine, max(1, events), max(1, candidates))
    except RequestError:
        return 0.0
    return float(engine.need_ns(task) / max(1, _tokens(task)))


def _typical(models: Models) -> AnyEngine:
    engines: list[AnyEngine] = [deployment.engine for deployment in models.deployments]
    return next((one for one in engines if serves(one.info, "rank")), engines[0])


def _prepared(engine: AnyEngine, events: int, candidates: int) -> Any:
    ids = list(islice(engine.served.catalog.item_ids, max(events, candidates)))
    request: Request = RecommendRequest(history=ids[:events], top_k=1)
    if serves(engine.info, "rank"):
        request = RankRequest(history=ids[:events], candidates=ids[:candidates])
    return engine.served.prepare(request, "")


def _tokens(task: Any) -> int:
    return int(task.usage.prompt_tokens)


def _own_name() -> str:
    from ray import serve

    name: str = serve.get_replica_context().replica_id.unique_id
    return name
