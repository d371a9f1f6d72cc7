# SPDX-License-Identifier: Apache-2.0
"""Changes of a fleet, one replica after the other: reloads, catalogs, and the way back.

The first replica is asked first. Where it refuses, nothing has changed. Where its change ends badly, since the new
version's probe failed, the rollout stops there: that replica serves what it served, and so do all others. Where a later
one fails, those that have changed go back, also one that was asked and then was silent; what does not go back is
replaced. One that is lost meanwhile stops nothing: the one that Ray starts for it gets what all serve by then, or waits
for its turn.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import parse_qsl, quote, urlencode

import msgspec

from jgr.serving.catalog_api import CatalogInfo
from jgr.serving.cluster.protocol import Incompatible, require
from jgr.serving.cluster.record import NOTHING, Record, States, plain, served
from jgr.serving.cluster.relay import Answered, Asked
from jgr.serving.errors import RequestError
from jgr.serving.fleet_api import Rollout
from jgr.serving.http.cold import UPLOAD_PATH
from jgr.serving.versions.served_state import packed

POLL_S = 0.2
LONGEST_S = 3600.0
STILL_S = 60.0
"""So long it is waited until no replica changes, where it is not known what they do: an earlier coordinator may have
begun it."""
SILENT_S = 120.0
"""So long a replica that does not answer is asked again. Ray replaces one that hangs much sooner."""
JOINING_S = 30.0
"""So long a replica that has joined is waited for until requests can be sent to it."""
BACK = "/rollback"
BAD = ("failed", "cancelled")
"""Ends of a replica's change that leave it with what it served."""
CANCELLED = ("/reload", "/activate")
"""Ends of paths at which one server's changes are cancelled."""

_log = logging.getLogger(__name__)


class Fleet(Protocol):
    """The replicas, as a rollout sees them. names: of those that answer. about: raises KeyError where the replica is
    gone, and TimeoutError where it is silent. remember: waits for no replica that is silent."""

    async def names(self) -> list[str]: ...
    async def ask(self, name: str, asked: Asked) -> Answered: ...
    async def about(self, name: str) -> dict[str, Any]: ...
    async def remember(self, record: Record) -> None: ...


