# SPDX-License-Identifier: Apache-2.0
"""One request at several replicas, which are functions here: some are lost, some never answer."""

from __future__ import annotations

import asyncio
import contextvars
import gc
from collections.abc import Awaitable, Callable, Coroutine
from functools import wraps
from typing import Any

import pytest

from jgr.serving.cluster.attempts import ATTEMPTS, SENDER, Attempts
from jgr.serving.cluster.hints import Hint
from jgr.serving.cluster.relay import Answered
from jgr.serving.errors import RequestError
from jgr.serving.policies.hedging import Hedging
from tests.serving.fakes import PATIENCE_S

LONG_NS = 10**18
OK = Answered(200, [], b"ok")
FULL = Answered(429, [], b"full")
BROKEN = Answered(500, [], b"broken")
LATE = Answered(504, [], b"late")


def runs(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(**given: Any) -> None:
        asyncio.run(test(**given))

    return run


class Lost(Exception):
    """A replica is gone."""


class World:
    """Replicas by name, and a router that takes the first that was not tried, the last where all were."""

    def __init__(self, **replicas: Callable[[], Awaitable[Answered]]) -> None:
        self.replicas = replicas
        self.hints: list[Hint] = []
        self.cancelled: list[str] = []
        self.hanging = asyncio.Event()

    async def send(self, hint: Hint, asked: Any) -> Answered:
        self.hints.append(hint)
        names = sorted(self.replicas, key=hint.tried.__contains__)
        ATTEMPTS[hint.attempt].node = names[0]
        try:
            return await self.replicas[names[0]]()
        except asyncio.CancelledError:
            self.cancelled.append(names[0])
            raise

    async def hang(self) -> Answered:
        self.hanging.set()
        await asyncio.Event().wait()
        raise AssertionError

    def attempts(self, most: int = 3, multiple: float = 0) -> Attempts:
        """Where a multiple is given, a replica is silent too long at once."""
        return self.hedged(most, Hedging(multiple, least_ns=1, first_ns=1))

    def hedged(self, most: int, hedging: Hedging) -> Attempts:
        return Attempts(self.send, (Lost,), most, hedging, lambda: self.replicas)

    @property
    def tried(self) -> list[tuple[str, ...]]:
        return [hint.tried for hint in self.hints]


async def ok() -> Answered:
    return OK


async def full() -> Answered:
    return FULL


async def broken() -> Answered:
    return BROKEN


async def late() -> Answered:
    return LATE


async def lost() -> Answered:
    raise Lost


def ask(of: Attempts, until_ns: int | None = None) -> Awaitable[Answered]:
    return asyncio.wait_for(of.answer(Hint(user="u"), None, 0, until_ns), PATIENCE_S)


@runs
async def test_a_request_goes_elsewhere_where_a_replica_is_lost() -> None:
    world = World(a=lost, b=lost, c=ok)
    assert await ask(world.attempts()) == OK
    assert world.tried == [(), ("a",), ("a", "b")]
    assert len({hint.attempt for hint in world.hints}) == 3
    assert {(hint.user, hint.sender) for hint in world.hints} == {("u", SENDER)}


@runs
async def test_it_is_sent_so_often_and_no_more() -> None:
    world = World(a=lost, b=lost, c=ok)
    with pytest.raises(RequestError) as raised:
        await ask(world.attempts(most=2))
    assert raised.value.type == "unavailable"
    assert len(world.hints) == 2


@runs
async def test_the_deadline_ends_it_and_its_work() -> None:
    world = World()
    world.replicas = {"a": world.hang}
    with pytest.raises(RequestError) as raised:
        await ask(world.attempts(), until_ns=1)
    assert raised.value.type == "deadline_exceeded"
    await asyncio.sleep(0)
    assert world.cancelled == ["a"]


@runs
async def test_who_lets_a_deadline_pass_is_not_asked_next() -> None:
    """Nobody else was asked, but the replica would seem to have nothing to do now."""
    world = World()
    world.replicas = {"a": world.hang, "b": ok}
    of = world.hedged(3, Hedging(1, first_ns=LONG_NS))
    with pytest.raises(RequestError):
        await ask(of, until_ns=1)
    assert await ask(of) == OK
    assert world.tried == [(), ("a",)]


@runs
async def test_another_replica_answers_for_one_that_is_silent() -> None:
    world = World()
    world.replicas = {"a": world.hang, "b": ok}
    of = world.attempts(multiple=1)
    assert await ask(of) == OK
    await asyncio.sleep(0)
    assert (world.tried, world.cancelled) == ([(), ("a",)], ["a"])
    assert await ask(of) == OK
    assert world.tried[2:] == [("a",)], "it was silent and has answered nobody since"
    gc.collect()
    assert not ATTEMPTS, "what has ended is forgotten"


@runs
async def test_a_silent_one_is_waited_for_where_nobody_may_be_asked_besides() -> None:
    world = World()
    release = asyncio.Event()

    async def late() -> Answered:
        await release.wait()
        return OK

    world.replicas = {"a": late, "b": ok}
    for of in (world.attempts(multiple=0), world.attempts(most=1, multiple=1)):
        release.clear()
        asked = asyncio.ensure_future(ask(of))
        for _ in range(20):
            await asyncio.sleep(0)
        release.set()
        assert await asked == OK
    assert world.tried == [(), ()]


@pytest.mark.parametrize("second", [full, lost])
@runs
async def test_a_second_that_refuses_or_is_lost_does_not_take_the_first_ones_place(second: Any) -> None:
    world = World()
    release = asyncio.Event()

    async def late() -> Answered:
        await release.wait()
        return OK

    async def other() -> Answered:
        release.set()
        found: Answered = await second()
        return found

    world.replicas = {"a": late, "b": other}
    assert await ask(world.attempts(most=2, multiple=1)) == OK
    assert world.tried == [(), ("a",)]


@runs
async def test_a_refusal_is_the_answer_where_nobody_else_is_asked() -> None:
    world = World(a=full, b=ok)
    assert await ask(world.attempts()) == FULL
    assert world.tried == [()]


@runs
async def test_what_fails_at_one_replica_is_asked_of_another_one() -> None:
    world = World(a=broken, b=ok)
    assert await ask(world.attempts()) == OK
    assert world.tried == [(), ("a",)]


@pytest.mark.parametrize(
    ("second", "most", "answer", "sent"),
    [
        (broken, 4, BROKEN, 2),
        (full, 4, FULL, 2),
        (late, 4, LATE, 2),
        (ok, 1, BROKEN, 1),
        (lost, 2, BROKEN, 2),
    ],
)
@runs
async def test_it_is_asked_of_one_other_alone_and_within_the_attempts(
    second: Any, most: int, answer: Answered, sent: int
) -> None:
    world = World(a=broken, b=second, c=ok, d=ok)
    assert await ask(world.attempts(most=most)) == answer
    assert len(world.hints) == sent


@runs
async def test_what_fails_at_the_only_replica_is_not_asked_of_it_again() -> None:
    world = World(a=broken)
    assert await ask(world.attempts()) == BROKEN
    assert world.tried == [()]


@runs
async def test_the_only_replica_is_not_asked_again_while_it_is_silent_but_is_suspected() -> None:
    """It would only have twice as much to do; who comes next may have another one."""
    world, hedging = World(), Hedging(1, least_ns=1, first_ns=1)
    world.replicas = {"a": world.hang}
    asked = asyncio.ensure_future(ask(world.hedged(3, hedging)))
    for _ in range(20):
        await asyncio.sleep(0)
    assert (world.tried, hedging.suspects) == ([()], ("a",))
    world.replicas["b"] = ok
    assert await asked == OK, "it is looked for again and again"
    assert world.tried == [(), ("a",)]


@runs
async def test_who_is_lost_alone_is_followed_by_whoever_takes_its_place() -> None:
    """Nobody may have heard yet of the replica that is there by then."""
    world = World()

    async def at_first() -> Answered:
        world.replicas["a"] = ok
        raise Lost

    world.replicas = {"a": at_first}
    assert await ask(world.attempts()) == OK
    assert world.tried == [(), ("a",)]


@runs
async def test_a_failure_does_not_take_the_place_of_an_answer_that_is_under_way() -> None:
    world = World()
    release = asyncio.Event()

    async def first() -> Answered:
        await release.wait()
        return OK

    async def other() -> Answered:
        release.set()
        return BROKEN

    world.replicas = {"a": first, "b": other}
    assert await ask(world.attempts(most=2, multiple=1)) == OK
    assert world.tried == [(), ("a",)]


@pytest.mark.parametrize("answer", [broken, late])
@runs
async def test_who_answers_that_it_failed_or_was_late_is_not_asked_next(answer: Any) -> None:
    """Its device may be broken, or hang, and it seems to have nothing to do."""
    world = World(a=answer, b=ok)
    hedging = Hedging(1, first_ns=LONG_NS)
    of = world.hedged(1, hedging)
    assert (await ask(of)).status in (500, 504)
    assert hedging.suspects == ("a",)
    assert await ask(of) == OK
    assert world.tried == [(), ("a",)]


@runs
async def test_an_answer_that_it_was_late_leaves_a_replica_among_the_suspects() -> None:
    world = World(a=late, b=ok)
    hedging = Hedging(1, first_ns=LONG_NS)
    hedging.silent("a", 0, 1)
    assert await ask(world.hedged(1, hedging)) == LATE
    assert hedging.suspects == ("a",)


@runs
async def test_who_stops_waiting_cancels_the_work() -> None:
    world = World()
    world.replicas = {"a": world.hang}
    task = asyncio.ensure_future(world.attempts().answer(Hint(), None, 0, None))
    await world.hanging.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    assert world.cancelled == ["a"]


@runs
async def test_each_attempt_has_a_context_of_its_own() -> None:
    """Ray takes calls of one context for calls of one request, and mixes them up."""
    request = contextvars.ContextVar("request", default="none")
    seen = []

    async def seeing() -> Answered:
        seen.append(request.get())
        return OK

    request.set("outer")
    assert await ask(World(a=seeing).attempts()) == OK
    assert seen == ["none"]
