# SPDX-License-Identifier: Apache-2.0
"""The real Amazon catalog with its official semantic ids, through the commands a user would run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jgr.catalog.catalog import load_catalog
from tests.commands import command
from tests.training.shortcuts import without_curves

FOLDER = "amazon-industrial-minionerec"


@pytest.mark.data(FOLDER)
@pytest.mark.slow
def test_train_and_evaluate_on_the_real_catalog(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [
        "--config=configs/industrial.py",
        f"--set=data.path={dataset}",
        f"--set=train.out={tmp_path / 'model'}",
        f"--set=model.path={tmp_path / 'model'}",
        "--set=model.compilation_cache=",
        "--set=profiles.batch=8",
        "--set=profiles.widths=10",
        "--set=beam.width=10",
        "--set=train.steps=1",
        "--set=train.batch=32",
        "--set=train.validation_examples=20",
        "--set=train.layers=1",
        "--set=train.hidden=32",
        "--set=train.mlp=32",
    ]
    with without_curves():
        assert command("train", *settings) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "model")
    assert command("evaluate", *settings, "--limit=40") == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["examples"] == 40
    assert report["returned"] == 400  # ten items of the catalog for each, none invented
    assert report["catalog_version"] == load_catalog(dataset / "index.json.gz").version
    assert report["rows"].keys() == {
        "popularity",
        "item-kNN",
        "Markov chain",
        "sequential rules",
        "sequence-kNN",
        "industrial",
    }
    assert all(0 <= row["hr@5"] <= row["hr@10"] <= 1 for row in report["rows"].values())
