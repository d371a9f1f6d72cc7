# SPDX-License-Identifier: Apache-2.0
"""The replicas behind their handle: one that is named or that the router chooses, or all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Any

from ray.serve.handle import DeploymentHandle

from jgr.serving.cluster.hints import Hint
from jgr.serving.cluster.protocol import received
from jgr.serving.cluster.record import Record
from jgr.serving.cluster.relay import Answered, Asked

ALL_S = 30.0
"""So long all replicas have to answer what all are asked."""
LOOK_S = 5.0
"""So long a replica has to say what is shown of it; one that hangs is left out. Prometheus waits for ten."""


class Replicas:
    """What is asked of a fleet's replicas. Ray's errors come as they are. known: the names of those that are there."""

    def __init__(self, handle: DeploymentHandle, known: Callable[[], Collection[str]] = tuple) -> None:
        self._handle, self._known = handle, known

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

    async def each(self, asked: Asked, within_s: float) -> list[Answered]:
        """The answers of those that answer so soon: nobody waits for one that hangs."""
        return [received(Answered, each) for each in await self._each("answer", within_s, asked)]

    async def names(self) -> list[str]:
        """The names of those that serve."""
        return [each["name"] for each in await self.about_all() if each["status"] == "ready"]

    async def about(self, name: str) -> dict[str, Any]:
        """What the replica of that name says of itself. KeyError where it does not answer."""
        return {str(each["name"]): each for each in await self.about_all()}[name]

    async def about_all(self) -> list[dict[str, Any]]:
        """What those that answer say of themselves, by their names."""
        found = [each for each in await self._broadcast("about") if isinstance(each, dict)]
        return sorted(found, key=lambda each: str(each["name"]))

    async def seen(self, within_s: float = LOOK_S) -> list[dict[str, Any]]:
        """The same of those that answer so soon."""
        return sorted(await self._each("about", within_s), key=lambda each: str(each["name"]))

    async def items(self, name: str, what: str, *arguments: Any) -> Any:
        """What the replica of that name answers to a question about items."""
        return (await self._handle.items.remote(Hint(to=name), what, *arguments))[1]

    async def items_all(self, what: str, *arguments: Any) -> dict[str, Any]:
        """The same of those that answer, and have a part in the items, by name."""
        found = await self._broadcast("items", Hint(), what, *arguments)
        answered = [each for each in found if not isinstance(each, Exception)]
        return {name: answer for name, answer in answered if answer is not None}

    async def metrics(self) -> dict[str, str]:
        """The series of those that answer soon, by name."""
        return dict(sorted(await self._each("metrics", LOOK_S)))

    async def remember(self, record: Record) -> None:
        """Tell all what the fleet serves."""
        await self._broadcast("remember", record)

    async def records(self) -> list[Record]:
        """What those that answer know of what the fleet serves."""
        return [
            Record.received(each)
            for each in await self._broadcast("recorded")
            if not isinstance(each, Exception)
        ]

    async def _each(self, method: str, within_s: float, *arguments: Any) -> list[Any]:
        """What each replica answers, of those that do within so long."""
        tasks = [asyncio.create_task(self._ask_named(method, name, *arguments)) for name in self._known()]
        if not tasks:
            found = await self._broadcast(method, Hint(), *arguments)
            return [each for each in found if not isinstance(each, Exception)]
        done, late = await asyncio.wait(tasks, timeout=within_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        return [task.result() for task in done if task.exception() is None]

    async def _ask_named(self, method: str, name: str, *arguments: Any) -> Any:
        response = getattr(self._handle, method).remote(Hint(to=name), *arguments)
        try:
            return await response
        except asyncio.CancelledError:
            response.cancel()
            raise

    async def _broadcast(self, method: str, *arguments: Any) -> list[Any]:
        answers = self._handle.broadcast(method, *arguments)
        found: list[Any] = await answers.results_async(timeout_s=ALL_S, return_exceptions=True)
        return found
