# SPDX-License-Identifier: Apache-2.0
"""`jgr retrieve` as a user meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from jgr.config import Config, DataConfig, TrainConfig
from jgr.data.datasets import load_dataset
from jgr.evaluation.candidates import load_candidates
from jgr.models import manifest, params, retrievers
from tests.commands import run_here

RUN = "import sys; from jgr.cli.main import run; sys.exit(run())"


def _retrieve(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", RUN, "retrieve", *argv], capture_output=True, text=True)


def test_it_writes_the_candidates_of_a_split_and_counts_the_targets(tmp_path: Path) -> None:
    dataset, folder, out = load_dataset(DataConfig()), tmp_path / "lru", tmp_path / "c.npz"
    cfg = retrievers.make_config(TrainConfig(model="lrurec", hidden=8, mlp=8), dataset.catalog.item_ids)
    weights = params.initialize(retrievers.retriever(cfg).spec(cfg), jax.random.key(0))
    retrievers.save(folder, cfg, weights, lambda _: None)
    done = _retrieve(f"--retriever={folder}", "--split=valid", "--k=20", "--exclude_history", f"--out={out}")
    assert done.returncode == 0, done.stderr
    valid, found = dataset.interactions.valid, load_candidates(out, dataset)
    np.testing.assert_array_equal(
        found.rows, retrievers.top_k(weights, cfg, valid.histories, 20, exclude_seen=True)
    )
    hits = (found.rows == valid.targets[:, None]).any(axis=1)
    report = json.loads(done.stdout.splitlines()[-1])
    assert report == {
        "retriever": "LRURec", "split": "valid", "exclude_history": True, "examples": len(valid),
        "users": len(valid), "eligible": int(hits.sum()), "recall@10": round(found.recall(10), 4),
        "recall@20": round(hits.mean(), 4),
    }  # fmt: skip


def test_examples_are_told_from_their_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By time, a user may have several test targets."""
    dataset, folder = load_dataset(DataConfig()), tmp_path / "lru"
    cfg = retrievers.make_config(TrainConfig(model="lrurec", hidden=8, mlp=8), dataset.catalog.item_ids)
    weights = params.initialize(retrievers.retriever(cfg).spec(cfg), jax.random.key(0))
    retrievers.save(folder, cfg, weights, lambda _: None)
    twice = np.array([0, 1, 2, 2])
    several = replace(dataset.interactions, test=dataset.interactions.test.select(twice))
    monkeypatch.setattr("jgr.data.datasets.load_dataset", lambda data: replace(dataset, interactions=several))
    line, report = run_here("retrieve", f"--retriever={folder}", "--k=20").stdout.splitlines()
    assert "of 4 examples (3 users) is among 20 candidates" in line
    assert [json.loads(report)[name] for name in ("examples", "users")] == [4, 3]


def test_validation_targets_that_were_learnt_are_not_counted(tmp_path: Path) -> None:
    dataset, folder = load_dataset(DataConfig()), tmp_path / "lru"
    cfg = retrievers.make_config(TrainConfig(model="lrurec", hidden=8, mlp=8), dataset.catalog.item_ids)
    weights = params.initialize(retrievers.retriever(cfg).spec(cfg), jax.random.key(0))

    def beside(out: Path) -> None:
        manifest.write(out, Config(), dataset.catalog, {"steps": 1.0, manifest.LEARNT_VALID: 1.0})

    retrievers.save(folder, cfg, weights, beside)
    done = _retrieve(f"--retriever={folder}", "--split=valid", "--k=20")
    assert (done.returncode, done.stdout, done.stderr) == (
        2,
        "",
        f"jgr: --split: {folder} has learnt the validation targets (train.learn_valid), so its figures would be too "
        "high: give --split=test\n",
    )
    assert _retrieve(f"--retriever={folder}", "--k=20").returncode == 0


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    for options, words in (
        ([], "--retriever: the folder that jgr train made is not set"),
        ([f"--retriever={tmp_path}", "--out=c.txt"], "--out must end in .npz, not 'c.txt'"),
    ):
        done = _retrieve(*options)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", f"jgr: {words}\n")
