# SPDX-License-Identifier: Apache-2.0
"""The margin of promises, and what runs are believed to take."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jgr.serving.policies.admission import (
    AT_ONCE,
    LEAST_NS,
    MOST,
    MOST_NS,
    PROMISES,
    STEP_NS,
    Admission,
)
from jgr.serving.policies.run_costs import COMMON, RunCosts

S = 1_000_000_000


def test_one_pause_counts_as_few_late_jobs() -> None:
    admission = Admission()
    for accepted_ns in range(1000):
        admission.late(accepted_ns, S)
    assert admission.room_ns("any", S) == LEAST_NS + AT_ONCE * STEP_NS
    admission.late(S + 1, 2 * S)  # it was accepted with the new margin, which was too small as well
    assert admission.room_ns("any", S) == LEAST_NS + (AT_ONCE + 1) * STEP_NS


def test_the_margin_shrinks_with_jobs_in_time_and_has_bounds() -> None:
    admission = Admission()
    for number in range(1000):
        admission.late(number * S, number * S + 1)
    assert admission.room_ns("any", S) == MOST_NS
    assert admission.room_ns("any", MOST_NS) == MOST_NS // 2, "half of the time is left"
    for _ in range(PROMISES * (MOST_NS // STEP_NS)):
        admission.in_time()
    assert admission.room_ns("any", S) == LEAST_NS


def test_a_class_that_is_refused_less_leaves_room_and_what_all_leave_counts_for_none() -> None:
    admission = Admission()
    plain_ns = admission.room_ns("short", S)
    for _ in range(200):
        admission.decided("short", False)
        admission.decided("long", True)
    assert plain_ns < admission.room_ns("short", S) <= plain_ns + MOST * S
    assert admission.room_ns("long", S) == plain_ns
    for _ in range(3000):  # now it is the long ones that are served
        admission.decided("short", True)
        admission.decided("long", False)
    assert admission.room_ns("short", S) == plain_ns < admission.room_ns("long", S)
    admission.decided("new", False)
    assert admission.room_ns("new", S) >= plain_ns, "less than none is never left"


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=400))
def test_some_class_has_no_handicap_and_none_has_less(decisions: list[tuple[int, bool]]) -> None:
    admission = Admission()
    for of, refused in decisions:
        admission.decided(of, refused)
    rooms = [admission.room_ns(of, S) for of in {of for of, _ in decisions}]
    assert min(rooms, default=LEAST_NS) == LEAST_NS


def test_a_shape_that_is_not_run_follows_the_machine_and_does_not_drift_from_it() -> None:
    rng = random.Random(0)
    costs = RunCosts({"run": 1e-3, "idle": 4e-3})
    for _ in range(20_000):
        costs.observe("run", round(1e6 * rng.paretovariate(1.5)))
    ran, idle = costs.ns("run") / 1e6, costs.ns("idle") / 4e6
    assert idle == pytest.approx(ran**COMMON, rel=1e-3)
    assert 1 < ran < 4, "about the mean of the times, of which the largest count for less"


@pytest.mark.parametrize("took_ns", [0, 1, 10**18])
def test_costs_stay_above_nothing_and_finite_whatever_runs_are_said_to_take(took_ns: int) -> None:
    costs = RunCosts({"run": 1e-3, "other": 2e-3})
    for _ in range(20_000):
        costs.observe("run", took_ns)
    for shape in ("run", "other"):
        costs.observe(shape, 1_000_000)
        assert 0 < costs.ns(shape) <= 10**19
    for _ in range(1_000):
        costs.observe("run", 1_000_000)
        costs.observe("other", 2_000_000)
    assert costs.ns("run") == pytest.approx(1_000_000) and costs.ns("other") == pytest.approx(2_000_000)
