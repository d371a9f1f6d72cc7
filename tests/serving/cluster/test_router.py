# SPDX-License-Identifier: Apache-2.0
"""The router as Ray calls it, with the replicas that it is told of in place of a cluster."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from functools import wraps
from typing import Any

import pytest

from jgr.serving.cluster.attempts import ATTEMPTS, Attempt
from jgr.serving.cluster.hints import Hint
from jgr.serving.cluster.protocol import PROTOCOL
from jgr.serving.policies.digests import digest

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
BITS = 12
SHAPE = {"event_tokens": 10.0, "item_tokens": 5.0, "other_tokens": 0.0}
HINT = Hint(user="u:1", events=10, items=("x", "y"))
"""110 tokens."""


def runs(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(**given: Any) -> None:
        asyncio.run(test(**given))

    return run


class Told:
    """A replica as Ray's router knows it."""

    max_ongoing_requests = 100
    routing_stats: Mapping[str, Any] = {}

    def __init__(self, name: str, **stats: Any) -> None:
        from ray.serve._private.common import DeploymentID
        from ray.serve.request_router import ReplicaID

        self.replica_id = ReplicaID(name, DeploymentID("Replica", "jgr"))
        self.report(**{"users": b"", "items": b"", "sent": {}, **stats})

    def report(self, **stats: Any) -> None:
        number = self.routing_stats.get("number", 0) + 1
        self.routing_stats = {"protocol": PROTOCOL, "number": number, **SHAPE, **stats}

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return 0


class Sent:
    """A request as Ray gives it to the router."""

    def __init__(self, hint: Hint, id: str) -> None:
        self.args = [hint]
        self.metadata = type("Metadata", (), {"internal_request_id": id})


class World:
    """A router of the live class and its replicas."""

    def __init__(self, **stats: dict[str, Any]) -> None:
        from ray.serve._private.common import DeploymentHandleSource, DeploymentID

        from jgr.serving.cluster.router import FleetRouter

        self.router = FleetRouter(DeploymentID("Replica", "jgr"), DeploymentHandleSource.REPLICA)
        self.router.initialize_state(bits=BITS)
        self.replicas = {name: Told(name, **each) for name, each in stats.items()}
        self.router.update_replicas(list(self.replicas.values()))
        self.number = 0

    async def send(self, hint: Hint = HINT) -> list[str]:
        """The names of the replicas, the first choice first; it goes there."""
        self.number += 1
        sent = Sent(hint, str(self.number))
        ranks = await self.router.choose_replicas(list(self.replicas.values()), sent)
        assert all(len(rank) == 1 for rank in ranks)
        names = [rank[0].replica_id.unique_id for rank in ranks]
        self.router.on_request_routed(sent, self.replicas[names[0]].replica_id, None)
        return names


@runs
async def test_a_replica_that_was_tried_comes_last_though_it_has_the_user() -> None:
    world = World(a={"users": digest(["u:1"], BITS)}, b={}, c={})
    assert (await world.send())[0] == "a"
    assert (await world.send(HINT._replace(tried=("a",))))[-1] == "a"
    assert (await world.send(HINT._replace(tried=("a", "b"))))[0] == "c"
    assert set(await world.send(HINT._replace(tried=("a", "b", "c")))) == {"a", "b", "c"}, "none is left"


@runs
async def test_a_replica_that_says_it_is_ten_times_slower_gets_few_requests() -> None:
    world = World(a={"ns_per_token": 1e5}, b={"ns_per_token": 1e4}, c={"ns_per_token": 1e4})
    got = Counter([(await world.send(HINT._replace(user=f"u:{n}")))[0] for n in range(60)])
    assert got["a"] <= 6 and min(got["b"], got["c"]) >= 25, got


@runs
async def test_one_that_would_be_late_for_the_deadline_is_not_chosen() -> None:
    """110 tokens take 11 ms on a, and 4.4 ms on b, which does not have the user."""
    world = World(a={"users": digest(["u:1"], BITS), "ns_per_token": 1e6}, b={"ns_per_token": 4e4})
    assert (await world.send(HINT._replace(left_ms=5.0)))[0] == "b"
    patient = World(a={"users": digest(["u:1"], BITS), "ns_per_token": 5e4}, b={"ns_per_token": 4e4})
    assert (await patient.send(HINT._replace(left_ms=50.0)))[0] == "a"


