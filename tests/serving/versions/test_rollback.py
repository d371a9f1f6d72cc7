# SPDX-License-Identifier: Apache-2.0
"""Rollbacks to the version before, over real HTTP: of real weights where a folder is read again, else of fakes."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jgr.models import checkpoint
from jgr.models.model_files import ModelFiles
from tests.serving.fakes import PATIENCE_S, LiveServer
from tests.serving.versions.test_reload import ADMIN, Versions, reload, reloading_server, wait_until
from tests.serving.versions.test_reload_model import REQUESTS, Switchable, scores

ROLLBACK = "/v1/models/{}/rollback"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Switchable]:
    server = Switchable(tmp_path_factory.mktemp("models"))
    yield server
    server.stop()


def rolled_back(server: Switchable) -> dict[str, Any]:
    status, answer = server.admin("POST", ROLLBACK.format("tiny"))
    assert status == 202, answer
    assert answer["reload"] == "running"
    model: dict[str, Any] = {"reload": "running"}
    while model["reload"] == "running":
        model = server.call("/v1/models/tiny")
    return model


def answers(server: Switchable) -> list[Any]:
    return [server.call(*request) for request in REQUESTS]


def test_a_rollback_serves_the_version_before_and_another_one_goes_forward(server: Switchable) -> None:
    assert server.call("/v1/models/tiny")["previous"] is None
    status, refusal = server.admin("POST", ROLLBACK.format("tiny"))
    assert (status, refusal["error"]["type"]) == (409, "conflict")
    assert "no other version" in refusal["error"]["message"]
    first, alone = server.call("/v1/models/tiny")["version"], answers(server)
    server.point_to("b")
    second = server.reload()
    assert second["previous"] == first != second["version"]
    assert np.abs(scores(answers(server)[0]) - scores(alone[0])).max() > 0.1
    in_load = server.compilations("load")

    back = rolled_back(server)
    assert (back["reload"], back["version"], back["previous"]) == ("done", first, second["version"])
    for got, want in zip(answers(server), alone, strict=True):
        assert got["model"] == first
        np.testing.assert_allclose(scores(got), scores(want), atol=1e-6)
    assert server.compilations("load") == in_load, "the programs are those that serve"
    assert rolled_back(server)["version"] == second["version"]


def test_a_reload_of_what_is_served_keeps_the_version_before(server: Switchable) -> None:
    server.point_to("a")
    first = server.reload()
    server.point_to("b")
    second = server.reload()
    assert server.reload()["previous"] == first["version"] == second["previous"]


def test_a_folder_that_holds_other_files_by_now_cannot_be_gone_back_to(
    server: Switchable, tmp_path: Path
) -> None:
    shutil.copytree(server.folder / "a", server.folder / "c")
    server.point_to("c")
    server.reload()
    server.point_to("b")
    before = server.reload()
    tokenizer = server.folder / "c" / "tokenizer.json"
    tokenizer.touch()
    for _ in range(2):
        status, refusal = server.admin("POST", ROLLBACK.format("tiny"))
        assert (status, refusal["error"]["type"]) == (409, "conflict")
        assert "holds other files by now" in refusal["error"]["message"]
        tokenizer.unlink()
        os.mkfifo(tokenizer)
    shutil.rmtree(server.folder / "c")
    assert server.admin("POST", ROLLBACK.format("tiny"))[0] == 409
    assert server.call("/v1/models/tiny")["version"] == before["version"]


def test_a_rollback_needs_the_admin_key_and_takes_no_body() -> None:
    with reloading_server(Versions()) as server:
        path = ROLLBACK.format("jgr")
        assert server.call(path, method="POST").status == 401
        assert server.call(path, b'{"to": "x"}', **ADMIN).status == 422
        assert server.call(ROLLBACK.format("other"), method="POST", **ADMIN).status == 404
        assert server.call(path, method="POST", **ADMIN).status == 409
    with LiveServer() as server:
        assert server.call(path, method="POST").status == 403


def test_files_that_take_long_to_look_at_hold_nobody_up(
    server: Switchable, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.point_to("a")
    server.reload()
    server.point_to("b")
    server.reload()
    looking, go_on = threading.Event(), threading.Event()

    def unchanged(_: ModelFiles) -> bool:
        looking.set()
        return go_on.wait(PATIENCE_S)

    monkeypatch.setattr(ModelFiles, "unchanged", property(unchanged))
    with contextlib.closing(server.connect()) as other:
        other.request("POST", ROLLBACK.format("tiny"), headers=ADMIN)
        assert looking.wait(PATIENCE_S)
        assert len(answers(server)) == len(REQUESTS)
        go_on.set()
        assert other.getresponse().status == 202
    while server.call("/v1/models/tiny")["reload"] == "running":
        pass


def test_a_change_that_is_refused_says_what_the_running_one_is_at() -> None:
    versions = Versions()
    with reloading_server(versions) as server:
        versions.open.clear()
        reload(server)
        versions.wait_entered()
        for path in ("reload", "rollback"):
            refused = server.call(f"/v1/models/jgr/{path}", method="POST", **ADMIN)
            assert refused.status == 409
            assert "is running: its files are being read" in refused.error["message"]
        versions.hold_warm_up = True
        versions.open.set()
        while "being read" in reload(server).error["message"]:
            pass
        assert "its programs are being compiled" in reload(server).error["message"]
        versions.executors[0].release()
        wait_until(server, "done")


def test_weights_whose_scores_are_no_numbers_are_refused_and_the_old_ones_serve(server: Switchable) -> None:
    before = server.call("/v1/models/tiny")
    cfg, weights = checkpoint.load(server.folder / "a")
    loud = replace(
        weights, norm=jnp.full_like(weights.norm, 3e38), embed=1e5 * weights.embed
    )  # their product is not

    def write_beside(folder: Path) -> None:
        for name in ("tokenizer.json", "catalog.jsonl"):
            shutil.copy(server.folder / "a" / name, folder / name)

    checkpoint.save(server.folder / "loud", cfg, loud, write_beside)
    server.point_to("loud")
    after = server.reload()
    assert (after["reload"], after["version"], after["state"]) == ("failed", before["version"], "ready")
    assert "gives scores that are no finite numbers" in after["reload_error"]
    assert "Error:" not in after["reload_error"], "it is a mistake of the user's"
    assert all(np.isfinite(scores(answer)).all() for answer in answers(server))
