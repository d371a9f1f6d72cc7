# SPDX-License-Identifier: Apache-2.0
"""KuaiRand-style event logs: `log_standard*.csv` (all parts of it) or `events*.csv` with the columns user_id, video_id
and time_ms, and `video_features_basic*.csv`. Every impression is an event; a row that repeats another's user,
video and time is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jgr.data.interactions import DataError
from jgr.data.sources.records import Event, Item, Raw, Source, as_time, csv_rows, find_all, find_only


def _open(folder: Path) -> Raw:
    logs = find_all(folder, "log_standard*.csv", "events*.csv")
    if not logs:
        raise DataError(f"{folder}: has no log_standard*.csv or events*.csv (each may be gzipped)")
    return Raw(
        tuple((log, _events) for log in logs), (find_only(folder, "video_features_basic*.csv"), _videos)
    )


def _events(path: Path) -> Iterator[tuple[int, Event]]:
    def parse(row: dict[str, str]) -> Event:
        return Event(row["user_id"], row["video_id"], as_time(row["time_ms"]))

    return csv_rows(path, ("user_id", "video_id", "time_ms"), parse)


def _videos(path: Path) -> Iterator[tuple[int, Item]]:
    def parse(row: dict[str, str]) -> Item:
        return Item(row.pop("video_id"), {name: value for name, value in row.items() if value})

    return csv_rows(path, ("video_id",), parse)


SOURCES = {"kuairand": Source(_open, splits=("leave_one_out", "time"), drop_repeats=True)}
