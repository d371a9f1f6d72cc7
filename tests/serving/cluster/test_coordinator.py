# SPDX-License-Identifier: Apache-2.0
"""What the coordinator and a front ask over Ray's handles, where some do not answer. The handles are no real ones."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import pytest

from jgr.config import Config, FleetConfig
from jgr.serving.cluster.protocol import Incompatible, spoken
from jgr.serving.cluster.record import Record
from jgr.serving.cluster.relay import Answered, Asked
from jgr.serving.errors import RequestError
from jgr.serving.versions.served_state import State

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

RELOAD = Asked("POST", "/v1/models/m/reload", b"", [], b"")
SILENT = object()
RECORD = Record("s", 3, {"m": State("m@1", "c")})
STRANGE = (99, "9.9", "what nobody here knows")


def runs(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*given: Any, **named: Any) -> None:
        asyncio.run(test(*given, **named))

    return run


class Handle:
    """A handle whose replicas answer a broadcast with what `answers` has of its method: a value, an error, or
    nothing."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def broadcast(self, method: str, *arguments: Any) -> Handle:
        self.asked.append(method)
        return self

    async def _fetch_replica_results_async(self) -> list[Result]:
        found = self.answers[self.asked[-1]]
        if isinstance(found, Exception):
            raise found
        return [Result(each) for each in found]


class Result:
    def __init__(self, answer: Any) -> None:
        self._answer = answer

    async def get_async(self) -> Any:
        if self._answer is SILENT:
            await asyncio.Event().wait()
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


def about(name: str, version: int = 1) -> dict[str, Any]:
    return {
        "name": name,
        "status": "ready",
        "spoken": tuple(spoken()),
        "states": {"m": tuple(State(f"m@{version}", "c"))},
        "changes": {"m model": (0, "never", None)},
    }


@pytest.fixture
def soon_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits long for one that is silent."""
    from jgr.serving.cluster import replicas

    monkeypatch.setattr(replicas, "ALL_S", 0.05)


@runs
async def test_nobody_who_asks_one_replica_waits_for_another() -> None:
    from jgr.serving.cluster.replicas import Replicas

    replicas = Replicas(Handle(about=[SILENT, ConnectionError(), about("a")]))  # type: ignore[arg-type]
    assert (await replicas.about("a"))["name"] == "a"
    gone = Replicas(Handle(about=[ConnectionError(), about("a")]))  # type: ignore[arg-type]
    with pytest.raises(KeyError):
        await gone.about("b")


@runs
async def test_a_replica_that_is_silent_or_out_of_reach_is_not_taken_for_one_that_is_gone(
    soon_over: None,
) -> None:
    from ray.exceptions import ActorUnavailableError

    from jgr.serving.cluster.replicas import Replicas

    for unknown in (SILENT, ActorUnavailableError("no network", b"0" * 16)):
        replicas = Replicas(Handle(about=[unknown, about("a")]))  # type: ignore[arg-type]
        with pytest.raises(TimeoutError, match="replica b is silent"):
            await replicas.about("b")
        assert await replicas.names() == ["a"], "nor does it stop what others are asked"


@runs
async def test_all_are_told_and_one_that_is_silent_stops_nothing(soon_over: None) -> None:
    from jgr.serving.cluster.replicas import Replicas

    replicas = Replicas(Handle(remember=[SILENT, None], recorded=[SILENT, SILENT]))  # type: ignore[arg-type]
    await replicas.remember(RECORD)
    with pytest.raises(TimeoutError, match="all replicas are silent"):
        await replicas.records()


@runs
async def test_what_no_replica_says_is_not_taken_for_nothing_while_one_may_serve(soon_over: None) -> None:
    """A coordinator that starts again would take the first to join for the first of all, and part the fleet."""
    from ray.exceptions import ActorUnavailableError

    from jgr.serving.cluster.replicas import Replicas, soon

    gone, cut_off = ConnectionError(), ActorUnavailableError("no network", b"0" * 16)
    for told in ([cut_off], [gone, cut_off], [gone, SILENT], []):
        with pytest.raises(TimeoutError, match="all replicas are silent"):
            await Replicas(Handle(recorded=told)).records()  # type: ignore[arg-type]
    for told, records in (([gone], []), ([cut_off, SILENT, RECORD], [RECORD])):
        assert await Replicas(Handle(recorded=told)).records() == records  # type: ignore[arg-type]
    with pytest.raises(TimeoutError, match="could be asked"):
        await soon(Handle(about=[]), "about")  # type: ignore[arg-type]


@runs
async def test_the_record_of_a_replica_of_another_jgr_is_left_out_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from jgr.serving.cluster.replicas import Replicas

    replicas = Replicas(Handle(recorded=[STRANGE, RECORD, ConnectionError(), STRANGE]))  # type: ignore[arg-type]
    assert await replicas.records() == [RECORD]
    assert await replicas.records() == [RECORD]
    assert [each.levelno for each in caplog.records] == [logging.WARNING]
    assert "speaks protocol 99" in caplog.text


def coordinator(handle: Handle) -> Any:
    from jgr.serving.cluster.coordinator import Coordinator

    return Coordinator(spoken(), handle, "s", 4, FleetConfig())  # type: ignore[arg-type]


@runs
async def test_what_an_earlier_coordinator_kept_is_looked_for_again_where_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from jgr.serving.cluster import coordinator as module

    monkeypatch.setattr(module, "_running", lambda: True)
    handle = Handle(about=[about("a")], recorded=ValueError("a message that nobody understands"))
    found = coordinator(handle)
    with pytest.raises(ValueError, match="nobody understands"):
        await found.record(spoken(), "s")
    handle.answers["recorded"] = [STRANGE, RECORD]
    assert await found.record(spoken(), "s") == RECORD
    handle.answers["recorded"] = []
    assert await found.record(spoken(), "s") == RECORD, "once is enough"


@runs
async def test_where_ray_does_not_say_what_runs_it_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.exceptions import RayActorError
    from ray.serve.exceptions import RayServeException

    from jgr.serving.cluster import coordinator as module

    errors: list[Exception] = [RayActorError(), RayServeException("no controller"), TimeoutError()]

    def running() -> bool:
        if errors:
            raise errors.pop()
        return True

    monkeypatch.setattr(module, "_running", running)
    monkeypatch.setattr(module, "LOOK_S", 0.0)
    handle = Handle(about=[about("a")], recorded=[RECORD])
    assert await coordinator(handle).record(spoken(), "s") == RECORD
    # Where that does not end, it is no fleet that nobody serves yet.
    monkeypatch.setattr(module, "FIND_S", 0.0)
    errors.append(TimeoutError("the head"))
    other = coordinator(handle)
    with pytest.raises(TimeoutError, match="the head"):
        await other.record(spoken(), "s")
    assert await other.record(spoken(), "s") == RECORD


@runs
async def test_what_is_looked_for_is_not_cancelled_with_who_asked_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from jgr.serving.cluster import coordinator as module

    monkeypatch.setattr(module, "_running", lambda: True)
    found = coordinator(Handle(about=[about("a")], recorded=[RECORD]))
    caller = asyncio.create_task(found.record(spoken(), "s"))
    while found._finding is None:
        await asyncio.sleep(0)
    caller.cancel()
    assert await found.record(spoken(), "s") == RECORD
    assert caller.cancelled()


class Response:
    """What Ray gives for a call: an answer, or nothing where it is silent."""

    def __init__(self, answer: Any) -> None:
        self._answer, self.cancels = answer, 0

    def remote(self, path: str, asked: Asked) -> Response:
        return self

    def __await__(self) -> Any:
        return Result(self._answer).get_async().__await__()

    def cancel(self) -> None:
        self.cancels += 1


def front(response: Response) -> Any:
    from jgr.serving.cluster.front import Front

    class Rollouts:
        roll = response

    class Local(Front):  # type: ignore[misc]
        def __del__(self) -> None:
            """Ray awaits what ends a front; Python itself would not."""

    found = object.__new__(Local)
    found._rollouts, found._config = Rollouts(), Config()
    return found


@runs
async def test_a_front_waits_for_a_change_no_longer_than_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself waits for ever where no coordinator is there."""
    from jgr.serving.cluster import front as module

    well = Response(Answered(202, [], b"{}"))
    assert (await front(well)._answer(RELOAD.path, RELOAD, 0.0, "")).status == 202
    assert well.cancels == 0
    monkeypatch.setattr(module, "CHANGE_S", 0.0)
    silent = Response(SILENT)
    with pytest.raises(RequestError, match="not answered in time") as refused:
        await front(silent)._answer(RELOAD.path, RELOAD, 0.0, "")
    assert refused.value.type == "unavailable"
    assert silent.cancels == 1, "a call that nobody has taken yet must not begin later"


