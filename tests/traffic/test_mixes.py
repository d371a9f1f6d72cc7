# SPDX-License-Identifier: Apache-2.0
"""Laws of lengths against their formulas, requests of classes, and mixes from files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from scipy import stats

from jgr.serving.api import RankRequest, RecommendRequest
from jgr.traffic.mixes import N_USERS, RequestClass, make_mix, parse_law, read_mix
from jgr.traffic.schedule import LoadError, Mix

IDS = [f"item-{i}" for i in range(30)]


def _drawn(text: str, n: int = 20_000) -> np.ndarray:
    return parse_law(text).draw(np.random.default_rng(0), n)


def _p_value(text: str, probabilities: dict[int, float]) -> float:
    """The p value of Pearson's test of a law's draws against the probability of each of its values."""
    drawn = _drawn(text)
    counts = [int((drawn == value).sum()) for value in probabilities]
    assert sum(counts) == len(drawn)
    return float(stats.chisquare(counts, [p * len(drawn) for p in probabilities.values()]).pvalue)


def test_laws_draw_from_their_distributions() -> None:
    assert set(_drawn("50").tolist()) == {50}
    assert _p_value("uniform:3:7", dict.fromkeys(range(3, 8), 0.2)) > 0.01
    assert _p_value("oneof:8:16:32", dict.fromkeys((8, 16, 32), 1 / 3)) > 0.01
    total = sum(n**-1.5 for n in range(2, 11))
    assert _p_value("power:1.5:2:10", {n: n**-1.5 / total for n in range(2, 11)}) > 0.01
    law = stats.lognorm(0.7, scale=4.0)
    cells = {n: float(law.cdf(n + 0.5) - law.cdf(n - 0.5)) for n in range(2, 12)}
    cells |= {1: float(law.cdf(1.5)), 12: float(law.sf(11.5))}  # cut to 1 .. 12
    assert _p_value("lognormal:4:0.7:12", cells) > 0.01


@pytest.mark.parametrize(
    "text",
    [
        "", "0", "-1", "1.5", "x", "100001", "uniform:5", "uniform:5:4", "uniform:0:4", "uniform:1.5:4", "nan",
        "uniform:1:nan", "lognormal:4:0.7", "lognormal:0:1:9", "lognormal:4:-1:9", "power:1:1:inf", "power:99:1:9",
        "oneof", "oneof:0", "oneof:1:x", "zipf:1:2",
    ],
)  # fmt: skip
def test_other_laws_are_refused(text: str) -> None:
    with pytest.raises(LoadError, match=r"candidates '.*' must be a number"):
        parse_law(text, "candidates")


def _mix(**fields: Any) -> Mix:
    return make_mix([RequestClass(name="c", **fields)], IDS, np.random.default_rng(0))


def test_a_rank_asks_for_distinct_candidates_of_the_catalog() -> None:
    mix = _mix(kind="rank", history_length=40, candidates=30, top_k=3)
    assert len(mix.requests) == N_USERS
    for user, request in enumerate(mix.requests[:20]):
        body = json.loads(request.body)
        assert (request.path, request.kind, request.group) == ("/v1/rank", "rank", "c")
        assert body.keys() == {"user_id", "history", "top_k", "candidates"}
        assert (body["user_id"], body["top_k"]) == (f"c-{user}", 3)
        assert len(body["history"]) == 40
        assert set(body["history"]) <= set(IDS)
        assert sorted(body["candidates"]) == sorted(IDS)


def test_a_recommend_has_what_its_class_sets_and_nothing_else() -> None:
    assert json.loads(_mix(history_length=1).requests[0].body).keys() == {"user_id", "history", "top_k"}
    request = _mix(
        beam_width=16, deadline_ms=50, priority="batch", exclude_history=True, fields={"model": "m"}
    )
    body = json.loads(request.requests[0].body)
    assert (body["beam_width"], body["deadline_ms"], body["priority"]) == (16, 50, "batch")
    assert (body["exclude_history"], body["model"]) == (True, "m")
    assert request.requests[0].deadline_ms == 50


@pytest.mark.parametrize("type_", [RecommendRequest, RankRequest])
def test_the_server_takes_what_a_class_makes(type_: type[msgspec.Struct]) -> None:
    kind = "rank" if type_ is RankRequest else "recommend"
    timed = {"timed": True} if kind == "rank" else {"beam_width": "oneof:10:20"}
    mix = _mix(kind=kind, candidates="uniform:1:9", deadline_ms=10.5, exclude_history=True, **timed)
    for request in mix.requests[:50]:
        body = msgspec.json.decode(request.body, type=type_)
        if isinstance(body, RankRequest):
            assert body.top_k is not None and body.top_k <= len(body.candidates)


def test_lengths_follow_their_laws() -> None:
    mix = _mix(kind="rank", history_length="uniform:2:4", candidates="oneof:5:9", top_k=1)
    bodies = [json.loads(request.body) for request in mix.requests]
    assert {len(body["history"]) for body in bodies} == {2, 3, 4}
    assert {len(body["candidates"]) for body in bodies} == {5, 9}


def test_times_are_an_hour_apart() -> None:
    body = json.loads(_mix(kind="rank", history_length=4, candidates=1, top_k=1, timed=True).requests[0].body)
    assert np.diff([*body["history_times"], body["time"]]).tolist() == [3600] * 4


def test_classes_are_drawn_by_their_weights() -> None:
    classes = [RequestClass(name="home", weight=3), RequestClass(name="feed", kind="rank", candidates=5)]
    mix = make_mix(classes, IDS, np.random.default_rng(0))
    which = mix.draw(20_000, np.random.default_rng(1))
    home = sum(mix.requests[i].group == "home" for i in which)
    assert abs(home - 15_000) < 4 * math.sqrt(20_000 * 0.75 * 0.25)
    assert len({int(i) for i in which}) > 1990  # each of a class's users comes


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kind": "rank", "candidates": 31}, "c: 31 candidates were asked for; the catalog has 30 items"),
        ({"kind": "rank", "candidates": "uniform:1:31"}, "c: 31 candidates"),
        ({"kind": "rank", "candidates": 5, "beam_width": 5}, "c: rank has no beam_width"),
        ({"top_k": 9, "beam_width": "oneof:8:16"}, "c: a beam_width of 8 is below a top_k of 9"),
        ({"history_length": 100_000}, "at most 20000000 are made"),
        ({"history_length": "some"}, "c: history_length 'some' must be a number"),
        ({"fields": {"history": []}}, "c: fields cannot hold history"),
        ({"fields": {"deadline_ms": 1}}, "c: fields cannot hold deadline_ms"),
    ],
)
def test_what_cannot_be_asked_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(LoadError, match=words):
        _mix(**fields)


def test_a_file_holds_classes(tmp_path: Path) -> None:
    path = tmp_path / "mix.json"
    home = {
        "name": "home",
        "weight": 2.5,
        "history_length": "lognormal:40:1.2:500",
        "priority": "interactive",
    }
    path.write_text(json.dumps({"classes": [home, {"name": "feed", "kind": "rank", "candidates": 20}]}))
    first, second = read_mix(path)
    assert first == RequestClass(
        name="home", weight=2.5, history_length="lognormal:40:1.2:500", priority="interactive"
    )
    assert (second.kind, second.weight, second.deadline_ms) == ("rank", 1.0, None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "truncated"),
        ("[]", "Expected `object`"),
        ('{"classes": []}', "length >= 1"),
        ('{"classes": [{"name": "a"}, {"name": "a"}]}', "two classes have the same name"),
        ('{"classes": [{"name": "a", "weight": 0}]}', r"classes\[0\]\.weight"),
        ('{"classes": [{"name": "a", "deadline_ms": -1}]}', "deadline_ms"),
        ('{"classes": [{"name": "a", "priority": "high"}]}', "priority"),
        ('{"classes": [{"name": "a b"}]}', "name"),
        ('{"classes": [{"name": "a", "wieght": 1}]}', "wieght"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "mix.json"
    path.write_text(text)
    with pytest.raises(LoadError, match=rf"mix\.json: .*{words}"):
        read_mix(path)
