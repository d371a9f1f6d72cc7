# SPDX-License-Identifier: Apache-2.0
"""Own files of every form against a reading by plain Python; what is left out is said."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jgr.data.impressions import feedback_of
from jgr.data.interactions import DataError
from jgr.data.preparation.prepare import Options, prepare
from jgr.data.prepared import load_prepared
from jgr.data.sources.records import EventColumns, TableOptions, Tabular
from jgr.data.sources.registry import SOURCES
from tests.data.preparation.own_files import FORMS, START, actions_of, by_user, iso, log, write


def read(folder: Path, **options: Any) -> EventColumns:
    raw = SOURCES["generic"].open(folder)
    assert isinstance(raw, Tabular)
    return raw.read(TableOptions(**options))


def csv(folder: Path, text: str, name: str = "interactions.csv") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_what_plain_python_reads(tmp_path: Path, form: str) -> None:
    rows = log()
    manifest, _ = prepare(Options("generic", write(tmp_path / "raw", form, rows), tmp_path / "out"))
    found = load_prepared(tmp_path / "out")
    data, whole = found.interactions, by_user(rows)
    names = manifest["actions"]
    assert sorted(names) == sorted(set().union(*map(actions_of, rows)))
    assert manifest["scenarios"] == ["home", "search"]
    assert dict(zip(found.item_ids, found.metadata, strict=True)) == {
        row.item: {"title": f"Item {row.item}"} for row in rows
    }
    assert sorted(data.user_ids) == sorted(whole)
    actions, scenarios, times = feedback_of(data.sequences)
    for user, start in zip(data.user_ids, data.sequences.starts.tolist(), strict=True):
        for at, row in enumerate(whole[user], start):
            assert found.item_ids[data.sequences.rows[at]] == row.item
            assert times[at] == row.time
            assert {name for bit, name in enumerate(names) if actions[at] >> bit & 1} == actions_of(row)
            assert manifest["scenarios"][scenarios[at]] == row.scenario
    empty = sum(row.rating is None for row in rows)
    assert any(note.startswith("rating: actions rating_from_2 ") for note in manifest["notes"])
    assert any(
        f"{empty} rows are empty, which counts as not done" in note
        for note in manifest["notes"]
        if note.startswith("rating")
    )
    assert any(note.startswith(f"note: left out, {len(rows)} values") for note in manifest["notes"])


SECONDS = [START, START + 60, START + 61, START + 62]
TIMES: list[tuple[list[Any], str, list[int], str]] = [
    (SECONDS, "s", SECONDS, "whole numbers of s, by their size"),
    ([1000 * t + 5 for t in SECONDS], "ms", SECONDS, "whole numbers of ms, by their size"),
    ([10**9 * t for t in SECONDS], "ns", SECONDS, "whole numbers of ns"),
    ([t + 0.25 for t in SECONDS], "us", SECONDS, "numbers of s, by their size"),
    ([float(t) for t in SECONDS], "s", SECONDS, "whole numbers of s"),
    ([iso(t) for t in SECONDS], "s", SECONDS, "ISO 8601; from 2023-11-14"),
    ([iso(t)[:-1] for t in SECONDS], "s", SECONDS, "those without a zone taken as UTC"),
    ([iso(t + 7200)[:-1] + "+02:00" for t in SECONDS], "s", SECONDS, "ISO 8601; from 2023-11-14"),
    (
        [iso(START), iso(SECONDS[1])[:-1] + ".500", iso(SECONDS[2] - 3600)[:-1] + "-01:00", iso(SECONDS[3])],
        "us",
        SECONDS,
        "taken as UTC",
    ),
]


@pytest.mark.parametrize("form", ["csv", "jsonl"])
@pytest.mark.parametrize(("stamps", "unit", "seconds", "said"), TIMES)
def test_times_of_every_kind(
    tmp_path: Path, form: str, stamps: list[Any], unit: str, seconds: list[int], said: str
) -> None:
    if form == "csv":
        csv(tmp_path, "user_id,item_id,timestamp\n" + "".join(f"u,{i},{t}\n" for i, t in enumerate(stamps)))
    else:
        lines = [{"user_id": "u", "item_id": i, "timestamp": t} for i, t in enumerate(stamps)]
        csv(tmp_path, "".join(json.dumps(line) + "\n" for line in lines), "interactions.jsonl")
    found = read(tmp_path)
    assert found.time is not None and found.time_unit == unit
    manifest, _ = prepare(Options("generic", tmp_path, tmp_path / "out", split="leave_one_out"))
    data = load_prepared(tmp_path / "out").interactions
    assert manifest["time_unit"] == unit
    assert data.test.histories.times_of(0).tolist() == seconds[:3]
    assert said in found.notes[0]


def test_a_unit_that_is_given_is_taken(tmp_path: Path) -> None:
    csv(tmp_path, "user_id,item_id,timestamp\nu,a,1000\nu,b,2000\nu,c,61000\nu,d,62000\n")
    manifest, _ = prepare(Options("generic", tmp_path, tmp_path / "out", tables=TableOptions("ms")))
    data = load_prepared(tmp_path / "out").interactions
    assert data.test.histories.times_of(0).tolist() == [1, 2, 61]
    assert "as asked for" in manifest["notes"][0]


def test_dates_of_parquet(tmp_path: Path) -> None:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    stamps = arrow.array([1000 * t + 250 for t in SECONDS], arrow.timestamp("ms", tz="Europe/Berlin"))
    table = arrow.table({"user_id": [1, 1, 1, 1], "item_id": ["a", "b", None, "c"], "timestamp": stamps})
    parquet.write_table(table, tmp_path / "interactions.parquet")
    with pytest.raises(DataError, match=r"interactions\.parquet:3: item_id: an id must be text .* None"):
        read(tmp_path)
    parquet.write_table(table.slice(0, 2), tmp_path / "interactions.parquet")
    found = read(tmp_path)
    assert found.time is not None and found.user_ids == ["1"]
    assert (found.time_unit, (found.time // 10**6).tolist()) == ("us", SECONDS[:2])
    assert "whole numbers of us, by the file's own type; from 20" in found.notes[0]


def test_a_number_that_is_none_is_an_empty_cell_of_parquet(tmp_path: Path) -> None:
    """Many writers have no other word for a missing rating; each NaN was a value of its own, so all were left out."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    found = []
    for name, missing in (("null", None), ("nan", float("nan"))):
        rated = [missing if at % 2 else float(at) for at in range(24)]
        columns = {"user_id": ["u"] * 24, "item_id": list(range(24)), "rating": [*rated[:8], *rated[:16]]}
        (tmp_path / name).mkdir()
        parquet.write_table(arrow.table(columns), tmp_path / name / "interactions.parquet")
        found.append(read(tmp_path / name))
    assert found[0].notes == found[1].notes and "rating_from_2" in found[0].action_names
    np.testing.assert_array_equal(found[0].actions, found[1].actions)


