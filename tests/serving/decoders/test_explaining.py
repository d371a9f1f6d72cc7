# SPDX-License-Identifier: Apache-2.0
"""Explained answers over real HTTP: a search's levels against a search by hand, and where the prompt came from."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jgr.config import override
from jgr.models.beam import Levels
from jgr.serving.decoders.explaining import explain_levels
from jgr.serving.decoders.loading import load_engine
from jgr.serving.decoders.work import RecommendOutcome, RecommendWork
from tests.serving.decoders.test_model_server import Served, body, history
from tests.serving.fakes import TREE, LiveServer, Pending, Reply
from tests.serving.http.test_keys import ADA, bearer, entry, told, write
from tests.serving.tiny_model import make_folder, shuffled_catalog

ATOL = 1e-4
RECOMMEND, RANK = "/v1/explain/recommend", "/v1/explain/rank"
SHAPES = ("profiles.tokens=32", "server.explain=true")
CACHED = (
    "cache.policy=cache_agnostic", "cache.cell_tokens=2", "cache.page_kb=2", "cache.device_mb=0.08",
    "cache.host_mb=1", "cache.item_share=0.25", "cache.repair_tokens=1", "cache.new_tokens=64", "rank.tokens=64",
    "rank.context=64", "rank.requests=1", "rank.candidates=16", "rank.method=item_probe", "rank.item={sid}",
    "rank.item_span=4", "rank.positive=<a_0>", "rank.negative=<a_1>",
)  # fmt: skip
Path3 = tuple[int, ...]


@pytest.fixture(scope="module")
def rows_alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A row for each request, and no cache."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    served = Served(override(make_folder(folder), *SHAPES, "profiles.batch=2"))
    yield served
    assert served.stop() == 0


@pytest.fixture(scope="module")
def paged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Users and candidates are kept, and the first token of each candidate but the first is repaired."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    served = Served(override(make_folder(folder), *SHAPES, *CACHED, "profiles.batch=1"))
    yield served
    assert served.stop() == 0


@pytest.fixture(params=["rows_alone", "paged"])
def served(request: pytest.FixtureRequest) -> Served:
    found: Served = request.getfixturevalue(request.param)
    return found


def ask(served: Served, path: str, given: Any = None) -> Reply:
    port = int(served.url.rpartition(":")[2])
    return Pending(port, "GET" if given is None else "POST", path, given, {}).reply()


def shown(served: Served, path: str, given: Any) -> Any:
    reply = ask(served, path, given)
    assert reply.status == 200, reply.body
    return reply.json


def prefixes(served: Served, rows: list[int]) -> dict[Path3, float]:
    """The log-likelihood of every prefix of an id: the mass of the ids below it, which the model alone gave."""
    leaves = dict(
        zip(map(tuple, served.catalog.codes.tolist()), served.likelihoods(rows).tolist(), strict=True)
    )
    mass: dict[Path3, float] = {}
    for path, score in leaves.items():
        for end in range(1, len(path) + 1):
            mass[path[:end]] = mass.get(path[:end], 0.0) + np.exp(score)
    return {path: float(np.log(value)) for path, value in mass.items()}


def search(scores: dict[Path3, float], width: int, allowed: set[Path3]) -> list[list[tuple[Path3, float]]]:
    """By level the prefixes that a beam search over the allowed ids keeps, with their scores, best first."""
    beams: list[list[tuple[Path3, float]]] = [[((), 0.0)]]
    for level in range(3):
        before = {prefix for prefix, _ in beams[-1]}
        within = {path[: level + 1] for path in allowed if path[:level] in before}
        beams.append(sorted(((p, scores[p]) for p in within), key=lambda one: -one[1])[:width])
    return beams[1:]


def check_search(served: Served, found: Any, rows: list[int], width: int, allowed: set[Path3]) -> None:
    scores = prefixes(served, rows)
    paths = [tuple(path) for path in served.catalog.codes.tolist()]
    levels, expected = found["levels"], search(scores, width, allowed)
    assert [level["level"] for level in levels] == [0, 1, 2]
    before: list[Any] = [{"prefix": []}]
    for at, (level, wanted) in enumerate(zip(levels, expected, strict=True)):
        beams = level["beams"]
        own = [tuple(one["prefix"]) for one in beams]
        assert len(set(own)) == len(own)
        np.testing.assert_allclose([one["score"] for one in beams], [score for _, score in wanted], atol=ATOL)
        np.testing.assert_allclose([one["score"] for one in beams], [scores[p] for p in own], atol=ATOL)
        ahead = {tuple(one["prefix"]) for one in before}
        assert level["candidates"] == len({path[: at + 1] for path in paths if path[:at] in ahead})
        for one in beams:
            prefix = one["prefix"]
            assert len(prefix) == at + 1 and one["token"] == served.catalog.symbols[at][prefix[-1]]
            assert one["items"] == sum(list(path[: at + 1]) == prefix for path in paths)
            assert (one["parent"] is None) if at == 0 else before[one["parent"]]["prefix"] == prefix[:-1]
        before = beams
    for level, following in pairwise(levels):
        followed = {one["parent"] for one in following["beams"]}
        assert [one["kept"] for one in level["beams"]] == [
            at in followed for at in range(len(level["beams"]))
        ]


def check_answer(served: Served, found: Any) -> None:
    """The last level's kept beams are the answer's items."""
    last, answer = found["levels"][-1]["beams"], found["answer"]
    assert [one["kept"] for one in last] == ["item_ids" in one for one in last]
    listed = [(item, one["score"]) for one in last if one["kept"] for item in one["item_ids"]]
    assert listed == [(item["item_id"], item["score"]) for item in answer["items"]]
    for one in last:
        for item in one.get("item_ids", ()):
            assert served.catalog.codes[served.catalog.row(item)].tolist() == one["prefix"]


def check_spans(found: Any) -> list[tuple[str, int, str]]:
    """The spans' names, tokens and sources; their sums are those of the usage."""
    usage, spans = found["answer"]["usage"], found["spans"]
    assert sum(span["tokens"] for span in spans) == usage["prompt_tokens"]
    assert sum(span["cached_tokens"] for span in spans) == usage["cached_tokens"]
    for span in spans:
        assert span["cached_tokens"] == (0 if span["source"] == "computed" else span["tokens"])
    return [(span["name"], span["tokens"], span["source"]) for span in spans]


