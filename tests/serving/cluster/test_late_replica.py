# SPDX-License-Identifier: Apache-2.0
"""A replica that starts after changes of the fleet serves what the others do, or does not start.

Real replicas over tiny models in one process; in Ray's place a fleet hands calls on.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from jgr.config import ConfigError, UserError
from jgr.models import manifest
from jgr.serving.cluster.hints import Hint
from jgr.serving.cluster.record import Record, States, latest
from jgr.serving.cluster.relay import Answered, Asked
from jgr.serving.cluster.replica import Replica, Source
from jgr.serving.cluster.rollout import Rollouts
from jgr.serving.versions.served_state import state_of
from tests.serving.tiny_model import as_lines, make_catalog, make_folder, shuffled_catalog

KEY = [(b"authorization", b"Bearer 4dm1n")]
SETTINGS = ("server.admin_key=4dm1n", "profiles.batch=1", "profiles.tokens=32")
ASK = json.dumps({"history": ["B001", "B007"], "top_k": 3}).encode()


class Local(Replica):
    """Ray awaits what ends a replica; Python itself would not."""

    def __del__(self) -> None:  # type: ignore[override]
        pass


class Fleet:
    """Replicas by name, and the coordinator's part."""

    def __init__(self, source: Source) -> None:
        self.replicas: dict[str, Replica] = {}
        self.source = source
        self.now_s = 0.0
        self.rollouts = Rollouts(self, self._wait, Record(source.key), clock=lambda: self.now_s)

    async def start(self, name: str) -> Replica:
        replica = Local(self.source, name, self)
        await replica.start()
        self.replicas[name] = replica
        return replica

    async def change(self, path: str, body: bytes = b"") -> Any:
        asked = Asked("POST", path, b"", KEY, body)
        answered = await self.rollouts.roll(path, asked)
        await self.rollouts.settled()
        assert answered.status < 300 and self.rollouts.last.state == "done", (
            answered,
            self.rollouts.last,
        )
        return json.loads(answered.body)

    async def versions(self, name: str) -> tuple[str, str]:
        answered = await self.ask(name, Asked("POST", "/v1/recommend", b"", [], ASK))
        answer = json.loads(answered.body)
        return answer["model"], answer["catalog_version"]

    async def record(self, source: str) -> Record:
        assert source == self.source.key
        return self.rollouts.record

    async def _wait(self, seconds: float) -> None:
        self.now_s += seconds
        await asyncio.sleep(0.01)

    async def joins(self, source: str, name: str, states: States) -> Record | None:
        return self.rollouts.record._replace(bodies={}) if self.rollouts.joins(name, states) else None

    async def names(self) -> list[str]:
        return sorted(self.replicas)

    async def ask(self, name: str, asked: Asked) -> Answered:
        return await self.replicas[name].answer(Hint(to=name), asked)

    async def about(self, name: str) -> dict[str, Any]:
        return await self.replicas[name].about()

    async def remember(self, record: Record) -> None:
        for replica in self.replicas.values():
            await replica.remember(record)

    async def end(self) -> None:
        for replica in self.replicas.values():
            await replica.end()