def test_a_least_value_is_proposed_for_numbers_and_not_for_texts(tmp_path: Path) -> None:
    rows = "".join(f"u,i{at},{at * 1000},word {at}\n" for at in range(12))
    csv(tmp_path, "user_id,item_id,watch_ms,review\n" + rows)
    assert read(tmp_path).notes[1:] == (
        "review: left out, 12 values: more than 10 different ones",
        "watch_ms: left out, 12 values: more than 10 different ones "
        "(--actions=watch_ms:LEAST makes an action of these numbers)",
    )


HEAD = "user_id,item_id,timestamp,rating\n"
BAD = [
    ("interactions.csv", HEAD + "u,a,5,1\nu,b,x,1\n", ":3: timestamp: a time must be a number .* 'x'"),
    ("interactions.csv", HEAD + "u,a,5,1\nu,b,-5,1\n", ":3: timestamp: a time must be a number from 0"),
    ("interactions.csv", HEAD + "u,a,5,1\nu,b,nan,1\n", ":3: timestamp: a time must be a number"),
    ("interactions.csv", HEAD + "u,a,5,1\nu,b,99999999999999999999,1\n", ":3: timestamp: a time must be"),
    ("interactions.csv", HEAD + "u,a,5,1\nu,b,,1\n", ":3: timestamp: some events have a time and some"),
    ("interactions.csv", HEAD + "u,a,,1\nu,b,5,1\n", ":3: timestamp: some events have a time and some"),
    (
        "interactions.csv",
        HEAD + "u,a,1700000000000,1\nu,b,1700000000,1\n",
        ":3: timestamp: 1700000000 is a time in s by its size, 1700000000000 one in ms.*--time_unit",
    ),
    (
        "interactions.csv",
        HEAD + "u,a,2024-01-01,1\nu,b,2024-13-01,1\n",
        ":3: timestamp: expected a time in ISO 8601.* '2024-13-01'",
    ),
    ("interactions.csv", HEAD + "u,a,1960-01-01,1\n", ":2: timestamp: a time must be from 1970 on"),
    ("interactions.csv", HEAD + '"u\nv",a,5,1\nu,,5,1\n', ":4: item_id: an id has 1 to 512 characters"),
    ("interactions.csv", "user_id,item\nu,a\n", ":1: .*item_id is missing, there are user_id, item: rename"),
    ("interactions.csv", HEAD + "u,a,5,1\nu,b,5\n", ":3: has 3 fields, the header 4"),
    ("interactions.tsv", "user_id\titem_id\nu\ta\tb\n", ":2: has 3 fields, the header 2"),
    ("interactions.jsonl", '{"user_id": "u"}\n', ":1: item_id: is missing"),
    ("interactions.jsonl", '{"user_id": "u", "item_id": "a"}\n\n', ":2: "),
    (
        "interactions.jsonl",
        '{"user_id": "u", "item_id": "a", "timestamp": 5}\n{"user_id": "u", "item_id": "b"}\n',
        ":2: timestamp: some events have a time and some have none",
    ),
    (
        "interactions.jsonl",
        '{"user_id": "u", "item_id": "a", "timestamp": true}\n',
        ":1: timestamp: a time must be a number",
    ),
    (
        "interactions.jsonl",
        '{"user_id": "u", "item_id": ["a"]}\n',
        r":1: item_id: an id must be text or a whole number, found \['a'\]",
    ),
    ("x.inter", "user_id:token\ritem_id:token\nu\ta\n", ":1: new-line character"),
    ("interactions.csv", "\ufeffuser_id,item_id\nu,a\n".encode("utf-16-le"), ":1: is in UTF-16; iconv"),
    (
        "interactions.jsonl",
        '{"user_id": 1, "item_id": 2, "split": ["train"]}\n',
        r":1: split: .* found \['train'\]",
    ),
    ("interactions.csv", "user_id,item_id,\x1b[2J\nu,a,1\n", r":2: '.x1b\[2J': the name of a column must be"),
    ("interactions.csv", 'user_id,item_id,"a\nb"\nu,a,1\n', r":3: 'a.nb': the name of a column must be"),
    (
        "interactions.csv",
        "user_id,item_id,scenario\nu,a,\x1b[2J\n",
        r":2: scenario: a name must be printable",
    ),
    ("x.inter", "user_id:token\titem_id\nu\ta\n", ":1: 'item_id': the header must give a type"),
    ("x.inter", "user_id:token\titem_id:word\nu\ta\n", ":1: 'item_id:word': the header must give a type"),
    (
        "x.inter",
        "user_id:token\titem_id:token\trating:float\nu\ta\t3\nu\tb\tgood\n",
        ":3: rating: expected a finite number, found 'good'",
    ),
    (
        "x.inter",
        "user_id:token\titem_seq:token_seq\tkind:token\nu\ta b\t1\nu\tc\t1\n",
        ":3: user_id: user 'u' has a row already",
    ),
    (
        "x.inter",
        "user_id:token\titem_seq:token_seq\titem_id:token\nu\ta b\tc\nu\tb\td\n",
        ":3: item_seq: the history does not continue the earlier rows of user 'u'",
    ),
    (
        "x.inter",
        "user_id:token\titem_seq:token_seq\ttimestamp_list:float_seq\nu\ta b\t1\n",
        ":2: timestamp_list: has 1 times for 2 items",
    ),
]