@pytest.mark.parametrize(
    ("seed", "length", "width", "top_k"), [(0, 7, 6, 4), (1, 2, 16, 16), (2, 7, 1, 1), (3, 2, 9, 2)]
)
def test_the_levels_are_those_of_a_search_by_hand(
    served: Served, seed: int, length: int, width: int, top_k: int
) -> None:
    rows = history(seed, length)
    given = body(rows, beam_width=width, top_k=top_k, user_id="by hand", explain=True)
    found, plain = shown(served, RECOMMEND, given), shown(served, "/v1/recommend", given)
    check_search(served, found, rows, width, set(map(tuple, served.catalog.codes.tolist())))
    check_answer(served, found)
    check_spans(found)
    answer = found["answer"]
    assert answer.keys() == plain.keys() and answer["usage"].keys() == plain["usage"].keys()
    assert [item["item_id"] for item in answer["items"]] == [item["item_id"] for item in plain["items"]]
    for one, other in zip(answer["items"], plain["items"], strict=True):
        assert one["score"] == pytest.approx(other["score"], abs=ATOL)


def test_a_filtered_search_has_only_what_is_left(served: Served) -> None:
    rows, denied = history(4, 7), [f"B{row:03}" for row in range(40)]
    found = shown(served, RECOMMEND, body(rows, beam_width=7, top_k=5, filters={"deny": denied}))
    check_search(served, found, rows, 7, set(map(tuple, served.catalog.codes[40:].tolist())))
    check_answer(served, found)
    assert not {item["item_id"] for item in found["answer"]["items"]} & set(denied)


def test_nothing_compiles_for_a_request_and_the_endpoints_are_counted(served: Served) -> None:
    def count(series: str) -> float:
        lines = ask(served, "/metrics").body.decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.rpartition(" ")[0] == series)

    asked = [f'jgr_requests_total{{endpoint="{path}",status="200"}}' for path in (RANK, RECOMMEND)]
    compiled, before = count('jgr_compilations_total{phase="request"}'), [count(series) for series in asked]
    found = shown(served, RANK, body(history(5, 3), candidates=["B007", "B001"]))
    assert found.keys() == {"answer", "spans"} and len(found["answer"]["items"]) == 2
    check_spans(found)
    shown(served, RECOMMEND, body(history(5, 3), top_k=1))
    assert [count(series) - some for series, some in zip(asked, before, strict=True)] == [1, 1]
    assert count('jgr_compilations_total{phase="request"}') == compiled


