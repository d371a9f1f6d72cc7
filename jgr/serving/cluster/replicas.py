# SPDX-License-Identifier: Apache-2.0
"""The replicas behind their handle: one that is named or that the router chooses, or all of them."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ray.exceptions import ActorUnavailableError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from jgr.serving.cluster.hints import Hint
from jgr.serving.cluster.protocol import Incompatible, received
from jgr.serving.cluster.record import Record
from jgr.serving.cluster.relay import Answered, Asked

ALL_S = 30.0
"""So long a replica has to answer what all are asked."""
SOON_S = 3.0
"""So long a replica has to say what is shown of it. Prometheus waits for 10 s, for less where it asks more often."""

UNKNOWN = (TimeoutError, ActorUnavailableError)
"""Why there is no answer of a replica that may serve all the same."""

_log = logging.getLogger(__name__)


def begun(handle: DeploymentHandle) -> DeploymentHandle:
    """The handle, whose way to the replicas is made now: Ray asks the head for it, at the first call otherwise, and all
    requests of the process would wait where the head is gone or cut off just then."""
    ready: DeploymentHandle = handle.options()  # which begins it, as Ray's documentation says
    return ready


async def soon(handle: DeploymentHandle, method: str, *arguments: Any, within_s: float = SOON_S) -> list[Any]:
    """What the replicas of a deployment answer, of those that do within so long: nobody waits for one that hangs or is
    cut off. Where none is so quick, the first answer within SOON_S. Raises TimeoutError, and Ray's errors where nobody
    can be asked."""
    # Ray gives all answers of a broadcast or none; what it gathers them from is not public.
    sent = handle.broadcast(method, *arguments)._fetch_replica_results_async()
    tasks = [asyncio.create_task(_answer(one)) for one in await asyncio.wait_for(sent, SOON_S)]
    try:
        if not tasks:  # Ray leaves out those that it finds dead or out of reach as it sends
            raise TimeoutError("no replica could be asked")
        done, late = await asyncio.wait(tasks, timeout=within_s)
        if late and not any(map(_is_well, done)):
            rest_s = SOON_S - within_s
            done, _ = await asyncio.wait(late, timeout=rest_s, return_when=asyncio.FIRST_COMPLETED)
        return [task.result() for task in done if _is_well(task)]
    finally:
        for task in tasks:
            task.cancel()


async def _answer(sent: Any) -> Any:
    try:
        return await sent.get_async()
    except asyncio.CancelledError:
        sent.cancel()  # else a replica that comes back would answer all that it was asked meanwhile
        raise


def _is_well(done: asyncio.Task[Any]) -> bool:
    return not done.cancelled() and done.exception() is None


def _is_out_of_reach(done: asyncio.Task[Any]) -> bool:
    return not done.cancelled() and isinstance(done.exception(), ActorUnavailableError)


def _outcome(task: asyncio.Task[Any]) -> Any:
    """The answer, or why there is none."""
    if not task.done() or task.cancelled():
        return TimeoutError(f"a replica was silent for {ALL_S:g} s")
    return task.exception() or task.result()


class Replicas:
    """What is asked of a fleet's replicas. Ray's errors come as they are. What all are asked, nobody waits longer for
    than ALL_S: one that is silent is left out, or has a TimeoutError for an answer."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle
        self._strangers: set[str] = set()  # what was logged of them

    async def answer(self, hint: Hint, asked: Asked) -> Answered:
        """The answer of the replica that the router chooses. Cancelled, it cancels the replica's work."""
        response = self._handle.answer.remote(hint, asked)
        try:
            return received(Answered, await response)
        except asyncio.CancelledError:
            response.cancel()  # else the replica would finish it
            raise

    async def ask(self, name: str, asked: Asked) -> Answered:
        """The answer of the replica of that name."""
        return await self.answer(Hint(to=name), asked)

    async def ask_all(self, asked: Asked) -> list[Answered | Exception]:
        """The answer of every replica, or why there is none."""
        found = await self._broadcast("answer", Hint(), asked)
        return [each if isinstance(each, Exception) else received(Answered, each) for each in found]

    async def answers(self, asked: Asked, within_s: float = SOON_S) -> list[Answered]:
        """The answers of those that answer soon, see `soon`."""
        found = await soon(self._handle, "answer", Hint(), asked, within_s=within_s)
        return [received(Answered, each) for each in found]

    async def names(self) -> list[str]:
        """The names of those that serve and answer."""
        return [each["name"] for each in await self.about_all() if each["status"] == "ready"]

    async def about(self, name: str) -> dict[str, Any]:
        """What the replica of that name says of itself; no other one is waited for. Raises KeyError where it is gone,
        and TimeoutError where it may be one that is silent."""
        tasks = await self._sent("about")
        late, silent, clock = set(tasks), False, asyncio.get_running_loop().time
        until_s = clock() + ALL_S
        try:
            while late and clock() < until_s:
                done, late = await asyncio.wait(
                    late, timeout=until_s - clock(), return_when=asyncio.FIRST_COMPLETED
                )
                for about in (task.result() for task in done if _is_well(task)):
                    if about["name"] == name:
                        return dict(about)
                silent |= any(map(_is_out_of_reach, done))
        finally:
            for task in tasks:
                task.cancel()
        raise TimeoutError(f"replica {name} is silent") if late or silent else KeyError(name)

    async def about_all(self) -> list[dict[str, Any]]:
        """What those that answer say of themselves, by their names."""
        found = [each for each in await self._broadcast("about") if isinstance(each, dict)]
        return sorted(found, key=lambda each: str(each["name"]))

    async def about_soon(self) -> list[dict[str, Any]]:
        """The same of those that answer soon, see `soon`."""
        return sorted(await soon(self._handle, "about"), key=lambda each: str(each["name"]))

    async def items(self, name: str, what: str, *arguments: Any) -> Any:
        """What the replica of that name answers to a question about items."""
        return (await self._handle.items.remote(Hint(to=name), what, *arguments))[1]

    async def items_all(self, what: str, *arguments: Any) -> dict[str, Any]:
        """The same of those that answer, and have a part in the items, by name; of nobody where none is there yet."""
        try:
            found = await self._broadcast("items", Hint(), what, *arguments)
        except DeploymentUnavailableError:
            return {}
        answered = [each for each in found if not isinstance(each, Exception)]
        return {name: answer for name, answer in answered if answer is not None}

    async def metrics(self, asked: Asked) -> dict[str, Answered]:
        """What those say to /metrics that answer soon, by name, see `soon`."""
        found = dict(sorted(await soon(self._handle, "metrics", asked)))
        return {name: received(Answered, each) for name, each in found.items()}

    async def remember(self, record: Record) -> None:
        """Tell all what the fleet serves."""
        await self._broadcast("remember", record)

    async def records(self) -> list[Record]:
        """What those that answer know of what the fleet serves; one of another protocol knows nothing. Raises
        TimeoutError where none answers and one may only be silent or out of reach, as where nobody could be asked."""
        found: list[Record] = []
        told = await self._broadcast("recorded")
        answered = any(not isinstance(each, Exception) for each in told)
        if not answered and (not told or any(isinstance(each, UNKNOWN) for each in told)):
            raise TimeoutError("all replicas are silent")
        for each in told:
            if isinstance(each, Exception):
                continue
            try:
                found.append(Record.received(each))
            except Incompatible as error:
                if str(error) not in self._strangers:  # it is asked again and again
                    self._strangers.add(str(error))
                    _log.warning("a replica's record is of no use: %s", error)
        return found

    async def _broadcast(self, method: str, *arguments: Any) -> list[Any]:
        """What each answers, or why it does not."""
        tasks = await self._sent(method, *arguments)
        try:
            if tasks:  # none where Ray finds all dead or out of reach as it sends
                await asyncio.wait(tasks, timeout=ALL_S)
            return [_outcome(task) for task in tasks]
        finally:
            for task in tasks:
                task.cancel()

    async def _sent(self, method: str, *arguments: Any) -> list[asyncio.Task[Any]]:
        """The answer of each. One that is silent still does what it is asked for, once it can, also where its answer is
        no longer waited for."""
        # Ray gives all answers of a broadcast or none; what it gathers them from is not public.
        sent = self._handle.broadcast(method, *arguments)._fetch_replica_results_async()
        return [asyncio.create_task(one.get_async()) for one in await asyncio.wait_for(sent, ALL_S)]
