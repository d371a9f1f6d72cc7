# SPDX-License-Identifier: Apache-2.0
"""One replica: the models and the HTTP application of `jgr serve`, asked by Ray in place of a socket."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, zip_longest
from typing import Any, Protocol

import msgspec

from jgr.config import Config, ConfigError, UserError
from jgr.logs import set_up_unless_done
from jgr.placement.transport import Bucket
from jgr.serving.cluster.hints import Hint
from jgr.serving.cluster.items import ItemShare
from jgr.serving.cluster.own_items import read_kv
from jgr.serving.cluster.places import own_node, place
from jgr.serving.cluster.protocol import PROTOCOL, received, sent, spoken
from jgr.serving.cluster.record import Record, States, served
from jgr.serving.cluster.relay import Answered, Asked, ask
from jgr.serving.cluster.reports import Shape, ask_of, expected
from jgr.serving.cluster.shapes import ns_per_token, shape
from jgr.serving.cluster.ways import Stamp, since_ns, stamp
from jgr.serving.engine.journal import journal_at, of_replica
from jgr.serving.errors import RequestError
from jgr.serving.fleet_api import ReplicaInfo, ServedVersion
from jgr.serving.http.server import App
from jgr.serving.policies.bookings import Work
from jgr.serving.policies.digests import digest
from jgr.serving.scorers.paging import Paging
from jgr.serving.scorers.serve import ServedScorer
from jgr.serving.versions.deployment import Beginning, Deployment
from jgr.serving.versions.served_models import Models
from jgr.serving.versions.served_state import begin_as, state_of
from jgr.serving.versions.sources import Loaded, configurations, load_all

STARTS = 4
"""So often a replica begins anew because the others have changed while it started."""
RATE = 1 / 16
"""The weight of one request in the means."""
MOST = 512
"""A request counts as one of so many events and candidates at most."""
FILL = 8
"""A digest names at most one entry for so many bits: the entries that were used last."""

_log = logging.getLogger(__name__)


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
        found = configurations(self.files, self.assignments, self.folders, loaded=not self.null)
        gpus, shared = found[0].fleet.gpus, max(config.model.tensor_parallel for config in found)
        parted = max(config.data_parallel.devices for config in found)
        if 0 < gpus < max(shared, parted):
            field = "model.tensor_parallel" if shared > parted else "data_parallel.devices"
            raise ConfigError(f"fleet.gpus: a replica sees {gpus:g}, and {field} needs {max(shared, parted)}")
        if found[0].server.host_cores:
            raise ConfigError(
                "server.host_cores is for jgr serve: replicas of a fleet share the cores of a machine"
            )
        return found

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
    what the others serve; None: from Ray's deployment. host: the address to give items on. bucket: makes its links to
    others slower, for measurements."""

    def __init__(
        self,
        source: Source,
        name: str = "",
        others: Coordination | None = None,
        host: str = "",
        bucket: Bucket | None = None,
    ) -> None:
        set_up_unless_done()
        self._source = received(Source, source)
        self.name, self.node = (name, socket.gethostname()) if name else (_own_name(), own_node())
        self._others = others
        self._host, self._bucket = host, bucket
        self.item_share: ItemShare | None = None
        self._record = Record(self._source.key)
        self._missed = ""  # how it differs from the others, for good
        self._to_judge: dict[str, int] | None = None  # changes begun when it was told what the others serve
        self._starting: asyncio.Task[None] | None = None
        self._work, self._waiting = Work(), Work()
        self._shape: Shape = {}
        self._mean_events = self._mean_items = 8.0  # of a request, in the mean of the last ones
        self._reports = 0

    def load(self, source: Source, configs: Sequence[Config], places: Sequence[str] = ()) -> list[Loaded]:
        """See `load_all`."""
        return load_all(source.folders, source.assignments, configs, source.null, places)

    def _load_as(self, record: Record) -> tuple[Config, list[Deployment]]:
        """The models, over the versions that the record has; those that are configured, where it has none. Raises
        UserError where these cannot be loaded."""
        source, places = self._source, [state.folder for state in record.states.values()]
        here = zip_longest(source.folders, places[: len(source.folders)])
        folders = tuple(place or folder for folder, place in here)
        configs = (replace(source, folders=folders) if places else source).configs()
        configs = [_with_own_journal(config, self.name, record.number > 0) for config in configs]
        deployments = []
        for one in self.load(source, configs, places):
            engine, begin = one.engine, Beginning()
            if one.config.model.name in record.states:
                engine, begin = begin_as(one, record.states[one.config.model.name], record.bodies)
            deployments.append(Deployment(engine, one.config.catalog, one.load, begin))
        return configs[0], deployments

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
            self._config, deployments = await asyncio.to_thread(self._load_as, self._record)
            models = Models(deployments)
            self._app = App(models, self._config.server, place(self.name, self.node))
            self.models = models
            for one in deployments:
                one.swapped.append(self._measure)
            if self._config.fleet.items != "none" and not self._source.null:
                host = self._host or _own_host(self._config)
                self.item_share = ItemShare(
                    self.models, self._config, host, self._bucket, late=self._record.number > 0
                )
            else:
                read_kv(self.models, self._config)
            await self.models.start(lambda done, total, label: None)
            joined = await others.joins(self._source.key, self.name, self._states())
            if joined is not None:
                self._record = self._record.merged(joined)
                self._measure()
                return
            await self.end()
        raise UserError(f"replica {self.name} serves {served(self._states())}, and the others do not")

    def _measure(self) -> None:
        """Prompts of another version or catalog are of other lengths, and work is reckoned in their tokens."""
        self._shape = shape(self.models)

    async def answer(self, hint: Hint, asked: Asked) -> Answered:
        """The answer of the HTTP application."""
        hint, asked = received(Hint, hint), received(Asked, asked)
        came_ns = since_ns(Stamp(*hint.sent)) or 0  # it was with Ray's event loops for so long
        hint = hint._replace(waited_ms=hint.waited_ms + came_ns / 1e6)
        if hint.to not in ("", self.name):  # that one is gone
            raise RequestError("unavailable", f"replica {hint.to} is gone")
        wanted, begun_ns = ask_of(hint, self._shape), self._now_ns()
        tokens = expected(hint, self.name, wanted.tokens)
        if hint.events:
            self._mean_events += RATE * (min(hint.events, MOST) - self._mean_events)
            self._mean_items += RATE * (min(len(hint.items), MOST) - self._mean_items)
        for work in (self._work, self._waiting):  # each is told, and begins anew, at its own times
            work.begin(hint.sender, tokens, begun_ns)
        fetched: Sequence[int] = ()
        try:
            if self.item_share is not None and hint.items:
                fetched = await self.item_share.fetch(hint, wanted.user_tokens)
            waited_ns = round(hint.waited_ms * 1e6) + self._now_ns() - begun_ns
            answered = await ask(self._app, asked, **{"jgr.waited_ns": waited_ns, "jgr.charged": True})
            return answered._replace(ended=stamp(), came_ns=came_ns)
        finally:
            for work in (self._work, self._waiting):
                work.end(hint.sender, tokens, self._now_ns())
            if self.item_share is not None:
                self.item_share.done(fetched)

    async def items(self, hint: Hint, what: str, *arguments: Any) -> Any:
        """Name, and what the coordinator asks of this replica's part in the items; None where it has none, or another
        replica is meant, which is gone."""
        if self.item_share is None or received(Hint, hint).to not in ("", self.name):
            return self.name, None
        if what == "step":
            return self.name, await self.item_share.step(*arguments)
        asked: Mapping[str, Callable[..., Any]] = {
            "about": self.item_share.about,
            "facts": self.item_share.facts,
            "join": self.item_share.join,
            "see": self.item_share.see,
            "counts": self.item_share.counts,
        }
        ready = what != "about" or self.models.status == "ready"
        return self.name, asked[what](*arguments) if ready else None

    async def about(self) -> dict[str, Any]:
        """Name, status and versions: what a rollout and the whole view ask for. info: as /v1/models tells it."""
        return {
            "info": msgspec.to_builtins(self._info()),
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
            self._to_judge = self._begun()
            self._judge()

    def _judge(self) -> None:
        """Whether this replica has missed a change, once none is running here. A change that was begun after it was
        told is not in the record yet: then it is told again."""
        if self._to_judge is None or any(
            change.state == "running" for one in self.models.deployments for change in one.changes.values()
        ):
            return
        states = self._states()
        if self._to_judge == self._begun() and not self._record.agrees(states):
            self._missed = f"serves {served(states)}, and the others {served(self._record.states)}"
        self._to_judge = None

    def _begun(self) -> dict[str, int]:
        """How many changes of each kind were begun."""
        return {
            f"{one.name} {kind}": change.number
            for one in self.models.deployments
            for kind, change in one.changes.items()
        }

    async def recorded(self) -> Record:
        """What the fleet serves, as far as it was told."""
        return self._record

    async def metrics(self, asked: Asked) -> tuple[str, Answered]:
        """Name, and the answer of the HTTP application: the series of all models, for who may ask."""
        return self.name, await ask(self._app, received(Asked, asked), **{"jgr.charged": True})

    async def record_routing_stats(self) -> dict[str, Any]:
        """What routers are told; Ray asks for it every so often. Its number tells a new report from the last one of a
        replica that hangs, and makes each differ: Ray brings routers nothing that is as it was."""
        self._reports += 1
        bits = self._config.fleet.digest_bits
        most = (1 << bits) // FILL
        # Only this rule asks for it; a look at all rows of a large table would hold up the event loop.
        by_shards = self._config.fleet.routing == "hlem"
        shards = await asyncio.to_thread(self._shards) if by_shards else b""
        return {
            "protocol": PROTOCOL,
            "number": self._reports,
            "users": digest(islice(self._held("user"), most), bits),
            "items": digest(islice(self._held("item"), most), bits),
            "sent": self._work.mean(self._now_ns()),
            "ns_per_token": self._ns_per_token(),
            "shards": shards,
            "rows_ns": sum(of.missing_ns(self._mean_events + self._mean_items) for of, _ in self._paged()),
            **self._shape,
        }

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What the number of replicas is decided by; Ray asks for it every so often where that is not fixed. The wait
        is that of the work in flight, in the mean since the last time, without what routers expect to be cached."""
        tokens = sum(self._waiting.mean(self._now_ns()).values())
        return {"wait_ms": tokens * self._ns_per_token() / 1e6}

    async def check_health(self) -> None:
        """Raises where Ray is to replace this replica. Ray asks every fleet.health_s, so changed keys are read here."""
        if self.models.status == "failed":
            raise RuntimeError(f"a model of replica {self.name} failed")
        if broken := self.models.broken:  # the process lives, and answers this for ever
            raise RuntimeError(f"replica {self.name} is {broken}")
        self._judge()
        if self._missed:
            raise RuntimeError(f"replica {self.name} {self._missed}")
        if hasattr(self, "_app"):
            self._app.keys.refresh()

    async def __del__(self) -> None:
        """Ray calls it, and waits for it, when the requests that it has sent are answered."""
        await self.end()

    async def end(self) -> None:
        """Finish what was accepted."""
        if hasattr(self, "models"):
            await self.models.drain(self._config.server.drain_timeout_s)
            if self.item_share is not None:
                self.item_share.close()
                self.item_share = None
            self.models.join(1.0)
            if self._app.traces is not None:
                await asyncio.to_thread(self._app.traces.close)

    def _info(self) -> ReplicaInfo:
        of = ("id", "version", "settings", "catalog_version", "state", "reload", "reload_error")
        served = [ServedVersion(**{name: getattr(info, name) for name in of}) for info in self.models.infos]
        return ReplicaInfo(name=self.name, node=self.node, state=self.models.status, models=served)

    def _states(self) -> States:
        return {one.name: state_of(one) for one in self.models.deployments}

    def _held(self, kind: str) -> Iterator[str]:
        """The names of what is cached, of all models, the last used first. Rows that a larger catalog left in the cache
        are nobody's."""
        for deployment in self.models.deployments:
            meta, ids = deployment.engine.meta, deployment.engine.served.catalog.item_ids
            if meta is None or kind not in meta.kinds:
                continue
            below = meta.below.names(kind) if meta.below is not None else ()
            for name in chain(meta.names(kind), below):
                if kind != "item":
                    yield str(name.id)
                elif (row := int(name.id)) < len(ids):
                    yield ids[row]

    def _shards(self) -> bytes:
        """The filter of the shards of rows that are on the device. What changes beside it is seen or not."""
        bits = self._config.fleet.digest_bits
        return digest(chain.from_iterable(of.shards(ids) for of, ids in self._paged()), bits)

    def _paged(self) -> Iterator[tuple[Paging, Sequence[str]]]:
        """The rows of each model that has them in pages, and its items."""
        for deployment in self.models.deployments:
            of = deployment.engine.served
            if isinstance(of, ServedScorer) and of.paging is not None:
                yield of.paging, of.catalog.item_ids

    def _ns_per_token(self) -> float:
        return ns_per_token(self.models, round(self._mean_events), round(self._mean_items))

    def _now_ns(self) -> int:
        return self.models.deployments[0].engine.clock()


def _own_host(config: Config) -> str:
    if config.fleet.items_host != "node":
        return config.fleet.items_host
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())


def _with_own_journal(config: Config, name: str, late: bool) -> Config:
    """The configuration with a journal of this replica's own: two processes cannot write to one file. late: whether the
    fleet serves already: then a journal that cannot be written is no reason to serve with one replica fewer. Raises
    ConfigError for such a one else."""
    own = of_replica(config.server.journal, name)
    try:
        if own:
            journal_at(own)
    except ConfigError as error:
        if not late:
            raise
        _log.error("this replica keeps no journal: %s", error)
        own = ""
    return replace(config, server=replace(config.server, journal=own))


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
