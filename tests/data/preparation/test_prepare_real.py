# SPDX-License-Identifier: Apache-2.0
"""The published datasets: their counts, and their sequences against independent readings."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from jgr.config import DataConfig
from jgr.data.datasets import load_dataset
from jgr.data.interactions import Interactions
from jgr.data.preparation.prepare import Options, prepare
from jgr.data.prepared import Prepared, load_prepared

# The file that SASRec, BERT4Rec and gSASRec were measured on, as git names its content.
SASREC_ML_1M = "9ab8e3edb8742f8d8cc4911e3dee25e82a6fcc24"


def _prepare(source: str, raw: Path, out: Path) -> tuple[Prepared, dict[str, int]]:
    manifest, _ = prepare(Options(source, raw, out))
    counts = manifest["counts"]
    return load_prepared(out), {name: counts[name] for name in counts if name != "raw"}


def _whole(prepared: Prepared) -> dict[str, list[str]]:
    """Every user's items: of the test examples, which exist for all users here."""
    test, ids = prepared.interactions.test, prepared.item_ids
    return {
        prepared.interactions.user_ids[user]: [ids[row] for row in history] + [ids[target]]
        for user, history, target in zip(test.users, test.histories, test.targets, strict=True)
    }


def _lines(path: Path) -> list[list[str]]:
    with gzip.open(path, "rt") as stream:
        return [line.split() for line in stream]


@pytest.mark.slow
@pytest.mark.data("ml-1m")
def test_movielens_1m_in_the_form_of_sasrec(dataset: Path, tmp_path: Path) -> None:
    prepared, counts = _prepare("movielens-1m-sasrec", dataset, tmp_path / "out")
    assert counts == {
        "users": 6040,
        "items": 3416,
        "interactions": 999_611,
        "train": 999_611 - 3 * 6040,
        "valid": 6040,
        "test": 6040,
    }
    item_of = {original: sasrec for sasrec, original in _lines(dataset / "sasrec_item_map.txt.gz")}
    user_of = dict(_lines(dataset / "sasrec_user_map.txt.gz"))
    whole = _whole(prepared)
    text = "".join(
        f"{user} {item_of[item]}\n" for user, original in user_of.items() for item in whole[original]
    ).encode()
    assert hashlib.sha1(b"blob %d\0" % len(text) + text).hexdigest() == SASREC_ML_1M
    trained = np.bincount(prepared.interactions.sequences.flatten()[0], minlength=3416)
    assert (np.diff(trained) <= 0).all()


@pytest.mark.data("ml-1m")
def test_movielens_1m(dataset: Path, tmp_path: Path) -> None:
    prepared, counts = _prepare("movielens-1m", dataset, tmp_path / "out")
    assert (counts["users"], counts["items"], counts["interactions"]) == (6040, 3706, 1_000_209)
    assert _whole(prepared) == {user: items for user, *items in _lines(dataset / "sequences.txt.gz")}
    titles = dict(zip(prepared.item_ids, prepared.metadata, strict=True))
    assert titles["1"] == {
        "title": "Toy Story (1995)",
        "genres": ["Animation", "Children's", "Comedy"],
        "year": 1995,
    }


@pytest.mark.data("ml-100k")
def test_movielens_100k(dataset: Path, tmp_path: Path) -> None:
    prepared, counts = _prepare("movielens-100k", dataset, tmp_path / "out")
    assert counts == {
        "users": 943,
        "items": 1682,
        "interactions": 100_000,
        "train": 100_000 - 3 * 943,
        "valid": 943,
        "test": 943,
    }
    rows = sorted(_lines(dataset / "u.data.gz"), key=lambda row: int(row[3]))  # a stable sort
    expected: dict[str, list[str]] = {}
    for user, item, _, _ in rows:
        expected.setdefault(user, []).append(item)
    assert _whole(prepared) == expected


