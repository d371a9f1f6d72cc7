# SPDX-License-Identifier: Apache-2.0
"""Requests that are refused before they are translated: which, and what they are told."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from jgr.serving.api import RankRequest, RecommendRequest, Request
from jgr.serving.engine.host import MOST_REFUSED, WAITS, Host, refusal
from jgr.serving.policies.jobs import Job, Rejected

MS = 1_000_000
REQUEST = RankRequest(history=["a"] * 10, candidates=["b"] * 5)


def make_host() -> Host:
    return Host(lambda: 0)


class Busy:
    """A policy that would refuse what is due before a job ends that begins at 100 ms, and takes a ms for each token."""

    def __init__(self) -> None:
        self.asked: list[Job] = []

    def refuses(self, job: Job, now_ns: int) -> Rejected | None:
        self.asked.append(job)
        end_ns = (100 + job.tokens) * MS
        return Rejected("too_late", end_ns) if end_ns > (job.deadline_ns or 0) else None


def known_late(
    host: Host, request: Request, deadline_ms: float, now_ms: int = 10, wait_ns: int = 0, policy: Any = None
) -> Rejected | None:
    given = 0, round(deadline_ms * MS), now_ms * MS, wait_ns
    return host.known_late(request, policy or Busy(), *given)


def test_who_waits_for_too_long_is_refused_without_a_prediction() -> None:
    host, deadline_ns = make_host(), 200 * MS
    enough_ns = (deadline_ns - 100 * MS) // WAITS
    assert known_late(host, REQUEST, 200, 100, enough_ns - 1) is None
    verdict = known_late(host, REQUEST, 200, 100, enough_ns)
    assert verdict is not None and verdict.reason == "too_late"
    assert refusal(verdict, 0, deadline_ns).predicted_ms is None


def test_a_deadline_that_has_passed_is_told_what_has_passed_already() -> None:
    verdict = known_late(make_host(), REQUEST, 200, 230)
    assert verdict is not None
    late = refusal(verdict, 10 * MS, 200 * MS, 5 * MS, 200.0)
    assert late.predicted_ms == 230 - 10 + 5
    assert late.message == "the answer may take 225.0 ms, which is past its deadline of 200 ms"
    others = refusal(replace(verdict, for_others=True), 10 * MS, 400 * MS, 5 * MS)
    assert others.predicted_ms == 225
    assert others.message.endswith("which would make others late, which were accepted before it")


def test_a_request_like_one_that_was_refused_is_judged_by_its_job_until_a_run_ends() -> None:
    host, policy = make_host(), Busy()
    assert known_late(host, REQUEST, 110, policy=policy) is None and not policy.asked
    host.refused(REQUEST, Job(7, "rank", 30, 5, 0, 100 * MS))
    assert known_late(host, REQUEST, 129, policy=policy) == Rejected("too_late", 130 * MS)
    assert policy.asked == [Job(7, "rank", 30, 5, 0, 129 * MS)]
    assert known_late(host, REQUEST, 130) is None
    assert known_late(host, REQUEST, 133, 10, MS) == Rejected("too_late", 130 * MS), (
        "it waits for its turn too"
    )
    assert known_late(host, replace(REQUEST, history=["a"] * 11), 129) is not None
    assert known_late(host, replace(REQUEST, candidates=["b"] * 7), 129) is not None
    host.ran()
    assert known_late(host, REQUEST, 129) is None


@pytest.mark.parametrize(
    "other",
    [
        {"history": ["a"] * 9},  # it may take less
        {"candidates": ["b"] * 4},
        {"candidates": "all"},
        {"history": ["a"] * 16},  # far more, so that it may be of another class
        {"priority": "batch"},  # it has another place
        {"min_candidates": 1},  # it can be answered by less
    ],
)
def test_what_is_not_like_it_is_not_known_to_be_late(other: dict[str, Any]) -> None:
    host = make_host()
    host.refused(REQUEST, Job(7, "rank", 30, 5, 0, 100 * MS))
    assert known_late(host, replace(REQUEST, **other), 110) is None


def test_searches_are_alike_with_the_same_beam_width() -> None:
    host, search = make_host(), RecommendRequest(history=["a"] * 10, beam_width=64)
    host.refused(search, Job(7, "recommend", 30, 64, 0, 100 * MS))
    assert known_late(host, search, 110) is not None
    assert known_late(host, replace(search, beam_width=32), 110) is None
    assert known_late(host, REQUEST, 110) is None


def test_only_so_many_sorts_of_requests_are_remembered() -> None:
    host, job = make_host(), Job(7, "recommend", 30, 64, 0, 100 * MS)
    searches = [RecommendRequest(history=["a"], beam_width=n + 1) for n in range(MOST_REFUSED + 1)]
    for search in searches:
        host.refused(search, job)
    assert known_late(host, searches[-2], 110) is not None
    assert known_late(host, searches[-1], 110) is None
