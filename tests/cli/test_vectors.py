# SPDX-License-Identifier: Apache-2.0
"""`jgr vectors`: a file that trainings and semantic ids take, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jgr.cli.main import run
from jgr.config import DataConfig
from jgr.data.datasets import load_dataset
from jgr.training.item_vectors import co_occurrence_vectors, load_vectors
from jgr.training.text_vectors import text_vectors


def test_vectors_of_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = load_dataset(DataConfig())
    out = tmp_path / "text.npy"
    assert run(["vectors", "--config=shop", f"--out={out}", "--fields=title", "--dims=6"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(out)
    found = load_vectors(out, dataset.catalog.n_items)
    texts = text_vectors(dataset.catalog.metadata, fields=["title"], dims=6)
    np.testing.assert_allclose(found @ found.T, texts @ texts.T, atol=1e-5)


def test_vectors_of_sequences(tmp_path: Path) -> None:
    dataset = load_dataset(DataConfig())
    near = tmp_path / "near.npy"
    assert run(["vectors", "--config=shop", f"--out={near}", "--of=sequences", "--dims=6", "--window=2"]) == 0
    expected = co_occurrence_vectors(
        dataset.interactions.sequences, dataset.catalog.n_items, dims=6, window=2
    )
    found = load_vectors(near, dataset.catalog.n_items)
    placed = np.where(expected.placed[:, None], expected.vectors, 0)
    np.testing.assert_allclose(found @ found.T, placed @ placed.T, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--out: the file to write is not set"),
        (["--out={0}/x"], "--out: the name of a .npy file"),
        (
            ["--out={0}/x.npy", "--of=sequences", "--fields=title"],
            "--fields has no effect here: it is for --of=text",
        ),
        (["--out={0}/x.npy", "--window=2"], "--window has no effect here: it is for --of=sequences"),
        (["--out={0}/x.npy", "--fields=colour"], "no item's metadata has a text 'colour'"),
        (["--out={0}/there.npy"], "--overwrite replaces it"),
    ],
)
def test_mistakes_are_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    (tmp_path / "there.npy").touch()
    assert run(["vectors", "--config=shop", *(part.format(tmp_path) for part in arguments)]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
