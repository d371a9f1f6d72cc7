# SPDX-License-Identifier: Apache-2.0
"""From raw files to a prepared folder and back: values and refusals."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jgr.catalog.catalog import Catalog, CatalogError, save_catalog
from jgr.config import DataConfig
from jgr.data.datasets import load_dataset
from jgr.data.interactions import DataError, Examples, leave_one_out, load_minionerec
from jgr.data.preparation.prepare import Options, prepare
from jgr.data.prepared import Arrays, Prepared, load_prepared
from jgr.prompt.tokens import Tokenizer
from tests.data.preparation.rows import LOG, log_options, write_rows

# user, item, time and split; written in this order.
ROWS: list[tuple[str, str, int, str]] = [
    ("ann", "tea", 30, "test"),
    ("bob", "jam", 11, "train"),
    ("ann", "jam", 10, "train"),
    ("ann", "nut", 20, "train"),
    ("bob", "tea", 22, "train"),
    ("bob", "nut", 26, "valid"),
    ("cy", "jam", 5, "train"),
    ("cy", "tea", 6, "train"),
]


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return Options("generic", write_rows(tmp_path / "raw", ROWS), tmp_path / "out")


def _named(prepared: Prepared, examples: Examples) -> list[tuple[str, list[str], str]]:
    ids, users = prepared.item_ids, prepared.interactions.user_ids
    return [
        (users[user], [ids[row] for row in history], ids[target])
        for user, history, target in zip(examples.users, examples.histories, examples.targets, strict=True)
    ]


def test_leave_one_out_orders_by_time(options: Options) -> None:
    manifest, fresh = prepare(options)
    prepared = load_prepared(options.out)
    data = prepared.interactions
    assert fresh
    assert prepared.manifest == manifest
    # Trained on: jam of ann and bob, jam and tea of cy.
    assert prepared.item_ids == ("jam", "tea", "nut")
    assert prepared.metadata == ({}, {}, {})
    assert data.user_ids == ("ann", "bob", "cy")
    assert [list(s) for s in data.sequences] == [[0], [0], [0, 1]]
    assert _named(prepared, data.train) == [("cy", ["jam"], "tea")]
    assert _named(prepared, data.valid) == [("ann", ["jam"], "nut"), ("bob", ["jam"], "tea")]
    assert _named(prepared, data.test) == [("ann", ["jam", "nut"], "tea"), ("bob", ["jam", "tea"], "nut")]


@given(st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=7), min_size=1, max_size=6))
@settings(max_examples=40, deadline=None)
def test_leave_one_out_equals_the_function_in_memory(
    tmp_path_factory: pytest.TempPathFactory, sequences: list[list[int]]
) -> None:
    sequences = [*sequences, [0, 1, 2, 3]]
    folder = tmp_path_factory.mktemp("p")
    rows = [(f"u{user}", item) for user, sequence in enumerate(sequences) for item in sequence]
    prepare(Options("generic", write_rows(folder / "raw", rows), folder / "out"))
    prepared = load_prepared(folder / "out")
    row = {item_id: row for row, item_id in enumerate(prepared.item_ids)}
    expected = leave_one_out([[row[str(item)] for item in sequence] for sequence in sequences])
    found = prepared.interactions
    assert [s.tolist() for s in found.sequences] == [s.tolist() for s in expected.sequences]
    for split in ("train", "valid", "test"):
        ours, theirs = getattr(found, split), getattr(expected, split)
        assert [h.tolist() for h in ours.histories] == [h.tolist() for h in theirs.histories]
        assert ours.targets.tolist() == theirs.targets.tolist()
        assert ours.users.tolist() == theirs.users.tolist()


def test_time_split_parts_at_the_quantiles(tmp_path: Path) -> None:
    options = Options("generic", write_rows(tmp_path / "raw", LOG), tmp_path / "out", split="time")
    prepare(options)
    prepared = load_prepared(options.out)
    # Of 20 times, 16 is the 80 % and 18 the 90 % quantile.
    for split, times in (("train", range(16)), ("valid", (16, 17)), ("test", (18, 19))):
        expected = [
            (user, [i for u, i, t in LOG if u == user and t < time], item)
            for user, item, time in sorted(LOG, key=lambda row: (row[0], row[2]))
            if time in times and any(u == user and t < time for u, _, t in LOG)
        ]
        assert _named(prepared, getattr(prepared.interactions, split)) == expected


def test_equal_times_are_not_parted(tmp_path: Path) -> None:
    log = [(user, f"{item} {time}", min(time, 16)) for user, item, time in LOG]
    options = Options("generic", write_rows(tmp_path / "raw", log), tmp_path / "out", split="time")
    with pytest.raises(DataError, match="leaves no valid example"):
        prepare(options)


def test_given_split_follows_the_source(options: Options) -> None:
    prepare(replace(options, split="given"))
    prepared = load_prepared(options.out)
    data = prepared.interactions
    assert _named(prepared, data.train) == [
        ("ann", ["jam"], "nut"),
        ("bob", ["jam"], "tea"),
        ("cy", ["jam"], "tea"),
    ]
    assert _named(prepared, data.valid) == [("bob", ["jam", "tea"], "nut")]
    assert _named(prepared, data.test) == [("ann", ["jam", "nut"], "tea")]


@pytest.mark.parametrize("fields", ["user_id item_id timestamp split", "user_id item_id skipped split"])
def test_a_given_split_that_leaks_is_refused(tmp_path: Path, fields: str) -> None:
    rows = [("ann", "jam", 1, "train"), ("ann", "tea", 2, "test"), ("ann", "nut", 3, "train")]
    options = Options("generic", write_rows(tmp_path / "raw", rows, fields), tmp_path / "out", split="given")
    with pytest.raises(
        DataError, match="user 'ann': the split leaks: an event of train comes after one of test"
    ):
        prepare(options)
    with pytest.raises(DataError, match="did not finish"):
        load_prepared(options.out)


def test_a_set_never_shows_a_held_out_item_of_the_same_split(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    for name, text in (("train", "0 5 6\n1 6\n"), ("valid", "1 5\n"), ("test", "0 7 8\n")):
        (raw / f"{name}.txt").write_text(text)
    options = Options("gowalla", raw, tmp_path / "out", allow_counts=True)
    prepare(options)
    prepared = load_prepared(options.out)
    assert _named(prepared, prepared.interactions.test) == [("0", ["5", "6"], "7"), ("0", ["5", "6"], "8")]
    (raw / "test.txt").write_text("0 7 5\n")
    with pytest.raises(DataError, match="user '0' has item '5' twice: the split leaks"):
        prepare(replace(options, out=tmp_path / "other"))


def _arrays(**changes: Any) -> Arrays:
    events = np.array([0, 1, 2, 0, 1, 2], np.int32)
    good = Arrays(
        events,
        np.array([0, 3, 6]),
        np.array([2, 4]),
        np.array([[0], [0], [1], [1]]),
        np.array([[1], [3], [4], [4]]),
        np.array([[0, 1], [0, 3], [2, 5], [2, 5]]),
        np.array([1, 2, 3, 1, 2, 3]),
    )
    return replace(good, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"test": np.array([[0], [0], [3], [2]])},
            "test: user 'a': the split leaks: a history holds its own",
        ),
        ({"test": np.array([[1], [0], [5], [5]])}, "test: user 'b': an example leaves the user's events"),
        ({"test": np.array([[0], [0], [0], [2]])}, "has no history"),
        ({"test": np.array([[2], [0], [1], [2]])}, "names a user that does not exist"),
        ({"train": np.array([[0], [0], [2], [2]])}, "train: user 'a': .*reaches a held-out target"),
        ({"train_stops": np.array([3, 4])}, "test: user 'a': .*reaches a held-out target"),
        ({"train_stops": np.array([2, 7])}, "end outside"),
        ({"rows": np.array([0, 1, 2, 0, 1, 9], np.int32)}, "items are 0 to 2, found 0 to 9"),
        ({"offsets": np.array([0, 6, 6])}, "user 'b' has no events"),
        ({"offsets": np.array([0, 6])}, "do not cover"),
        ({"times": np.array([1, 2, 3, 1, 3, 2])}, "user 'b': the events are not in order of time"),
        ({"times": np.array([1])}, "not as many times"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    _arrays().check(3, ("a", "b"))
    with pytest.raises(DataError, match=message):
        _arrays(**changes).check(3, ("a", "b"))


def test_filters_run_until_nothing_changes(tmp_path: Path) -> None:
    # "x" leaves for lack of users; then u1 has too few events; then "y" has too few users.
    events = {"u0": "abcd", "u1": "axy", "u2": "abcdy"}
    raw = write_rows(tmp_path / "raw", [(user, item) for user, items in events.items() for item in items])
    options = Options("generic", raw, tmp_path / "out", min_user=3, min_item=2)
    counts = prepare(options)[0]["counts"]
    prepared = load_prepared(options.out)
    assert (prepared.interactions.user_ids, set(prepared.item_ids)) == (("u0", "u2"), set("abcd"))
    assert counts["raw"] == {"users": 3, "items": 6, "interactions": 12}
    assert counts == counts | {"users": 2, "items": 4, "interactions": 8, "train": 2, "valid": 2, "test": 2}
    with pytest.raises(DataError, match="no event is left"):
        prepare(replace(options, min_user=9, out=tmp_path / "none"))


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ('{"item_id": "i0"}\n{"item_id": "i1"}\n{"item_id": "i1"}\n', r"items\.jsonl:3: item 'i1' .* line 2"),
        ('{"item_id": "i0"}\n', r"interactions\.jsonl:2: item 'i1' is not in items\.jsonl"),
        ('{"item_id": "i0", "v": NaN}\n', r"items\.jsonl:1: JSON is malformed"),
        ('{"item_id": "i0", "v": [1e999]}\n', r"items\.jsonl:1: "),
    ],
)
def test_bad_items_are_refused(tmp_path: Path, items: str, message: str) -> None:
    options = log_options(tmp_path)
    (options.raw / "items.jsonl").write_text(items)
    with pytest.raises(DataError, match=message):
        prepare(options)


def test_metadata_follows_the_items(tmp_path: Path) -> None:
    options = log_options(tmp_path)
    names = ["i4", "i0", "unused", "i1"]
    (options.raw / "items.jsonl").write_text(
        "".join(json.dumps({"item_id": n, "t": n}) + "\n" for n in names)
    )
    prepare(options)
    prepared = load_prepared(options.out)
    assert set(prepared.item_ids) == {"i0", "i1", "i4"}
    assert prepared.metadata == tuple({"t": item_id} for item_id in prepared.item_ids)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "the file holds no events"),
        ([("a", "b", 1), ("a", "b")], ":2: timestamp: some events have a time and some have none"),
        ([("a", "b"), ("a", "b", 1)], ":2: timestamp: some events have a time and some have none"),
        ([("", "b")], ":1: user_id: an id has 1 to 512 characters"),
        ([("a", "b" * 513)], ":1: item_id: an id has 1 to 512 characters"),
        ([("a", "b"), ("a", "c\nd")], r":2: item_id: no control characters may be in it, found 'c.nd'"),
        ([("a", "b"), ("a", "c")], "leaves no valid example"),
    ],
)
def test_events_that_cannot_be_used(tmp_path: Path, rows: list[tuple[Any, ...]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        prepare(Options("generic", write_rows(tmp_path / "raw", rows), tmp_path / "out"))


def test_truncated_gzip_is_refused(tmp_path: Path) -> None:
    options = log_options(tmp_path)
    plain = options.raw / "interactions.jsonl"
    packed = gzip.compress(plain.read_bytes())
    plain.unlink()
    (options.raw / "interactions.jsonl.gz").write_bytes(packed[:-12])
    with pytest.raises(DataError, match=r"interactions\.jsonl\.gz: the gzip file is cut short"):
        prepare(options)
    assert not (options.out / "manifest.json").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "movielens"}, "no 'movielens'; known: movielens-100k, "),
        ({"source": "gowalla", "split": "time"}, "--split=time: gowalla has given"),
        ({"bpe_vocab": 5}, "--bpe_vocab must be 0 or at least 300"),
        ({"bpe_vocab": 300}, "no item has a title"),
    ],
)
def test_options_that_cannot_be(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        prepare(replace(log_options(tmp_path), **changes))


def test_time_split_needs_times(tmp_path: Path) -> None:
    raw = write_rows(tmp_path / "raw", [row[:2] for row in LOG])
    with pytest.raises(DataError, match="give no times"):
        prepare(Options("generic", raw, tmp_path / "out", split="time"))


def test_known_counts_are_verified(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "sequences.txt").write_text("1 1 2 3\n2 1 2 3 1\n")
    options = Options("amazon-beauty", raw, tmp_path / "out")
    with pytest.raises(DataError, match=r"interactions=7\).*interactions=198502\); --allow_counts"):
        prepare(options)
    manifest, _ = prepare(replace(options, allow_counts=True))
    assert manifest["counts"]["raw"]["interactions"] == 7
    assert "known for amazon-beauty" in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"7": [1, 2.5]}', "user '7': an id must be text or a whole number, found 2.5"),
        ('{"7": []}', "user '7' has no list of items"),
        ('{"7": 3}', "user '7' has no list of items"),
        ("[1]", "expected an object, found list"),
        ('{"7": [1, 2], "8": [1], "7": [3]}', "sequences.json: key '7' occurs twice"),
        ('{"7": ' + "[" * 20_000, "sequences.json: is nested too deeply"),
        ('{"7": [1, 2', "sequences.json: Input data was truncated"),
    ],
)
def test_damaged_json_sequences_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "sequences.json").write_text(text)
    with pytest.raises(DataError, match=re.escape(message)):
        prepare(Options("amazon-instruments", tmp_path, tmp_path / "out"))


def test_title_tokenizer_gives_titles_back(tmp_path: Path) -> None:
    options = replace(log_options(tmp_path), bpe_vocab=320)
    titles = {f"i{i}": f"naïve tea tea teapot {i}" for i in (0, 1, 4)}
    lines = [json.dumps({"item_id": item_id, "title": title}) + "\n" for item_id, title in titles.items()]
    (options.raw / "items.jsonl").write_text("".join(lines))
    manifest, _ = prepare(options)
    assert "title_tokenizer.json" in manifest["outputs"]
    tokenizer = Tokenizer.from_file(options.out / "title_tokenizer.json")
    assert [tokenizer.token_id(name) for name in ("<pad>", "<bos>", "<sid>")] == [0, 1, 2]
    words = json.loads((options.out / "title_tokenizer.json").read_text())["model"]["vocab"]
    text_of = {token: text for text, token in words.items()}
    tokens = tokenizer.encode(titles["i0"])
    assert len(tokens) < len(titles["i0"])  # merges were learnt
    assert "".join(text_of[token] for token in tokens) == titles["i0"].replace("ï", "Ã¯").replace(" ", "Ġ")
    load_prepared(options.out)
    manifest, _ = prepare(replace(options, bpe_vocab=0, overwrite=True))
    assert "title_tokenizer.json" not in manifest["outputs"]
    assert not (options.out / "title_tokenizer.json").exists()


def test_dataset_needs_semantic_ids_of_these_items(tmp_path: Path) -> None:
    options = log_options(tmp_path)
    prepare(options)
    config = DataConfig(kind="prepared", path=str(options.out))
    with pytest.raises(DataError, match="run jgr ids"):
        load_dataset(config)
    prepared = load_prepared(options.out)
    n = len(prepared.item_ids)
    catalog = Catalog.build(prepared.item_ids, [[i] for i in range(n)], [{}] * n)
    save_catalog(catalog, options.out / "catalog.jsonl")
    dataset = load_dataset(config)
    assert dataset.catalog.version == catalog.version
    assert dataset.interactions.test.targets.tolist() == prepared.interactions.test.targets.tolist()
    other = Catalog.build(prepared.item_ids[::-1], [[i] for i in range(n)], [{}] * n)
    save_catalog(other, options.out / "catalog.jsonl")
    with pytest.raises(DataError, match="other items"):
        load_dataset(config)


def test_a_catalog_that_describes_items_otherwise_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = log_options(tmp_path)
    lines = [json.dumps({"item_id": f"i{row}", "title": f"Item {row}", "price": 1.5}) for row in range(5)]
    (options.raw / "items.jsonl").write_text("".join(line + "\n" for line in lines))
    prepare(options)
    prepared, path = load_prepared(options.out), options.out / "catalog.jsonl"
    ids = [[row] for row in range(len(prepared.item_ids))]
    newer = [*prepared.metadata[:-1], {**prepared.metadata[-1], "price": 2.5}]
    told = f"{path}: describes items otherwise than {options.out / 'items.jsonl'}; run jgr ids again"
    for metadata, warnings in ((prepared.metadata, []), (newer, [f"{told} to take what is new"])):
        save_catalog(Catalog.build(prepared.item_ids, ids, metadata), path)
        caplog.clear()
        found = load_dataset(DataConfig(kind="prepared", path=str(options.out)))
        assert caplog.messages == warnings
        assert list(found.catalog.metadata) == list(metadata)


def _minionerec(folder: Path) -> Path:
    folder.mkdir()
    index = {str(i): [f"<a_{i}>", f"<b_{i % 2}>"] for i in range(4)}
    (folder / "index.json").write_text(json.dumps(index))
    (folder / "item.json").write_text(json.dumps({"0": {"title": "zero"}}))
    header = "user_id:token\titem_id_list:token_seq\titem_id:token\n"
    rows = {"train": "7\t3\t1\n8\t0\t1\n", "valid": "7\t3 1\t2\n", "test": "7\t1 2\t0\n"}
    for split, lines in rows.items():
        (folder / f"{split}.inter").write_text(header + lines)
    return folder


def test_minionerec_brings_its_semantic_ids_and_examples(tmp_path: Path) -> None:
    options = Options("minionerec", _minionerec(tmp_path / "raw"), tmp_path / "out")
    prepare(options)
    dataset = load_dataset(DataConfig(kind="prepared", path=str(options.out)))
    direct = load_dataset(DataConfig(kind="minionerec", path=str(options.raw)))
    assert dataset.catalog.version == direct.catalog.version
    expected = load_minionerec(options.raw, direct.catalog)
    for split in ("train", "valid", "test"):
        ours, theirs = getattr(dataset.interactions, split), getattr(expected, split)
        assert [h.tolist() for h in ours.histories] == [h.tolist() for h in theirs.histories]
        assert ours.targets.tolist() == theirs.targets.tolist()
    assert load_prepared(options.out).metadata[0] == {"title": "zero"}
    with pytest.raises(DataError, match="--min_user, --min_item"):
        prepare(replace(options, out=tmp_path / "other", min_item=2))
    (options.raw / "index.json").write_text('{"0": ["<a_0>"], "0": ["<a_1>"]}')
    with pytest.raises(CatalogError, match="occurs twice"):
        prepare(replace(options, out=tmp_path / "third"))
