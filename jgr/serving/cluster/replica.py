# SPDX-License-Identifier: Apache-2.0
"""One replica: the models and the HTTP application of `jgr serve`, asked by Ray in place of a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from typing import Any, Protocol

from jgr.config import Config, UserError
from jgr.serving.api import RankRequest, RecommendRequest, Request
from jgr.serving.cluster.hints import Hint
from jgr.serving.cluster.protocol import PROTOCOL, received, sent, spoken
from jgr.serving.cluster.record import Record, States, served
from jgr.serving.cluster.relay import Answered, Asked, ask
from jgr.serving.cluster.reports import Shape, Work, ask_of
from jgr.serving.engine.engine import AnyEngine
from jgr.serving.errors import RequestError
from jgr.serving.http.server import App
from jgr.serving.policies.digests import digest
from jgr.serving.versions.deployment import Beginning, Deployment
from jgr.serving.versions.served_models import Models, serves
from jgr.serving.versions.served_state import begin_as, state_of
from jgr.serving.versions.sources import configurations, load_all

STARTS = 4
"""So often a replica begins anew because the others have changed while it started."""
FILL = 8
"""A digest names at most one entry for so many bits: the entries that were used last."""


@dataclass(frozen=True)
class Source:
    """What is served, as for `jgr serve`: folders, configuration files, and single fields."""

    folders: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    assignments: tuple[str, ...] = ()
    null: bool = False

    def __reduce__(self) -> Any:
        return sent((self.folders, self.files, self.assignments, self.null))

    def configs(self) -> list[Config]:
        """Raises ConfigError for what cannot be served."""
        return configurations(self.files, self.assignments, self.folders, loaded=not self.null)

    @property
    def key(self) -> str:
        """What tells one source from another."""
        return repr((self.folders, self.files, self.assignments, self.null))


class Coordination(Protocol):
    """Where a replica learns what the others serve. See Coordinator."""

    async def record(self, source: str) -> Record: ...
    async def joins(self, source: str, name: str, states: States) -> Record | None: ...


class Replica:
    """The deployment that Ray starts several times. name: this replica's own, as routers know it. others: how it learns
    what the others serve; None: from Ray's deployment."""

    def __init__(self, source: Source, name: str = "", others: Coordination | None = None) -> None:
        self._source = received(Source, source)
        self.name = name or _own_name()
        self._others = others
        self._record = Record(self._source.key)
        self._missed = ""  # how it differs from the others, for good
        self._starting: asyncio.Task[None] | None = None
        self._work = Work()
        self._shape: Shape = {}

    async def reconfigure(self, user_config: Any) -> None:
        """Ray calls it before the first request: the replica is there once its programs are compiled."""
        await self.start()

    async def start(self) -> None:
        """Load, compile, and serve what the others do. Raises what a load and a warm-up raise, and UserError where that
        cannot be served here."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        others = self._others or _Coordinator()
        for _ in range(STARTS):  # the others may change meanwhile
            self._record = await others.record(self._source.key)
            # Not on the event loop: it is asked for its health meanwhile.
            self._config, deployments = await asyncio.to_thread(load_as, self._source, self._record)
            self.models = Models(deployments)
            self._app = App(self.models, self._config.server)
            await self.models.start(lambda done, total, label: None)
            joined = await others.joins(self._source.key, self.name, self._states())
            if joined is not None:
                self._record = self._record.merged(joined)
                self._shape = shape(self.models)
                return
            await self.end()
        raise UserError(f"replica {self.name} serves {served(self._states())}, and the others do not")

    async def answer(self, hint: Hint, asked: Asked) -> Answered:
        """The answer of the HTTP application."""
        hint, asked = received(Hint, hint), received(Asked, asked)
        if hint.to not in ("", self.name):  # that one is gone
            raise RequestError("unavailable", f"replica {hint.to} is gone")
        tokens = ask_of(hint, self._shape).tokens
        self._work.begin(hint.sender, tokens, self._now_ns())
        try:
            return await ask(self._app, asked, **{"jgr.waited_ns": round(hint.waited_ms * 1e6)})
        finally:
            self._work.end(hint.sender, tokens, self._now_ns())

    async def about(self) -> dict[str, Any]:
        """Name, status and versions: what a rollout and the whole view ask for."""
        return {
            "name": self.name,
            "spoken": tuple(spoken()),
            "status": self.models.status,
            "waiting": self.models.waiting,
            "models": {info.id: (info.version, info.reload, info.reload_error) for info in self.models.infos},
            "states": {name: tuple(state) for name, state in self._states().items()},
            "changes": {
                f"{one.name} {kind}": (change.number, change.state, change.error)
                for one in self.models.deployments
                for kind, change in one.changes.items()
            },
        }

    async def remember(self, record: Record) -> None:
        """What the fleet serves after a change. One that has missed the change is not healthy, and is replaced."""
        record = Record.received(record)
        if record.source == self._record.source and record.number > self._record.number:
            self._record = self._record.merged(record)
            states = self._states()
            changing = any(
                change.state == "running"
                for one in self.models.deployments
                for change in one.changes.values()
            )
            if not changing and not record.agrees(states):
                self._missed = f"serves {served(states)}, and the others {served(record.states)}"

    async def recorded(self) -> Record:
        """What the fleet serves, as far as it was told."""
        return self._record

    async def metrics(self) -> tuple[str, str]:
        """Name, and the series of all models as text."""
        return self.name, self.models.render_metrics().decode()

    async def record_routing_stats(self) -> dict[str, Any]:
        """What routers are told; Ray asks for it every so often."""
        bits = self._config.fleet.digest_bits
        most = (1 << bits) // FILL
        return {
            "protocol": PROTOCOL,
            "users": digest(islice(self._held("user"), most), bits),
            "items": digest(islice(self._held("item"), most), bits),
            "sent": self._work.mean(self._now_ns()),
            **self._shape,
        }

    async def check_health(self) -> None:
        """Raises where Ray is to replace this replica."""
        if self.models.status == "failed":
            raise RuntimeError(f"a model of replica {self.name} failed")
        if self._missed:
            raise RuntimeError(f"replica {self.name} {self._missed}")

    async def __del__(self) -> None:
        """Ray calls it, and waits for it, when the requests that it has sent are answered."""
        await self.end()

    async def end(self) -> None:
        """Finish what was accepted."""
        if hasattr(self, "models"):
            await self.models.drain(self._config.server.drain_timeout_s)
            self.models.join(1.0)

    def _states(self) -> States:
        return {one.name: state_of(one) for one in self.models.deployments}

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


def load_as(source: Source, record: Record) -> tuple[Config, list[Deployment]]:
    """The models, over the versions that the record has; those that are configured, where it has none. Raises UserError
    where these cannot be loaded."""
    states = list(record.states.values())
    places = [state.folder for state in states]
    folders = tuple(
        place or folder for folder, place in zip_longest(source.folders, places[: len(source.folders)])
    )
    configs = (replace(source, folders=folders) if states else source).configs()
    loaded = load_all(source.folders, source.assignments, configs, source.null, places)
    deployments = []
    for one in loaded:
        engine, begin = one.engine, Beginning()
        if one.config.model.name in record.states:
            engine, begin = begin_as(one, record.states[one.config.model.name], record.bodies)
        deployments.append(Deployment(engine, one.config.catalog, one.load, begin))
    return configs[0], deployments


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


def _own_name() -> str:
    from ray import serve

    name: str = serve.get_replica_context().replica_id.unique_id
    return name


class _Coordinator:
    """The coordinator of the application that this replica is of."""

    async def record(self, source: str) -> Record:
        return Record.received(await self._handle().record.remote(spoken(), source))

    async def joins(self, source: str, name: str, states: States) -> Record | None:
        plain = {model: tuple(state) for model, state in states.items()}
        joined = await self._handle().joins.remote(spoken(), source, name, plain)
        return None if joined is None else Record.received(joined)

    def _handle(self) -> Any:
        from ray import serve

        return serve.get_deployment_handle("Coordinator", serve.get_replica_context().app_name)