@pytest.mark.parametrize(("name", "text", "message"), BAD)
def test_errors_name_file_line_and_column(tmp_path: Path, name: str, text: str | bytes, message: str) -> None:
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=f"{name}{message}"):
        read(tmp_path)


def test_a_long_list_is_read(tmp_path: Path) -> None:
    items = [f"item{at}" for at in range(30_000)]
    csv(
        tmp_path,
        f"user_id:token\titem_id_list:token_seq\titem_id:token\nu\t{' '.join(items)}\tz\n",
        "x.inter",
    )
    found = read(tmp_path)
    assert [found.item_ids[at] for at in found.item] == [*items, "z"]


def test_a_row_that_comes_again_is_dropped_where_it_has_a_time(tmp_path: Path) -> None:
    rows = [f"u,{item},{at}" for at, item in enumerate("abcab")]
    twice = "".join(f"{row}\n" for row in rows for _ in range(2))

    def taken(head: str, text: str, **options: Any) -> list[list[str]]:
        raw, out = (
            tmp_path / f"raw{len(list(tmp_path.iterdir()))}",
            tmp_path / f"out{len(list(tmp_path.iterdir()))}",
        )
        csv(raw, head + text)
        prepare(Options("generic", raw, out, **options))
        found = load_prepared(out)
        whole = found.interactions.test.histories
        return [[found.item_ids[row] for row in whole[at]] for at in range(len(whole))]

    assert taken("user_id,item_id,timestamp\n", twice) == [list("abca")]
    untimed = "".join(f"{row.rpartition(',')[0]}\n" for row in twice.split())
    assert taken("user_id,item_id\n", untimed) == [list("aabbccaab")]
    acted = "".join(f"{row},view\n" for row in rows for _ in range(2)) + "u,b,4,cart\n"
    assert taken("user_id,item_id,timestamp,event\n", acted) == [list("abcab")]  # seen and taken at one time
    # Rows of one moment may be several actions, which stay; a user of one event that comes again has one.
    alone = twice + "v,a,1\n" * 9
    assert taken("user_id,item_id,timestamp\n", alone, min_user=2) == [list("abca")]


