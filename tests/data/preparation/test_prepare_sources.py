# SPDX-License-Identifier: Apache-2.0
"""Each raw form as its publisher writes it, in miniature, and what is wrong with a line."""

from __future__ import annotations

import gzip
import json
import re
import sys
from pathlib import Path

import pytest

from jgr.data.interactions import DataError
from jgr.data.sources.records import Event, Item, Raw, TableOptions, Tabular
from jgr.data.sources.registry import SOURCES

LATIN = "Les Misérables (1995)"


def _write(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        data = content if isinstance(content, bytes) else content.encode()
        (folder / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return folder


def _read(source: str, folder: Path) -> tuple[list[Event], list[Item]]:
    raw = SOURCES[source].open(folder)
    assert isinstance(raw, Raw | Tabular)
    if isinstance(raw, Raw):
        events = [event for path, read in raw.events for _, event in read(path)]
    else:
        found = raw.read(TableOptions())
        times = [None] * len(found.user) if found.time is None else found.time.tolist()
        events = [
            Event(found.user_ids[user], found.item_ids[item], time, int(split))
            for user, item, time, split in zip(found.user, found.item, times, found.split, strict=True)
        ]
    return events, [item for _, item in raw.items[1](raw.items[0])] if raw.items else []


def test_movielens_100k(tmp_path: Path) -> None:
    flags = "0|1|0|0|1" + "|0" * 14
    files = {
        "u.data.gz": "7\t1\t3\t881250949\n8\t1\t5\t891717742\n",
        "u.item": f"1|{LATIN}|01-Jan-1995||http://x|{flags}\n".encode("latin-1"),
    }
    events, items = _read("movielens-100k", _write(tmp_path, files))
    assert events == [Event("7", "1", 881250949), Event("8", "1", 891717742)]
    assert items == [Item("1", {"title": LATIN, "genres": ["Action", "Children's"], "year": 1995})]


def test_movielens_1m_prefers_ratings_to_sequences(tmp_path: Path) -> None:
    _write(tmp_path, {"movies.dat": f"1::{LATIN}::Drama|War\n2::No year::Comedy\n".encode("latin-1")})
    _write(tmp_path, {"sequences.txt.gz": "1 2 1\n"})
    events, items = _read("movielens-1m", tmp_path)
    assert events == [Event("1", "2"), Event("1", "1")]
    assert items[1] == Item("2", {"title": "No year", "genres": ["Comedy"]})
    _write(tmp_path, {"ratings.dat": "1::1::5::978300760\n"})
    assert _read("movielens-1m", tmp_path)[0] == [Event("1", "1", 978300760)]


def test_amazon_5core(tmp_path: Path) -> None:
    files = {"sequences.txt": "1 1 2\n2 2\n", "items.jsonl": '{"item_id": 1, "title": "a"}\n{"item_id": 2}\n'}
    events, items = _read("amazon-5core", _write(tmp_path, files))
    assert events == [Event("1", "1"), Event("1", "2"), Event("2", "2")]
    assert items == [Item("1", {"title": "a"}), Item("2", {})]


def test_amazon_2023_reviews(tmp_path: Path) -> None:
    review = {"rating": 5.0, "asin": "B1", "parent_asin": "P1", "user_id": "U", "timestamp": 1588687728923}
    meta = {"parent_asin": "P1", "title": "Gloss", "price": None, "store": "S", "videos": [1]}
    files = {"All_Beauty.jsonl.gz": json.dumps(review), "meta_All_Beauty.jsonl": json.dumps(meta)}
    events, items = _read("amazon-2023", _write(tmp_path, files))
    assert events == [Event("U", "P1", 1588687728923)]
    assert items == [Item("P1", {"title": "Gloss", "store": "S"})]


def test_amazon_2023_splits(tmp_path: Path) -> None:
    header = "user_id,parent_asin,rating,timestamp,history\n"
    parts = [("train", "U,P1,5.0,10,\n"), ("valid", "U,P2,5.0,20,P1\n"), ("test", '"U",P3,5.0,30,P1 P2\n')]
    _write(tmp_path, {f"Beauty.{part}.csv": header + row for part, row in parts})
    events, items = _read("amazon-2023", tmp_path)
    assert events == [Event("U", "P1", 10, 0), Event("U", "P2", 20, 1), Event("U", "P3", 30, 2)]
    assert items == []


def test_gowalla_without_valid_is_refused_by_the_files_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"valid\.txt"):
        _read("gowalla", _write(tmp_path, {"train.txt.gz": "0 5 6\n", "test.txt": "0 7\n"}))


def test_kuairand_reads_every_part_of_the_log(tmp_path: Path) -> None:
    header = "user_id,video_id,date,time_ms,is_click\n"
    files = {
        "log_standard_1.csv": header + "1,9,20220408,100,1\n",
        "log_standard_2.csv.gz": header + "2,9,20220422,200,0\n",
        "video_features_basic_pure.csv": 'video_id,tag,music\n9,"3,4",\n',
    }
    events, items = _read("kuairand", _write(tmp_path, files))
    assert events == [Event("1", "9", 100), Event("2", "9", 200)]
    assert items == [Item("9", {"tag": "3,4"})]


GENERIC_EVENTS = [Event("u", "7", 5, 0), Event("u", "8", 6, 2)]
GENERIC_ITEMS = [Item("7", {"title": "two\nlines"}), Item("8", {})]


def test_generic_jsonl_and_csv_say_the_same(tmp_path: Path) -> None:
    rows = [
        {"user_id": "u", "item_id": 7, "timestamp": 5, "more": 1},
        {"user_id": "u", "item_id": "8", "timestamp": 6, "split": "test"},
    ]
    items = [{"item_id": 7, "metadata": {"title": "two\nlines"}}, {"item_id": "8"}]
    lines = {
        "interactions.jsonl": "\n".join(map(json.dumps, rows)),
        "items.jsonl": "\n".join(map(json.dumps, items)),
    }
    table = {
        "interactions.csv.gz": "\ufeffuser_id,item_id,timestamp,split\r\nu,7,5,train\r\nu,8,6,test\r\n",
        "items.csv": 'title,item_id\n"two\nlines",7\n,8\n',
    }
    for name, files in (("lines", lines), ("table", table)):
        (tmp_path / name).mkdir()
        assert _read("generic", _write(tmp_path / name, files)) == (GENERIC_EVENTS, GENERIC_ITEMS)


def test_generic_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow
    import pyarrow.parquet as parquet

    events = {"user_id": ["u", "u"], "item_id": [7, 8], "timestamp": [5, 6], "split": ["train", "test"]}
    items = {"item_id": [7, 8], "title": ["two\nlines", None]}
    parquet.write_table(pyarrow.table(events), tmp_path / "interactions.parquet", row_group_size=1)
    parquet.write_table(pyarrow.table(items), tmp_path / "items.parquet")
    assert _read("generic", tmp_path) == (GENERIC_EVENTS, GENERIC_ITEMS)
    parquet.write_table(pyarrow.table(events | {"timestamp": [5, -6]}), tmp_path / "interactions.parquet")
    with pytest.raises(
        DataError, match=r"interactions\.parquet:2: timestamp: a time must be a number from 0"
    ):
        _read("generic", tmp_path)
    (tmp_path / "interactions.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=r"interactions\.parquet: "):
        _read("generic", tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"interactions\.parquet: .*pip install jgr\[parquet\]"):
        _read("generic", tmp_path)


HEADER = "user_id,item_id,timestamp\n"
BAD_EVENTS = [
    ("movielens-100k", "u.data", "1\t2\t3\n", ":1: expected 4 fields"),
    ("movielens-100k", "u.data", "1\t2\t3\t4\n1\t2\t6\t4\n", ":2: a rating must be 1 to 5, found '6'"),
    ("movielens-100k", "u.data", "1\t2\t3\tnan\n", ":1: invalid literal"),
    ("movielens-1m", "sequences.txt", "1 2\n2\n", ":2: user '2' has no items"),
    ("movielens-1m", "sequences.txt", "1 2  3\n", ":1: .*two spaces"),
    ("movielens-1m", "sequences.txt", "1 2\n1 3\n", ":2: user '1' has a line already"),
    ("generic", "interactions.jsonl", '{"user_id": "a"}\n', ":1: item_id: is missing"),
    (
        "generic",
        "interactions.jsonl",
        '{"user_id": "a", "item_id": 1.0}',
        ":1: item_id: an id must be text.* 1.0",
    ),
    ("generic", "interactions.jsonl", '{"user_id": "a", "item_id": NaN}', ":1: JSON is malformed"),
    ("generic", "interactions.jsonl", "[1]", ":1: expected an object, found list"),
    ("generic", "interactions.jsonl", "[" * 100_000, ":1: "),
    ("generic", "interactions.jsonl", '{"user_id": 1, "item_id": 2, "split": "dev"}', ":1: split: must be"),
    (
        "generic",
        "interactions.jsonl",
        '{"user_id": 1, "item_id": 2, "timestamp": -1}',
        ":1: timestamp: a time must",
    ),
    ("generic", "interactions.csv", HEADER + "1,2,3\n1,2\n", ":3: has 2 fields, the header 3"),
    ("generic", "interactions.csv", HEADER + "1,2,NaN\n", ":2: timestamp: expected a time in ISO 8601"),
    ("generic", "interactions.csv", HEADER + '1,"2"x,3\n', ":2: "),
    ("generic", "interactions.csv", "user_id,timestamp\n", ":1: the header must name .*item_id"),
    ("generic", "interactions.csv", "user_id,item_id,user_id\n", ":1: the header must name each column once"),
    ("generic", "interactions.csv", b"user_id,item_id\n\xff,1\n", ":2: .*0xff is not UTF-8"),
    (
        "generic",
        "interactions.csv",
        b"user_id;item_id;rating\nu;1;2\n",
        ":1: there is one column, .* by commas",
    ),
    ("generic", "interactions.csv", "", ":1: the header must name"),
]


@pytest.mark.parametrize(("source", "name", "content", "message"), BAD_EVENTS)
def test_malformed_events_name_file_and_line(
    tmp_path: Path, source: str, name: str, content: str | bytes, message: str
) -> None:
    _write(tmp_path, {"u.item": "", "movies.dat": "", name: content})
    with pytest.raises(DataError, match=re.escape(str(tmp_path / name)) + message):
        _read(source, tmp_path)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("movielens-100k", "u.data"),
        ("movielens-1m", "movies.dat"),
        ("amazon-5core", "sequences.txt"),
        ("amazon-2023", "expected one file"),
        ("gowalla", "train.txt"),
        ("kuairand", "log_standard"),
        ("minionerec", "index.json"),
        ("generic", "interactions.jsonl or interactions.csv or interactions.tsv or interactions.parquet"),
    ],
)
def test_missing_files_are_named(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        SOURCES[source].open(tmp_path)
