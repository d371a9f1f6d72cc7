# SPDX-License-Identifier: Apache-2.0
"""Schedules: drawn requests, parts for processes, and traces with requests of their own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jgr.traffic.arrivals import parse_process
from jgr.traffic.schedule import LoadError, Mix, Request, draw, read_trace
from jgr.traffic.sources import LogSource, ProcessSource, TraceSource

MIX = Mix([Request("/", bytes([i])) for i in range(4)], np.full(4, 0.25))


def test_a_schedule_uses_all_requests_and_keeps_the_times() -> None:
    at_s = np.arange(100.0)
    schedule = draw(at_s, 100.0, MIX, np.random.default_rng(0))
    assert schedule.at_s.tolist() == at_s.tolist()
    assert set(schedule.which.tolist()) == {0, 1, 2, 3}
    assert (len(schedule), schedule.offered_per_s) == (100, 1.0)


def test_parts_are_the_whole() -> None:
    schedule = draw(np.arange(10.0), 10.0, MIX, np.random.default_rng(0))
    parts = [schedule.part(number, 3) for number in range(3)]
    assert [len(part) for part in parts] == [4, 3, 3]
    pairs = sorted(
        (at, which) for p in parts for at, which in zip(p.at_s.tolist(), p.which.tolist(), strict=True)
    )
    assert pairs == list(zip(schedule.at_s.tolist(), schedule.which.tolist(), strict=True))


def test_sources_make_any_rate_and_repeat_with_the_seed() -> None:
    source = ProcessSource(parse_process("poisson"), MIX, seed=3, max_requests=1000)
    first, again, second = (source.schedule(50.0, 2.0, number) for number in (0, 0, 1))
    np.testing.assert_array_equal(first.at_s, again.at_s)
    np.testing.assert_array_equal(first.which, again.which)
    assert first.at_s.tolist() != second.at_s.tolist()
    assert source.schedule(None, None, 0).length_s == 10.0
    log = LogSource(np.array([0.0, 1.0, 3.0]), MIX, seed=0, max_requests=1000)
    np.testing.assert_allclose(log.schedule(2.0, None, 0).at_s, [0.0, 1 / 3, 1.0])
    trace = TraceSource(np.array([0.5, 1.0]), MIX.requests[:2], max_requests=1000)
    assert trace.schedule(None, None, 0).at_s.tolist() == [0.5, 1.0]
    assert trace.schedule(None, 0.7, 0).which.tolist() == [0]


def test_a_flash_crowd_counts_in_the_bound() -> None:
    source = ProcessSource(parse_process("flash:10:5:3"), MIX, seed=0, max_requests=190)
    with pytest.raises(LoadError, match="200 requests; --max_requests is 190"):
        source.schedule(10.0, 10.0, 0)


def _trace(folder: Path, *lines: str) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_a_trace_is_sorted_and_has_deadlines(tmp_path: Path) -> None:
    path = _trace(
        tmp_path,
        '{"at_ms": 1500, "path": "/v1/rank", "body": {"b": [1,  2], "deadline_ms": 20}}',
        '{"at_ms": 0.5, "path": "/v1/recommend", "body": {}}',
        '{"at_ms": 2000, "path": "/x?model=a/b", "body": null}',
        '{"at_ms": 2001, "path": "/", "body": {"deadline_ms": "soon"}}',
    )
    times_s, requests = read_trace(path, 4)
    assert times_s.tolist() == [0.0005, 1.5, 2.0, 2.001]
    assert requests == [
        Request("/v1/recommend", b"{}", "recommend", "recommend"),
        Request("/v1/rank", b'{"b": [1,  2], "deadline_ms": 20}', "rank", "rank", 20.0),
        Request("/x?model=a/b", b"null", "x", "x"),
        Request("/", b'{"deadline_ms": "soon"}', "/", "/"),
    ]
    with pytest.raises(LoadError, match="holds more than 3 requests"):
        read_trace(path, 3)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "truncated"),
        ("[]", "Expected `object`, got `array`"),
        ('{"at_ms": 1, "path": "/x"}', "missing required field `body`"),
        ('{"at_ms": -1, "path": "/x", "body": {}}', r"at `\$\.at_ms`"),
        ('{"at_ms": 1e300, "path": "/x", "body": {}}', r"at `\$\.at_ms`"),
        ('{"at_ms": "1", "path": "/x", "body": {}}', r"at `\$\.at_ms`"),
        ('{"at_ms": 1, "path": "x", "body": {}}', r"at `\$\.path`"),
        ('{"at_ms": 1, "path": "/x\\r\\nHost: y", "body": {}}', r"at `\$\.path`"),
        ('{"at_ms": 1, "path": "/x\\n", "body": {}}', r"at `\$\.path`"),
        ('{"at_ms": 1, "path": "/x", "body": {}, "user": 1}', "unknown field `user`"),
    ],
)
def test_a_bad_line_of_a_trace_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = _trace(tmp_path, '{"at_ms": 0, "path": "/x", "body": {}}', line)
    with pytest.raises(LoadError, match=rf"trace\.jsonl:2: .*{words}"):
        read_trace(path, 10)
