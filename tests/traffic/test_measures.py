# SPDX-License-Identifier: Apache-2.0
"""Percentiles, their intervals against simulation and exact laws, and the report of a run worked out by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jgr.traffic import load_lines
from jgr.traffic.http_client import TIMEOUT, Verdict
from jgr.traffic.measures import (
    QUANTILES,
    after,
    interval,
    needed,
    percentiles_ms,
    quantile,
    share_bounds,
    summarize,
)
from jgr.traffic.open_loop import Results
from jgr.traffic.schedule import Request, Schedule


@given(st.lists(st.floats(0.0, 1e3), min_size=1, max_size=300))
def test_percentiles_are_those_of_numpy(seconds: list[float]) -> None:
    found = percentiles_ms(seconds)
    assert found is not None
    wanted = np.percentile(seconds, [50, 90, 99, 100], method="inverted_cdf") * 1e3
    assert list(found) == ["p50", "p90", "p99", "max"]
    np.testing.assert_allclose(list(found.values()), wanted, atol=5.1e-4)


def test_there_is_no_percentile_of_nothing() -> None:
    assert percentiles_ms([]) is None


@pytest.mark.parametrize("n", [7, 10, 100, 459, 1000, 4603, 10_000])
def test_a_quantile_is_not_moved_by_rounding(n: int) -> None:
    ranked = np.arange(1.0, n + 1)
    for share, thousandths in ((0.5, 500), (0.9, 900), (0.99, 990), (0.999, 999)):
        assert quantile(ranked, share) == -(-n * thousandths // 1000)


def test_how_many_answers_a_percentile_takes() -> None:
    assert {name: needed(share) for name, share in QUANTILES.items()} == {
        "p50": 7, "p90": 44, "p99": 459, "p99.9": 4603,
    }  # fmt: skip
    for share in QUANTILES.values():
        assert share ** needed(share) < 0.01 <= share ** (needed(share) - 1)


@pytest.mark.parametrize(("n", "share"), [(7, 0.5), (100, 0.5), (200, 0.9), (459, 0.99), (5000, 0.99)])
def test_intervals_hold_the_quantile_in_95_of_100_samples(n: int, share: float) -> None:
    rng = np.random.default_rng(0)
    samples = np.sort(rng.exponential(size=(4000, n)), axis=1)
    true = -np.log1p(-share)
    found = [interval(sample, share) for sample in samples[:1]]
    assert found[0] is not None
    # Which two ranks are taken depends on n alone: all samples are compared at once.
    low, high = (int(np.searchsorted(samples[0], bound)) for bound in found[0])
    covered = ((samples[:, low] <= true) & (true <= samples[:, high])).mean()
    assert covered > 0.95 - 4 * (0.05 * 0.95 / 4000) ** 0.5
    # No narrower pair of ranks would do, on the side that is cut off least.
    assert ((samples[:, low + 1] <= true) & (true <= samples[:, high - 1])).mean() < 0.95


def test_a_sample_may_be_too_small_for_an_interval() -> None:
    assert interval(np.arange(100.0), 0.99) is None
    assert interval(np.arange(3.0), 0.5) is None


def test_bounds_of_a_share_are_clopper_and_pearsons() -> None:
    assert share_bounds(0, 10, 0.95) == (0.0, pytest.approx(1 - 0.05**0.1))
    assert share_bounds(10, 10, 0.95) == (pytest.approx(0.05**0.1), 1.0)
    # The published 95 % two-sided interval of 4 in 20 (each side .975).
    assert share_bounds(4, 20, 0.975) == pytest.approx((0.0573, 0.4366), abs=5e-5)


REQUESTS = [
    Request("/v1/recommend", b"{}", "recommend", "home"),
    Request("/v1/rank", b"{}", "rank", "feed", deadline_ms=50.0),
    Request("/v1/rank", b"{}", "rank", "mail", deadline_ms=400.0),
]


def _run() -> tuple[Schedule, Results]:
    verdicts = [Verdict("200"), Verdict("429", "overloaded"), TIMEOUT]
    rows = [  # request, due, began, sent, end, verdict
        (0, 0.0, 0.0, 0.0, 0.1, 0),
        (0, 1.0, 1.08, 1.08, 1.1, 0),
        (0, 1.0, 1.2, 1.2, 1.21, 0),  # quick once sent, but late
        (1, 2.0, 2.0, 2.0, 2.06, 0),  # within the limit of all, and not within its own
        (
            2,
            2.0,
            2.0,
            2.25,
            2.3,
            0,
        ),  # beyond the limit of all, and within its own; it waited for a connection
        (2, 3.0, 3.0, 3.0, 3.001, 1),
        (1, 3.0, 3.0, 3.0, 8.0, 2),
    ]
    which, due, began, sent, end, ended = map(np.array, zip(*rows, strict=True))
    schedule = Schedule(due, which.astype(np.int32), REQUESTS, 4.0)
    return schedule, Results(due, began, sent, end, ended.astype(np.int32), verdicts)


def test_the_report_counts_goodput_from_the_scheduled_time_within_each_requests_limit() -> None:
    report = summarize(*_run(), slo_ms=101.0)
    parts = {name: report.pop(name) for name in ("kinds", "classes")}
    none = {name: None for name in QUANTILES}
    assert report == {
        "sent": 7,
        "answered": {"200": 5, "429": 1},
        "failed": {"timeout": 1},
        "errors": {"429": {"overloaded": 1}},
        "in_time": 3,
        "goodput_per_s": 0.75,
        "latency_ms": {**none, "max": 300.0},  # five answers carry no percentile
        "latency_95_ms": none,
        "deadline_ms": None,
        "slo_ms": 101.0,
        "elapsed_s": 8.0,
        "offered_per_s": 1.75,
        "achieved_per_s": 1.25,
        "lateness_ms": {"p50": 0.0, "p90": 200.0, "p99": 200.0, "max": 200.0},
        "waited_for_connection": 1,
        "connection_wait_max_ms": 250.0,
    }
    assert {name: part["in_time"] for name, part in parts["kinds"].items()} == {"recommend": 2, "rank": 1}
    assert {name: part["in_time"] for name, part in parts["classes"].items()} == {
        "home": 2, "feed": 0, "mail": 1,
    }  # fmt: skip
    assert parts["classes"]["feed"]["failed"] == {"timeout": 1}
    assert parts["classes"]["mail"]["errors"] == {"429": {"overloaded": 1}}
    assert parts["classes"]["home"]["sent"] == 3


def test_the_lines_say_what_the_report_says() -> None:
    lines = load_lines.run_lines(summarize(*_run(), slo_ms=101.0))
    starts = [
        "sent ", "refused ", "goodput ", "latency ", "  kind recommend:", "  kind rank:", "  class home:",
        "  class feed:", "  class mail:", "lateness ", "waited ", "warning ",
    ]  # fmt: skip
    assert [line[: len(start)] for line, start in zip(lines, starts, strict=True)] == starts
    assert lines[-2] == "waited    1 request over 1 ms for a connection, the longest 250.0 ms"
    assert "offered 1.8/s, answered 1.2/s" in lines[0]
    assert lines[1] == "refused   429: 1 overloaded"
    assert "answered 200 within deadline_ms, else 101 ms (42.9% of the requests)" in lines[2]
    assert "not enough requests for P50 (7), P90 (44), P99 (459), P99.9 (4,603)" in lines[3]


def _even(n: int) -> dict[str, Any]:
    """The report of n requests whose latencies are 1 .. n ms, sent on time."""
    due = np.zeros(n)
    end = np.arange(1, n + 1) / 1e3
    schedule = Schedule(due, np.zeros(n, np.int32), REQUESTS[:1], 1.0)
    return summarize(schedule, Results(due, due, due, end, np.zeros(n, np.int32), [Verdict("200")]), 1e6)


def test_the_lines_name_the_one_deadline_of_all() -> None:
    schedule, results = _run()
    ranks = [request._replace(deadline_ms=80.0) for request in schedule.requests]
    report = summarize(dataclasses.replace(schedule, requests=ranks), results, slo_ms=101.0)
    assert report["deadline_ms"] == 80.0
    assert "answered 200 within their deadline of 80 ms (" in load_lines.run_lines(report)[2]


def test_figures_appear_with_the_answers_that_carry_them() -> None:
    assert _even(458)["latency_ms"]["p99"] is None
    full = _even(459)
    assert (full["latency_ms"]["p99"], full["latency_ms"]["p99.9"]) == (455.0, None)
    low, high = full["latency_95_ms"]["p99"]
    assert low < 455.0 < high == 459.0
    assert _even(4603)["latency_ms"]["p99.9"] == 4599.0
    (latency,) = (line for line in load_lines.run_lines(full) if line.startswith("latency"))
    assert f"p99 455.0 ms [{low:.1f}, 459.0]" in latency
    assert "not enough requests for P99.9 (4,603)" in latency


def test_a_run_without_an_answer_has_no_latency() -> None:
    schedule, results = _run()
    refused = Results(*[getattr(results, name)[5:] for name in ("due_s", "began_s", "sent_s", "end_s", "ended")],
                      results.verdicts)  # fmt: skip
    report = summarize(
        schedule.__class__(schedule.at_s[5:], schedule.which[5:], REQUESTS, 1.0), refused, 100.0
    )
    assert (report["in_time"], report["latency_ms"], report["achieved_per_s"]) == (0, None, 0.0)
    assert "no answer" in load_lines.point_line(report)


def test_a_run_without_its_beginning_counts_from_there() -> None:
    request = Request("/v1/rank", b"{}")
    at_s = np.array([0.0, 0.5, 1.0, 1.5])
    schedule = Schedule(at_s, np.arange(4, dtype=np.int32), [request] * 4, 2.0)
    verdicts = [Verdict("200"), TIMEOUT]
    ended = np.array([1, 1, 0, 1], np.int32)
    results = Results(at_s, at_s + 0.01, at_s + 0.02, at_s + 0.03, ended, verdicts)
    rest, left = after(schedule, results, 1.0)
    assert rest.at_s.tolist() == [0.0, 0.5] and rest.which.tolist() == [2, 3] and rest.length_s == 1.0
    assert left.due_s.tolist() == [0.0, 0.5] and left.ended.tolist() == [0, 1]
    np.testing.assert_allclose([left.began_s[1], left.sent_s[1], left.end_s[1]], [0.51, 0.52, 0.53])
