# SPDX-License-Identifier: Apache-2.0
"""Feedback from raw files to requests: what was done and where, what is not recorded, and who shares a history."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jgr.data.impressions import DAY_S, action_bits, requests
from jgr.data.interactions import DataError, leave_one_out
from jgr.data.preparation.prepare import Options, prepare
from jgr.data.prepared import Arrays, load_prepared
from jgr.data.sources.kuairand import ACTIONS, FEEDBACK

APRIL_29, APRIL_30, MAY_1 = 1_651_200_000_000, 1_651_248_000_000, 1_651_334_400_000
HEADER = ",".join(["user_id", "video_id", "time_ms", *FEEDBACK, "tab"])
# user, video, ms, the actions that are 1, tab
LOG = [
    ("a", "3", APRIL_29, (), 1),
    ("a", "1", APRIL_29 + 5000, ("is_click", "long_view"), 1),
    ("b", "2", APRIL_29 + 5000, ("is_like",), 0),
    ("a", "2", APRIL_30, ("is_click",), 4),
    ("a", "3", MAY_1, ("is_click",), 1),
    ("a", "1", MAY_1 + 1000, (), 1),
]


def write_raw(folder: Path) -> Path:
    lines = [
        ",".join([user, video, str(time), *(str(int(name in done)) for name in FEEDBACK), str(tab)])
        for user, video, time, done, tab in LOG
    ]
    (folder / "log_standard_1.csv").write_text("\n".join([HEADER, *lines]) + "\n")
    (folder / "user_history.txt").write_text(f"a\t12\t{APRIL_29 - 100}\t2 2 1\nc\t1\t9000\t3\n")
    (folder / "video_features_basic.csv").write_text(
        'video_id,author_id,tag,video_duration\n1,77,"3,4",7000\n2,77,,\n3,78,4,0\n'
    )
    return folder


def test_kuairand_with_feedback_becomes_a_dataset(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    manifest, _ = prepare(Options("kuairand-feedback", write_raw(tmp_path / "raw"), tmp_path / "out"))
    assert manifest["actions"] == [*(name.removeprefix("is_") for name in FEEDBACK), "unrecorded"]
    found = load_prepared(tmp_path / "out")
    data, ids = found.interactions, found.item_ids
    assert data.actions == ACTIONS
    click, long_view, unrecorded = (
        1 << bit for bit in action_bits(data, ("click", "long_view", "unrecorded"), "")
    )
    user = data.user_ids.index("a")
    (test,) = np.flatnonzero(data.test.targets == ids.index("1"))
    assert data.test.users[test] == user
    history = data.test.histories.select(np.array([test]))
    places = history.positions()[0]
    assert [ids[row] for row in history[0]] == ["2", "2", "1", "3", "1", "2", "3"]
    assert history.actions is not None and history.scenarios is not None
    assert history.actions[places].tolist() == [unrecorded] * 3 + [0, click | long_view, click, click]
    assert history.scenarios[places].tolist() == [-1, -1, -1, 1, 1, 4, 1]
    last = APRIL_29 // 1000
    assert history.times_of(0).tolist() == [last - 1] * 3 + [
        last, last + 5, APRIL_30 // 1000, MAY_1 // 1000,
    ]  # fmt: skip
    # April 29th is learnt from, the 30th validates.
    assert [ids[row] for row in data.sequences[user]] == ["2", "2", "1", "3", "1"]
    assert [ids[row] for row in data.valid.targets] == ["2"]
    described = dict(zip(ids, found.metadata, strict=True))
    assert described["1"] == {"author": "77", "tags": ["3", "4"], "duration": 7}  # 1 + 2 log2(8)
    assert described["2"] == {"author": "77"} and described["3"]["duration"] == 1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (",1,0,0,0,0,0,1,1", ",2,0,0,0,0,0,1,1", "is_click must be 0 or 1"),
        (",4\n", ",x\n", "tab must be"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    log = write_raw(tmp_path) / "log_standard_1.csv"
    log.write_text(log.read_text().replace(old, new))
    with pytest.raises(DataError, match=rf"log_standard_1.csv:\d: {message}"):
        prepare(Options("kuairand-feedback", tmp_path, tmp_path / "out"))


def _arrays(feedback: bool = True) -> Arrays:
    made = dataclasses.replace(Arrays.of(leave_one_out([[0, 1, 0]])), times=np.arange(3))
    given = np.array([0, 1, 2], np.int32)
    return dataclasses.replace(made, actions=given, scenarios=given) if feedback else made


def test_feedback_that_does_not_fit_is_refused() -> None:
    user = ("a",)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"actions": np.array([0, 1], np.int32)}, "actions: not as many"),
        ({"actions": np.array([0, -1, 0], np.int32)}, "actions: not as many .* below 0"),
        ({"scenarios": None}, "actions and no scenarios"),
    ]
    for wrong, message in cases:
        with pytest.raises(DataError, match=message):
            dataclasses.replace(_arrays(), **wrong).check(2, user)
    with pytest.raises(DataError, match="2 has more bits than the 1 names"):
        _arrays().interactions(user, ("click",))
    with pytest.raises(DataError, match="names that the manifest lacks"):
        _arrays().interactions(user)
    plain = _arrays(feedback=False).interactions(user)
    with pytest.raises(DataError, match="no feedback"):
        requests(plain, plain.test)
    with pytest.raises(DataError, match="tasks: the dataset has no action 'like'; it has click, long"):
        action_bits(_arrays().interactions(user, ("click", "long")), ("like",), "tasks")


def test_a_dataset_without_feedback_has_no_word_of_it(tmp_path: Path) -> None:
    (tmp_path / "interactions.jsonl").write_text(
        "".join(json.dumps({"user_id": "u", "item_id": i, "timestamp": i}) + "\n" for i in range(4))
    )
    manifest, _ = prepare(Options("generic", tmp_path, tmp_path / "out"))
    assert "actions" not in manifest
    assert {"actions", "scenarios"}.isdisjoint(np.load(tmp_path / "out" / "interactions.npz").files)


def test_impressions_of_a_day_and_scenario_share_a_history() -> None:
    rng = np.random.default_rng(3)
    users, names = 12, ("click", "unrecorded")
    lengths = rng.integers(3, 15, users)
    made = Arrays.of(leave_one_out([rng.integers(0, 9, n) for n in lengths]))
    total = lengths.sum()
    hours = [np.sort(rng.integers(0, 4 * 24, n)) for n in lengths]
    times = np.concatenate(hours).astype(np.int64) * 3600
    actions, scenarios = rng.integers(0, [[4], [2]], (2, total)).astype(np.int32)
    arrays = dataclasses.replace(made, times=times, actions=actions, scenarios=scenarios)
    data = arrays.interactions(tuple(map(str, range(users))), names)
    for most in (None, 2):
        found = requests(data, data.train, most)
        expected: dict[tuple[int, int, int], list[int]] = {}
        for user, place in zip(data.train.users.tolist(), data.train.histories.stops.tolist(), strict=True):
            if not actions[place] & 2:
                key = (user, int(times[place]) // DAY_S, int(scenarios[place]))
                expected.setdefault(key, []).append(place)
        size = most or total
        parts = [
            (user, places[at : at + size])
            for (user, _, _), places in expected.items()
            for at in range(0, len(places), size)
        ]
        given = [(int(found.users[i]), found.places(i).tolist()) for i in range(len(found))]
        assert sorted(given) == sorted(parts) and len(given) > users
        for i, (user, places) in enumerate(given):
            window = (found.histories.starts[i], found.histories.stops[i])
            assert window == (arrays.offsets[user], places[0])
            assert found.times[i] == times[places[0]]
            assert found.scenarios[i] == scenarios[places[0]]
    chosen = found.select(np.array([3, 1]))
    assert chosen.places(0).tolist() == given[3][1] and chosen.places(1).tolist() == given[1][1]
    assert chosen.owners.tolist() == [0] * len(given[3][1]) + [1] * len(given[1][1])
    assert chosen.rows.tolist() == arrays.rows[given[3][1] + given[1][1]].tolist()
    assert chosen.actions.tolist() == actions[given[3][1] + given[1][1]].tolist()
