# SPDX-License-Identifier: Apache-2.0
"""How long requests and answers are on their way between a fleet's processes, and what is refused for it."""

from __future__ import annotations

import asyncio
import json
import pickle
import time

import pytest
from starlette.types import Message, Receive, Scope, Send

from jgr.boot import boot_id
from jgr.serving.cluster import doors, ways
from jgr.serving.cluster.doors import Doors
from jgr.serving.cluster.relay import Answered, Asked, ask, reply
from jgr.serving.cluster.ways import ARRIVED, HALF_NS, LEFT, RATE, Stamp, Way, refuse_late
from jgr.serving.errors import RequestError

MS = 1_000_000


def test_a_moment_is_known_on_the_machine_whose_clock_it_is_alone() -> None:
    now = ways.stamp()
    assert pickle.loads(pickle.dumps(now)) == tuple(now)
    assert type(pickle.loads(pickle.dumps(now))) is tuple, "another version of jgr has not this type"
    passed_ns = ways.since_ns(now)
    assert passed_ns is not None and 0 <= passed_ns <= time.monotonic_ns() - now.at_ns
    assert ways.since_ns(Stamp("another machine", now.at_ns)) is None
    assert ways.since_ns(Stamp()) is None
    assert ways.since_ns(now._replace(at_ns=now.at_ns + 10**12)) is None, "it is to come"
    assert ways.read(ways.written(now, 7.4, 3)) == (now, 7.0, 3)
    assert ways.read(ways.written(now, ways.UNTOLD)) == (now, ways.UNTOLD, 0)
    for broken in (b"", b"x", b"a b c d", b"a 1 2", b"\xff 1 2 3"):
        assert ways.read(broken) == (Stamp(), 0.0, 0)


def test_a_way_is_a_mean_of_late_and_fades_where_nothing_is_measured() -> None:
    now_ns = [0]
    way = Way(lambda: now_ns[0])
    assert way.mean_ns == 0
    for _ in range(200):
        way.took(80 * MS)
    assert way.mean_ns == pytest.approx(80 * MS)
    way.took(0)
    assert way.mean_ns == pytest.approx(80 * MS * (1 - RATE))
    way.took(None)
    now_ns[0] += HALF_NS
    assert way.mean_ns == pytest.approx(40 * MS * (1 - RATE))
    way.took(0)
    assert way.mean_ns == pytest.approx(40 * MS * (1 - RATE) ** 2)


def test_what_cannot_be_there_in_time_is_refused_at_once() -> None:
    refuse_late(60 * MS, 39.9 * MS, 100 * MS)
    with pytest.raises(RequestError) as late:
        refuse_late(60 * MS, 40.0 * MS, 100 * MS)
    assert (late.value.type, late.value.predicted_ms) == ("overloaded", 100.0)
    with pytest.raises(RequestError) as over:
        refuse_late(100 * MS, 0.0, 100 * MS)
    assert over.value.type == "deadline_exceeded"


def test_the_proxy_says_when_a_request_came_and_learns_how_long_answers_take() -> None:
    found: list[tuple[Stamp, float, int]] = []

    async def behind(scope: Scope, receive: Receive, send: Send) -> None:
        (value,) = (value for name, value in scope["headers"] if name == ARRIVED)
        found.append(ways.read(value))
        left = ways.stamp()._replace(at_ns=time.monotonic_ns() - 50 * MS)
        await reply(send, Answered(200, [(b"x", b"y"), (LEFT, ways.written(left))], b"{}"))

    door = Doors(behind)
    forged = (ARRIVED, ways.written(Stamp(boot_id(), 1)))
    for _ in range(2):
        before_ns = time.monotonic_ns()
        answered = asyncio.run(ask(door, Asked("GET", "/v1/models", b"", [forged], b"")))
        assert answered.headers == [(b"x", b"y")], "clients are told nothing of it"
        assert before_ns <= found[-1][0].at_ns <= time.monotonic_ns(), "nor are they believed"
    assert found[0][1] == 0
    assert 0.5 * RATE * 50 * MS < found[1][1] < RATE * 50 * MS + 1e9


