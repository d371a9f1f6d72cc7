# SPDX-License-Identifier: Apache-2.0
"""Replay of prepared datasets: order, histories and candidates of a small log, and the published ones' figures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from jgr.data.interactions import DataError
from jgr.data.preparation.prepare import Options, prepare
from jgr.data.sources.kuairand import FEEDBACK
from jgr.data.sources.records import TableOptions
from jgr.traffic.replay import Replay
from jgr.traffic.workloads import Access
from tests.traffic.trace_report import report

# user, video, time in ms
EVENTS = [
    ("a", 1, 50),
    ("b", 2, 10),
    ("a", 3, 10_000),
    ("b", 1, 3000),
    ("a", 2, 20_000),
    ("c", 3, 70),
    ("a", 4, 90),
]
START_MS = 1650812741436


@pytest.fixture
def log(tmp_path: Path) -> tuple[Path, Path]:
    """A raw folder in KuaiRand's form and what `jgr prepare` makes of it."""
    raw, out = tmp_path / "raw", tmp_path / "out"
    raw.mkdir()
    lines = [f"{user},{video},{START_MS + time}" for user, video, time in EVENTS]
    (raw / "events.csv").write_text("\n".join(["user_id,video_id,time_ms", *lines]) + "\n")
    videos = [f"{video},{'blue car ' * video}" for video in range(1, 5)]
    (raw / "video_features_basic.csv").write_text("\n".join(["video_id,title", *videos]) + "\n")
    prepare(Options("kuairand", raw, out))
    return raw, out


def _ids(out: Path, name: str, key: str | None = None) -> list[str]:
    lines = map(json.loads, (out / name).read_text().splitlines())
    return [line[key] if key else line for line in lines]