def run(folder: Path, scenario: Callable[[Fleet], Awaitable[object]], *settings: str) -> None:
    async def all_of_it() -> None:
        fleet = Fleet(Source((str(folder),), assignments=(*SETTINGS, *settings)))
        try:
            await scenario(fleet)
        finally:
            await fleet.end()

    asyncio.run(all_of_it())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A link to a model, as a deployment switches it."""
    write(tmp_path / "one", seed=1)
    (tmp_path / "current").symlink_to(tmp_path / "one")
    return tmp_path / "current"


def write(folder: Path, seed: int) -> None:
    manifest.write(folder, make_folder(folder, seed=seed), make_catalog())


def switch(link: Path, to: str) -> None:
    link.unlink()
    link.symlink_to(link.parent / to)


def test_a_catalog_that_was_uploaded_is_on_a_replica_that_starts_later(folder: Path) -> None:
    async def scenario(fleet: Fleet) -> None:
        await fleet.start("a")
        first = await fleet.versions("a")
        version = (await fleet.change("/v1/catalogs", as_lines(shuffled_catalog())))["version"]
        await fleet.change(f"/v1/catalogs/{version}/activate")
        assert await fleet.versions("a") == (first[0], version)
        late = await fleet.start("b")
        assert await fleet.versions("b") == (first[0], version)
        # A coordinator that was lost has it from any replica, with the bodies.
        found = latest([await late.recorded(), Record(fleet.source.key)], fleet.source.key)
        assert found == fleet.rollouts.record and set(found.bodies) == {version}
        await fleet.change("/v1/catalogs/rollback")
        assert await fleet.versions("a") == await fleet.versions("b") == first
        await fleet.start("c")
        assert await fleet.versions("c") == first
        await fleet.change(f"/v1/catalogs/{version}/activate")
        assert {await fleet.versions(name) for name in "abc"} == {(first[0], version)}, "c holds it too"

    run(folder, scenario)


def test_a_rolled_back_model_is_what_a_late_replica_serves_and_can_go_forward_from(folder: Path) -> None:
    async def scenario(fleet: Fleet) -> None:
        await fleet.start("a")
        one = await fleet.versions("a")
        write(folder.parent / "two", seed=2)
        switch(folder, "two")
        await fleet.change("/v1/models/tiny/reload")
        two = await fleet.versions("a")
        assert one[0] != two[0]
        await fleet.start("b")
        assert await fleet.versions("b") == two
        await fleet.change("/v1/models/tiny/rollback")
        await fleet.start("c")  # the link is that of two
        assert {await fleet.versions(name) for name in "abc"} == {one}
        await fleet.change("/v1/models/tiny/rollback")
        assert {await fleet.versions(name) for name in "abc"} == {two}
        await fleet.change("/v1/models/tiny/reload")
        assert {await fleet.versions(name) for name in "abc"} == {two}

    run(folder, scenario)


def test_where_the_folder_holds_something_else_by_now_a_replica_does_not_start(folder: Path) -> None:
    async def scenario(fleet: Fleet) -> None:
        await fleet.start("a")
        write(folder.resolve(), seed=3)  # in place, and nobody has reloaded
        with pytest.raises(UserError, match=r"the fleet serves tiny@\w+, and .*/one holds tiny@\w+ by now"):
            await fleet.start("b")
        await fleet.change("/v1/models/tiny/reload")
        await fleet.start("b")
        assert await fleet.versions("a") == await fleet.versions("b")

    run(folder, scenario)


def test_settings_of_the_folder_are_part_of_what_a_fleet_serves(folder: Path) -> None:
    """They change answers and are not in the version."""
    settings = folder.resolve() / "serving.json"
    before = settings.read_text()

    def most(replica: Replica) -> int:
        return replica.models.infos[0].max_history_in_prompt

    async def scenario(fleet: Fleet) -> None:
        first = await fleet.start("a")
        one, length = await fleet.versions("a"), most(first)
        found = json.loads(before)
        found["settings"].setdefault("prompt", {})["max_items"] = length - 1
        settings.write_text(json.dumps(found))  # in place, and nobody has reloaded
        with pytest.raises(
            UserError, match=r"the fleet serves tiny@\w+ with settings \w{8}, and .*/one has \w{8} by"
        ):
            await fleet.start("b")
        await fleet.change("/v1/models/tiny/reload")
        assert await fleet.versions("a") == one and most(first) == length - 1
        assert most(await fleet.start("b")) == length - 1
        await fleet.rollouts.roll(
            "/v1/models/tiny/rollback", Asked("POST", "/v1/models/tiny/rollback", b"", KEY, b"")
        )
        await fleet.rollouts.settled()
        # The settings that `a` had are nowhere that `b` could read them.
        assert fleet.rollouts.last.state == "failed" and "other settings by now" in str(
            fleet.rollouts.last.error
        )
        assert most(first) == length - 1
        settings.write_text(before)
        await fleet.change("/v1/models/tiny/rollback")
        assert {most(replica) for replica in fleet.replicas.values()} == {length}

    run(folder, scenario)


def test_a_replica_that_starts_later_has_the_settings_of_the_folder_that_is_served(folder: Path) -> None:
    """The link names another one by now, and nobody has reloaded."""
    write(folder.parent / "two", seed=1)
    settings = folder.parent / "two" / "serving.json"

    async def scenario(fleet: Fleet) -> None:
        first = await fleet.start("a")
        length = first.models.infos[0].max_history_in_prompt
        found = json.loads(settings.read_text())
        found["settings"].setdefault("prompt", {})["max_items"] = length - 1
        settings.write_text(json.dumps(found))
        switch(folder, "two")
        late = await fleet.start("b")
        assert late.models.infos[0].max_history_in_prompt == length
        await fleet.change("/v1/models/tiny/reload")
        assert {of.models.infos[0].max_history_in_prompt for of in fleet.replicas.values()} == {length - 1}
        last = await fleet.start("c")
        assert last.models.infos[0].max_history_in_prompt == length - 1
        await fleet.change("/v1/models/tiny/rollback")
        assert {of.models.infos[0].max_history_in_prompt for of in fleet.replicas.values()} == {length}

    run(folder, scenario)


def test_a_replica_whose_journal_cannot_be_written_by_now_starts_without(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journals = folder.parent / "journals"
    journals.mkdir()

    async def scenario(fleet: Fleet) -> None:
        await fleet.start("a")
        journals.rename(folder.parent / "elsewhere")
        late = await fleet.start("b")
        assert await fleet.versions("a") == await fleet.versions("b")
        assert "this replica keeps no journal" in caplog.text
        (deployment,) = late.models.deployments
        assert deployment.engine.status == "ready"

    run(folder, scenario, f"server.journal={journals}/j.jsonl")
    with pytest.raises(ConfigError, match=r"server\.journal: .*/j\.a\.jsonl: No such file or directory"):
        run(folder, lambda fleet: fleet.start("a"), f"server.journal={folder.parent}/nowhere/j.jsonl")


def test_what_a_rollback_went_to_is_named_where_a_replica_that_starts_later_does_not_find_it(
    folder: Path,
) -> None:
    """The folder of the version before is gone, and with it the catalog that only it had."""

    async def scenario(fleet: Fleet) -> None:
        await fleet.start("a")
        version, catalog = await fleet.versions("a")
        two = folder.parent / "two"
        config = make_folder(two, seed=2)
        (two / "catalog.jsonl").write_bytes(as_lines(shuffled_catalog()))
        manifest.write(two, config, shuffled_catalog())
        switch(folder, "two")
        await fleet.change("/v1/models/tiny/reload")
        shutil.rmtree(folder.parent / "one")
        await fleet.start("b")

        async def refused(path: str) -> str:
            answered = await fleet.ask("b", Asked("POST", path, b"", KEY, b""))
            assert answered.status == 409
            return str(json.loads(answered.body)["error"]["message"])

        assert await refused("/v1/models/tiny/rollback") == (
            f"the folder of {version!r} is gone: {folder.parent / 'one'}"
        )
        assert (await refused("/v1/catalogs/rollback")).startswith(
            f"catalog {catalog!r} was active before, and is"
        )
        (deployment,) = fleet.replicas["b"].models.deployments
        assert state_of(deployment).previous == catalog, "which those are told that start later still"

    run(folder, scenario)


def test_a_replica_that_starts_while_a_change_goes_on_gets_it_too(folder: Path) -> None:
    async def scenario(fleet: Fleet) -> None:
        await fleet.start("a")
        write(folder.parent / "two", seed=2)
        late = Local(fleet.source, "b", fleet)
        await late.start()  # it has joined, and nobody can send to it yet
        switch(folder, "two")
        asked = Asked("POST", "/v1/models/tiny/reload", b"", KEY, b"")
        await fleet.rollouts.roll(asked.path, asked)
        while (await fleet.about("a"))["changes"]["tiny model"][1] != "done":
            await asyncio.sleep(0.01)
        fleet.replicas["b"] = late
        await fleet.rollouts.settled()
        assert fleet.rollouts.last.done == ("a", "b")
        assert await fleet.versions("a") == await fleet.versions("b")
        assert len((await fleet.versions("b"))[0]) > len("tiny@")

    run(folder, scenario)


def test_a_replica_that_has_missed_a_change_is_to_be_replaced(folder: Path) -> None:
    async def scenario(fleet: Fleet) -> None:
        await fleet.start("a")
        missed = await fleet.start("b")
        await missed.check_health()
        write(folder.parent / "two", seed=2)
        switch(folder, "two")
        del fleet.replicas["b"]  # it hangs
        await fleet.change("/v1/models/tiny/reload")
        await missed.remember(fleet.rollouts.record)
        with pytest.raises(RuntimeError, match=r"replica b serves .*, and the others "):
            await missed.check_health()
        await fleet.replicas["a"].check_health()
        await missed.end()

    run(folder, scenario)


def test_a_replica_that_was_told_within_a_change_is_judged_at_its_end(folder: Path) -> None:
    """Nobody tells it again: the change that it goes on with has failed elsewhere."""

    async def scenario(fleet: Fleet) -> None:
        replica = await fleet.start("a")
        write(folder.parent / "two", seed=2)
        switch(folder, "two")
        await fleet.ask("a", Asked("POST", "/v1/models/tiny/reload", b"", KEY, b""))
        await replica.remember(fleet.rollouts.record.later())
        assert (await replica.about())["changes"]["tiny model"][1] == "running"
        await replica.check_health()
        (deployment,) = replica.models.deployments
        await deployment.settled()
        with pytest.raises(RuntimeError, match=r"replica a serves .*, and the others "):
            await replica.check_health()

    run(folder, scenario)


def test_a_change_that_was_begun_after_a_replica_was_told_is_not_judged_by_that(folder: Path) -> None:
    async def scenario(fleet: Fleet) -> None:
        replica = await fleet.start("a")
        (deployment,) = replica.models.deployments
        for seed, name in ((2, "two"), (3, "three")):
            write(folder.parent / name, seed=seed)
            switch(folder, name)
            await fleet.ask("a", Asked("POST", "/v1/models/tiny/reload", b"", KEY, b""))
            if seed == 2:
                await replica.remember(fleet.rollouts.record.later())
            await deployment.settled()
        await replica.check_health()

    run(folder, scenario)


def test_a_call_that_is_meant_for_another_replica_is_refused(folder: Path) -> None:
    async def scenario(fleet: Fleet) -> None:
        replica = await fleet.start("a")
        with pytest.raises(Exception, match="replica z is gone"):
            await replica.answer(Hint(to="z"), Asked("POST", "/v1/models/tiny/reload", b"", KEY, b""))

    run(folder, scenario)