@dataclass
class _Change:
    """A change on its way through the fleet. begun, served: how many changes of each kind a replica had begun, and what
    it served, before it was asked for this one. done, lost: names of replicas."""

    path: str
    asked: Asked
    begun: dict[str, Mapping[str, int]] = field(default_factory=dict)
    served: dict[str, States] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def begins(self, name: str, about: Mapping[str, Any]) -> None:
        """A replica is about to be asked. Raises Incompatible for one of another protocol."""
        self.begun[name] = _numbers(about)
        self.served[name] = plain(about["states"])


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
        """Go on where it is not known what all serve: after a change that failed, or for a coordinator that was lost,
        maybe within a change, before the change was recorded. record: the latest that the replicas have. Where all
        serve the same, that is recorded; else those that do not serve what is recorded are told so, and are
        replaced."""
        states = await self._still()
        if not record.number or all(record.agrees(each) for each in states):
            self.record = record
            return
        alike = all(served(each) == served(states[0]) for each in states)
        # Who joins from here on is told of this one: nothing is awaited since the last look at who is there.
        self.record = record.after(states[0], most=self._most) if alike else record.later()
        _log.warning("a change was not finished: %s", "it stands" if alike else "those that have it go")
        await self._fleet.remember(self.record)

    async def _still(self) -> list[States]:
        """What each replica that answers serves, once none of them changes and all that have joined are seen."""
        until_s = self._clock() + STILL_S
        while True:
            found: list[States] = []
            names = await self._fleet.names()
            changing = self._coming(names)
            for name in names:
                try:
                    about = await self._fleet.about(name)
                    require(about["spoken"])
                except (KeyError, Incompatible):  # it is lost, or gets no request
                    continue
                except TimeoutError:  # nor is it known whether it changes
                    changing = True
                    continue
                changing |= any(state == "running" for _, state, _ in about["changes"].values())
                found.append(plain(about["states"]))
            if not changing or self._clock() >= until_s:
                return found
            await self._wait(POLL_S)

    async def roll(self, path: str, asked: Asked) -> Answered:
        """The first replica's answer; the change of the others goes on in the background. Who is cancelled while that
        is awaited cancels nothing of it. Raises RequestError where another change is going on, or no replica is
        there."""
        if asked.method == "DELETE" and path.endswith(CANCELLED):
            raise RequestError(
                "conflict",
                "a fleet's change cannot be cancelled; it stops at the first replica where it fails",
            )
        if self._going_on is not None and not self._going_on.done():
            raise RequestError(
                "conflict", "another change of the fleet is going on; ask again when it is over"
            )
        answer: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
        # Ray cancels what a request has called where its client leaves, and knows that by the request's context. The
        # first replica may have begun by then, so the change is a task of its own.
        self._going_on = asyncio.create_task(
            self._roll(_Change(path, asked), answer), context=contextvars.Context()
        )
        return await asyncio.shield(answer)

    async def _roll(self, change: _Change, answer: asyncio.Future[Answered]) -> None:
        """Ask the first replica, tell its answer, and go on."""
        names: list[str] = []
        try:
            names = await self._fleet.names()
            if not names:
                raise RequestError("unavailable", "no replica is ready")
            change.begins(names[0], await self._fleet.about(names[0]))
            answered = await self._fleet.ask(names[0], change.asked)
            answer.set_result(answered)
        except Exception as error:
            answer.set_exception(error)
            if change.begun:  # it was asked, and may have begun
                self.last = Rollout(state="running", path=change.path, of=len(names))
                await self._take_back(change, names[0], error)
            return
        finally:
            answer.cancel()  # where this task was cancelled
        if answered.status < 300:
            self.last = Rollout(state="running", path=change.path, of=len(names))
            await self._go_on(change, names[0], _upload(change.path, change.asked, answered))

    async def settled(self) -> None:
        """Wait for the change that is going on."""
        if self._going_on is not None:
            await asyncio.shield(self._going_on)

    async def _go_on(self, change: _Change, first: str, upload: tuple[str, bytes] | None) -> None:
        states: States = {}
        name: str | None = first
        try:
            while name is not None:
                states = await self._change_one(change, name) or states
                self._tell(done=tuple(change.done))
                name = await self._next((*change.done, *change.lost))
            if not change.done:
                raise Failed(first, "was lost with all others")
        except Exception as error:
            await self._take_back(change, error.name if isinstance(error, Failed) else str(name), error)
            return
        # Nothing is awaited since the last look at who is there: who joins from here on is told of this change.
        self.record = self.record.after(states, _of_model(upload, states, change.asked), self._most)
        self._tell(state="done")
        _log.info("%s: done on %d replicas", change.path, len(change.done))
        try:
            await self._fleet.remember(self.record)
        except Exception as error:
            _log.error("%s: the replicas were not told that it is done: %s", change.path, error)

    async def _change_one(self, change: _Change, name: str) -> States | None:
        """What the replica serves after its change; None: it was lost meanwhile."""
        try:
            if name not in change.begun:
                await self._begin(change, name)
            states = await self._done(name, change.begun[name])
        except Failed:
            raise
        except Exception as error:
            if name in await self._fleet.names():
                raise
            _log.warning("%s: replica %s was lost meanwhile: %s", change.path, name, error)
            change.lost.append(name)
            return None
        change.done.append(name)
        return states

    async def _next(self, had: tuple[str, ...]) -> str | None:
        """A replica that has not had the change; None: there is none."""
        while True:
            names = await self._fleet.names()
            coming = self._coming((*names, *had))
            if found := [name for name in names if name not in had]:
                return found[0]
            if not coming:
                return None
            await self._wait(POLL_S)

    def _coming(self, seen: Iterable[str]) -> bool:
        """Whether a replica that has joined is still to be seen."""
        for name in seen:
            self._joined.pop(name, None)
        now_s = self._clock()
        self._joined = {name: until_s for name, until_s in self._joined.items() if until_s > now_s}
        return bool(self._joined)

    async def _begin(self, change: _Change, name: str) -> None:
        """Ask a replica for the change. Raises Failed where it refuses."""
        change.begins(name, await self._about(name))
        answered = await self._fleet.ask(name, change.asked)
        if answered.status >= 300:
            raise Failed(name, f"answered {answered.status}: {answered.body.decode(errors='replace')[:500]}")

    async def _about(self, name: str) -> dict[str, Any]:
        """What a replica says of itself; one that is silent is asked again. Raises KeyError where it is gone, and
        TimeoutError where it is silent for too long."""
        until_s = self._clock() + SILENT_S
        while True:
            try:
                return await self._fleet.about(name)
            except TimeoutError as error:
                if self._clock() >= until_s:
                    raise
                _log.info("replica %s is silent, and is asked again: %s", name, error)
            await self._wait(POLL_S)

    async def _done(self, name: str, begun: Mapping[str, int]) -> States:
        """Wait until the replica's change is over, and tell what it serves. Raises Failed where it ended badly."""
        waited_s = 0.0
        while waited_s < LONGEST_S:
            about = await self._about(name)
            mine = [
                (state, error)
                for of, (number, state, error) in about["changes"].items()
                if number > begun.get(of, 0)
            ]
            failed = next((error or state for state, error in mine if state in BAD), None)
            if failed is not None:
                raise Failed(name, failed)
            if all(state != "running" for state, _ in mine):
                return plain(about["states"])
            await self._wait(POLL_S)
            waited_s += POLL_S
        raise Failed(name, "took too long")

    async def _take_back(self, change: _Change, at: str, error: Exception) -> None:
        """End a change that failed at a replica: who has it goes back, and who does not go is replaced."""
        self._tell(state="failed", replica=at, error=str(error))
        _log.error("%s: stopped after %d replicas: %s", change.path, len(change.done), error)
        # One that is Failed has no new version, or takes too long and is replaced where it gets one after all. Another
        # one may still be at its change.
        if not isinstance(error, Failed) and at not in change.done and await self._has(change, at):
            change.done.append(at)
            self._tell(done=tuple(change.done))
        await self._go_back(change)
        before = self.record
        try:
            await self.resume(before)
            # All that were seen agree then. One that is silent may not.
            if before.number and self.record is before:
                self.record = before.later()
                await self._fleet.remember(self.record)
        except Exception as unknown:
            _log.error("%s: it is not known what all serve now: %s", change.path, unknown)

    async def _has(self, change: _Change, name: str) -> bool:
        """Whether a replica has the change, once its own is over."""
        if name not in change.begun:
            return False
        try:
            await self._done(name, change.begun[name])
            return _numbers(await self._about(name)) != change.begun[name]
        except Exception as error:
            _log.warning("%s: replica %s does not get it: %s", change.path, name, error)
            return False

    async def _go_back(self, change: _Change) -> None:
        for name in change.done:
            try:
                now = plain((await self._about(name))["states"])
                asked = _way_back(change.asked, change.served[name], now)
                if asked is None:
                    continue
                back = _Change(asked.path, asked)
                await self._begin(back, name)
                await self._done(name, back.begun[name])
            except Exception as error:
                _log.error("%s of replica %s: it does not go back: %s", change.path, name, error)
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


def _way_back(asked: Asked, before: States, now: States) -> Asked | None:
    """What undoes a change of one replica; None: nothing needs to, or can. before, now: what it served and serves."""
    path = asked.path
    changed = [
        name for name, state in now.items() if name not in before or before[name].served != state.served
    ]
    if not changed:  # such as a reload of what serves already: the version before is not what it served
        return None
    of = changed[0]
    # By its name: the change may have been asked for by an exact version, which serves no more.
    own = asked._replace(path=f"/v1/models/{quote(of)}{BACK}", body=b"")
    if path.endswith("/reload"):
        if of in before and before[of]._replace(catalog=now[of].catalog).served == now[of].served:
            query = urlencode({"model": of}).encode()  # its catalog alone, which has a way back of its own
            return asked._replace(path=UPLOAD_PATH + BACK, query=query, body=b"")
        return own
    if path.endswith("/activate"):
        return asked._replace(path=UPLOAD_PATH + BACK, body=b"")
    if not path.endswith(BACK):
        return None
    # The version before is by then the later one.
    return asked._replace(body=b"") if path == UPLOAD_PATH + BACK else own