@runs
async def test_who_waits_is_told_what_was_chosen_and_how_long_it_should_take() -> None:
    world = World(a={"ns_per_token": 1e4})
    found = []
    for number in range(2):
        name = f"test-{number}"
        attempt = ATTEMPTS[name] = Attempt()
        await world.send(HINT._replace(attempt=name))
        found.append((attempt.node, attempt.predicted_ns))
    assert found == [("a", 110 * 1e4), ("a", 220 * 1e4)]
    for number in ("1", "2"):
        world.router.on_request_completed(world.replicas["a"].replica_id, number)
    attempt = ATTEMPTS["test-3"] = Attempt()
    await world.send(HINT._replace(attempt="test-3"))
    assert attempt.predicted_ns == 110 * 1e4, "the others have ended"


@runs
async def test_each_replica_is_told_what_the_router_books_for_it() -> None:
    """110 tokens, of which a has the user's 100 and b one of two items of 5."""
    kept = {"a": {"users": digest(["u:1"], BITS)}, "b": {"items": digest(["x"], BITS)}, "c": {}, "d": {}}
    world = World(**kept)  # type: ignore[arg-type]
    sent = Sent(HINT, "1")
    ranks = await world.router.choose_replicas(list(world.replicas.values()), sent)
    (told,) = sent.args
    works = {"a": 10, "b": 105, "c": 110, "d": 110}
    assert told._replace(expected=()) == HINT
    assert [name for name, _ in told.expected] == [rank[0].replica_id.unique_id for rank in ranks]
    assert dict(told.expected).items() <= works.items() and len(told.expected) == 3
    assert world.router._policy._bookings.work.tolist() == [10, 0, 0, 0]
    world.replicas["b"].report(users=digest(["u:1"], BITS))
    world.router.update_replicas(list(world.replicas.values()))
    for name, own in (("b", [0, 105, 0, 0]), ("a", [10, 0, 0, 0])):
        world.router.on_request_routed(sent, world.replicas[name].replica_id, None)
        if name in dict(told.expected):
            assert world.router._policy._bookings.work.tolist() == own, (
                "as it was told, whatever was heard since"
            )


@runs
async def test_what_has_ended_is_not_booked_again_though_ray_tells_only_then_who_took_it() -> None:
    world = World(a={}, b={}, c={}, d={})
    bookings = world.router._policy._bookings
    for number, taken in enumerate(("first", "third", "refused")):
        sent = Sent(HINT, str(number))
        ranks = await world.router.choose_replicas(list(world.replicas.values()), sent)
        first, _, third = (rank[0].replica_id for rank in ranks)
        assert bookings.work.sum() == 110
        at = third if taken == "third" else first
        world.router.on_request_completed(at, str(number))
        if taken == "refused":  # by the first one, which takes it after all
            ranks = await world.router.choose_replicas([world.replicas[first.unique_id]], sent)
            world.router.on_request_routed(sent, first, None)
            assert ranks[0][0].replica_id == first and bookings.work.sum() == 110
            world.router.on_request_completed(first, str(number))
        else:
            world.router.on_request_routed(sent, at, None)
        assert (bookings.work.sum(), len(bookings)) == (0, 0), taken


