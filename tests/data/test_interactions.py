# SPDX-License-Identifier: Apache-2.0
"""Splits against naive loops, and the MiniOneRec reader on good, broken and real files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jgr.catalog.catalog import Catalog, load_catalog
from jgr.data.interactions import DataError, Examples, Ragged, leave_one_out, load_minionerec

HEADER = "user_id:token\titem_id_list:token_seq\titem_id:token\n"
CATALOG = Catalog.build([f"i{row}" for row in range(10)], [[row] for row in range(10)], [{}] * 10)
SEQUENCES = st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=8), min_size=1, max_size=8)


def plain(examples: Examples) -> list[tuple[int, list[int], int]]:
    histories = [history.tolist() for history in examples.histories]
    return list(zip(examples.users.tolist(), histories, examples.targets.tolist(), strict=True))


@given(SEQUENCES)
def test_leave_one_out_equals_slicing(sequences: list[list[int]]) -> None:
    data = leave_one_out(sequences)
    kept = [s[:-2] if len(s) >= 3 else s for s in sequences]
    assert [s.tolist() for s in data.sequences] == kept
    assert plain(data.train) == [(u, s[:i], s[i]) for u, s in enumerate(kept) for i in range(1, len(s))]
    assert plain(data.valid) == [(u, s[:-2], s[-2]) for u, s in enumerate(sequences) if len(s) >= 3]
    assert plain(data.test) == [(u, s[:-1], s[-1]) for u, s in enumerate(sequences) if len(s) >= 3]
    assert data.user_ids == tuple(map(str, range(len(sequences))))
    assert data.train.targets.dtype == data.train.users.dtype == data.train.histories.rows.dtype == np.int32


def test_nested_histories_share_one_array() -> None:
    data = leave_one_out([np.arange(1000, dtype=np.int32)], ["Ada"])
    assert len(data.train) == 997 and data.train.histories.lengths.sum() == 997 * 998 // 2
    assert len(data.train.histories.rows) == 1000
    assert data.user_ids == ("Ada",)


@given(SEQUENCES, st.data())
def test_ragged_selects_and_flattens(sequences: list[list[int]], draw: st.DataObject) -> None:
    ragged = Ragged.of(sequences)
    assert [s.tolist() for s in ragged] == sequences and len(ragged) == len(sequences)
    indices = draw.draw(st.lists(st.integers(0, len(sequences) - 1), max_size=5))
    chosen = ragged.select(np.array(indices, np.int64))
    rows, owner = chosen.flatten()
    assert rows.tolist() == [row for i in indices for row in sequences[i]]
    assert owner.tolist() == [at for at, i in enumerate(indices) for _ in sequences[i]]
    assert [s.tolist() for s in ragged.select(slice(1, 3))] == sequences[1:3]


def test_examples_are_selected_together() -> None:
    data = leave_one_out([[5, 6, 7, 8], [9], [1, 2, 3]])
    assert plain(data.test.select(np.array([1, 0]))) == [(2, [1, 2], 3), (0, [5, 6, 7], 8)]
    assert len(data.test.select(slice(0, 1))) == 1


@pytest.mark.parametrize(
    ("sequences", "users", "reason"),
    [
        ([], None, "at least one"),
        ([[1]], ["a", "b"], "1 sequences of 2 users"),
        ([[1, 2], []], ["a", "b"], "user 'b' has an empty sequence"),
        ([[1, -2]], None, "rows must be 0 to 2147483647, found -2 to 1"),
        ([[1, 2**31]], None, "found 1 to 2147483648"),
        ([[1], [1.0, 2.0]], None, "sequence 1: expected a list of rows, found float64"),
        ([[1, float("nan")]], None, "sequence 0: expected a list of rows, found float64"),
        ([["1"]], None, "sequence 0: expected a list of rows"),
        ([[[1]]], None, "sequence 0: expected a list of rows"),
    ],
)
def test_sequences_that_cannot_be_split_are_refused(
    sequences: list[list[int]], users: list[str] | None, reason: str
) -> None:
    with pytest.raises(DataError, match=reason):
        leave_one_out(sequences, users)


def write(folder: Path, **rows: str) -> None:
    for split, text in rows.items():
        (folder / f"{split}.inter").write_text(HEADER + text)


GOOD = {"train": "u\ti0 i1\ti2\nv\ti5\ti5\nu\ti2\ti3\n", "valid": "w\ti9\ti8\n", "test": "u\ti1 i2 i3\ti4\n"}


def test_minionerec_rows_become_windows_of_the_users_sequences(tmp_path: Path) -> None:
    write(tmp_path, **GOOD)
    data = load_minionerec(tmp_path, CATALOG, counts=(3, 1, 1))
    assert data.user_ids == ("u", "v", "w")
    assert [s.tolist() for s in data.sequences] == [[0, 1, 2, 3], [5, 5], []]
    assert plain(data.train) == [(0, [0, 1], 2), (1, [5], 5), (0, [2], 3)]
    assert plain(data.valid) == [(2, [9], 8)]
    assert plain(data.test) == [(0, [1, 2, 3], 4)]
    with pytest.raises(DataError, match=r"\(3, 1, 1\) rows in train, valid and test, expected \(3, 1, 2\)"):
        load_minionerec(tmp_path, CATALOG, counts=(3, 1, 2))


@pytest.mark.parametrize(
    ("split", "text", "reason"),
    [
        ("train", "", "train.inter:1: the file holds no rows"),
        ("train", "u\ti0\ti1\nu\ti1\n", "train.inter:3: expected user, history and target.* found 2 fields"),
        ("train", "u\ti0\ti1\tx\n", "train.inter:2: .* found 4 fields"),
        ("train", "u\t\ti1\n", "train.inter:2: expected user"),
        ("train", "\ti0\ti1\n", "train.inter:2: expected user"),
        ("train", "\n", "train.inter:2: .* found 1 fields"),
        ("train", "u\ti0 i77\ti1\n", "train.inter:2: item 'i77' is not in the catalog"),
        ("train", "u\ti0  i1\ti1\n", "train.inter:2: item '' is not in the catalog"),
        ("test", "u\ti0\tnan\n", "test.inter:2: item 'nan' is not in the catalog"),
        ("test", "u\ti3 i4\ti4\n", "test.inter:2: the history does not continue .* user 'u'"),
        ("test", "u\ti9 i0 i1 i2 i3\ti4\n", "test.inter:2: the history does not continue"),
        ("valid", "w\ti9\ti8\nw\ti9\ti7\n", "valid.inter:3: the history does not continue .* user 'w'"),
    ],
)
def test_a_malformed_row_is_refused_with_file_and_line(
    tmp_path: Path, split: str, text: str, reason: str
) -> None:
    write(tmp_path, **{**GOOD, split: text})
    with pytest.raises(DataError, match=reason):
        load_minionerec(tmp_path, CATALOG)


def test_malformed_files_are_refused(tmp_path: Path) -> None:
    write(tmp_path, **GOOD)
    (tmp_path / "valid.inter").write_text("user\titems\titem\n")
    with pytest.raises(DataError, match=r"valid\.inter:1: the header must be 'user_id:token"):
        load_minionerec(tmp_path, CATALOG)
    (tmp_path / "valid.inter").write_bytes(HEADER.encode() + b"\xff\ti9\ti8\n")
    with pytest.raises(DataError, match=r"valid\.inter:2: .*utf-8"):
        load_minionerec(tmp_path, CATALOG)
    (tmp_path / "valid.inter").unlink()
    with pytest.raises(DataError, match=r"has no valid\.inter or valid\.inter\.gz"):
        load_minionerec(tmp_path, CATALOG)
    whole = gzip.compress((HEADER + "w\ti9\ti8\n" * 5).encode())
    (tmp_path / "valid.inter.gz").write_bytes(whole[:-12])
    with pytest.raises(DataError, match=r"valid\.inter"):
        load_minionerec(tmp_path, CATALOG)


@pytest.mark.data("amazon-industrial-minionerec")
def test_amazon_industrial(dataset: Path) -> None:
    catalog = load_catalog(dataset / "index.json.gz")
    data = load_minionerec(dataset, catalog, counts=(36259, 4532, 4533))
    # The published file of whole sequences gives every history: the (at most 10) items before the target.
    with gzip.open(dataset / "user_sequences.json.gz") as stream:
        published = {user: [str(item) for item in items] for user, items in json.load(stream).items()}
    assert published.keys() == set(data.user_ids)
    reached = [1] * len(data.user_ids)
    for split in (data.train, data.valid, data.test):
        for user, history, target in plain(split):
            items = published[data.user_ids[user]]
            at = reached[user]
            assert [catalog.item_ids[row] for row in history] == items[max(0, at - 10) : at]
            assert catalog.item_ids[target] == items[at]
            reached[user] = at + 1
    assert sum(reached) == sum(map(len, published.values())) == 53018
    trained = data.sequences.lengths
    assert trained.sum() == 36259 + np.count_nonzero(trained)