def test_a_door_lets_in_as_many_as_are_not_held_up_and_tells_of_the_others() -> None:
    """Every answer says that its request was held up, until none does; five come at a time."""
    told, waiting, held = list[int](), asyncio.Event(), [1.0]

    async def behind(scope: Scope, receive: Receive, send: Send) -> None:
        (value,) = (value for name, value in scope["headers"] if name == ARRIVED)
        told.append(ways.read(value)[2])
        await waiting.wait()
        left = (LEFT, ways.written(ways.stamp(), held[0] if scope["path"] == "/v1/rank" else ways.UNTOLD))
        await reply(send, Answered(200, [left], b"{}"))

    async def five(door: Doors, path: str = "/v1/rank") -> list[int]:
        waiting.clear()
        asked = Asked("POST", path, b"", [(b"x-request-id", b"mine")], b"")
        running = [asyncio.create_task(ask(door, asked)) for _ in range(5)]
        await asyncio.sleep(0)
        waiting.set()
        answers = [await each for each in running]
        for each in answers:
            if each.status == 429:
                error = json.loads(each.body)["error"]
                assert (error["type"], error["request_id"]) == ("overloaded", "mine")
                assert "requests in hand" in error["message"] and dict(each.headers)[b"retry-after"] == b"1"
        return [each.status for each in answers]

    async def run() -> None:
        door = Doors(behind)
        assert await five(door) == [200] * 5
        for _ in range(100):
            await five(door)
        told.clear()
        assert await five(door) == [200, 200, 429, 429, 429], "the least that are let in"
        assert await five(door, "/v1/models") == [200] * 5, "the window is for models' work alone"
        assert sum(told) == 3 + 3, "of the turn before, and of this one"
        held[0] = 0.0
        for _ in range(100):
            await five(door)
        assert await five(door) == [200] * 5

    asyncio.run(run())


def test_who_is_slow_to_send_a_body_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What such a client sends is passed on as it comes, and counts once it is whole."""
    came, ends = list[bytes](), asyncio.Event()

    async def behind(scope: Scope, receive: Receive, send: Send) -> None:
        more = True
        while more:
            message = await receive()
            came.append(message["body"])
            more = message.get("more_body", False)
        await ends.wait()
        await reply(send, Answered(200, [], b"{}"))

    async def ask_by_parts(door: Doors, parts: asyncio.Queue[Message]) -> list[Message]:
        answer = list[Message]()

        async def send(message: Message) -> None:
            answer.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/rank", "query_string": b"", "headers": []}
        await door(scope, parts.get, send)
        return answer

    async def run() -> None:
        door = Doors(behind)
        door._window.answered(False, 0, time.monotonic_ns())  # it knows something of what is there now
        door._window.size = 2
        stalled = [asyncio.Queue[Message]() for _ in range(5)]
        running = [asyncio.create_task(ask_by_parts(door, parts)) for parts in stalled]
        for parts in stalled[:3]:
            parts.put_nowait({"type": "http.request", "body": b"a", "more_body": True})
        for _ in range(5):
            await asyncio.sleep(0)
        assert (came, door._window.inside) == ([b"a"] * 3, 0)
        for parts in stalled[:3]:
            parts.put_nowait({"type": "http.request", "body": b"b"})
        for _ in range(5):
            await asyncio.sleep(0)
        assert (came[3:], door._window.inside) == ([b"b"] * 3, 3)
        stalled[3].put_nowait({"type": "http.request", "body": b"c"})
        assert (await running[3])[0]["status"] == 429
        ends.set()
        assert [(await each)[0]["status"] for each in running[:3]] == [200] * 3
        assert door._window.inside == 0
        stalled[4].put_nowait({"type": "http.disconnect"})
        assert await running[4] == []
        monkeypatch.setattr(doors, "READ_TIMEOUT_S", 0.0)
        late = await ask_by_parts(door, asyncio.Queue())
        assert late[0]["status"] == 400 and b"the body did not come in time" in late[1]["body"]

    asyncio.run(run())