@pytest.mark.data("amazon-beauty")
def test_amazon_beauty(dataset: Path, tmp_path: Path) -> None:
    prepared, counts = _prepare("amazon-beauty", dataset, tmp_path / "out")
    assert counts == {
        "users": 22_363,
        "items": 12_101,
        "interactions": 198_502,
        "train": 198_502 - 3 * 22_363,
        "valid": 22_363,
        "test": 22_363,
    }
    assert _whole(prepared) == {user: items for user, *items in _lines(dataset / "sequences.txt.gz")}
    assert sum(bool(metadata["title"]) for metadata in prepared.metadata) == 12_094


@pytest.mark.data("amazon-sports")
def test_amazon_sports(dataset: Path, tmp_path: Path) -> None:
    _, counts = _prepare("amazon-sports", dataset, tmp_path / "out")
    assert (counts["users"], counts["items"], counts["interactions"]) == (35_598, 18_357, 296_337)


@pytest.mark.data("amazon-instruments")
def test_amazon_instruments(dataset: Path, tmp_path: Path) -> None:
    prepared, counts = _prepare("amazon-instruments", dataset, tmp_path / "out")
    assert (counts["users"], counts["items"], counts["interactions"]) == (24_772, 9_922, 206_153)
    with gzip.open(dataset / "sequences.json.gz") as stream:
        given = json.load(stream)
    assert _whole(prepared) == {user: [str(item) for item in items] for user, items in given.items()}


def _same(ours: Interactions, theirs: Interactions) -> None:
    for split in ("train", "valid", "test"):
        a, b = getattr(ours, split), getattr(theirs, split)
        np.testing.assert_array_equal(a.targets, b.targets)
        np.testing.assert_array_equal(a.users, b.users)
        np.testing.assert_array_equal(a.histories.flatten(), b.histories.flatten())


@pytest.mark.data("amazon-industrial-minionerec")
def test_amazon_industrial_equals_reading_it_directly(dataset: Path, tmp_path: Path) -> None:
    prepared, counts = _prepare("amazon-industrial", dataset, tmp_path / "out")
    assert counts == {
        "users": 7694,
        "items": 3686,
        "interactions": 53_018,
        "train": 36_259,
        "valid": 4532,
        "test": 4533,
    }
    ours = load_dataset(DataConfig(kind="prepared", path=str(tmp_path / "out")))
    direct = load_dataset(DataConfig(kind="minionerec", path=str(dataset)))
    assert ours.catalog.version == direct.catalog.version
    _same(ours.interactions, direct.interactions)
    assert prepared.metadata == direct.catalog.metadata


@pytest.mark.slow
@pytest.mark.data("gowalla-lightgcn")
def test_gowalla(dataset: Path, tmp_path: Path) -> None:
    prepared, counts = _prepare("gowalla", dataset, tmp_path / "out")
    assert (counts["users"], counts["items"], counts["interactions"]) == (29_858, 40_981, 1_027_370)
    assert (counts["valid"], counts["test"]) == (91_047, 217_242)
    data = prepared.interactions
    assert counts["train"] == 719_081 - 29_858  # all but each user's first
    first = data.test.select(slice(0, 1))
    lines = [_lines(dataset / f"{split}.txt.gz")[0] for split in ("train", "valid", "test")]
    user, *history = lines[0] + lines[1][1:]
    assert data.user_ids[first.users[0]] == user
    assert [prepared.item_ids[row] for row in first.histories[0]] == history
    assert prepared.item_ids[first.targets[0]] == lines[2][1]


@pytest.mark.data("kuairand-pure")
def test_kuairand(dataset: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    manifest, _ = prepare(Options("kuairand", dataset, out, split="time"))
    counts = manifest["counts"]
    assert counts["raw"] == {"users": 25_156, "items": 6361, "interactions": 228_329}
    assert (counts["users"], counts["items"], counts["interactions"]) == (25_156, 6361, 222_444)
    times = np.load(out / "interactions.npz")["times"]
    assert (times.min(), times.max()) == (1650812741436, 1652025130564)
    assert json.loads((out / "manifest.json").read_text())["parameters"]["split"] == "time"
