# SPDX-License-Identifier: Apache-2.0
"""What every engine offers to the server: one version of one model, over one catalog.

`jgr.serving.decoders.serve` serves decoders, `jgr.serving.scorers.serve` models that score a user's candidates in one
pass. The server, reloads and evaluation know no more of either than what stands here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from jgr.cache.meta import CacheMeta
from jgr.catalog.catalog import Catalog
from jgr.serving.api import Answer, ModelInfo, Request
from jgr.serving.engine.metrics import Metrics

Progress = Callable[[int, int, str], None]
"""Called with (done, total, label) after each step of a warm-up, in the thread that takes it."""
Status = Literal["starting", "ready", "draining", "failed"]


class ClientGone(Exception):
    """Ends the future of a request that nobody waits for."""


class AnyTicket(Protocol):
    """A request on its way."""

    @property
    def answer(self) -> asyncio.Future[Answer]:
        """Ends with an Answer, a RequestError or ClientGone."""


class AnyEngine(Protocol):
    """All methods but `join` are called on the event loop that `start` was called on."""

    @property
    def metrics(self) -> Metrics:
        """May be shared with the engines of other versions and models."""

    @property
    def clock(self) -> Callable[[], int]:
        """Nanoseconds that never go back."""

    @property
    def rebuild(self) -> Rebuild | None:
        """None where the catalog cannot be changed."""

    @property
    def catalog(self) -> Catalog: ...

    @property
    def meta(self) -> CacheMeta | None:
        """Of its cache; None where nothing is cached."""

    @property
    def memory(self) -> Mapping[str, int]:
        """Bytes that its parts take, on the device and on the host, by their names."""

    @property
    def status(self) -> Status: ...

    @property
    def info(self) -> ModelInfo:
        """What is served, and the limits on its requests."""

    @property
    def queued(self) -> int:
        """Requests waiting for the device."""

    async def start(self, progress: Progress = ...) -> None:
        """Compile; `progress` is called in another thread. Raises what warm-up raises."""

    def submit(self, request: Request, request_id: str = "", arrival_ns: int | None = None) -> AnyTicket:
        """Accept a request or raise RequestError. arrival_ns: when it came in; deadlines count from it."""

    def cancel(self, ticket: Any) -> None:
        """Nobody waits for this engine's ticket any more. Does nothing where it has already ended."""

    async def answer(self, request: Request, request_id: str = "") -> Answer:
        """Submit and wait. RequestError as in `submit` and for failures; a cancelled caller cancels it."""

    async def drain(self, timeout_s: float | None) -> bool:
        """Refuse new work and finish what was accepted. False: time ran out, and the rest got errors. None: no limit.

        An engine that nobody else holds is freed afterwards, its device memory too.
        """

    def join(self, timeout_s: float) -> bool:
        """After `drain`: wait for its threads. False where the device still holds one."""

    def forget(self, user_id: str) -> int:
        """Erase a user's cache entries; how many there were."""

    def check(self) -> None:
        """Audit the invariants; AssertionError names the broken one."""


@dataclass(frozen=True)
class Rebuild:
    """How a model is served over another catalog. check: raises UserError where that cannot be.

    engine: the catalog's engine, not started; as `check`, besides. Both take long and run in a thread of their own.
    """

    check: Callable[[Catalog], object]
    engine: Callable[[Catalog], AnyEngine]
