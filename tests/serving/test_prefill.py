# SPDX-License-Identifier: Apache-2.0
"""Hints that a user is about to be ranked, over real HTTP, from Python, and under load.

What a ranking after a hint must give is what a server without a hint gives; what it must find cached is what a second
ranking finds.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import jgr
from jgr.config import Config
from jgr.models.scorers import ScorerConfig
from jgr.serving.api import Answer, RankRequest
from jgr.serving.decoders.loading import load_engine
from jgr.serving.engine.engine import Engine
from jgr.serving.engine.host import HINTS_YIELD
from jgr.serving.errors import RequestError
from jgr.serving.prefill import Prefill, Prefilled
from jgr.serving.scorers.serve import ServedScorer
from tests.serving.decoders.test_cached_server import Served, ids, make_config, scores
from tests.serving.fakes import LiveServer
from tests.serving.scorer_fakes import DAY, HSTU, ITEMS, MONDAY, STU, FakeExecutors, ScorerServer, make_folder
from tests.serving.scorers.test_serve import request as ranking
from tests.serving.scorers.test_serve import run as run_scorer

GROWING_STU = dataclasses.replace(
    STU, stack=dataclasses.replace(STU.stack, contextual=0), slots=(), position_rows=0, time_rows=0
)
HISTORY, CANDIDATES = ids(*range(12)), ids(20, 21, 22)
PROBES = ("rank.method=item_probe", "rank.item={sid}", "rank.positive=<a_1>", "rank.negative=<a_2>")


def asked(reply: Any) -> tuple[bool, int, int]:
    assert reply.status == 200, reply.body
    answer = reply.json
    assert answer.keys() == {"id", "model", "catalog_version", "kept", "tokens", "cached_tokens"}
    return answer["kept"], answer["tokens"], answer["cached_tokens"]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = Served(make_config(tmp_path_factory.mktemp("decoder") / "model", "cache.shadow=0"))
    yield server
    server.stop()


def hint(server: Served, user: str, history: list[str], **more: Any) -> tuple[bool, int, int]:
    return asked(server.call(f"/v1/users/{user}/prefill", {"history": history, **more}))


def test_a_ranking_by_a_decoder_finds_what_was_hinted(decoder: Served) -> None:
    cold = decoder.rank("never-hinted", HISTORY, CANDIDATES)
    warm = decoder.rank("never-hinted", HISTORY, CANDIDATES)
    device = decoder.metrics("jgr_device_seconds_total")
    assert hint(decoder, "u", HISTORY) == (True, 13, 0)
    assert decoder.metrics("jgr_device_seconds_total") > device
    before = decoder.metrics("jgr_device_seconds_total")
    assert hint(decoder, "u", HISTORY) == (True, 0, 13)
    assert decoder.metrics("jgr_device_seconds_total") == before, "nothing was computed for the second hint"
    answer = decoder.rank("u", HISTORY, CANDIDATES)
    for name in ("layout", "cached_tokens", "computed_tokens"):
        assert answer["usage"][name] == warm["usage"][name]
    assert answer["usage"]["cached_tokens"] == 13
    assert scores(answer) == pytest.approx(scores(cold), abs=1e-5)
    erased = decoder.call("/v1/users/u/cache", method="DELETE")
    assert erased.json == {"entries": 1}
    assert decoder.rank("u", HISTORY, CANDIDATES)["usage"]["cached_tokens"] == 0


def test_a_recommendation_by_a_decoder_finds_what_was_hinted(decoder: Served) -> None:
    body = {"history": HISTORY[::-1], "top_k": 4}
    cold = decoder.call("/v1/recommend", {**body, "user_id": "x"}).json
    assert hint(decoder, "r", HISTORY[::-1]) == (True, 13, 0)
    answer = decoder.call("/v1/recommend", {**body, "user_id": "r"}).json
    assert (cold["usage"]["cached_tokens"], answer["usage"]["cached_tokens"]) == (0, 13)
    assert scores(answer) == pytest.approx(scores(cold), abs=1e-5)


def test_a_hint_for_a_longer_history_computes_what_is_new(decoder: Served) -> None:
    found = [hint(decoder, "g", HISTORY[:count]) for count in (4, 4, 9, 12)]
    assert found == [(True, 5, 0), (True, 0, 5), (True, 5, 5), (True, 3, 10)]
    grown, whole = (decoder.rank(user, HISTORY, CANDIDATES) for user in ("g", "never-seen"))
    assert grown["usage"]["cached_tokens"] == 13
    assert scores(grown) == pytest.approx(scores(whole), abs=1e-5)
    assert hint(decoder, "g", HISTORY[1:]) == (True, 12, 0), "another history is computed whole"


@pytest.mark.parametrize(("policy", "kept"), [("item", False), ("user", True)])
def test_a_server_says_whether_it_keeps_users(tmp_path: Path, policy: str, kept: bool) -> None:
    async def scenario(engine: Engine[Any]) -> None:
        found = await engine.answer(Prefill(history=list(HISTORY), user_id="u"))
        assert (found.kept, found.tokens) == (kept, 13 * kept)
        assert engine.metrics.hints["computed" if kept else "not_kept"]._value.get() == 1

    on_engine(make_config(tmp_path / "model", "cache.shadow=0", f"cache.policy={policy}"), scenario)


def test_where_only_generation_is_cached_a_hint_serves_it(tmp_path: Path) -> None:
    settings = ("rank.method=likelihood", "cache.policy=user", "cache.shadow=0", "cache.item_share=none")
    server = Served(make_config(tmp_path / "model", *settings))
    body = {"history": HISTORY, "top_k": 4}
    cold = server.call("/v1/recommend", {**body, "user_id": "x"}).json
    assert [hint(server, "u", HISTORY) for _ in range(2)] == [(True, 13, 0), (True, 0, 13)]
    answer = server.call("/v1/recommend", {**body, "user_id": "u"}).json
    server.stop()
    assert answer["usage"]["cached_tokens"] == 13
    assert scores(answer) == pytest.approx(scores(cold), abs=1e-5)


@pytest.mark.parametrize("method", ["item_token", "item_probe"])
def test_hints_and_rankings_share_a_batch(tmp_path: Path, method: str) -> None:
    settings = PROBES if method == "item_probe" else ()

    def of(user: str) -> RankRequest:
        return RankRequest(history=list(HISTORY[:5]), candidates=list(CANDIDATES), user_id=user)

    async def scenario(engine: Engine[Any]) -> None:
        alone = await engine.answer(of("alone"))
        hinted = [Prefill(history=list(HISTORY[:4]), user_id=user) for user in ("a", "b")]
        tickets = [engine.submit(one) for one in (hinted[0], of("c"), hinted[1], of("d"))]
        answers = await asyncio.gather(*(ticket.answer for ticket in tickets))
        assert {len(ticket.start.work) for ticket in tickets if ticket.start is not None} == {4}
        for answer in answers:
            if isinstance(answer, Prefilled):
                assert (answer.kept, answer.tokens) == (True, 5)
            else:
                assert by_item(answer) == pytest.approx(by_item(alone), abs=1e-5)
        after = await engine.answer(of("a"))
        assert after.usage.cached_tokens == 5
        assert by_item(after) == pytest.approx(by_item(alone), abs=1e-5)

    on_engine(make_config(tmp_path / "model", "cache.shadow=0", "cache.policy=user", *settings), scenario)


def by_item(answer: Answer) -> dict[str, float]:
    return {item.item_id: item.score for item in answer.items}


def on_engine(config: Config, scenario: Callable[[Engine[Any]], Awaitable[None]]) -> None:
    async def main() -> None:
        engine = load_engine(config)
        await engine.start()
        try:
            await scenario(engine)
        finally:
            await engine.drain(None)
        engine.check()

    asyncio.run(main())


@pytest.mark.parametrize("cfg", [HSTU, GROWING_STU], ids=["hstu", "stu"])
def test_a_ranking_by_a_scorer_finds_what_was_hinted(tmp_path: Path, cfg: ScorerConfig) -> None:
    kept = ("executors.share_user=cache", "executors.growth=2", "cache.device_mb=0.1", "executors.sizes=8")
    user: dict[str, Any] = {
        "history": ITEMS[7:12],
        "history_times": [MONDAY + 7_000 * at for at in range(5)],
    }
    if cfg is not HSTU:
        user["history_actions"] = [1, 0, 5, 2, 7]
    when = {"time": MONDAY + DAY}

    def of(events: int) -> dict[str, Any]:
        return {name: values[:events] for name, values in user.items()}

    with ScorerServer(make_folder(tmp_path / "model", cfg, *kept)) as server:

        def hinted(events: int, **more: Any) -> tuple[bool, int, int]:
            status, answer = server.call("/v1/users/u/prefill", {**of(events), **when, **more})
            assert status == 200, answer
            return answer["kept"], answer["tokens"], answer["cached_tokens"]

        candidates = {"candidates": ITEMS[20:40]}
        cold = server.rank(**user, **when, **candidates, user_id="never-hinted")
        runs = server.metric('jgr_parts_total{size="0"}')
        assert [hinted(events) for events in (3, 3, 5)] == [(True, 3, 0), (True, 0, 3), (True, 2, 3)]
        assert server.metric('jgr_parts_total{size="0"}') == runs + 2, "of three hints, two had work to do"
        answer = server.rank(**user, **when, **candidates, user_id="u")
        assert (answer["usage"]["cached_tokens"], answer["usage"]["computed_tokens"]) == (5, 0)
        assert scores(answer) == pytest.approx(scores(cold), abs=1e-5)
        assert hinted(5, time=MONDAY + 3 * DAY) == (True, 0, 5), "what is kept does not depend on now"
        assert server.call("/v1/users/u/cache", method="DELETE") == (200, {"entries": 1})
        assert hinted(5) == (True, 5, 0)
        for wrong, field in (
            ({"history_times": None}, "history_times"),
            ({"history_times": [MONDAY]}, "history_times"),
            ({"time": 0}, "time"),
            ({"context": {"slot0": 1}}, "context"),
            ({"scenario": 1}, "scenario"),
        ):
            status, refused = server.call("/v1/users/u/prefill", {**user, **when, **wrong})
            assert (status, refused["error"]["field"]) == (422, field)


def test_a_scorer_that_keeps_no_users_computes_nothing() -> None:
    async def scenario(engine: Engine[ServedScorer], executors: FakeExecutors) -> None:
        found = await engine.answer(scorer_hint("u"))
        assert (found.kept, found.tokens, found.cached_tokens) == (False, 0, 0)
        assert not executors.works

    run_scorer(scenario, reads=True)


def scorer_hint(user: str) -> Prefill:
    given = ranking()
    return Prefill(history=given.history, history_times=given.history_times, time=given.time, user_id=user)


def test_hints_give_way_and_are_the_first_to_be_refused() -> None:
    async def scenario(engine: Engine[ServedScorer], executors: FakeExecutors) -> None:
        executors.hold()
        running = [engine.submit(ranking(user_id=f"r{at}")) for at in range(2)]  # on all that read users
        for _ in running:
            await asyncio.to_thread(executors.wait_entered)
        early = engine.submit(scorer_hint("early"))
        waiting = [engine.submit(ranking(user_id=f"w{at}")) for at in range(HINTS_YIELD)]
        second = engine.submit(scorer_hint("second"))
        waiting.append(engine.submit(ranking(user_id="one-more")))
        with pytest.raises(RequestError) as refused:
            engine.submit(scorer_hint("third"))
        assert (refused.value.type, refused.value.retry_after_s) == ("overloaded", 1)
        waiting.append(engine.submit(ranking(user_id="yet-another")))  # which a ranking is not
        executors.release()
        tickets = [*running, *waiting, early, second]
        answers = await asyncio.gather(*(ticket.answer for ticket in tickets))
        assert [answer.kept for answer in answers[-2:]] == [True, True]
        assert min(early.planned_ns, second.planned_ns) >= max(ticket.planned_ns for ticket in waiting)
        assert (await engine.answer(scorer_hint("early"))).cached_tokens == 5  # three events and two slots

    run_scorer(scenario, reads=True, pages=64)


def test_a_full_queue_of_batch_jobs_refuses_hints_before_they_are_read() -> None:
    async def scenario(engine: Engine[ServedScorer], executors: FakeExecutors) -> None:
        executors.hold()
        running = [engine.submit(ranking(user_id=f"r{at}")) for at in range(2)]
        for _ in running:
            await asyncio.to_thread(executors.wait_entered)
        waiting = [engine.submit(scorer_hint(f"h{at}")) for at in range(2)]
        with pytest.raises(RequestError, match="too many requests") as refused:
            engine.submit(Prefill(history=["unknown"], user_id="h"))
        assert refused.value.type == "overloaded"
        executors.release()
        await asyncio.gather(*(ticket.answer for ticket in [*running, *waiting]))

    run_scorer(scenario, "batching.max_queue=2", reads=True, pages=64)


def test_bad_hints_are_refused_by_name(decoder: Served) -> None:
    for body, status, field in (
        ({"history": []}, 422, "history"),
        ({}, 422, "history"),
        ({"history": HISTORY, "user_id": "u"}, 422, "user_id"),
        ({"history": HISTORY, "candidates": CANDIDATES}, 422, "candidates"),
        ({"history": HISTORY, "history_times": [1] * 12}, 422, "history_times"),
        ({"history": HISTORY, "deadline_ms": 0}, 422, "deadline_ms"),
        ({"history": ["nowhere"]}, 422, "history"),
        ({"history": HISTORY, "model": "other"}, 404, "model"),
    ):
        reply = decoder.call("/v1/users/u/prefill", body)
        assert (reply.status, reply.error["field"]) == (status, field)
    reply = decoder.call("/v1/users/u/prefill", {"history": HISTORY, "user_id": "u"})
    assert reply.error["message"] == "user_id stands in the path alone: /v1/users/{user_id}/prefill"
    reply = decoder.call("/v1/users/u/prefill", {"history": HISTORY, "priority": "batch"})
    assert reply.error["message"] == (
        "unknown field 'priority'; there are history, model, history_times, time, history_actions, context, scenario, "
        "deadline_ms"
    )
    reply = decoder.call(f"/v1/users/{'u' * 257}/prefill", {"history": HISTORY})
    assert (reply.status, reply.error["field"]) == (422, "user_id")
    reply = decoder.call("/v1/users//prefill", {"history": HISTORY})
    assert (reply.status, reply.error["field"]) == (422, "user_id")
    assert (
        reply.error["message"] == "user_id: is empty, which means nobody; the path is /v1/users/{user_id}/..."
    )
    assert decoder.call("/v1/users/u/prefill", b"{").status == 400
    assert decoder.call("/v1/users/u/prefill").status == 405


def test_a_server_without_a_cache_validates_and_keeps_nothing() -> None:
    with LiveServer() as server:
        reply = server.call("/v1/users/u/prefill", {"history": ["a"]}, x_request_id="mine")
        assert asked(reply) == (False, 0, 0)
        assert reply.json["id"] == reply.headers["x-request-id"] == "mine"
        assert server.call("/v1/users/u/prefill", {"history": ["zz"]}).status == 422
        assert server.executor.batches == []


def test_clients_and_engines_give_hints(decoder: Served) -> None:
    with jgr.Client(f"http://127.0.0.1:{decoder.port}", model="jgr") as client:
        one = client.prefill(HISTORY, user_id="a/b c")
        assert (one.kept, one.tokens, one.cached_tokens) == (True, 13, 0)
        assert client.rank(HISTORY, CANDIDATES, user_id="a/b c").usage.cached_tokens == 13
        several = client.prefill([HISTORY[:3], HISTORY[:6]], user_id=["c1", 17])
        assert [(each.kept, each.tokens) for each in several] == [(True, 4), (True, 7)]
        assert client.rank(HISTORY[:6], CANDIDATES, user_id="17").usage.layout == "user_prefix"
        with pytest.raises(jgr.InvalidRequest) as refused:
            client.prefill([], user_id="u")
        assert refused.value.field == "history"
        with pytest.raises(jgr.InvalidRequest, match="user_id"):
            client.prefill(HISTORY, user_id=None)  # type: ignore[call-overload]
    with jgr.Engine(decoder.config) as engine:
        one = engine.prefill(HISTORY, user_id="e")
        assert isinstance(one, jgr.Prefilled) and (one.kept, one.tokens) == (True, 13)
        assert engine.rank(HISTORY, CANDIDATES, user_id="e").usage.cached_tokens == 13
        assert asyncio.run(engine.aprefill(HISTORY, user_id="e")).cached_tokens == 13
        with pytest.raises(jgr.InvalidRequest) as refused:
            engine.prefill(HISTORY, user_id="e" * 257)
        assert refused.value.field == "user_id"
        with pytest.raises(jgr.InvalidRequest) as refused:
            engine.prefill(HISTORY, user_id="")
        assert refused.value.field == "user_id"


def test_an_empty_user_id_means_nobody(decoder: Served) -> None:
    history = HISTORY[3:]
    body = {"history": history, "top_k": 4}
    first, again = (decoder.call("/v1/recommend", {**body, "user_id": ""}).json["usage"] for _ in range(2))
    assert (first["cached_tokens"], again["cached_tokens"]) == (0, len(history) + 1), "known by the history"
    assert decoder.call("/v1/recommend", body).json["usage"]["cached_tokens"] == len(history) + 1
    reply = decoder.call("/v1/users//cache", method="DELETE")
    assert (reply.status, reply.error["field"]) == (422, "user_id")
