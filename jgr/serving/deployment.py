# SPDX-License-Identifier: Apache-2.0
"""A named model of the server, and how its version is replaced while it serves.

The one idea: a version is an engine, whole and never changed, and a deployment is the one variable that says which
engine takes new requests. A request holds the engine that accepted it and ends there. So versions never meet in a
batch, an answer's version is the one that computed it, and what nobody holds any more is freed, device memory too.

A reload loads the next engine in a thread of its own, compiles it in the engine's own worker thread, sets the
variable, and drains the old engine without a limit of time. Until the variable is set nothing has happened: whatever
fails before, out-of-memory included, is told and leaves the old engine serving. The device holds two models
meanwhile. All state here belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from datetime import UTC, datetime

import msgspec

from jgr.config import UserError
from jgr.serving.api import ModelInfo, ReloadState, RequestError, quoted
from jgr.serving.engine import Engine, Status
from jgr.serving.metrics import Metrics
from jgr.serving.work import Progress

Load = Callable[[Metrics], Engine]
"""Makes the next engine, not started, which writes to the given metrics. Raises for what cannot be served."""

MAX_ERROR_CHARS = 500

_log = logging.getLogger(__name__)


class Deployment:
    """Serves a first engine, and after each `reload` the one that `load` makes. load: None where there is none."""

    def __init__(self, engine: Engine, load: Load | None = None) -> None:
        self.engine = engine
        self.metrics = engine.metrics
        self._load = load
        self._engines = [engine]  # and those that warm up or drain
        self._loaded_at: str | None = None
        self._reload: ReloadState = "never"
        self._error: str | None = None
        self._task: asyncio.Task[None] | None = None
        self._loader: threading.Thread | None = None
        self.metrics.watch_queue(lambda: sum(engine.queued for engine in self._engines))
        self.metrics.show_model(engine.info)

    @property
    def status(self) -> Status:
        return self.engine.status

    @property
    def info(self) -> ModelInfo:
        """The version that takes requests, and how the last reload went."""
        return msgspec.structs.replace(
            self.engine.info,
            state=self.status,
            loaded_at=self._loaded_at,
            reload=self._reload,
            reload_error=self._error,
        )

    def find(self, model: str | None) -> Engine:
        """The engine for a request that names `model`. RequestError where it is not what is served."""
        info = self.engine.info
        if model is not None and model not in (info.version, info.id):
            raise RequestError(
                "not_found",
                f"there is no model {quoted(model)}; there is {info.id!r}, now {info.version!r}",
                "model",
            )
        return self.engine

    async def start(self, progress: Progress) -> None:
        """Compile the first engine; `progress` is called in its worker thread. Raises what its warm-up raises."""
        await self.engine.start(progress)
        self._loaded_at = _now()

    def reload(self) -> None:
        """Begin to replace the engine. RequestError where that cannot be; `info` tells how it goes on."""
        if self.status != "ready":
            raise RequestError("unavailable", f"the server is {self.status}")
        if self._load is None:
            raise RequestError("conflict", f"model {self.engine.info.id!r} was not loaded from a folder")
        if self._reload == "running":
            raise RequestError("conflict", f"a reload of model {self.engine.info.id!r} is running")
        self._reload, self._error = "running", None
        self._task = asyncio.create_task(self._replace(self._load))

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new work, give up a reload, finish what was accepted. False: time ran out; the rest got errors."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        return all(await asyncio.gather(*(engine.drain(timeout_s) for engine in self._engines)))

    def join(self, timeout_s: float) -> bool:
        """After `drain`: wait for every thread. False where a load or the device still holds one."""
        if self._loader is not None:
            self._loader.join(timeout_s)
            if self._loader.is_alive():
                return False
        return all(engine.join(timeout_s) for engine in self._engines)

    def check(self) -> None:
        """Audit the invariants of every engine; AssertionError names the broken one."""
        for engine in self._engines:
            engine.check()

    async def _replace(self, load: Load) -> None:
        _log.info("model %s: a reload has begun", self.engine.info.version)
        new: Engine | None = None
        try:
            new = await self._in_thread(load)
            self._engines.append(new)
            await new.start()
        except Exception as error:
            self._error = _reason(error)
            trace = None if isinstance(error, UserError) else error
            _log.error(
                "the reload failed, %s goes on: %s", self.engine.info.version, self._error, exc_info=trace
            )
            if new is not None:
                await new.drain(0)
                self._engines.remove(new)
            _forget_frames(error)
            self._end("failed")
        else:
            await self._swap(new)
            self._end("done")

    async def _swap(self, new: Engine) -> None:
        old, self.engine = self.engine, new
        self._loaded_at = _now()
        self.metrics.hide_model(old.info)
        self.metrics.show_model(new.info)
        _log.info("model %s serves; %s finishes what it has accepted", new.info.version, old.info.version)
        await old.drain(None)
        self._engines.remove(old)

    def _end(self, outcome: ReloadState) -> None:
        self._reload = outcome
        self.metrics.reloads[outcome].inc()

    async def _in_thread(self, load: Load) -> Engine:
        """A daemon thread, unlike the loop's own: a process that stops must not wait for a load."""
        loaded: Future[Engine] = Future()

        def call() -> None:
            if loaded.set_running_or_notify_cancel():
                try:
                    loaded.set_result(load(self.metrics))
                except Exception as error:
                    loaded.set_exception(error)

        self._loader = threading.Thread(target=call, name="jgr-load", daemon=True)
        self._loader.start()
        return await asyncio.wrap_future(loaded)


def _now() -> str:
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