def test_a_scenario_of_thousands_of_digits_is_a_name(tmp_path: Path) -> None:
    found = read(csv(tmp_path, f"user_id,item_id,scenario,x\nu,a,{'1' * 5000},1\nu,b,2,0\n"))
    assert found.scenario_names == ("1" * 5000, "2")


def test_parquet_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    path = tmp_path / "interactions.parquet"
    ids = [arrow.array(["u1", "u2"]), arrow.array(["aaaa", "bbbb"])]
    parquet.write_table(arrow.Table.from_arrays([*ids, ids[1]], ["user_id", "item_id", "item_id"]), path)
    with pytest.raises(DataError, match=r"interactions\.parquet: the schema must name each column once"):
        read(tmp_path)
    plain = {"use_dictionary": False, "compression": "none", "write_statistics": False}
    parquet.write_table(arrow.Table.from_arrays(ids, ["user_id", "item_id"]), path, **plain)
    path.write_bytes(path.read_bytes().replace(b"aaaa", b"\xff\xfeaa"))
    with pytest.raises(DataError, match=r"interactions\.parquet: .*utf-8.* codec can.t decode"):
        read(tmp_path)


def test_a_later_block_is_named_by_its_line(tmp_path: Path) -> None:
    lines = [f"u,i{i % 7},{i}" for i in range(40_000)]
    lines[39_000] = "u,i1,later"
    csv(tmp_path, "user_id,item_id,timestamp\n" + "\n".join(lines) + "\n")
    with pytest.raises(DataError, match=r":39002: timestamp: .* 'later'"):
        read(tmp_path)


def bits(found: EventColumns) -> list[set[str]]:
    assert found.actions is not None
    return [
        {name for bit, name in enumerate(found.action_names) if one >> bit & 1}
        for one in found.actions.tolist()
    ]


