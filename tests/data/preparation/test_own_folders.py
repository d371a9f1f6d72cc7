# SPDX-License-Identifier: Apache-2.0
"""Folders of own files: what is refused and why, what is there is replaced where asked, and scorers learn from them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from jgr.catalog.catalog import save_catalog
from jgr.config import DataConfig, UserError, override
from jgr.data.datasets import load_dataset
from jgr.data.interactions import DataError
from jgr.data.preparation.prepare import Options, prepare
from jgr.data.prepared import load_prepared
from jgr.data.sources.registry import SOURCES
from jgr.models import scorers
from jgr.training.feedback import train_feedback
from jgr.training.semantic_ids import id_catalog
from tests.data.preparation.own_files import FORMS, log, write
from tests.data.preparation.test_own_data import HEAD, csv
from tests.training.feedback_world import config
from tests.training.shortcuts import without_curves


@pytest.mark.parametrize("name", ["interactions.csv", "items.csv", "users.csv"])
def test_what_is_no_file_is_refused_and_not_waited_for_or_left_out(tmp_path: Path, name: str) -> None:
    """A pipe has no end until somebody writes to it. An items.csv that leads nowhere is not the same as none."""
    folder = csv(tmp_path / "raw", "user_id,item_id\nu,a\nu,b\nu,c\n")
    path = folder / name
    makers = (
        lambda: os.mkfifo(path),
        path.mkdir,
        lambda: path.symlink_to(path),
        lambda: path.symlink_to("gone"),
    )
    for at, make in enumerate(makers):
        if name == "interactions.csv":
            path.unlink(missing_ok=True)
        make()
        with pytest.raises(DataError, match=f"{name}: cannot be read: |has no {name[:6]}"):
            prepare(Options("generic", folder, tmp_path / f"out{at}"))
        path.rmdir() if path.is_dir() else path.unlink()


def test_one_log_a_folder(tmp_path: Path) -> None:
    csv(tmp_path, HEAD, "interactions.csv")
    csv(tmp_path, "user_id:token\n", "x.inter")
    with pytest.raises(DataError, match=r"expected one file of interactions.*interactions\.csv, x\.inter"):
        SOURCES["generic"].open(tmp_path)


@pytest.mark.parametrize(
    ("raw", "names", "message"),
    [
        ("raw", ("x.csv", "y.csv"), r"raw: has no interactions\.jsonl .*; there are x\.csv, y\.csv$"),
        ("raw", [f"{n}.x" for n in range(9)], r"; there are 0\.x, .*7\.x, \.\.\.$"),
        ("raw", (), "; it is empty$"),
        ("raw/ratings.csv", ("ratings.csv",), r"ratings\.csv: is a file: name the folder that it is in$"),
        ("rwa", (), "rwa: there is no such folder$"),
    ],
)  # fmt: skip
def test_a_folder_without_a_log_is_told_with_what_it_has(
    tmp_path: Path, raw: str, names: Sequence[str], message: str
) -> None:
    (tmp_path / "raw").mkdir()
    for name in names:
        (tmp_path / "raw" / name).touch()
    with pytest.raises(DataError, match=message):
        SOURCES["generic"].open(tmp_path / raw)


def test_a_header_without_item_ids_is_told_with_what_it_has(tmp_path: Path) -> None:
    csv(tmp_path, HEAD + "u,a,5,1\n")
    csv(tmp_path, "movieId,title\na,A\n", "items.csv")
    with pytest.raises(
        DataError, match=r"items\.csv:1: .*item_id is missing, there are movieId, title: rename"
    ):
        prepare(Options("generic", tmp_path, tmp_path / "out"))


def test_what_is_there_is_replaced_only_where_asked(tmp_path: Path) -> None:
    raw = csv(tmp_path / "raw", "user_id,item_id\n" + "".join(f"u,{i}\n" for i in range(4)))
    options = Options("generic", raw, tmp_path / "out")
    prepare(options)
    before = (tmp_path / "out" / "manifest.json").read_bytes()
    csv(raw, "user_id,item_id\n" + "".join(f"u,{i}\n" for i in range(5)) + "u\n")
    with pytest.raises(
        UserError, match=r"out holds a dataset of other files.*--overwrite replaces it, or give"
    ):
        prepare(options)
    replaced = Options("generic", raw, tmp_path / "out", overwrite=True)
    with pytest.raises(DataError, match="has 1 fields"):
        prepare(replaced)
    assert (tmp_path / "out" / "manifest.json").read_bytes() == before  # what is broken replaces nothing
    load_prepared(tmp_path / "out")
    csv(raw, "user_id,item_id\n" + "".join(f"u,{i}\n" for i in range(5)))
    assert prepare(replaced)[0]["counts"]["items"] == 5


@pytest.mark.parametrize("link", [False, True])
def test_a_raw_file_is_never_replaced(tmp_path: Path, link: bool) -> None:
    """Not by its own name, and not through a link to the raw folder."""
    raw = csv(tmp_path / "raw", "user_id,item_id\n" + "".join(f"u,{i}\n" for i in range(4)))
    titles = "".join(f'{{"item_id": "{i}", "title": "T{i}"}}\n' for i in range(9))
    csv(raw, titles, "items.jsonl")
    out = raw
    if link:
        out = tmp_path / "out"
        out.symlink_to(raw)
    for overwrite in (False, True):
        with pytest.raises(DataError) as refused:
            prepare(Options("generic", raw, out, overwrite=overwrite))
        message = f"--out: {out / 'items.jsonl'} is a raw file that would be replaced: give another folder"
        assert str(refused.value) == message
    assert {path.name for path in raw.iterdir()} == {"interactions.csv", "items.jsonl"}
    assert (raw / "items.jsonl").read_text() == titles
    inside = Options("generic", raw, raw / "prepared")
    assert [prepare(inside)[1], prepare(inside)[1]] == [True, False]
    csv(raw, "user_id,item_id\n" + "".join(f"u,{i}\n" for i in range(5)))
    assert prepare(Options("generic", raw, raw / "prepared", overwrite=True))[0]["counts"]["items"] == 5
    assert (raw / "items.jsonl").read_text() == titles


@pytest.mark.slow
@pytest.mark.parametrize(("form", "model"), [*zip(FORMS, ("climber", "stu") * 3, strict=False)])
def test_scorers_learn_from_own_files(tmp_path: Path, form: str, model: str) -> None:
    prepare(Options("generic", write(tmp_path / "raw", form, log()), tmp_path / "out"))
    prepared = load_prepared(tmp_path / "out")
    codes = np.arange(len(prepared.item_ids), dtype=np.int32)[:, None]
    save_catalog(id_catalog(prepared.item_ids, codes, prepared.metadata), tmp_path / "out" / "catalog.jsonl")
    dataset = load_dataset(DataConfig(kind="prepared", path=str(tmp_path / "out")))
    settings = override(
        config(tmp_path / "model", model), "feedback.tasks=click,rating_from_4", "train.steps=2",
        "train.evaluate_every=0",
    )  # fmt: skip
    with without_curves():
        cfg, _ = scorers.load(train_feedback(settings, dataset, {}))
    assert cfg.tasks == ("click", "rating_from_4")
