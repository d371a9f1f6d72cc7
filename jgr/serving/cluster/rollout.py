# SPDX-License-Identifier: Apache-2.0
"""Changes of a fleet, one replica after the other: reloads, catalogs, and the way back.

The first replica is asked first. Where it refuses, nothing has changed. Where its change ends badly, since the new
version's probe failed, the rollout stops there: that replica serves what it served, and so do all others. Where a later
one fails, those that have changed go back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from jgr.serving.cluster.relay import Answered, Asked
from jgr.serving.errors import RequestError

POLL_S = 0.2
LONGEST_S = 3600.0
BACK = "/rollback"

_log = logging.getLogger(__name__)


class Fleet(Protocol):
    """The replicas, as a rollout sees them."""

    async def names(self) -> list[str]: ...
    async def ask(self, name: str, asked: Asked) -> Answered: ...
    async def about(self, name: str) -> dict[str, Any]: ...


class Rollouts:
    """One change at a time. wait: between two looks at a replica."""

    def __init__(self, fleet: Fleet, wait: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._fleet, self._wait = fleet, wait
        self._going_on: asyncio.Task[None] | None = None
        self._asking = False
        self.state: dict[str, Any] = {"state": "never"}

    async def roll(self, path: str, asked: Asked) -> Answered:
        """The first replica's answer; the change of the others goes on in the background. Raises RequestError where
        another change is going on, or no replica is there."""
        if self._asking or (self._going_on is not None and not self._going_on.done()):
            raise RequestError(
                "conflict", "another change of the fleet is going on; ask again when it is over"
            )
        self._asking = True
        try:
            names = await self._fleet.names()
            if not names:
                raise RequestError("unavailable", "no replica is ready")
            first, *others = names
            answered = await self._fleet.ask(first, asked)
            if answered.status < 300:
                self.state = {"state": "running", "path": path, "done": [], "of": len(names)}
                self._going_on = asyncio.create_task(self._go_on(path, asked, first, others))
            return answered
        finally:
            self._asking = False

    async def settled(self) -> None:
        """Wait for the change that is going on."""
        if self._going_on is not None:
            await asyncio.shield(self._going_on)

    async def _go_on(self, path: str, asked: Asked, first: str, others: list[str]) -> None:
        done: list[str] = []
        try:
            for name in (first, *others):
                if name != first and (answered := await self._fleet.ask(name, asked)).status >= 300:
                    raise Failed(
                        name, f"answered {answered.status}: {answered.body.decode(errors='replace')[:500]}"
                    )
                await self._done(name)
                done.append(name)
                self.state |= {"done": list(done)}
            self.state |= {"state": "done"}
            _log.info("%s: done on %d replicas", path, len(done))
        except Exception as error:
            at = error.name if isinstance(error, Failed) else "?"
            self.state |= {"state": "failed", "replica": at, "error": str(error)}
            _log.error("%s: stopped after %d replicas: %s", path, len(done), error)
            await self._go_back(path, asked, done)

    async def _done(self, name: str) -> None:
        """Wait until the replica's change is over. Raises Failed where it ended badly."""
        waited_s = 0.0
        while waited_s < LONGEST_S:
            models = (await self._fleet.about(name))["models"]
            states = {model: (state, error) for model, (_, state, error) in models.items()}
            failed = next((error for state, error in states.values() if state == "failed"), None)
            if failed is not None:
                raise Failed(name, failed)
            if all(state != "running" for state, _ in states.values()):
                return
            await self._wait(POLL_S)
            waited_s += POLL_S
        raise Failed(name, "took too long")

    async def _go_back(self, path: str, asked: Asked, done: list[str]) -> None:
        back = _way_back(path)
        if back is None or not done:
            return
        for name in done:
            answered = await self._fleet.ask(name, asked._replace(path=back, query=asked.query, body=b""))
            _log.warning("%s of replica %s: %d", back, name, answered.status)
        self.state |= {"back": list(done)}


class Failed(Exception):
    """A replica's change ended badly."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"replica {name}: {reason}")
        self.name = name


def _way_back(path: str) -> str | None:
    """What undoes a change; None: nothing needs to, or can."""
    if path.endswith("/reload"):
        return path.removesuffix("/reload") + BACK
    if path.endswith("/activate"):
        return "/v1/catalogs" + BACK
    return None
