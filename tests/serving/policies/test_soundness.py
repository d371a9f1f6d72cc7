# SPDX-License-Identifier: Apache-2.0
"""When a device counts as broken, by hand."""

from __future__ import annotations

from jgr.serving.policies.soundness import LEAST_NS, MOST_FAILED, TIMES, broken

S = 1_000_000_000


def test_runs_that_fail_in_a_row_are_a_broken_device() -> None:
    assert (MOST_FAILED, LEAST_NS, TIMES) == (5, 60 * S, 20)
    assert broken(4, [], 0) == ""
    assert broken(5, [], 0) == "5 runs in a row have failed"


def test_a_run_that_does_not_come_back_is_one_too() -> None:
    assert broken(0, [(7 * S, S)], 67 * S) == ""
    assert broken(0, [(7 * S, S)], 67 * S + 1) == "a run has not come back for 60 s"
    assert broken(0, [(90 * S, S), (7 * S, S)], 97 * S) == "a run has not come back for 90 s", (
        "the oldest counts"
    )


def test_runs_that_take_long_may_take_longer_and_wait_for_each_other() -> None:
    assert broken(0, [(0, 10 * S)], 200 * S) == ""
    assert broken(0, [(0, 10 * S)], 201 * S) == "a run has not come back for 201 s"
    assert broken(0, [(0, 10 * S), (1, 5 * S)], 300 * S) == ""
    assert broken(0, [(0, 10 * S), (1, 5 * S)], 301 * S) == "a run has not come back for 301 s"
