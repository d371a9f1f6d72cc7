# SPDX-License-Identifier: Apache-2.0
"""A named model of the server, and how its version is replaced while it serves.

The one idea: a version is an engine, whole and never changed, and a deployment is the one variable that says which
engine takes new requests. A request holds the engine that accepted it and ends there. So versions never meet in a
batch, an answer's version is the one that computed it, and what nobody holds any more is freed, device memory too.

A change, of the model or of its catalog, makes the next engine in a thread of its own, compiles it in the engine's own
worker thread, sets the variable, and drains the old engine without a limit of time. Until the variable is set nothing
has happened: what fails before, out-of-memory included, is reported and leaves the old engine serving. The device holds
two models meanwhile, or one where the weights did not change, or two catalogs of one. One change runs at a time. All
state here belongs to the event loop.

A change can be cancelled until the variable is set. Its thread is told, and ends at its next step; what it took is
given back. One that hangs, as in a read of a disk that does not answer, is waited for no longer than GRACE_S: then the
change is over, others may run, and what the thread holds is given back when it ends.

A catalog that was activated stays active over reloads, as long as it fits the model.
`jgr.serving.versions.served_models` has the deployments of one server.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Literal, TypeVar

import msgspec

from jgr import stopping
from jgr.catalog.catalog import Catalog
from jgr.config import CatalogConfig, UserError
from jgr.serving.api import ModelInfo
from jgr.serving.engine.contract import Progress, Status
from jgr.serving.engine.engine import AnyEngine
from jgr.serving.engine.metrics import Metrics
from jgr.serving.engine.opening import Again
from jgr.serving.errors import RequestError
from jgr.serving.fleet_api import ReloadState

Load = Callable[[Metrics], AnyEngine]
"""Makes the next engine, not started, which writes to the given metrics. Raises for what cannot be served."""

MAX_ERROR_CHARS = 500
GRACE_S = 10.0
"""So long the thread of a cancelled load is waited for."""

Kind = Literal["model", "catalog"]
T = TypeVar("T")


@dataclass
class Change:
    """The last change of one kind, of the model or of its catalog.

    to: the version that it goes to. doing: what it is at, while it runs. number: so many of its kind were begun. told:
    set on the event loop where it is to stop; any thread may look. swapped: its version serves.
    """

    state: ReloadState = "never"
    error: str | None = None
    to: str = ""
    doing: str = ""
    number: int = 0
    told: asyncio.Event = field(default_factory=asyncio.Event)
    swapped: bool = False


@dataclass(frozen=True, eq=False)
class Beginning:
    """Where a deployment begins, if not with nothing changed; the attributes of Deployment say what each is.

    activated: the catalog of its engine, where that is no configured one. lost: the version of the previous catalog,
    where it is known and the catalog itself is not held.
    """

    activated: Catalog | None = None
    previous: Catalog | None = None
    before: Again | None = None
    uploaded: tuple[Catalog, ...] = ()
    lost: str = ""


_log = logging.getLogger(__name__)


class Hangs(stopping.Stopped):
    """A thread was told to stop, and has not ended."""


class Deployment:
    """Serves a first engine, and after each change another.

    load: makes the engine of a reload; None: the model cannot be reloaded. catalogs: how many may be held, and how
    large. changes: the last change of each kind. previous: the catalog that was served before the present one. before:
    how the version of the model that was served before the present one is loaded. begin: what others have made of the
    same model by their changes.
    """

    def __init__(
        self,
        engine: AnyEngine,
        catalogs: CatalogConfig,
        load: Load | None = None,
        begin: Beginning = Beginning(),
    ) -> None:
        self.engine = engine
        self.catalogs = catalogs
        self.metrics = engine.metrics
        self.changes: dict[Kind, Change] = {"model": Change(), "catalog": Change()}
        self.previous: Catalog | None = begin.previous
        self.lost = begin.lost
        self.before: Again | None = begin.before
        self.uploaded = begin.uploaded
        """The catalogs that were uploaded before the start, the oldest first."""
        self.swapped: list[Callable[[], object]] = []
        """Each is called when `engine` is another one."""
        self.changed: list[Callable[[], object]] = []
        """Each is called when a change has ended, well or not."""
        self._load = load
        self._engines = [engine]  # and those that warm up or drain
        self._activated: Catalog | None = begin.activated
        self._loaded_at: str | None = None
        self.ending = False
        """Whether the server is to end, so that only what it owes is still asked of the engine."""
        self.warming = ""
        """How far the first warm-up is, in words; it is written by the thread that warms up."""
        self._task: asyncio.Task[None] | None = None
        self._threads: list[threading.Thread] = []
        self.metrics.watch_queue(lambda: sum(engine.queued for engine in self._engines))
        self.metrics.watch_flights(lambda: sum(engine.in_flight for engine in self._engines))
        self.metrics.watch_cache(lambda: self.engine.meta)
        self.metrics.watch_memory(lambda: self.engine.memory)
        self.metrics.watch_drift(lambda: self.engine.served.watch)
        self.metrics.show_model(engine.info)

    @property
    def name(self) -> str:
        return self.engine.info.id

    @property
    def status(self) -> Status:
        return "draining" if self.ending and self.engine.status == "ready" else self.engine.status

    @property
    def broken(self) -> str:
        """Why the device of one of its versions counts as broken; "": none does."""
        return next(filter(None, (engine.broken for engine in self._engines)), "")

    @property
    def info(self) -> ModelInfo:
        """The version that takes requests, and how the last reload went."""
        return msgspec.structs.replace(
            self.engine.info,
            state=self.status,
            loaded_at=self._loaded_at,
            reload=self.changes["model"].state,
            reload_error=self.changes["model"].error,
            previous=None if self.before is None else self.before.version,
        )

    def forget(self, user_id: str, tenant: str = "") -> int:
        """Erase the cache entries of a tenant's user, in versions that drain too; how many there were."""
        return sum(engine.forget(user_id, tenant) for engine in self._engines)

    async def start(self, progress: Progress) -> None:
        """Compile the first engine; `progress` is called in its worker thread. Raises what its warm-up raises."""

        def told(done: int, total: int, label: str) -> None:
            self.warming = f"{done} of {total} shapes are compiled"
            progress(done, total, label)

        await self.engine.start(told)
        self._loaded_at = now()
        if self.engine.memory:
            parts = ", ".join(f"{part} {size / 2**20:.4g}" for part, size in self.engine.memory.items())
            _log.info("model %s takes, in MB: %s", self.engine.info.version, parts)

    def reload(self) -> None:
        """Begin to replace the model. RequestError where that cannot be; `info` tells how it goes on."""
        self._require_idle()
        if self._load is None:
            raise RequestError("conflict", f"model {self.name!r} was not loaded from a folder")
        self._begin("model", self.name, partial(self._reloaded, self._load, self._activated))

    async def rollback(self) -> None:
        """Begin to serve the version before. RequestError where there is none; `info` tells how it goes on.

        Nothing is kept for it: it is read from its folder again, which must not have changed.
        """
        self._require_idle()
        before = self.before
        if before is None:
            raise RequestError("conflict", f"no other version of model {self.name!r} was served before")
        if before.files is None:
            raise RequestError("conflict", f"the folder of {before.version!r} is gone: {before.folder}")
        if not await self.in_thread(lambda: before.files is not None and before.files.unchanged):
            raise RequestError("conflict", f"the folder of {before.version!r} holds other files by now")
        self._require_idle()  # still
        self._begin("model", before.version, partial(self._reloaded, before.load, self._activated, before))

    async def settled(self) -> None:
        """Wait until no change is running."""
        while self._task is not None and not self._task.done():
            await asyncio.wait([self._task])

    def activate(self, catalog: Catalog, *, uploaded: bool = True) -> None:
        """Begin to serve a catalog. RequestError where that cannot be; `changes` tells how it goes on.

        uploaded: whether a reload keeps it; else it reads the catalog that is configured.
        """
        self._require_idle()
        rebuild = self.engine.rebuild
        if rebuild is None:
            raise RequestError("conflict", f"model {self.name!r} was not loaded from a folder")
        if catalog.version == self.engine.info.catalog_version:
            raise RequestError("conflict", f"catalog {catalog.version!r} is active already")
        self._begin(
            "catalog", catalog.version, partial(rebuild.engine, catalog), catalog if uploaded else None
        )

    def keep(self, catalog: Catalog) -> None:
        """A catalog was uploaded: if it is the active one, a reload keeps it."""
        if catalog.version == self.engine.info.catalog_version:
            self._activated = catalog

    def cancel(self, kind: Kind) -> None:
        """Tell the change of that kind to stop; again does nothing more. `changes` tells when it has.

        RequestError where none is running, or its version serves already.
        """
        change, what = self.changes[kind], "a reload" if kind == "model" else "an activation of a catalog"
        if change.state != "running":
            last = "" if change.state == "never" else f"; the last one is {change.state}"
            raise RequestError("conflict", f"{what} of model {self.name!r} is not running{last}")
        if change.swapped:
            raise RequestError(
                "conflict", f"{what} of model {self.name!r} cannot be cancelled: {change.doing}; roll it back"
            )
        change.told.set()

    def _require_idle(self) -> None:
        if self.status != "ready":
            raise RequestError("unavailable", f"the server is {self.status}")
        name = self.name
        if self.changes["model"].state == "running":
            doing = _doing(self.changes["model"])
            raise RequestError("conflict", f"a reload of model {name!r} is running: {doing}")
        if self.changes["catalog"].state == "running":
            catalog = self.changes["catalog"]
            raise RequestError("conflict", f"catalog {catalog.to!r} is being activated: {_doing(catalog)}")

    def _reloaded(self, load: Load, activated: Catalog | None, wanted: Again | None = None) -> AnyEngine:
        engine: AnyEngine = load(self.metrics)
        found = engine.info
        if wanted is not None and (found.version, found.settings) != (wanted.version, wanted.settings):
            engine.served.close(True)
            other = found.version if found.version != wanted.version else "other settings"
            raise UserError(f"model.path: the folder of {wanted.version} holds {other} by now")
        if activated is None or activated.version == engine.info.catalog_version:
            return engine
        assert engine.rebuild is not None  # it was activated by one
        try:
            return engine.rebuild.engine(activated)
        finally:  # it is never started, and so never drained: what it opened ends here
            engine.served.close(idle=True)

    def _begin(
        self, kind: Kind, to: str, make: Callable[[], AnyEngine], activated: Catalog | None = None
    ) -> None:
        self.changes[kind] = Change("running", to=to, number=self.changes[kind].number + 1)
        self._task = asyncio.create_task(self._replace(kind, make, activated))

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new work, give up a change, finish what was accepted. False: time ran out; the rest got errors."""
        if self._task is not None:
            for change in self.changes.values():
                if not change.swapped:  # so that a long load ends with its process
                    change.told.set()
            self._task.cancel()
            await asyncio.wait([self._task])
        return all(await asyncio.gather(*(engine.drain(timeout_s) for engine in self._engines)))

    def join(self, timeout_s: float) -> bool:
        """After `drain`: wait for every thread. False where a load or the device still holds one."""
        for thread in self._threads:
            thread.join(timeout_s)
            if thread.is_alive():
                return False
        return all(engine.join(timeout_s) for engine in self._engines)

    def check(self) -> None:
        """Audit the invariants of every engine; AssertionError names the broken one."""
        for engine in self._engines:
            engine.check()

    async def _replace(self, kind: Kind, make: Callable[[], AnyEngine], activated: Catalog | None) -> None:
        change = self.changes[kind]
        _log.info("%s: a new %s is being loaded", self.engine.info.version, kind)
        new: AnyEngine | None = None

        def compiling(done: int, total: int, label: str) -> None:
            change.doing = f"{done} of {total} shapes are compiled"

        try:
            with stopping.stoppable(change.told.is_set):
                change.doing = "its files are being read"
                new = await self._made(change, make)
                self._engines.append(new)
                change.doing = "its programs are being compiled"
                _log.info("%s: programs of the new %s are being compiled", self.engine.info.version, kind)
                await new.start(compiling)
                stopping.check()
        except Exception as error:
            outcome = self._ended_badly(kind, change, error)
            if new is not None:
                await new.drain(0)
                self._engines.remove(new)
            _forget_frames(error)
            self._end(kind, outcome)
        else:
            change.swapped, change.doing = True, "the old version finishes its requests"
            if kind == "catalog":
                self._activated = activated
            await self._swap(new)
            self._end(kind, "done")

    async def _made(self, change: Change, make: Callable[[], AnyEngine]) -> AnyEngine:
        """The engine that `make` gives in a thread. Raises Stopped where the change is told to stop, and Hangs where
        its thread has not ended GRACE_S after."""

        def unless_told() -> AnyEngine:
            engine = make()
            if change.told.is_set():  # nobody may be waiting for it any more
                engine.served.close(idle=True)
                raise stopping.Stopped("it was cancelled")
            return engine

        making = asyncio.create_task(self.in_thread(stopping.carried(unless_told)))
        told = asyncio.create_task(change.told.wait())
        try:
            await asyncio.wait([making, told], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([making], timeout=GRACE_S)
            if making.done():
                return making.result()
            raise Hangs(f"{change.doing} still, and what that holds is given back when it ends")
        finally:
            making.cancel()
            told.cancel()

    def _ended_badly(self, kind: Kind, change: Change, error: Exception) -> ReloadState:
        """Tell why a change has ended before its version served; how it has."""
        serves = self.engine.info.version
        if change.told.is_set():
            change.error = str(error) if isinstance(error, Hangs) else None
            _log.warning(
                "the new %s was cancelled, %s goes on%s", kind, serves, f": {error}" if change.error else ""
            )
            return "cancelled"
        change.error = _reason(error)
        trace = None if isinstance(error, UserError) else error
        _log.error("the new %s failed, %s goes on: %s", kind, serves, change.error, exc_info=trace)
        return "failed"

    async def _swap(self, new: AnyEngine) -> None:
        old, self.engine = self.engine, new
        for call in self.swapped:
            call()
        self._loaded_at = now()
        if old.info.catalog_version != new.info.catalog_version:
            self.previous, self.lost = old.catalog, ""
        if (old.info.version, old.info.settings) != (new.info.version, new.info.settings):
            self.before = None if old.rebuild is None else old.rebuild.again
        self.metrics.hide_model(old.info)
        self.metrics.show_model(new.info)
        _log.info(
            "model %s over catalog %s serves; %s over %s finishes what it has accepted",
            new.info.version,
            new.info.catalog_version,
            old.info.version,
            old.info.catalog_version,
        )
        try:
            await old.drain(None)
        except Exception as error:  # the new version serves, so the change is done and the next one may begin
            _log.error("%s did not end as it should: %s", old.info.version, _reason(error), exc_info=error)
        self._engines.remove(old)

    def _end(self, kind: Kind, outcome: ReloadState) -> None:
        self.changes[kind].state = outcome
        self.metrics.changes[kind][outcome].inc()
        for call in self.changed:
            call()

    async def in_thread(self, call: Callable[[], T]) -> T:
        """A daemon thread, unlike the loop's own: a process that stops must not wait for a load."""
        done: Future[T] = Future()

        def run() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(call())
                except Exception as error:
                    done.set_exception(error)

        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(threading.Thread(target=run, name="jgr-load", daemon=True))
        self._threads[-1].start()
        return await asyncio.wrap_future(done)


def _doing(change: Change) -> str:
    return f"it is being cancelled while {change.doing}" if change.told.is_set() else change.doing


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _forget_frames(error: BaseException | None) -> None:
    """Free what the functions that failed had in hand, such as weights, now and not at the next garbage collection."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _reason(error: Exception) -> str:
    """An exception on one bounded line; what is no user's mistake keeps its type's name."""
    text = " ".join(str(error).split())
    if not isinstance(error, UserError):
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= MAX_ERROR_CHARS else text[: MAX_ERROR_CHARS - 3] + "..."