def test_columns_of_feedback_become_actions(tmp_path: Path) -> None:
    csv(
        tmp_path,
        "user_id,item_id,like,stars,event,same,watch_ms\n"
        "u,a,true,0.5,view,9,100\nu,b,FALSE,3.5,add/cart,9,200.5\nu,c,,,,,\nu,d,true,5,view,9,\n",
    )
    found = read(tmp_path)
    up = {"watch_ms_from_200.5"}
    assert bits(found) == [
        {"like", "event_view"},
        {"event_add_cart", "stars_from_3.5"} | up,
        {"unrecorded"},
        {"like", "event_view", "stars_from_3.5", "stars_from_5"},
    ]
    assert "same: left out, 3 values: all are 9" in found.notes
    assert found.scenario is not None and found.scenario.tolist() == [0, 0, 0, 0]
    chosen = read(tmp_path, actions=("watch_ms:150", "like", "stars:1", "stars:4"))
    assert bits(chosen) == [{"like"}, {"watch_ms_from_150", "stars_from_1"}, {"unrecorded"}, {
        "like", "stars_from_1", "stars_from_4"}]  # fmt: skip
    assert "event: left out: --actions does not name it" in chosen.notes


def test_actions_are_named_by_all_digits_of_their_level(tmp_path: Path) -> None:
    csv(tmp_path, "user_id,item_id,watched\nu,a,0.1\nu,b,1000001\nu,c,1000002\nu,d,1800000\n")
    low, middle, high = (f"watched_from_{level}" for level in (1000001, 1000002, 1800000))
    assert bits(read(tmp_path)) == [set(), {low}, {low, middle}, {low, middle, high}]
    chosen = ("watched:0.1", "watched:1000001", "watched:1000002", "watched:1800000")
    least = "watched_from_0.1"
    found = bits(read(tmp_path, actions=chosen))
    assert found == [{least}, {least, low}, {least, low, middle}, {least, low, middle, high}]


def test_a_level_of_32_bits_is_named_by_its_own_digits(tmp_path: Path) -> None:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    stars = arrow.array([0.1, 3.7, 16777215.0], arrow.float32())
    table = arrow.Table.from_arrays([["u"] * 3, ["a", "b", "c"], stars], ["user_id", "item_id", "stars"])
    parquet.write_table(table, tmp_path / "interactions.parquet")
    low, high = "stars_from_3.7", "stars_from_16777215"
    assert bits(read(tmp_path)) == [set(), {low}, {low, high}]


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        (("click",), "--actions: there is no column 'click' of feedback; there are id"),
        (("id",), "--actions=id: cannot be an action: left out, 40 values: more than 10 different ones"),
        (("id:x",), "'id:x' is neither COLUMN nor COLUMN:LEAST"),
        (tuple(f"id:{i}" for i in range(32)), "make 32 actions, 31 are the most"),
    ],
)
def test_actions_that_cannot_be(tmp_path: Path, actions: tuple[str, ...], message: str) -> None:
    csv(tmp_path, "user_id,item_id,id\n" + "".join(f"u,a,{i}\n" for i in range(40)))
    with pytest.raises(DataError, match=message):
        read(tmp_path, actions=actions)