@runs
async def test_what_the_coordinator_refuses_comes_as_it_is() -> None:
    refused = Response(Incompatible("unavailable", "another protocol"))
    with pytest.raises(Incompatible, match="another protocol"):
        await front(refused)._answer(RELOAD.path, RELOAD, 0.0, "")


@runs
async def test_a_refused_change_is_an_answer_and_no_error_that_ray_would_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from jgr.serving.cluster import coordinator as module

    monkeypatch.setattr(module, "_running", lambda: False)
    asked = RELOAD._replace(headers=[(b"x-request-id", b"mine")])
    answered = await coordinator(Handle(about=[ConnectionError()])).roll("/v1/models/m/reload", asked)
    error = json.loads(answered.body)["error"]
    assert (answered.status, error["type"], error["request_id"]) == (503, "unavailable", "mine")
    assert dict(answered.headers)[b"retry-after"] == b"1"


@runs
async def test_items_are_nobodys_where_no_replica_is_there_yet() -> None:
    from ray.serve._private.common import DeploymentID
    from ray.serve.exceptions import DeploymentUnavailableError

    from jgr.serving.cluster.replicas import Replicas

    gone = DeploymentUnavailableError(DeploymentID("Replica", "jgr"))
    assert await Replicas(Handle(items=gone)).items_all("about") == {}  # type: ignore[arg-type]
    some = Replicas(Handle(items=[("a", {"key": "k"}), ("b", None), ConnectionError()]))  # type: ignore[arg-type]
    assert await some.items_all("about") == {"a": {"key": "k"}}


@runs
async def test_what_keeps_items_from_being_placed_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    from jgr.serving.cluster.placements import Placements

    left = [ValueError("a"), ValueError("a"), ValueError("b"), asyncio.CancelledError()]

    class Fleet:
        async def items_all(self, what: str) -> dict[str, Any]:
            raise left.pop(0)

    async def wait(seconds: float) -> None:
        pass

    with pytest.raises(asyncio.CancelledError):
        await Placements(Fleet(), FleetConfig(items="hash"), wait=wait).go_on()  # type: ignore[arg-type]
    assert [str(each.exc_info[1]) for each in caplog.records if each.exc_info] == ["a", "b"]
