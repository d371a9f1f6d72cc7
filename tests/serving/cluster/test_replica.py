# SPDX-License-Identifier: Apache-2.0
"""What a replica tells routers and Ray's autoscaling of its speed, over an engine whose runs take what is said here."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from jgr.cache.entries import Name
from jgr.fields import ConfigError
from jgr.serving.api import RankRequest
from jgr.serving.cluster import replica as module
from jgr.serving.cluster.hints import Hint
from jgr.serving.cluster.record import NoOthers, Record, States
from jgr.serving.cluster.relay import Asked
from jgr.serving.cluster.replica import Replica, Source
from jgr.serving.decoders.null import NullExecutor
from jgr.serving.engine.contract import Progress
from jgr.serving.engine.journal import Closed, Opened, read
from jgr.serving.engine.threads import Lanes
from jgr.serving.errors import RequestError
from jgr.serving.policies.digests import digest
from jgr.serving.policies.policy import Policy
from jgr.serving.policies.soundness import LEAST_NS, MOST_FAILED

PADDED_NS = 1000.0
"""Of a token of a full batch, padding included."""


class Alone(Replica):
    """Ray waits for what `__del__` returns, Python does not."""

    def __del__(self) -> None:  # type: ignore[override]
        pass


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch) -> Replica:
    """Each of its profiles takes a microsecond for each of its tokens."""

    def warm_up(executor: NullExecutor, progress: Progress) -> None:
        executor.costs = {p: p.batch * p.tokens * PADDED_NS / 1e9 for p in executor.profiles}

    async def at_once(lanes: Lanes) -> float:
        return 0.0

    monkeypatch.setattr(NullExecutor, "warm_up", warm_up)
    monkeypatch.setattr(Lanes, "handover_s", at_once)
    settings = ("profiles.tokens=16,64,256", "profiles.batch=1,4", "fleet.digest_bits=10")
    return Alone(Source(assignments=settings, null=True), "r", NoOthers())


def started(of: Replica, then: Callable[[], object]) -> None:
    async def run() -> None:
        await of.start()
        try:
            found = then()
            if asyncio.iscoroutine(found):
                await found
        finally:
            await of.models.drain(5.0)
            of.models.join(10)

    asyncio.run(run())


def test_a_report_has_what_a_token_takes_now(replica: Replica) -> None:
    async def then() -> None:
        engine = replica.models.deployments[0].engine
        shape = replica._shape
        tokens = 8 * shape["event_tokens"] + 8 * shape["item_tokens"] + shape["other_tokens"]
        first = (await replica.record_routing_stats())["ns_per_token"]
        assert first == pytest.approx(PADDED_NS * 64 / tokens), (
            "a request of so many tokens takes 64 with the padding"
        )
        for profile, seconds in engine.served.executors.costs.items():
            for _ in range(100):
                engine._policy.costs.observe(profile, round(10e9 * seconds))
        assert (await replica.record_routing_stats())["ns_per_token"] == pytest.approx(10 * first, rel=0.05)

    started(replica, then)


def test_what_a_larger_catalog_left_in_the_cache_is_not_told(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def then() -> None:
        engine = replica.models.deployments[0].engine
        ids = engine.catalog.item_ids
        held = [Name("item", row, "") for row in (len(ids), 0)]
        with monkeypatch.context() as patch:
            patch.setattr(
                engine, "meta", SimpleNamespace(kinds=("item",), below=None, names=lambda kind: held)
            )
            told = await replica.record_routing_stats()
        assert told["items"] == digest([ids[0]], 10)

    started(replica, then)


def test_a_report_tells_of_the_prompts_that_are_served_now(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a new version may be longer; by the old ones, routers and autoscaling would reckon wrongly for ever."""

    async def then() -> None:
        monkeypatch.setattr(module, "shape", lambda models: {"item_tokens": 7.5})
        for call in replica.models.deployments[0].swapped:
            call()
        assert (await replica.record_routing_stats())["item_tokens"] == 7.5

    started(replica, then)