def test_what_is_left_out_is_counted_and_said(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    rows = [f"{user}\t{item}" for user in "uv" for item in "abca"] + ["w\ta"]
    csv(raw, "user_id:token\titem_id:token\n" + "".join(f"{row}\n" for row in rows), "x.inter")
    csv(
        raw,
        "item_id:token\tprice:float\ttags:token_seq\tspan:float_seq\na\t1.5\tx y\t1 2\nb\t\t\t\nc\t2\tz\t3\nq\t1\t\t\n",
        "x.item",
    )
    csv(raw, "user_id:token\tage:float\nu\t30\nv\t31\n", "x.user")
    manifest, _ = prepare(Options("generic", raw, tmp_path / "out", min_user=2))
    assert manifest["notes"] == [
        "there are no times: events are taken in the order of the file",
        "x.user: left out, 2 users: models read no features of users",
        "x.item: left out, 1 items: they have no event",
        "interactions: left out, 1 of 9: by --min_user and --min_item, or as repeats",
    ]
    found = load_prepared(tmp_path / "out")
    assert dict(zip(found.item_ids, found.metadata, strict=True)) == {
        "a": {"price": 1.5, "tags": ["x", "y"], "span": [1.0, 2.0]}, "b": {}, "c": {
            "price": 2.0, "tags": ["z"], "span": [3.0]}
    }  # fmt: skip


def test_atomic_files_of_three_splits_with_histories(tmp_path: Path) -> None:
    header = "user_id:token\titem_id_list:token_seq\titem_id:token\trating:float\n"
    parts = {
        "train": "u\ta\tb\t1\nu\ta b\tc\t0\nv\tc\ta\t1\n",
        "valid": "u\tb c\td\t1\nw\ta b\tc\t1\n",
        "test": "u\tc d\ta\t0\nv\tc a\tb\t1\nw\tb c\td\t0\n",
    }
    for split, text in parts.items():
        csv(tmp_path, header + text, f"x.{split}.inter")
    found = read(tmp_path)
    names = [(found.user_ids[u], found.item_ids[i]) for u, i in zip(found.user, found.item, strict=True)]
    assert names == [
        ("u", "a"), ("u", "b"), ("u", "c"), ("v", "c"), ("v", "a"), ("u", "d"), ("w", "a"), ("w", "b"), ("w", "c"),
        ("u", "a"), ("v", "b"), ("w", "d"),
    ]  # fmt: skip
    assert found.split.tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 1, 2, 2, 2]
    assert [sorted(done) for done in bits(found)][:3] == [["unrecorded"], ["rating"], []]
    assert "split: 7 train, 2 valid, 3 test; --split=given takes it" in found.notes
    prepare(Options("generic", tmp_path, tmp_path / "out", split="given"))
    data = load_prepared(tmp_path / "out")
    assert len(data.interactions.test) == 3


@pytest.mark.parametrize("between", [",", "\t"])
def test_an_empty_split_is_train(tmp_path: Path, between: str) -> None:
    """In JSON lines a row leaves it out, and means the same."""
    lines = ["user_id item_id split", *(f"u {item} {split}" for item, split in zip(
        "abcde", ["", "train", "valid", "", "test"], strict=True))]  # fmt: skip
    name = "interactions.csv" if between == "," else "interactions.tsv"
    csv(tmp_path, "\n".join(line.replace(" ", between) for line in lines) + "\n", name)
    found = read(tmp_path)
    assert found.split.tolist() == [0, 0, 1, 0, 2]
    assert "split: 3 train, 1 valid, 1 test; --split=given takes it" in found.notes
    csv(tmp_path, "\n".join(line.replace(" ", between) for line in [*lines, "u f dev"]) + "\n", name)
    with pytest.raises(DataError, match=r":7: split: must be train, valid or test, found 'dev'"):
        read(tmp_path)


def test_whole_sequences_with_times(tmp_path: Path) -> None:
    csv(
        tmp_path,
        "user_id:token\titem_seq:token_seq\ttimestamp_list:float_seq\tage:float\nu\ta b\t5 6.0\t30\nv\tb\t7\t31\n",
        "x.inter",
    )
    found = read(tmp_path)
    assert found.time is not None
    assert (found.user.tolist(), found.time.tolist(), found.time_unit) == ([0, 0, 1], [5, 6, 7], "s")
    assert "age: left out: it belongs to a user's list and to none of its items" in found.notes


def test_tsv_and_atomic_files_are_literal(tmp_path: Path) -> None:
    csv(tmp_path, 'user_id\titem_id\nu\t"a\nu\tb"c\n', "interactions.tsv")
    assert read(tmp_path).item_ids == ['"a', 'b"c']


def calls(work: Callable[[], object]) -> int:
    """How many Python functions are called."""
    counted = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal counted
        counted += event == "call"

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return counted


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stamp", [int, iso, lambda time: f"{time}.5"], ids=["whole", "iso", "fractions"])
def test_no_python_function_is_called_for_each_row(
    tmp_path: Path, form: str, stamp: Callable[[int], Any]
) -> None:
    if form == "inter" and stamp is iso:
        stamp = str  # its header says that times are numbers
    rows = log(60, 40)
    few = write(tmp_path / "few", form, rows[:600], stamp)
    many = write(tmp_path / "many", form, rows, stamp)
    read(few)  # what is imported once
    assert calls(lambda: read(many)) < calls(lambda: read(few)) + len(rows) / 4