@runs
@pytest.mark.parametrize("given_up", ["while it is asked whether it takes more", "before it was ranked"])
async def test_what_is_given_up_before_it_is_sent_is_not_booked(given_up: str) -> None:
    """Ray's own loop asks a replica that it knows nothing of, and the attempt is cancelled meanwhile."""
    from ray.serve._private.common import RequestMetadata
    from ray.serve.request_router import PendingRequest

    from jgr.serving.cluster.router import SERIES

    world = World(a={})
    bookings = world.router._policy._bookings
    asked = asyncio.Event()

    async def silent(*, deadline_s: float) -> int:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    world.replicas["a"].get_queue_len = silent  # type: ignore[method-assign]
    attempt = ATTEMPTS["given-up"] = Attempt()
    sent = PendingRequest(
        args=[HINT._replace(attempt="given-up")], kwargs={}, metadata=RequestMetadata("1", "2")
    )
    if given_up.startswith("before"):
        attempt.end()
    routing = asyncio.create_task(world.router._choose_replica_for_request(sent))
    await asked.wait()
    if not attempt.over:
        assert bookings.work.tolist() == [110]
        attempt.end()
    routing.cancel()
    await asyncio.gather(routing, return_exceptions=True)
    await asyncio.sleep(0)
    assert (bookings.work.sum(), len(bookings)) == (0, 0)
    assert SERIES.tokens() == {"a": 0.0}


@runs
async def test_a_replica_of_a_jgr_that_is_not_understood_gets_nothing_unless_there_are_no_others() -> None:
    world = World(a={"users": digest(["u:1"], BITS), "protocol": 99}, b={"protocol": PROTOCOL}, c={})
    assert set(await world.send()) == {"b", "c"}
    assert await World(a={"protocol": 99}).send() == ["a"]


@runs
async def test_a_report_that_cannot_be_read_does_not_end_rays_poll() -> None:
    """What it is told in is a callback of Ray's, which polls no more after an error."""
    world = World(a={"users": digest(["u:1"], BITS + 4), "ns_per_token": 7.0}, b={"sent": {"f": -1.0}})
    assert world.router._policy.nodes == ("a", "b")
    assert world.router._policy._ns.tolist() == [7.0, 0.0]


def test_each_process_routes_under_a_name_of_its_own() -> None:
    """What replicas report by sender must be told apart; a copy of the module would keep another process's name."""
    from ray.serve.config import RequestRouterConfig

    from jgr.serving.cluster.application import ROUTER
    from jgr.serving.cluster.router import FleetRouter

    assert RequestRouterConfig(request_router_class=ROUTER).get_request_router_class() is FleetRouter


class Broadcast:
    """A handle, and what it broadcasts, with one that never answers, one that is dead, and one that answers on its
    own time."""

    def __init__(self) -> None:
        self.cancelled: list[str] = []
        self.goes_on = asyncio.Event()

    def broadcast(self, method: str, *arguments: Any) -> Broadcast:
        return self

    async def _fetch_replica_results_async(self) -> list[Result]:
        return [Result(self, name) for name in ("silent", "dead", "well")]


class Result:
    """What Ray gets the answer of one from."""

    def __init__(self, of: Broadcast, name: str) -> None:
        self._of, self._name = of, name

    async def get_async(self) -> str:
        if self._name == "dead":
            raise ConnectionError
        await (asyncio.Event() if self._name == "silent" else self._of.goes_on).wait()
        return self._name

    def cancel(self) -> None:
        self._of.cancelled.append(self._name)


@runs
async def test_nobody_waits_for_one_that_is_silent_and_the_first_is_waited_for_longer() -> None:
    from jgr.serving.cluster.replicas import soon

    for slow in (False, True):
        all_ = Broadcast()
        if slow:
            asyncio.get_running_loop().call_later(0.1, all_.goes_on.set)
        else:
            all_.goes_on.set()
        found = await soon(all_, "about", within_s=0.05)  # type: ignore[arg-type]
        assert found == ["well"]
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True)
        assert all_.cancelled == ["silent"]


def test_a_handles_way_to_the_replicas_is_made_before_the_first_call() -> None:
    """Ray asks the head then. The router is not a real one."""
    from ray.serve.handle import DeploymentHandle

    from jgr.serving.cluster.replicas import begun

    made: list[object] = []

    def make(**given: object) -> object:
        made.append(given["deployment_id"])
        return object()

    handle = DeploymentHandle("Replica", "jgr", _create_router=make)  # type: ignore[arg-type]
    assert not handle.is_initialized
    ready = begun(handle)
    assert ready.is_initialized and ready.answer.is_initialized
    assert [str(each) for each in made] == [str(handle.deployment_id)], "once, for all its methods"