def test_refusals_are_those_of_the_plain_endpoints(served: Served) -> None:
    for kind, field, given in (
        ("recommend", "beam_width", {"beam_width": 999}),
        ("recommend", "top_k", {"top_k": 0}),
        ("recommend", "beem_width", {"beem_width": 3}),
        ("recommend", "filters.segments[0]", {"top_k": 1, "filters": {"segments": ["x"]}}),
        ("rank", "candidates[0]", {"candidates": ["nobody"]}),
        ("rank", "candidates", {}),
        ("rank", "history_times", {"candidates": ["B001"], "history_times": [3]}),
    ):
        plain, explained = (
            ask(served, path, body([1], **given)) for path in (f"/v1/{kind}", f"/v1/explain/{kind}")
        )
        assert explained.status == plain.status == 422
        assert explained.error | {"request_id": ""} == plain.error | {"request_id": ""}
        assert explained.error["field"] == field
    assert ask(served, RECOMMEND, b'{"history": ').error["type"] == "invalid_json"
    assert told(ask(served, RECOMMEND)) == (405, "method_not_allowed")
    assert told(ask(served, RECOMMEND, body([1], deadline_ms=1e-6))) == (429, "overloaded")


def test_a_batch_explains_only_those_who_asked(rows_alone: Served) -> None:
    """Beside each other in one batch of the second program, and alone in the first: all find the same."""
    executor = rows_alone.engine.served.executors.plain
    (profile,) = (profile for profile in executor.profiles if profile.kind == "recommend")
    prompt = rows_alone.prompts.build(np.array([3, 1, 4], np.int32))
    alone, other = RecommendWork(prompt, 5), RecommendWork(prompt[:4], 9, explained=True)
    first, second = executor.run(profile, [alone, other])
    (plain,) = executor.run(profile, [alone])
    assert isinstance(first, RecommendOutcome) and isinstance(second, RecommendOutcome)
    assert first.levels is None and second.levels is not None and second.levels.scores.shape == (3, 16)
    np.testing.assert_array_equal(first.leaves, plain.leaves)
    np.testing.assert_allclose(first.scores, plain.scores, atol=ATOL)


def test_off_nothing_more_is_compiled_and_the_plain_programs_are_the_same(served: Served) -> None:
    """A server without the switch takes the plain programs of one with it, and has no others."""
    off, on = (
        load_engine(override(served.config, f"server.explain={switch}")).served.executors
        for switch in ("false", "true")
    )
    second = sum(profile.kind == "recommend" for profile in on.profiles)
    assert off.profiles == on.profiles and second
    assert (off.to_compile, on.to_compile) == (len(off.profiles), len(off.profiles) + second)
    off.warm_up(lambda done, total, label: None)
    assert off.to_compile == 0
    running = served.engine.served.executors
    for mine, other in ((off.plain, running.plain), (off.paged, running.paged)):
        if mine is not None:
            assert not mine._explaining
            assert mine._programs.keys() == other._programs.keys()
            assert all(other._programs[profile] is program for profile, program in mine._programs.items())
            assert mine.program_texts() == other.program_texts()


def test_another_catalog_of_about_this_size_shares_the_second_programs(served: Served) -> None:
    engine = served.engine.rebuild.engine(shuffled_catalog())
    assert engine.served.executors.to_compile == 0
    engine.served.close(idle=True)


def test_a_server_without_the_switch_says_how_to_turn_it_on(server: LiveServer) -> None:
    for path in (RECOMMEND, RANK):
        reply = server.call(path, {"history": ["a"], "candidates": ["b"]})
        assert told(reply) == (404, "not_found")
        assert "--set server.explain=true" in reply.error["message"]


