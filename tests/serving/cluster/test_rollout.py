# SPDX-License-Identifier: Apache-2.0
"""Changes of a fleet, one replica after the other, and where they stop."""

from __future__ import annotations

import asyncio
import contextvars
from contextlib import suppress
from typing import Any

import pytest

from jgr.serving.cluster.protocol import spoken
from jgr.serving.cluster.record import Record
from jgr.serving.cluster.relay import Answered, Asked
from jgr.serving.cluster.rollout import JOINING_S, POLL_S, SILENT_S, STILL_S, Rollouts, _way_back
from jgr.serving.errors import RequestError
from jgr.serving.fleet_api import Rollout
from jgr.serving.versions.served_state import State

RELOAD = Asked("POST", "/v1/models/m/reload", b"", [], b"")


class Replicas:
    """Replicas of a model whose versions are numbers. bad: those whose new version's probe fails. dying: those that die
    with a change. slow: looks that a change takes. silent: so many looks at a replica that has begun a change go
    unanswered. keeps: those that refuse to go back. loses: those whose answer to a change is lost. brings: what a
    reload brings: another "version", another "catalog" alone, or "nothing"."""

    def __init__(
        self,
        *names: str,
        bad: tuple[str, ...] = (),
        refuses: tuple[str, ...] = (),
        dying: tuple[str, ...] = (),
        slow: int = 2,
        silent: dict[str, int] | None = None,
        keeps: tuple[str, ...] = (),
        loses: tuple[str, ...] = (),
        brings: str = "version",
    ) -> None:
        self.brings, self.catalogs = brings, dict.fromkeys(names, 1)
        self.silent, self.keeps, self.loses = dict(silent or {}), keeps, loses
        self.begun: dict[str, int] = {}
        self.dying, self.told = dying, list[Record]()
        self.versions = dict.fromkeys(names, 1)
        self.bad, self.refuses, self.slow = bad, refuses, slow
        self.asked: list[tuple[str, str]] = []
        self.left: dict[str, int] = {}
        self.states: dict[str, tuple[str, str | None]] = dict.fromkeys(names, ("never", None))
        self.most_changing = 0

    async def names(self) -> list[str]:
        return sorted(self.versions)

    async def ask(self, name: str, asked: Asked) -> Answered:
        self.asked.append((name, asked.path.rpartition("/")[2]))
        await asyncio.sleep(0)
        if name in self.refuses or (name in self.keeps and asked.path.endswith("rollback")):
            return Answered(409, [], b"not now")
        self.left[name] = self.slow
        self.begun[name] = self.begun.get(name, 0) + 1
        self.states[name] = ("running", None)
        self.most_changing = max(
            self.most_changing, sum(state == "running" for state, _ in self.states.values())
        )
        if asked.path == "/v1/catalogs/rollback":
            assert asked.query == b"model=m"
            self.catalogs[name] -= 1
            self.states[name] = ("done", None)
        elif asked.path.endswith("rollback"):
            self.versions[name] -= 1
            self.states[name] = ("done", None)
        elif name in self.loses:
            raise ConnectionError(name)
        return Answered(202, [], b"{}")

    async def about(self, name: str) -> dict[str, Any]:
        if name in self.dying and self.states[name][0] == "running":
            del self.versions[name]
        if name not in self.versions:
            raise KeyError(name)
        if self.states[name][0] != "never" and self.silent.get(name, 0) > 0:
            self.silent[name] -= 1
            raise TimeoutError(name)
        self.left[name] = self.left.get(name, 0) - 1
        if self.left[name] <= 0 and self.states[name][0] == "running":
            if name in self.bad:
                self.states[name] = ("failed", "the probe failed")
            else:
                self.versions[name] += self.brings == "version"
                self.catalogs[name] += self.brings == "catalog"
                self.states[name] = ("done", None)
        return {
            "spoken": spoken(),
            "states": {"m": State(f"m@{self.versions[name]}", "c" * self.catalogs[name])},
            "changes": {"m model": (self.begun.get(name, 0), *self.states[name])},
        }

    async def remember(self, record: Record) -> None:
        self.told.append(record)


async def _at_once(seconds: float) -> None:
    await asyncio.sleep(0)


def rolled(replicas: Replicas) -> tuple[Answered, Rollout]:
    async def run() -> tuple[Answered, Rollout]:
        rollouts = Rollouts(replicas, _at_once)
        answered = await rollouts.roll(RELOAD.path, RELOAD)
        await rollouts.settled()
        return answered, rollouts.last

    return asyncio.run(run())