@pytest.mark.parametrize("routing", ["joint", "hlem"])
def test_shards_are_looked_for_where_the_rule_asks_for_them_and_beside_the_event_loop(
    replica: Replica, monkeypatch: pytest.MonkeyPatch, routing: str
) -> None:
    looked: list[bool] = []

    class Rows:
        def shards(self, ids: list[str]) -> list[str]:
            looked.append(threading.current_thread() is threading.main_thread())
            return ["shard 1", *ids]

        def missing_ns(self, rows: float) -> float:
            return 0.0

    async def then() -> None:
        fleet = replace(replica._config.fleet, routing=routing)
        monkeypatch.setattr(replica, "_config", replace(replica._config, fleet=fleet))
        monkeypatch.setattr(replica, "_paged", lambda: [(Rows(), ["shard 2"])])
        told = await replica.record_routing_stats()
        if routing == "joint":
            assert (told["shards"], looked) == (b"", [])
        else:
            assert (told["shards"], looked) == (digest(["shard 1", "shard 2"], 10), [False])

    started(replica, then)


def test_the_predicted_wait_is_that_of_the_work_in_flight(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def then() -> None:
        now_ns = [0]
        monkeypatch.setattr(replica, "_now_ns", lambda: now_ns[0])
        assert await replica.record_autoscaling_stats() == {"wait_ms": 0}
        tokens = 100 * replica._shape["event_tokens"] + replica._shape["other_tokens"]
        released = asyncio.Event()

        async def held(*given: object, **others: object) -> None:
            await released.wait()

        monkeypatch.setattr(replica, "_app", held)
        asked = asyncio.create_task(replica.answer(Hint(), Asked("GET", "/", b"", [], b"")))
        work = asyncio.create_task(replica.answer(Hint(events=100), Asked("GET", "/", b"", [], b"")))
        await asyncio.sleep(0)
        now_ns[0] = 1_000_000
        told = await replica.record_autoscaling_stats()
        ns = (await replica.record_routing_stats())["ns_per_token"]
        other = max(1.0, replica._shape["other_tokens"])
        assert told["wait_ms"] == pytest.approx((tokens + other) * ns / 1e6)
        released.set()
        await asyncio.gather(asked, work)
        now_ns[0] = 2_000_000
        assert await replica.record_autoscaling_stats() == {"wait_ms": pytest.approx(0)}

    started(replica, then)


def test_others_are_told_the_work_that_the_sender_expects_here(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def then() -> None:
        now_ns = [0]
        monkeypatch.setattr(replica, "_now_ns", lambda: now_ns[0])
        shape, released = replica._shape, asyncio.Event()
        whole = 100 * shape["event_tokens"] + shape["other_tokens"]

        async def held(*given: object, **others: object) -> None:
            await released.wait()

        monkeypatch.setattr(replica, "_app", held)
        await replica.record_routing_stats()
        await replica.record_autoscaling_stats()
        hints = (
            Hint(events=100, sender="f", expected=(("q", 90), ("r", 7))),
            Hint(events=100, sender="f", expected=(("r", 3),)),
            Hint(events=100, sender="g", expected=(("q", 90),)),  # no work of this replica is known
        )
        asked = [asyncio.create_task(replica.answer(hint, Asked("GET", "/", b"", [], b""))) for hint in hints]
        await asyncio.sleep(0)
        now_ns[0] = 1_000_000
        ns = (told := await replica.record_routing_stats())["ns_per_token"]
        assert told["sent"] == {"f": pytest.approx(10.0), "g": pytest.approx(whole)}
        assert (await replica.record_autoscaling_stats())["wait_ms"] == pytest.approx((10 + whole) * ns / 1e6)
        released.set()
        await asyncio.gather(*asked)
        before = (await replica.record_routing_stats())["number"]
        now_ns[0] = 2_000_000
        idle = [await replica.record_routing_stats() for _ in range(2)]
        assert [(each["number"] - before, each["sent"]) for each in idle] == [(1, {}), (2, {})]

    started(replica, then)


def test_a_replica_whose_device_fails_is_not_healthy(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def then() -> None:
        engine = replica.models.deployments[0].engine
        item = engine.catalog.item_ids[0]
        asked = RankRequest(history=[item], candidates=[item])
        await engine.answer(asked)
        with monkeypatch.context() as patch:
            patch.setattr(NullExecutor, "run", broken)
            for _ in range(MOST_FAILED):
                await replica.check_health()
                with pytest.raises(RequestError) as raised:
                    await engine.answer(asked)
                assert raised.value.type == "internal"
            model = engine.info.id
            with pytest.raises(
                RuntimeError,
                match=f"^replica r is broken: model '{model}': {MOST_FAILED} runs in a row have failed$",
            ):
                await replica.check_health()
        await engine.answer(asked)
        await replica.check_health()

    def broken(*given: object) -> None:
        raise RuntimeError("the device fell off")

    started(replica, then)


def test_a_replica_with_a_run_that_does_not_come_back_is_not_healthy(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def then() -> None:
        engine = replica.models.deployments[0].engine
        monkeypatch.setattr(Policy, "flights", [(engine.clock() - LEAST_NS + 10**10, 0)])
        await replica.check_health()
        monkeypatch.setattr(Policy, "flights", [(engine.clock() - LEAST_NS - 10**9, 0)])
        with pytest.raises(RuntimeError, match="a run has not come back for 61 s"):
            await replica.check_health()

    started(replica, then)


def test_series_are_rendered_once_and_for_who_may_ask_alone(
    replica: Replica, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "k" * 16
    (tmp_path / "keys").write_text(json.dumps({"keys": [{"name": "ada", "key": key, "role": "client"}]}))
    settings = (*replica._source.assignments, f"server.keys={tmp_path / 'keys'}")
    one, rendered = Alone(Source(assignments=settings, null=True), "r", NoOthers()), []

    async def then() -> None:
        render = one.models.render_metrics
        monkeypatch.setattr(
            one.models, "render_metrics", lambda: (rendered.append(render()), rendered[-1])[1]
        )
        asked = Asked("GET", "/metrics", b"", [], b"")
        name, refused = await one.metrics(asked)
        assert (name, refused.status, rendered) == ("r", 401, [])
        known = [(b"authorization", b"Bearer " + key.encode())]
        name, answered = await one.metrics(asked._replace(headers=known))
        assert (name, answered.status, [answered.body]) == ("r", 200, rendered)
        assert b"jgr_requests_total" in answered.body

    started(one, then)


def test_a_replica_writes_a_journal_of_its_own(tmp_path: Path) -> None:
    """And where it begins anew since the others have changed, that goes on."""

    class Changing(NoOthers):
        """The others serve something else at first."""

        begun = 0

        async def joins(self, source: str, name: str, states: States) -> Record | None:  # type: ignore[override]
            self.begun += 1
            return None if self.begun == 1 else Record(source)

    settings = ("model.name=m", f"server.journal={tmp_path / 'day.jsonl'}")
    others = Changing()
    one = Alone(Source(assignments=settings, null=True), "r", others)

    def then() -> None:
        assert {path.name for path in tmp_path.iterdir()} == {"day.r.jsonl"}
        opened = [each for each in read(tmp_path / "day.r.jsonl") if isinstance(each.event, Opened)]
        assert [each.event.name.partition("/")[0] for each in opened] == ["m", "m"]

    started(one, then)
    assert others.begun == 2
    closed = [each for each in read(tmp_path / "day.r.jsonl") if isinstance(each.event, Closed)]
    assert len(closed) == 2


def test_a_replica_leaves_no_cores_to_its_host() -> None:
    """Which threads there are would hold for the replicas of one machine alone."""
    with pytest.raises(ConfigError, match=r"server\.host_cores is for jgr serve"):
        Source(assignments=("server.host_cores=1",), null=True).configs()
