# SPDX-License-Identifier: Apache-2.0
"""FLAME's three builds behind the whole server: the same answers, whatever is shared of the user (FLAME-7)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args

import jax
import pytest

from jgr.config import ConfigError
from jgr.models.climber_layers import Build
from jgr.serving.versions.loading import load_any
from tests.serving.scorer_fakes import HSTU, ITEMS, ScorerServer, make_folder
from tests.serving.scorers.test_kept_users import CLIMBER, body, compare

BUILDS: tuple[Build, ...] = get_args(Build)
SHARES = {"request": BUILDS, "cache": ("op_by_op",)}
CFG = dataclasses.replace(CLIMBER, layers=1)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, str], ScorerServer]]:
    folder = tmp_path_factory.mktemp("climber") / "model"
    with ExitStack() as stack:
        started = {}
        for share, builds in SHARES.items():
            for build in builds:
                settings = (
                    f"executors.share_user={share}",
                    f"executors.build={build}",
                    "cache.device_mb=0.1",
                )
                config = make_folder(folder, CFG, *settings, "executors.number=1", "executors.sizes=8")
                started[share, build] = stack.enter_context(ScorerServer(config))
        yield started


def test_answers_are_the_models_in_every_build(servers: dict[tuple[str, str], ScorerServer]) -> None:
    series = 'jgr_compilations_total{phase="request"}'
    for asked in (body(CFG, candidates=ITEMS[20:23]), body(CFG, 3, candidates=ITEMS[10:29])):
        answers: dict[Any, Any] = {}
        for key, server in servers.items():
            before = server.metric(series)
            answers[key] = server.rank(**asked)
            assert server.metric(series) == before, f"{key}: warm-up left something to compile"
        for answer in answers.values():
            compare(answer, CFG, asked)
    again = servers["cache", "op_by_op"].rank(**asked | {"time": asked["time"] + 3600})
    assert again["usage"]["cached_tokens"] == 3
    compare(again, CFG, asked | {"time": asked["time"] + 3600})


def test_a_build_is_what_its_name_says(servers: dict[tuple[str, str], ScorerServer]) -> None:
    programs: dict[str, Any] = {
        build: server.engine.served.executors.programs[8]  # type: ignore[attr-defined]
        for (share, build), server in servers.items()
        if share == "request"
    }
    assert not isinstance(programs["op_by_op"], jax.stages.Compiled)
    assert isinstance(programs["xla"], jax.stages.Compiled)
    assert programs["xla"].as_text() != programs["fused"].as_text()


def test_another_model_has_no_builds(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"executors\.build: xla is for Climber alone; HstuConfig is served fused"
    ):
        load_any(make_folder(tmp_path / "model", HSTU, "executors.build=xla"))