def test_one_replica_changes_after_the_other() -> None:
    replicas = Replicas("a", "b", "c")
    answered, last = rolled(replicas)
    assert answered.status == 202
    assert last == Rollout(state="done", path=RELOAD.path, of=3, done=("a", "b", "c"))
    assert replicas.versions == {"a": 2, "b": 2, "c": 2}
    assert replicas.asked == [("a", "reload"), ("b", "reload"), ("c", "reload")]
    assert replicas.most_changing == 1


def test_where_the_first_ones_probe_fails_no_other_is_asked() -> None:
    replicas = Replicas("a", "b", "c", bad=("a",))
    _, last = rolled(replicas)
    assert (last.state, last.replica, last.done, last.back) == ("failed", "a", (), ())
    assert last.error == "replica a: the probe failed"
    assert replicas.asked == [("a", "reload")] and set(replicas.versions.values()) == {1}


def test_where_a_later_one_fails_those_before_go_back() -> None:
    replicas = Replicas("a", "b", "c", bad=("c",))
    _, last = rolled(replicas)
    assert (last.state, last.replica, last.done, last.back) == ("failed", "c", ("a", "b"), ("a", "b"))
    assert replicas.versions == {"a": 1, "b": 1, "c": 1}


def test_where_a_later_one_refuses_those_before_go_back() -> None:
    replicas = Replicas("a", "b", refuses=("b",))
    _, last = rolled(replicas)
    assert last.error == "replica b: answered 409: not now"
    assert replicas.versions == {"a": 1, "b": 1}


def test_a_change_that_brought_nothing_new_is_not_gone_back_from() -> None:
    """The version before is one that the replica did not serve when it was asked."""
    replicas = Replicas("a", "b", bad=("b",), brings="nothing")
    _, last = rolled(replicas)
    assert (last.state, last.replica, last.back) == ("failed", "b", ())
    assert replicas.asked == [("a", "reload"), ("b", "reload")]
    assert replicas.versions == {"a": 1, "b": 1}


def test_a_reload_that_brought_another_catalog_alone_goes_back_to_the_catalog_before() -> None:
    replicas = Replicas("a", "b", bad=("b",), brings="catalog")
    _, last = rolled(replicas)
    assert (last.state, last.back) == ("failed", ("a",))
    assert (replicas.versions["a"], replicas.catalogs["a"]) == (1, 1)


@pytest.mark.parametrize("path", ["/v1/models/shop@1a2b/reload", "/v1/models/shop@1a2b/rollback"])
def test_the_way_back_names_the_model_where_the_change_named_its_version(path: str) -> None:
    """That version serves no more when the replica is to go back."""
    asked = RELOAD._replace(path=path, body=b"{}")
    before, now = ({"books/shop é": State(f"shop@{version}", "c")} for version in ("1a2b", "3c4d"))
    back = _way_back(asked, before, now)
    assert back == RELOAD._replace(path="/v1/models/books/shop%20%C3%A9/rollback")


def test_the_way_back_from_a_catalogs_rollback_is_the_same_again() -> None:
    asked = RELOAD._replace(path="/v1/catalogs/rollback", query=b"model=shop", body=b"{}")
    before, now = ({"shop": State("shop@1", catalog)} for catalog in "cd")
    assert _way_back(asked, before, now) == asked._replace(body=b"")
    assert _way_back(asked._replace(path="/v1/catalogs"), before, now) is None


def test_what_the_first_refuses_is_refused_and_changes_nothing() -> None:
    replicas = Replicas("a", "b", refuses=("a",))
    answered, last = rolled(replicas)
    assert (answered.status, last) == (409, Rollout())
    assert replicas.asked == [("a", "reload")]


def test_a_change_of_the_fleet_is_not_cancelled() -> None:
    async def run() -> None:
        replicas = Replicas("a", slow=5)
        rollouts = Rollouts(replicas, _at_once)
        await rollouts.roll(RELOAD.path, RELOAD)
        with pytest.raises(RequestError, match="cannot be cancelled") as refused:
            await rollouts.roll(RELOAD.path, RELOAD._replace(method="DELETE"))
        assert refused.value.type == "conflict"
        await rollouts.settled()
        assert (rollouts.last.state, replicas.asked) == ("done", [("a", "reload")])

    asyncio.run(run())


