# SPDX-License-Identifier: Apache-2.0
"""Changes of a fleet, one replica after the other: reloads, catalogs, and the way back.

The first replica is asked first. Where it refuses, nothing has changed. Where its change ends badly, since the new
version's probe failed, the rollout stops there: that replica serves what it served, and so do all others. Where a later
one fails, those that have changed go back. One that is lost meanwhile stops nothing: the one that Ray starts for it
gets what all serve by then, or waits for its turn.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol
from urllib.parse import parse_qsl

import msgspec

from jgr.serving.catalog_api import CatalogInfo
from jgr.serving.cluster.protocol import require
from jgr.serving.cluster.record import NOTHING, Record, States, plain, served
from jgr.serving.cluster.relay import Answered, Asked
from jgr.serving.errors import RequestError
from jgr.serving.fleet_api import Rollout
from jgr.serving.http.cold import UPLOAD_PATH
from jgr.serving.versions.served_state import packed

POLL_S = 0.2
LONGEST_S = 3600.0
STILL_S = 60.0
"""So long a new coordinator waits for the change that an earlier one had begun on a replica."""
JOINING_S = 30.0
"""So long a replica that has joined is waited for until requests can be sent to it."""
BACK = "/rollback"

_log = logging.getLogger(__name__)


class Fleet(Protocol):
    """The replicas, as a rollout sees them."""

    async def names(self) -> list[str]: ...
    async def ask(self, name: str, asked: Asked) -> Answered: ...
    async def about(self, name: str) -> dict[str, Any]: ...
    async def remember(self, record: Record) -> None: ...


class Rollouts:
    """One change at a time, and what the fleet serves after it. wait: between two looks at a replica. most: uploaded
    catalogs that are kept. clock: seconds that never go back.

    last: the last change since this began, as `/v1/models` tells it.
    """

    def __init__(
        self,
        fleet: Fleet,
        wait: Callable[[float], Awaitable[None]] = asyncio.sleep,
        record: Record = NOTHING,
        most: int = 4,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet, self._wait, self._most, self._clock = fleet, wait, most, clock
        self._going_on: asyncio.Task[None] | None = None
        self._asking = False
        self._joined: dict[str, float] = {}  # until when those that have joined may still not be seen
        self.record = record
        self.last = Rollout()

    def joins(self, name: str, states: States) -> bool:
        """Whether a replica that starts may answer: it serves what the others do. The first one of all says what that
        is."""
        if not self.record.number:
            self.record = self.record.after(states, most=self._most)
        if not self.record.agrees(states):
            return False
        self._joined[name] = self._clock() + JOINING_S
        return True

    async def resume(self, record: Record) -> None:
        """Go on for a coordinator that was lost, maybe within a change, before the change was recorded. record: the
        latest that the replicas have. Where all serve the same, that is recorded; else those that do not serve what is
        recorded are told so, and are replaced."""
        states = await self._still()
        if record.number and not all(record.agrees(each) for each in states):
            alike = all(served(each) == served(states[0]) for each in states)
            record = record.after(states[0], most=self._most) if alike else record.later()
            _log.warning("a change was not finished: %s", "it stands" if alike else "those that have it go")
            await self._fleet.remember(record)
        self.record = record

    async def _still(self) -> list[States]:
        """What each replica that is ready serves, once none of them changes."""
        waited_s = 0.0
        while True:
            found: list[States] = []
            changing = False
            for name in await self._fleet.names():
                with suppress(KeyError):  # it is lost
                    about = await self._fleet.about(name)
                    changing |= any(state == "running" for _, state, _ in about["changes"].values())
                    found.append(plain(about["states"]))
            if waited_s >= STILL_S or not changing:
                return found
            await self._wait(POLL_S)
            waited_s += POLL_S

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
            first = names[0]
            begun = _numbers(await self._fleet.about(first))
            answered = await self._fleet.ask(first, asked)
            if answered.status < 300:
                self.last = Rollout(state="running", path=path, of=len(names))
                upload = _upload(path, asked, answered)
                self._going_on = asyncio.create_task(self._go_on(path, asked, first, begun, upload))
            return answered
        finally:
            self._asking = False

    async def settled(self) -> None:
        """Wait for the change that is going on."""
        if self._going_on is not None:
            await asyncio.shield(self._going_on)

    async def _go_on(
        self, path: str, asked: Asked, first: str, begun: Mapping[str, int], upload: tuple[str, bytes] | None
    ) -> None:
        done: list[str] = []
        lost: list[str] = []
        states: States = {}
        name: str | None = first
        try:
            while name is not None:
                try:
                    if name != first:
                        begun = await self._begin(name, asked)
                    states = await self._done(name, begun)
                    done.append(name)
                except Failed:
                    raise
                except Exception as error:
                    if name in await self._fleet.names():
                        raise
                    _log.warning("%s: replica %s was lost meanwhile: %s", path, name, error)
                    lost.append(name)
                self._tell(done=tuple(done))
                name = await self._next((*done, *lost))
            if not done:
                raise Failed(first, "was lost with all others")
        except Exception as error:
            at = error.name if isinstance(error, Failed) else str(name)
            self._tell(state="failed", replica=at, error=str(error))
            _log.error("%s: stopped after %d replicas: %s", path, len(done), error)
            await self._go_back(path, asked, done)
            return
        # Nothing is awaited since the last look at who is there: who joins from here on is told of this change.
        self.record = self.record.after(states, _of_model(upload, states, asked), self._most)
        self._tell(state="done")
        _log.info("%s: done on %d replicas", path, len(done))
        await self._fleet.remember(self.record)

    async def _next(self, had: tuple[str, ...]) -> str | None:
        """A replica that has not had the change; None: there is none."""
        while True:
            names = await self._fleet.names()
            for name in (*names, *had):
                self._joined.pop(name, None)
            if found := [name for name in names if name not in had]:
                return found[0]
            now_s = self._clock()
            self._joined = {name: until_s for name, until_s in self._joined.items() if until_s > now_s}
            if not self._joined:
                return None
            await self._wait(POLL_S)

    async def _begin(self, name: str, asked: Asked) -> Mapping[str, int]:
        """Ask a replica for the change; how many it had begun before. Raises Failed where it refuses."""
        begun = _numbers(await self._fleet.about(name))
        answered = await self._fleet.ask(name, asked)
        if answered.status >= 300:
            raise Failed(name, f"answered {answered.status}: {answered.body.decode(errors='replace')[:500]}")
        return begun

    async def _done(self, name: str, begun: Mapping[str, int]) -> States:
        """Wait until the replica's change is over, and tell what it serves. Raises Failed where it ended badly."""
        waited_s = 0.0
        while waited_s < LONGEST_S:
            about = await self._fleet.about(name)
            mine = [
                (state, error)
                for of, (number, state, error) in about["changes"].items()
                if number > begun.get(of, 0)
            ]
            failed = next((error for state, error in mine if state == "failed"), None)
            if failed is not None:
                raise Failed(name, failed)
            if all(state != "running" for state, _ in mine):
                return plain(about["states"])
            await self._wait(POLL_S)
            waited_s += POLL_S
        raise Failed(name, "took too long")

    async def _go_back(self, path: str, asked: Asked, done: list[str]) -> None:
        back = _way_back(asked.path)
        if back is None or not done:
            return
        for name in done:
            try:
                begun = await self._begin(name, asked._replace(path=back, query=asked.query, body=b""))
                await self._done(name, begun)
            except Exception as error:
                _log.error("%s of replica %s: it does not go back: %s", path, name, error)
            else:
                self._tell(back=(*self.last.back, name))

    def _tell(self, **changed: Any) -> None:
        self.last = msgspec.structs.replace(self.last, **changed)