def test_keys_and_quotas_are_those_of_the_plain_endpoints(tmp_path: Path) -> None:
    keys = write(tmp_path / "keys", entry("ada", ADA, rate=0.001, burst=2))
    with LiveServer(keys, "server.admin_key=4dm1n", "server.explain=true") as server:
        given = {"history": ["a"], "top_k": 2}
        assert told(server.call(RECOMMEND, given)) == (401, "unauthorized")
        assert told(server.call(RECOMMEND, given, **bearer("4dm1n"))) == (403, "forbidden")
        found = server.call(RECOMMEND, given, **bearer(ADA)).json
        assert [item["item_id"] for item in found["answer"]["items"]] == ["c", "d"]
        assert found["levels"] == [], "there is no model"
        assert check_spans(found) == [("history", 3, "computed"), ("instruction", 1, "computed")]
        assert server.call(RANK, {"history": ["a"], "candidates": ["b"]}, **bearer(ADA)).status == 200
        assert told(server.call(RECOMMEND, given, **bearer(ADA))) == (429, "quota_exceeded")


def test_each_explanation_of_a_batch_has_a_turn_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes milliseconds, in which nobody else is served."""
    turns, told_in = 0, list[int]()
    with LiveServer("server.explain=true") as server:
        explanation = server.engine.served.explanation

        def explain(task: Any, answer: Any) -> Any:
            if not told_in:
                asyncio.get_running_loop().call_soon(turn)
            told_in.append(turns)
            return explanation(task, answer)

        def turn() -> None:
            nonlocal turns
            turns += 1
            if len(told_in) < 4:
                asyncio.get_running_loop().call_soon(turn)

        server.executor.hold()
        running = server.send("/v1/recommend", {"history": ["a"], "top_k": 1})
        server.executor.wait_entered()
        monkeypatch.setattr(server.engine.served, "explanation", explain)
        batch = [server.send(RECOMMEND, {"history": [item], "top_k": 1}) for item in "abcd"]
        server.wait_for("jgr_queue_depth", 4)
        server.executor.release()
        found = [each.reply().json["answer"]["items"] for each in batch]
        assert running.reply().status == 200 and server.executor.batches == [1, 4]
        for item, items in zip("abcd", found, strict=True):
            alone = server.call("/v1/recommend", {"history": [item], "top_k": 1})
            assert items == alone.json["items"], "each has its own answer"
    assert len(told_in) == 4 and all(a < b for a, b in pairwise(told_in)), told_in


def test_spans_name_the_device_and_the_host(paged: Served) -> None:
    """A user is computed, read from the pool, grows, gives way to others and comes back from the host."""
    rows, last = history(7, 9), ("history", 1, "computed")  # the prompt's end is computed in any case

    def spans(rows: list[int], user: str = "u") -> list[tuple[str, int, str]]:
        return check_spans(shown(paged, RECOMMEND, body(rows, top_k=1, user_id=user)))

    assert spans(rows[:7]) == [("history", 22, "computed")]
    assert spans(rows[:7]) == [("history", 21, "device"), last]
    assert spans(rows) == [("history", 22, "device"), ("history", 6, "computed")]
    for other in range(12):
        spans(history(20 + other, 10), f"other {other}")
    assert spans(rows) == [("history", 27, "host"), last]
    assert spans(rows) == [("history", 27, "device"), last]


def test_the_spans_of_a_ranking_name_its_candidates(paged: Served) -> None:
    rows = history(8, 5)

    def spans(**more: Any) -> list[tuple[str, int, str]]:
        found = shown(paged, RANK, body(rows, candidates=["B020", "B021"], user_id="ranked", **more))
        kinds = [span["kind"] for span in found["spans"] if span["source"] == "computed"]
        assert kinds[-3:] == ["instruction", "probe", "probe"]
        return check_spans(found)

    end = [("instruction", 1, "computed"), ("B020", 1, "computed"), ("B021", 1, "computed")]
    items = [("B020", 3, "computed"), ("B021", 3, "computed")]
    assert spans(layout="user_prefix") == [("history", 16, "computed"), *items, *end]
    assert spans(layout="user_prefix") == [("history", 16, "device"), *items, *end]
    assert spans(layout="item_prefix") == [*items, ("history", 16, "computed"), *end]
    assert spans(layout="item_prefix") == [
        ("B020", 3, "device"), ("B021", 1, "computed"), ("B021", 2, "device"), ("history", 16, "computed"), *end,
    ]  # fmt: skip


def test_a_score_that_is_no_number_is_a_fault() -> None:
    numbers = np.zeros((2, 3), np.int32)
    scores = np.array([[-1, np.nan, -np.inf], [-2, -3, -np.inf]], np.float32)
    with pytest.raises(ValueError, match="not finite"):
        explain_levels(TREE, [["x", "y", "z"], ["x", "y"]], Levels(numbers, numbers, scores), {})