def test_one_change_at_a_time_and_none_without_replicas() -> None:
    async def run() -> None:
        rollouts = Rollouts(Replicas("a", slow=5), _at_once)
        await rollouts.roll(RELOAD.path, RELOAD)
        with pytest.raises(RequestError, match="another change") as refused:
            await rollouts.roll(RELOAD.path, RELOAD)
        assert refused.value.type == "conflict"
        await rollouts.settled()
        assert (await rollouts.roll(RELOAD.path, RELOAD)).status == 202
        await rollouts.settled()
        both = await asyncio.gather(
            *(rollouts.roll(RELOAD.path, RELOAD) for _ in range(2)), return_exceptions=True
        )
        assert [type(each) for each in both] == [Answered, RequestError], "also while the first is asked"
        await rollouts.settled()
        with pytest.raises(RequestError, match="no replica"):
            await Rollouts(Replicas(), _at_once).roll(RELOAD.path, RELOAD)

    asyncio.run(run())


def failed(replicas: Replicas) -> Rollouts:
    """After a change of replicas whose record is the third. Time goes on only while it is waited."""

    async def run() -> Rollouts:
        now_s = [0.0]

        async def wait(seconds: float) -> None:
            now_s[0] += seconds
            await asyncio.sleep(0)

        rollouts = Rollouts(replicas, wait, at(1, 3), clock=lambda: now_s[0])
        with suppress(ConnectionError):
            await rollouts.roll(RELOAD.path, RELOAD)
        await rollouts.settled()
        return rollouts

    return asyncio.run(run())


def test_a_replica_that_is_silent_for_a_while_is_asked_again() -> None:
    replicas = Replicas("a", "b", silent={"a": 3, "b": 1})
    _, last = rolled(replicas)
    assert (last.state, last.done, last.error) == ("done", ("a", "b"), None)
    assert replicas.versions == {"a": 2, "b": 2}


def test_a_replica_that_is_silent_for_too_long_goes_back_when_it_has_changed() -> None:
    """Else it would serve the new version alone, and for good."""
    replicas = Replicas("a", "b", silent={"b": round(SILENT_S / POLL_S) + 9})
    last = failed(replicas).last
    assert (last.state, last.replica, last.error) == ("failed", "b", "b")
    assert (last.done, last.back) == (("a", "b"), ("a", "b"))
    assert replicas.versions == {"a": 1, "b": 1}


def test_a_replica_whose_answer_to_a_change_is_lost_goes_back_when_it_has_changed() -> None:
    for loses in ("a", "b"):
        replicas = Replicas("a", "b", loses=(loses,))
        last = failed(replicas).last
        assert (last.state, last.replica, last.error) == ("failed", loses, loses)
        assert last.done == last.back == tuple("ab"[: "ab".index(loses) + 1])
        assert replicas.versions == {"a": 1, "b": 1}


def test_a_replica_that_does_not_go_back_is_told_what_the_others_serve() -> None:
    replicas = Replicas("a", "b", bad=("b",), keeps=("a",))
    rollouts = failed(replicas)
    assert (rollouts.last.done, rollouts.last.back) == (("a",), ())
    assert replicas.versions == {"a": 2, "b": 1}
    assert rollouts.record == at(1, 4) and replicas.told == [at(1, 4)], "it hears a later one only"


def test_where_nobody_goes_back_and_all_serve_the_same_that_stands() -> None:
    replicas = Replicas("a", keeps=("a",), loses=("a",))
    rollouts = failed(replicas)
    assert rollouts.last.state == "failed" and replicas.versions == {"a": 2}
    assert rollouts.record == at(2, 4) and replicas.told == [at(2, 4)]


def test_after_a_failure_one_that_stays_silent_is_told_too() -> None:
    """Nobody knows what it serves by then."""
    replicas = Replicas("a", "b", silent={"b": round((2 * SILENT_S + STILL_S) / POLL_S) + 99})
    rollouts = failed(replicas)
    assert (rollouts.last.done, rollouts.last.back) == (("a",), ("a",))
    assert replicas.told == [at(1, 4)] and replicas.silent["b"] > 0


