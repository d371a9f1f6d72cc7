# SPDX-License-Identifier: Apache-2.0
"""Reads KuaiRand-style event logs: `log_standard*.csv` (all parts) or `events*.csv` with the columns user_id, video_id
and time_ms, and `video_features_basic*.csv`. Every impression is an event. A row with the user, video and time of an
earlier row is dropped.

`kuairand-feedback` also reads the feedback on each impression and the tab in which it was shown, and, from
`user_history.txt` if it is there, the events before the log: lines of user, number of events, time of the last event
in milliseconds, and the last video ids, oldest first, separated by tabs and spaces. Earlier events have no times: they
are placed a millisecond apart before the last one, and their feedback is unrecorded. The `given` split trains up to
April 29th 2022, validates on the 30th and tests on May, in the app's time zone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jgr.data.interactions import UNRECORDED, DataError
from jgr.data.sources.records import (
    Event,
    Item,
    Raw,
    Source,
    as_time,
    csv_rows,
    fields_of,
    find_all,
    find_only,
    find_optional,
    parsed,
)

FEEDBACK = ("is_click", "is_like", "is_follow", "is_comment", "is_forward", "is_hate", "long_view")
ACTIONS = (*(name.removeprefix("is_") for name in FEEDBACK), UNRECORDED)
_UNRECORDED_BIT = 1 << ACTIONS.index(UNRECORDED)
# Midnight of April 30th and of May 1st at UTC+8.
_HELD_OUT_FROM_MS = (1_651_248_000_000, 1_651_334_400_000)


def _open(folder: Path) -> Raw:
    return _raw(folder, _events, _videos)


def _open_feedback(folder: Path) -> Raw:
    raw = _raw(folder, _events_with_feedback, _typed_videos)
    before = find_optional(folder, "user_history.txt")
    return raw if before is None else Raw(((before, _before_the_log), *raw.events), raw.items)


def _raw(folder: Path, events: Any, videos: Any) -> Raw:
    logs = find_all(folder, "log_standard*.csv", "events*.csv")
    if not logs:
        raise DataError(f"{folder}: has no log_standard*.csv or events*.csv (each may be gzipped)")
    return Raw(tuple((log, events) for log in logs), (find_only(folder, "video_features_basic*.csv"), videos))


def _events(path: Path) -> Iterator[tuple[int, Event]]:
    def parse(row: dict[str, str]) -> Event:
        return Event(row["user_id"], row["video_id"], as_time(row["time_ms"]))

    return csv_rows(path, ("user_id", "video_id", "time_ms"), parse)


def _events_with_feedback(path: Path) -> Iterator[tuple[int, Event]]:
    def parse(row: dict[str, str]) -> Event:
        actions = 0
        for bit, name in enumerate(FEEDBACK):
            if row[name] not in ("0", "1"):
                raise ValueError(f"{name} must be 0 or 1, not {row[name]!r}")
            actions |= int(row[name]) << bit
        if not row["tab"].isdecimal() or len(row["tab"]) > 4:
            raise ValueError(f"tab must be a small whole number, not {row['tab']!r}")
        time = as_time(row["time_ms"])
        split = sum(time >= start for start in _HELD_OUT_FROM_MS)
        return Event(row["user_id"], row["video_id"], time, split, actions, int(row["tab"]))

    return csv_rows(path, ("user_id", "video_id", "time_ms", "tab", *FEEDBACK), parse)


def _before_the_log(path: Path) -> Iterator[tuple[int, Event]]:
    def parse(line: bytes) -> Iterator[Event]:
        user_id, _, last, videos = fields_of(line, "\t", 4)
        video_ids, end = videos.split(), as_time(last)
        for before, video_id in zip(range(len(video_ids))[::-1], video_ids, strict=True):
            yield Event(user_id, video_id, as_time(end - before), 0, _UNRECORDED_BIT)

    return parsed(path, parse)


def _videos(path: Path) -> Iterator[tuple[int, Item]]:
    def parse(row: dict[str, str]) -> Item:
        return Item(row.pop("video_id"), {name: value for name, value in row.items() if value})

    return csv_rows(path, ("video_id",), parse)


def _typed_videos(path: Path) -> Iterator[tuple[int, Item]]:
    """Videos with the features a scorer can use: author, tags, and the duration's step on a scale of factor sqrt(2)."""

    def parse(row: dict[str, str]) -> Item:
        metadata: dict[str, Any] = {"author": row["author_id"], "tags": row["tag"].split(",")}
        if row["video_duration"]:
            seconds = float(row["video_duration"]) / 1000
            metadata["duration"] = 1 + round(2 * math.log2(1 + seconds))
        return Item(
            row["video_id"], {name: value for name, value in metadata.items() if value not in ("", [""])}
        )

    return csv_rows(path, ("video_id", "author_id", "tag", "video_duration"), parse)


SOURCES = {
    "kuairand": Source(_open, splits=("leave_one_out", "time"), drop_repeats=True),
    "kuairand-feedback": Source(
        _open_feedback, splits=("given", "time", "leave_one_out"), drop_repeats=True, actions=ACTIONS
    ),
}