def test_every_event_is_a_request_at_its_time(log: tuple[Path, Path]) -> None:
    out = log[1]
    replay = Replay(out, candidates=2, item_tokens=3, user_tokens=100, profile_tokens=32)
    found = list(replay.accesses())
    users, items = _ids(out, "users.jsonl"), _ids(out, "items.jsonl", "item_id")
    in_order = sorted(EVENTS, key=lambda event: event[2])
    assert [(users[a.user], a.time_ns // 10**6) for a in found] == [(u, t - 10) for u, _, t in in_order]
    history: dict[str, int] = {}
    for access, (user, video, _) in zip(found, in_order, strict=True):
        assert str(video) in [items[row] for row in access.items] and len(set(access.items.tolist())) == 2
        seen = history.get(user, 0)
        assert access.user_tokens == int(32 + replay.parameters["event_tokens"] * seen)
        history[user] = seen + 1
    assert replay.parameters["mean_user_tokens"] == pytest.approx(100, abs=1)
    assert replay.parameters["made_up"] == ["candidates", "tokens"]
    assert [a.time_ns for a in replay.accesses(10)] == [a.time_ns // 10 for a in found]
    again = Replay(out, candidates=2, item_tokens=3, user_tokens=100).accesses()
    assert [a.items.tolist() for a in again] == [a.items.tolist() for a in found]


def test_milliseconds_of_another_source_are_milliseconds(tmp_path: Path) -> None:
    header = ",".join(["user_id", "video_id", "time_ms", *FEEDBACK, "tab"])
    lines = [f"{user},{video},{START_MS + time},{'0,' * len(FEEDBACK)}1" for user, video, time in EVENTS]
    (tmp_path / "log_standard_1.csv").write_text("\n".join([header, *lines]) + "\n")
    videos = [f"{video},7,4,9000" for video in range(1, 5)]
    (tmp_path / "user_history.txt").touch()
    (tmp_path / "video_features_basic.csv").write_text(
        "\n".join(["video_id,author_id,tag,video_duration", *videos]) + "\n"
    )
    prepare(Options("kuairand-feedback", tmp_path, tmp_path / "out", split="leave_one_out"))
    replay = Replay(tmp_path / "out", candidates=2)
    assert [a.time_ns for a in replay.accesses()] == [
        (time - 10) * 10**6 for time in sorted(time for *_, time in EVENTS)
    ]


def generic(folder: Path, unit: str, times: list[int]) -> Path:
    """A dataset of one user's events at these times."""
    raw, out = folder / "raw", folder / "out"
    raw.mkdir()
    lines = [f"u,i{at},{time}" for at, time in enumerate(times)]
    (raw / "interactions.csv").write_text("\n".join(["user_id,item_id,timestamp", *lines]) + "\n")
    prepare(Options("generic", raw, out, tables=TableOptions(unit)))
    return out


@pytest.mark.parametrize(("unit", "ns"), [("s", 10**9), ("ms", 10**6), ("us", 1000), ("ns", 1)])
def test_times_are_in_the_unit_that_the_manifest_names(tmp_path: Path, unit: str, ns: int) -> None:
    replay = Replay(generic(tmp_path, unit, [700, 703, 710, 750]), candidates=2)
    assert [a.time_ns for a in replay.accesses()] == [0, 3 * ns, 10 * ns, 50 * ns]


@pytest.mark.parametrize(("unit", "per_second"), [("s", 1), ("ms", 1000)])
def test_times_that_no_number_of_ns_can_hold_are_refused(tmp_path: Path, unit: str, per_second: int) -> None:
    longest = (2**63 - 1) // 10**9 * per_second  # 292 years
    out = generic(tmp_path, unit, [0, 1, 2, longest])
    assert list(Replay(out, candidates=2).accesses())[-1].time_ns == longest // per_second * 10**9
    longer = tmp_path / "longer"
    longer.mkdir()
    with pytest.raises(DataError, match="generic: its times span more than 292 years"):
        Replay(generic(longer, unit, [0, 1, 2, longest + per_second]), candidates=2)


def test_histories_are_stretched_to_the_longest_prompt(log: tuple[Path, Path]) -> None:
    replay = Replay(log[1], candidates=2, item_tokens=4, max_prompt=1008, profile_tokens=40)
    assert replay.parameters["event_tokens"] == 320  # (1008 - 2 x 4 - 40) / 3, user a's
    lengths = {(a.user, a.time_ns // 10**6): a.user_tokens for a in replay.accesses()}
    users = _ids(log[1], "users.jsonl")
    assert lengths[users.index("a"), 80] == 40 + 320
    assert lengths[users.index("a"), 19_990] == 1000
    assert lengths[users.index("c"), 60] == 40


def test_what_does_not_fit_is_named(log: tuple[Path, Path]) -> None:
    out = log[1]
    with pytest.raises(DataError, match="has real times"):
        Replay(out, candidates=2, hours=3)
    with pytest.raises(DataError, match="distinct"):
        Replay(out)
    with pytest.raises(DataError, match="no room"):
        Replay(out, candidates=2, max_prompt=40)
    with pytest.raises(DataError, match="user_tokens=1: the mean can be 32"):
        Replay(out, candidates=2, user_tokens=1)


def _expect(replay: Replay, requests: int, share: float) -> list[Access]:
    measured = report(replay, requests)
    assert 0.4 < replay.parameters["events_top10_share"] < 0.6
    assert replay.parameters["events_top10_share"] == pytest.approx(share, abs=0.001)
    assert measured["top10_share"] == pytest.approx(replay.parameters["expected_top10_share"], abs=0.01)
    return list(replay.accesses())


@pytest.mark.data("kuairand-pure")
def test_kuairand(dataset: Path, tmp_path: Path) -> None:
    prepare(Options("kuairand", dataset, tmp_path / "out", split="time"))
    replay = Replay(tmp_path / "out", candidates=20, user_tokens=1500)
    accesses = _expect(replay, 10_000, 0.594)
    assert len(accesses) == 222_444
    assert np.mean([access.user_tokens for access in accesses]) == pytest.approx(1500, abs=1)
    # The figures of the data's description.
    gaps, last = [], dict[int, int]()
    for access in accesses:
        gaps.append(access.time_ns - last.get(access.user, -(10**18)))
        last[access.user] = access.time_ns
    within = [
        round(100 * float(np.mean(np.array(gaps) <= s * 10**9)), 1) for s in (60, 600, 3600, 21_600, 86_400)
    ]
    assert within == [1.7, 8.1, 20.4, 38.1, 62.6]


@pytest.mark.data("amazon-beauty")
def test_amazon_beauty_has_no_times(dataset: Path, tmp_path: Path) -> None:
    prepare(Options("amazon-beauty", dataset, tmp_path / "out"))
    with pytest.raises(DataError, match="has no times: set hours"):
        Replay(tmp_path / "out")
    replay = Replay(tmp_path / "out", candidates=20, hours=24)
    accesses = _expect(replay, 5000, 0.428)
    assert replay.parameters["made_up"] == ["candidates", "tokens", "times"]
    assert 23.9 < accesses[-1].time_ns / 3600e9 < 24
    # Spread over the time, a user's events keep their order: the tokens never fall.
    last: dict[int, int] = {}
    for access in accesses:
        assert access.user_tokens >= last.get(access.user, 0)
        last[access.user] = access.user_tokens
