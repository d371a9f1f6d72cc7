# SPDX-License-Identifier: Apache-2.0
"""`jgr.Engine`: a model folder behind Python calls, without a server.

The one idea: it is the server's engine without HTTP. Requests are read by the same code and meet in the same batches
and compiled programs, so answers are the same. The engine's event loop runs in a thread of its own, which makes the
calls work from any thread and beside any other loop, such as a notebook's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import msgspec

from jgr.client.errors import RequestFailed, Unavailable, failure
from jgr.client.recommender import Kind, Recommender
from jgr.config import Config, ConfigError, override
from jgr.models import hub
from jgr.models.manifest import folder_config
from jgr.serving.api import Answer, ModelInfo, RankRequest, RecommendRequest
from jgr.serving.cluster.own_items import read_kv
from jgr.serving.errors import RequestError
from jgr.serving.http.decoding import decode
from jgr.serving.policies import jobs
from jgr.serving.prefill import Asked, Prefill, Prefilled
from jgr.serving.versions.deployment import Deployment
from jgr.serving.versions.loading import is_scorer, load_any
from jgr.serving.versions.served_models import Models

T = TypeVar("T")

IN_FLIGHT = 256
"""The most requests that one call with several histories has in the engine at a time, if its queue takes so many."""

_read: dict[Kind, Callable[[bytes], Asked]] = {
    "recommend": partial(decode, msgspec.json.Decoder(RecommendRequest)),
    "rank": partial(decode, msgspec.json.Decoder(RankRequest)),
    "prefill": partial(decode, msgspec.json.Decoder(Prefill)),
}


class Engine(Recommender):
    """A model in this process. Its construction returns when all programs are compiled.

    model: a folder that `jgr train` or `jgr convert` wrote, or a whole configuration. settings: overrides such as
    "beam.width=64". kinds: of the calls that will be made, "recommend", "rank" or both; a generator's programs for the
    other are not compiled, and such a call is refused. Raises jgr.Error, naming the field, for what cannot be served.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Config,
        settings: Sequence[str] = (),
        kinds: Sequence[jobs.Kind] = jobs.KINDS,
    ) -> None:
        if isinstance(settings, str | Mapping):
            raise ConfigError(f'settings must be a list such as ["beam.width=64"], not {settings!r}')
        if isinstance(kinds, str) or not kinds or not set(kinds) <= set(jobs.KINDS):
            raise ConfigError(
                f'kinds must be a list such as ["rank"], of {", ".join(jobs.KINDS)}, not {kinds!r}'
            )
        base = model if isinstance(model, Config) else folder_config(os.fspath(model))
        config = override(base, *settings)
        if "rank" not in kinds and config.model.path and is_scorer(hub.local(config.model.path)):
            raise ConfigError(
                f"kinds: {config.model.path} is a scorer, which answers rank alone, not {kinds!r}"
            )
        thread = _EngineThread(config, kinds)
        # Stops it too where nobody closes the engine: when it is freed, or the interpreter ends.
        self._stop = weakref.finalize(self, thread.stop)
        self._thread = thread
        thread.started.result()

    @property
    def info(self) -> ModelInfo:
        return self._thread.models.infos[0]

    def close(self) -> None:
        self._stop()

    def metrics(self) -> str:
        """The engine's series as a server shows them under /metrics. Raises Unavailable after `close`."""
        return self._thread.metrics().result()

    def _ask(self, kind: Kind, bodies: Sequence[bytes]) -> list[Any]:
        answers = self._thread.begin(kind, bodies)
        try:
            return answers.result()
        except BaseException:  # such as KeyboardInterrupt: nobody waits any more
            answers.cancel()
            raise

    async def _aask(self, kind: Kind, bodies: Sequence[bytes]) -> list[Any]:
        return await asyncio.wrap_future(self._thread.begin(kind, bodies))


class _EngineThread:
    """The event loop of an engine, in a daemon thread. It holds no reference to the Engine, which can so be freed."""

    def __init__(self, config: Config, kinds: Sequence[jobs.Kind]) -> None:
        self.models = Models([Deployment(load_any(config, kinds=kinds), config.catalog)])
        read_kv(self.models, config)
        self.started: Future[None] = Future()
        self._timeout_s = config.server.drain_timeout_s
        self._slots = asyncio.Semaphore(min(IN_FLIGHT, config.batching.max_queue))
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._lock = threading.Lock()
        self._closed = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._serve, name="jgr-engine", daemon=True)
        self._thread.start()

    def begin(self, kind: Kind, bodies: Sequence[bytes]) -> Future[list[Any]]:
        """Ask for all bodies at once. Unavailable after `stop`, and in a forked process, which has no such thread."""
        return self._begin(lambda: self._answers(kind, bodies))

    def metrics(self) -> Future[str]:
        """Read the series on the event loop, which writes them. Unavailable as in `begin`."""

        async def read() -> str:
            return self.models.render_metrics().decode()

        return self._begin(read)

    def _begin(self, what: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        if os.getpid() != self._process:
            raise Unavailable(
                "a forked process cannot ask its parent's engine; make one there", "unavailable"
            )
        with self._lock:  # so that what is accepted stands in the loop's queue before the stop
            if self._closed:
                raise Unavailable("the engine is closed", "unavailable")
            return asyncio.run_coroutine_threadsafe(what(), self._loop)

    def stop(self) -> None:
        """Finish what was accepted, and end the thread. May be called from any thread, and again."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._loop.call_soon_threadsafe(self._stopping.set)
        if threading.current_thread() is not self._thread:  # where the garbage collector calls it
            self._thread.join()

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._main())
        self.models.join(self._timeout_s)

    async def _main(self) -> None:
        drained = asyncio.create_task(self._drained())
        try:
            await self.models.start(lambda done, total, label: None)
        except BaseException as error:
            self._closed = True
            self._stopping.set()
            await drained
            self.started.set_exception(error)
            return
        self.started.set_result(None)
        await drained
        left = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*left, return_exceptions=True)  # they hear that the engine has stopped

    async def _drained(self) -> None:
        """Drain after a stop, which in the warm-up ends that once the program at hand is compiled."""
        await self._stopping.wait()
        await self.models.drain(self._timeout_s)

    async def _answers(self, kind: Kind, bodies: Sequence[bytes]) -> list[Any]:
        several = len(bodies) > 1
        requests = [self._request(kind, body, at if several else None) for at, body in enumerate(bodies)]
        if not several:
            return [await self._answer(kind, request, None) for request in requests]

        async def one(at: int, request: Asked) -> Answer | Prefilled:
            async with self._slots:
                return await self._answer(kind, request, at)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(at, request)) for at, request in enumerate(requests)]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    def _request(self, kind: Kind, body: bytes, index: int | None) -> Asked:
        with _typed(index, None):
            return _read[kind](body)

    async def _answer(self, kind: Kind, request: Asked, index: int | None) -> Answer | Prefilled:
        request_id = os.urandom(16).hex()
        with _typed(index, request_id):
            if isinstance(request, Prefill):
                return await self.models.hinted(request.model).answer(request, request_id)
            assert kind != "prefill"
            return await self.models.engine(request.model, kind).answer(request, request_id)


@contextlib.contextmanager
def _typed(index: int | None, request_id: str | None) -> Iterator[None]:
    """Turn the engine's refusals into the exceptions of jgr.client.errors."""
    try:
        yield
    except RequestError as error:
        wait_s = float(error.retry_after_s) if error.type == "overloaded" else None
        failed: RequestFailed = failure(error.type, error.message, error.field, request_id, wait_s)
        failed.index = index
        raise failed from None
