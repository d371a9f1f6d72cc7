# SPDX-License-Identifier: Apache-2.0
"""Requests that are refused before they are translated: which, and what they are told."""

from __future__ import annotations

from jgr.serving.api import RankRequest
from jgr.serving.engine.host import WAITS, Host, refusal

MS = 1_000_000
REQUEST = RankRequest(history=["a"] * 10, candidates=["b"] * 5)


def make_host() -> Host:
    return Host(lambda: 0)


def test_who_waits_for_too_long_is_refused_without_a_prediction() -> None:
    host, deadline_ns = make_host(), 200 * MS
    enough_ns = (deadline_ns - 100 * MS) // WAITS
    assert host.known_late(REQUEST, deadline_ns, 100 * MS, enough_ns - 1) is None
    verdict = host.known_late(REQUEST, deadline_ns, 100 * MS, enough_ns)
    assert verdict is not None and verdict.reason == "too_late"
    assert refusal(verdict, 0, deadline_ns).predicted_ms is None


def test_a_deadline_that_has_passed_is_told_what_has_passed_already() -> None:
    verdict = make_host().known_late(REQUEST, 200 * MS, 230 * MS, 0)
    assert verdict is not None
    assert refusal(verdict, 10 * MS, 200 * MS, 5 * MS).predicted_ms == 230 - 10 + 5


def test_what_is_as_large_and_has_no_more_time_is_refused_like_the_one_before_until_a_run_ends() -> None:
    host = make_host()
    host.refused(REQUEST, left_ns=100 * MS, late_ns=30 * MS, now_ns=0)
    again = host.known_late(REQUEST, 110 * MS, 10 * MS, 0)
    assert again is None, "it has the 100 ms that the other one had, of which 10 have gone by"
    again = host.known_late(REQUEST, 100 * MS, 10 * MS, 0)
    assert again is not None and refusal(again, 0, 100 * MS).predicted_ms == 130
    assert host.known_late(RankRequest(history=["a"], candidates=["b"]), 100 * MS, 10 * MS, 0) is None
    shrinks = RankRequest(history=["a"] * 10, candidates=["b"] * 5, min_candidates=1)
    assert host.known_late(shrinks, 100 * MS, 10 * MS, 0) is None
    host.ran()
    assert host.known_late(REQUEST, 100 * MS, 10 * MS, 0) is None
