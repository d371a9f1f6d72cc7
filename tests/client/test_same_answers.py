# SPDX-License-Identifier: Apache-2.0
"""A real model, asked in this process and over HTTP: the same answers, alone and in company."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import jgr
from jgr.config import override
from jgr.models import manifest
from jgr.serving.policies import jobs
from tests.serving.decoders.test_model_server import Served
from tests.serving.scorer_fakes import HSTU, ITEMS, MONDAY, ScorerServer
from tests.serving.scorer_fakes import make_folder as make_scorer_folder
from tests.serving.tiny_model import N_ITEMS, make_catalog, make_folder

# Shapes that no other test compiles: one of these counts its own.
SETTINGS = (
    "model.compilation_cache=",
    "profiles.batch=4",
    "profiles.tokens=32",
    "profiles.widths=12",
    "profiles.candidates=12",
)
HISTORIES = [
    [f"B{row:03}" for row in np.random.default_rng(seed).integers(0, N_ITEMS, 1 + seed % 9)]
    for seed in range(24)
]
CANDIDATES = [f"B{row:03}" for row in range(0, N_ITEMS, 5)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    manifest.write(folder, make_folder(folder), make_catalog())
    served = Served(make_config(folder))
    yield served
    assert served.stop() == 0


def make_config(folder: Path) -> jgr.Config:
    return override(manifest.folder_config(folder), "server.port=0", *SETTINGS)


def scores(answer: jgr.Answer) -> list[tuple[str, float]]:
    return [(item.item_id, item.score) for item in answer.items]


def test_an_engine_answers_as_http_does(served: Served) -> None:
    with (
        jgr.Engine(served.config.model.path, SETTINGS) as engine,
        jgr.Client(served.url) as client,
    ):
        assert engine.info.version == client.info.version
        alone = []
        for history in HISTORIES:
            here, there = engine.recommend(history, top_k=5), client.recommend(history, top_k=5)
            assert scores(here) == scores(there)  # bit for bit: one request in the same program
            assert (here.model, here.usage) == (there.model, there.usage)
            assert scores(engine.rank(history, CANDIDATES)) == scores(client.rank(history, CANDIDATES))
            alone.append(dict(scores(here)))
        for together in (engine.recommend(HISTORIES, top_k=5), client.recommend(HISTORIES, top_k=5)):
            for answer, expected in zip(together, alone, strict=True):
                for item in answer.items:
                    if item.item_id in expected:  # others can stand there only by a tie
                        assert item.score == pytest.approx(expected[item.item_id], abs=1e-4)
                    else:
                        assert item.score == pytest.approx(min(expected.values()), abs=1e-4)


@pytest.mark.parametrize("kind", ["recommend", "rank"])
def test_an_engine_for_calls_of_one_kind_refuses_the_other(served: Served, kind: jobs.Kind) -> None:
    with jgr.Engine(served.config.model.path, SETTINGS, [kind]) as engine, jgr.Client(served.url) as client:
        asked = {"recommend": ([HISTORIES[0]], {"top_k": 5}), "rank": ([HISTORIES[0], CANDIDATES], {})}
        for name, (given, more) in asked.items():
            here, there = getattr(engine, name), getattr(client, name)
            if name == kind:
                assert scores(here(*given, **more)) == scores(there(*given, **more))
            else:
                with pytest.raises(jgr.InvalidRequest, match=f"no model of this server serves {name}"):
                    here(*given, **more)


def test_a_scorer_is_asked_the_same(tmp_path: Path) -> None:
    # One way to compute it: else the engine takes the one that it measured to be the fastest at its start.
    settings = ("executors.share_user=part", "executors.sizes=8")
    config = make_scorer_folder(tmp_path / "hstu", HSTU, *settings)
    histories, candidates = [list(ITEMS[:3]), list(ITEMS[4:9])], list(ITEMS[:20:3])
    times = [[MONDAY + at for at in range(len(history))] for history in histories]
    nows = [MONDAY + 100, MONDAY + 5000]
    with ScorerServer(config) as server, jgr.Engine(config) as engine:
        answers = engine.rank(histories, candidates, history_times=times, time=nows)
        for history, seconds, now, answer in zip(histories, times, nows, answers, strict=True):
            fields = {"history": history, "candidates": candidates, "history_times": seconds, "time": now}
            expected = [(item["item_id"], item["score"]) for item in server.rank(**fields)["items"]]
            alone = engine.rank(history, candidates, history_times=seconds, time=now)
            assert scores(alone) == expected
            for (item_id, score), (same, close) in zip(scores(answer), expected, strict=True):
                assert (item_id, score) == (same, pytest.approx(close, abs=1e-4))
        with pytest.raises(jgr.InvalidRequest, match="no model of this server serves recommend"):
            engine.recommend(histories[0])