class Failed(Exception):
    """A replica's change ended badly."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"replica {name}: {reason}")
        self.name = name


def _numbers(about: Mapping[str, Any]) -> dict[str, int]:
    """How many changes of each kind a replica has begun. Raises Incompatible for one of another protocol."""
    require(about["spoken"])
    return {of: number for of, (number, _, _) in about["changes"].items()}


def _upload(path: str, asked: Asked, answered: Answered) -> tuple[str, bytes] | None:
    """The version and the body of a catalog that was uploaded."""
    if path != UPLOAD_PATH:
        return None
    return msgspec.json.decode(answered.body, type=CatalogInfo).version, packed(asked.body)


def _of_model(
    upload: tuple[str, bytes] | None, states: States, asked: Asked
) -> tuple[str, str, bytes] | None:
    """The upload with the model that it is for, which the query names unless there is one alone."""
    if upload is None:
        return None
    named = dict(parse_qsl(asked.query.decode("latin-1"))).get("model")
    model = next((name for name, state in states.items() if named in (None, name, state.version)), "")
    return model, *upload


def _way_back(path: str) -> str | None:
    """What undoes a change; None: nothing needs to, or can."""
    if path.endswith("/reload"):
        return path.removesuffix("/reload") + BACK
    if path.endswith("/activate"):
        return path.rpartition(f"{UPLOAD_PATH}/")[0] + UPLOAD_PATH + BACK
    return path if path.endswith(BACK) else None  # the version before is by then the later one
