# SPDX-License-Identifier: Apache-2.0
"""Arrival times from logs of others and from our own journal; the format is recognised by the first line.

| file | how it is recognised | a time |
|---|---|---|
| KuaiRand's log (CSV) | columns `user_id`, `video_id`, `time_ms` | ms; rows that repeat all three are dropped |
| Azure's LLM traces (CSV) | a column `TIMESTAMP` | date and time in UTC, to 100 ns |
| Mooncake's traces (JSON lines) | a field `timestamp` | ms |
| `server.journal` (JSON lines) | fields `policy`, `now_ns`, `event` | ns of "submit" and "refuses", of all engines |

Files whose names end in `.gz` are read as such. Only times are taken: what is asked for comes from the mix.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np

from jgr.files import reading
from jgr.traffic.schedule import Float64, LoadError

MAX_ARRIVALS = 10_000_000
_MAX_LINE_BYTES = 1 << 26  # a line of a journal holds all that a policy planned
_TIME = re.compile(rb"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:Z|\+00:00)?")

TimeOf = Callable[[bytes], int | None]
"""Reads the time of a line, in ns; None for a line that is no arrival. Raises ValueError, which says what is wrong."""


class _Mooncake(msgspec.Struct):
    timestamp: float


class _Event(msgspec.Struct):
    type: str


class _Journal(msgspec.Struct):
    """The part of a journal's line that does not depend on what policies are told."""

    policy: int
    now_ns: int
    event: _Event


def read_arrivals(path: Path) -> tuple[str, Float64]:
    """The format's name and the arrivals, [n] ascending seconds from the first one on.

    Raises LoadError for a file of another format, without an arrival or with more than MAX_ARRIVALS, for times too far
    apart to be counted in ns, and for a line without a time, which it names.
    """
    times = array("q")
    found: tuple[str, TimeOf] | None = None
    for number, line in _lines(path):
        text = line.strip()
        try:
            if found is None:
                found = _recognise(text)
            time_ns = found[1](text)
            if time_ns is not None:
                times.append(time_ns)
        except (ValueError, OverflowError, RecursionError, msgspec.DecodeError) as error:
            if found is not None and found[0] == "journal" and not line.endswith(b"\n"):
                break  # the server ended while it wrote this line
            raise LoadError(f"{path}:{number}: {error}") from None
        if len(times) > MAX_ARRIVALS:
            raise LoadError(f"{path}: holds more than {MAX_ARRIVALS} arrivals")
    if found is None or not times:
        raise LoadError(f"{path}: holds no arrivals")
    ns = np.sort(np.frombuffer(times, np.int64))
    if int(ns[-1]) - int(ns[0]) > np.iinfo(np.int64).max:  # the differences would be negative
        raise LoadError(f"{path}: its times span more than 292 years")
    return found[0], (ns - ns[0]) / 1e9


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with reading(path, LoadError) as stream:
        number = 0
        while line := stream.readline(_MAX_LINE_BYTES):
            number += 1
            if len(line) == _MAX_LINE_BYTES:
                raise LoadError(f"{path}:{number}: the line is longer than {_MAX_LINE_BYTES - 1} bytes")
            yield number, line


def _recognise(first: bytes) -> tuple[str, TimeOf]:
    """The format by the file's first line, and what reads its lines, that one too."""
    if first.startswith(b"{"):
        try:
            fields = set(msgspec.json.decode(first, type=dict[str, msgspec.Raw]))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            fields = set()
        if fields >= {"policy", "now_ns", "event"}:
            return "journal", _journal()
        if "timestamp" in fields:
            return "mooncake", _mooncake()
    columns = first.removeprefix(b"\xef\xbb\xbf").split(b",")
    if {b"user_id", b"video_id", b"time_ms"} <= set(columns):
        return "kuairand", _kuairand(columns)
    if b"TIMESTAMP" in columns:
        return "azure", _azure(columns)
    raise ValueError(
        "the format is not known: it must be KuaiRand's or Azure's CSV with its header, Mooncake's JSON lines, or a "
        "server.journal"
    )


def _journal() -> TimeOf:
    decode = msgspec.json.Decoder(_Journal).decode

    def time_of(text: bytes) -> int | None:
        line = decode(text)
        return line.now_ns if line.event.type in ("submit", "refuses") else None

    return time_of


def _mooncake() -> TimeOf:
    decode = msgspec.json.Decoder(_Mooncake).decode
    return lambda text: round(decode(text).timestamp * 1e6)


def _kuairand(columns: list[bytes]) -> TimeOf:
    user, video, time_ms = (columns.index(name) for name in (b"user_id", b"video_id", b"time_ms"))
    seen: set[tuple[bytes, bytes, bytes]] = set()

    def time_of(text: bytes) -> int | None:
        row = _row(text, columns)
        key = row[user], row[video], row[time_ms]
        if row == columns or key in seen:
            return None
        if not re.fullmatch(rb"\d{1,15}", row[time_ms]):
            raise ValueError("time_ms is not a number of milliseconds")
        seen.add(key)
        return int(row[time_ms]) * 1_000_000

    return time_of


def _azure(columns: list[bytes]) -> TimeOf:
    at = columns.index(b"TIMESTAMP")

    def time_of(text: bytes) -> int | None:
        row = _row(text, columns)
        if row == columns:
            return None
        match = _TIME.fullmatch(row[at])
        if match is None:
            raise ValueError("TIMESTAMP must look like 2023-11-16 18:17:03.9799600")
        second = np.datetime64(match[1].decode(), "s").astype(np.int64)
        return int(second) * 1_000_000_000 + int((match[2] or b"").ljust(9, b"0"))

    return time_of


def _row(text: bytes, columns: list[bytes]) -> list[bytes]:
    row = text.removeprefix(b"\xef\xbb\xbf").split(b",")
    if len(row) != len(columns):
        raise ValueError(f"has {len(row)} columns, the first line has {len(columns)}")
    return row