def test_a_change_goes_on_where_who_asked_for_it_leaves_meanwhile() -> None:
    async def run() -> None:
        goes_on, begun = asyncio.Event(), asyncio.Event()

        class Slow(Replicas):
            async def ask(self, name: str, asked: Asked) -> Answered:
                answered = await super().ask(name, asked)
                begun.set()
                await goes_on.wait()
                return answered

        replicas = Slow("a", "b")
        rollouts = Rollouts(replicas, _at_once)
        caller = asyncio.create_task(rollouts.roll(RELOAD.path, RELOAD))
        await begun.wait()
        caller.cancel()
        await asyncio.gather(caller, return_exceptions=True)
        assert caller.cancelled()
        goes_on.set()
        await rollouts.settled()
        assert rollouts.last == Rollout(state="done", path=RELOAD.path, of=2, done=("a", "b"))
        assert replicas.versions == {"a": 2, "b": 2}

    asyncio.run(run())


def test_a_change_is_of_no_requests_context() -> None:
    """By which Ray finds what it cancels where a client leaves."""
    request = contextvars.ContextVar("request", default="")

    async def run() -> list[str]:
        seen: list[str] = []

        class Looking(Replicas):
            async def ask(self, name: str, asked: Asked) -> Answered:
                seen.append(request.get())
                return await super().ask(name, asked)

        rollouts = Rollouts(Looking("a", "b"), _at_once)
        request.set("the client's")
        await rollouts.roll(RELOAD.path, RELOAD)
        await rollouts.settled()
        return seen

    assert asyncio.run(run()) == ["", ""]


def resumed(replicas: Replicas, record: Record) -> Record:
    async def run() -> Record:
        rollouts = Rollouts(replicas, _at_once)
        await rollouts.resume(record)
        return rollouts.record

    return asyncio.run(run())


def at(version: int, number: int) -> Record:
    return Record("s", number, {"m": State(f"m@{version}", "c")})


def test_a_change_that_all_had_when_the_coordinator_died_stands() -> None:
    replicas = Replicas("a", "b")
    replicas.versions = {"a": 2, "b": 2}
    assert resumed(replicas, at(1, 3)) == at(2, 4)
    assert replicas.told == [at(2, 4)]


def test_a_change_that_some_had_when_the_coordinator_died_is_told_not_to_be_what_is_served() -> None:
    """A higher number than that of the record which they have: else they would not look at it."""
    replicas = Replicas("a", "b")
    replicas.versions = {"a": 2, "b": 1}
    assert resumed(replicas, at(1, 3)) == at(1, 4)
    assert replicas.told == [at(1, 4)]


def test_a_change_that_goes_on_when_the_coordinator_died_is_waited_for() -> None:
    replicas = Replicas("a", slow=9)
    asyncio.run(replicas.ask("a", RELOAD))
    assert resumed(replicas, at(1, 3)) == at(2, 4)


def test_a_replica_of_another_jgr_counts_for_nothing_when_a_coordinator_comes_back() -> None:
    class Strange(Replicas):
        async def about(self, name: str) -> dict[str, Any]:
            found = await super().about(name)
            return {"spoken": (99, "9.9"), "states": {"m": range(9)}, "changes": {}} if name == "b" else found

    replicas = Strange("a", "b")
    assert resumed(replicas, at(2, 3)) == at(1, 4)


def test_where_all_serve_what_is_recorded_nobody_is_told_anything() -> None:
    replicas = Replicas("a", "b")
    assert resumed(replicas, at(1, 3)) == at(1, 3)
    assert resumed(Replicas(), at(1, 3)) == at(1, 3)  # and where nobody is there
    assert resumed(replicas, Record("s")) == Record("s")
    assert replicas.told == []


def test_a_replica_that_joined_and_died_long_before_a_change_is_not_waited_for() -> None:
    """Else the change after a loss would go on for half a minute, and others would be refused meanwhile."""

    async def run() -> tuple[list[float], int]:
        now_s, waits = [0.0], list[float]()

        async def wait(seconds: float) -> None:
            now_s[0] += seconds
            waits.append(seconds)

        rollouts = Rollouts(Replicas("a", slow=1), wait, clock=lambda: now_s[0])
        for name in ("a", "lost"):
            assert rollouts.joins(name, {"m": State("m@1", "c")})
        now_s[0] += JOINING_S
        await rollouts.roll(RELOAD.path, RELOAD)
        await rollouts.settled()
        late = list(waits)
        assert rollouts.joins("coming", {"m": State("m@2", "c")})
        await rollouts.roll(RELOAD.path, RELOAD)
        await rollouts.settled()
        return late, len(waits) - len(late)

    assert asyncio.run(run()) == ([], round(JOINING_S / POLL_S))
