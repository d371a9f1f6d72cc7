# SPDX-License-Identifier: Apache-2.0
"""`jgr embeddings upload`: any family's rows go to a server, from which a folder that lacks them is served."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jgr.cli.embeddings import upload
from jgr.config import UserError
from jgr.models import scorers
from jgr.models.model_files import ModelFiles
from jgr.models.table_file import TableFile
from tests.commands import run_here
from tests.features.redis_process import RedisProcess
from tests.serving.scorer_fakes import ITEMS, ScorerServer, draw
from tests.serving.scorers.test_paging import FAMILIES, PAGED, SASREC, TABLE, asked, folder_of, settings

KEPT = 20


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisProcess]:
    process = RedisProcess(tmp_path)
    yield process
    process.kill()


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return run_here("embeddings", *argv)


def scores(folder: Path, bodies: list[dict[str, Any]], *more: str) -> tuple[list[Any], float]:
    """The answers, and how many rows came from the server."""
    with ScorerServer(settings(folder, *PAGED, *more)) as served:
        found = [served.rank(**each)["items"] for each in bodies]
        return found, served.metric('jgr_embedding_rows_total{event="remote",table="items"}')


@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder_with_few_rows_is_served_as_the_whole_one(
    tmp_path: Path, server: RedisProcess, name: str
) -> None:
    cfg = FAMILIES[name]
    whole, few = folder_of(tmp_path / "whole", cfg), tmp_path / "few"
    report = upload(whole, server.address, KEPT, few, overwrite=False)
    lacking, row_bytes = len(ITEMS) - KEPT, TableFile(whole / TABLE).header.row_bytes
    assert report == {"items": {"rows": lacking, "first": KEPT, "row_bytes": row_bytes, "new": lacking}}
    kept, files = TableFile(few / TABLE), ModelFiles(few)
    assert kept.header.held == KEPT and (kept.rows == TableFile(whole / TABLE).rows[:KEPT]).all()
    files.check()
    assert files.identity() == ModelFiles(whole).identity()
    scorers.save(tmp_path / "held", cfg, draw(cfg), rows="float32", held=KEPT)
    assert (TableFile(tmp_path / "held" / TABLE).rows == kept.rows).all()
    bodies = [asked(cfg, seed) for seed in range(8)]
    remote = (f"embeddings.remote={server.address}", "embeddings.timeout_ms=5000")
    here, none = scores(whole, bodies)
    there, read = scores(few, bodies, *remote)
    assert there == here and none == 0 and read > KEPT


def test_the_command_says_what_is_there_and_comes_a_second_time(tmp_path: Path, server: RedisProcess) -> None:
    whole, few = folder_of(tmp_path / "whole", SASREC), tmp_path / "few"
    remote = f"--remote={server.address}"
    done = run("upload", str(whole), remote, f"--local_rows={KEPT}", f"--out={few}")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "table items: 40 rows of 32 bytes are in the server of --remote, 40 are new"
    assert lines[1].startswith(f"{few}: has the first 20 rows; serve it with")
    assert json.loads(lines[-1]) == {"items": {"rows": 40, "first": 20, "row_bytes": 32, "new": 40}}
    done = run("upload", str(whole), f"--set=embeddings.remote={server.address}", f"--local_rows={KEPT}")
    assert json.loads(done.stdout.splitlines()[-1])["items"]["new"] == 0
    done = run("upload", str(whole), remote)  # more rows of the same table
    there = {"rows": 60, "first": 0, "row_bytes": 32, "new": 20}
    assert json.loads(done.stdout.splitlines()[-1]) == {"items": there}


def test_mistakes_are_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", SASREC)
    for argv, message in (
        (["download"], "there is no 'jgr embeddings download'; there is upload"),
        (["upload"], "name the model's folder"),
        (["upload", str(folder)], "--remote: name the server that gets the rows"),
        (["upload", str(folder), "--remote=unix:///none", "--out=x"], "--out: say with --local_rows"),
        (
            ["upload", str(folder), "--remote=unix:///none"],
            "table items: the server of embeddings.remote failed",
        ),
        (["upload", str(folder), "--remote=ftp://x"], "embeddings.remote: Redis URL must specify"),
    ):
        done = run(*argv)
        assert done.returncode == 2 and message in done.stderr, done.stderr
        assert "Traceback" not in done.stderr


def test_what_cannot_be_uploaded_is_refused(tmp_path: Path) -> None:
    folder, resident = folder_of(tmp_path / "m", SASREC), folder_of(tmp_path / "r", SASREC, "none")

    def refused(folder: Path, local_rows: int, out: Path | None, message: str) -> None:
        with pytest.raises(UserError, match=message):
            upload(folder, "unix:///none", local_rows, out, overwrite=False)

    refused(resident, 0, None, "has no embeddings/items.table; train it with train.tables=float32")
    refused(folder, 60, None, "--local_rows: 60, but the largest table has 60 rows")
    refused(folder, 20, folder, "is the model's own folder")
    refused(folder, 20, folder / "params" / "x", "is the model's own folder, or in it")
    refused(folder, 20, resident, "holds a model: --overwrite replaces it")
    with open(folder / TABLE, "r+b") as file:
        file.seek(5000)
        file.write(b"!")
    refused(folder, 0, None, "damaged checkpoint")
