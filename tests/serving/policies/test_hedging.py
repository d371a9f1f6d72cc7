# SPDX-License-Identifier: Apache-2.0
"""When a request is sent to a second node, how many are, and which nodes are left out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jgr.serving.policies.hedging import BURST, LEFT_OUT_NS, NODES, SHARE, Hedging

MS = 1_000_000


def test_a_node_may_be_silent_for_a_multiple_of_what_a_request_should_take() -> None:
    of = Hedging(3, least_ns=1 * MS, first_ns=500 * MS)
    assert of.wait_ns(0) == 500 * MS, "nothing was answered yet"
    assert of.wait_ns(400 * MS) == 1200 * MS
    of.answered("a", 30 * MS, 10 * MS, 0)
    assert of.wait_ns(10 * MS) == 3 * (10 + 20) * MS, "answers took 20 ms more than predicted"
    for _ in range(200):
        of.answered("a", 10 * MS, 10 * MS, 0)
    assert 3 * 10 * MS <= (of.wait_ns(10 * MS) or 0) < 31 * MS
    assert of.wait_ns(0) == 1 * MS
    assert Hedging(0).wait_ns(10 * MS) is None


@given(st.lists(st.booleans(), max_size=400))
def test_no_more_requests_are_sent_twice_than_their_share(silent: list[bool]) -> None:
    of, twice = Hedging(3), 0
    for number, each in enumerate(silent, 1):
        of.came()
        twice += each and of.silent("a", 0, number)
        assert twice <= BURST + SHARE * number


def test_what_was_saved_up_is_a_burst_and_comes_back_with_requests() -> None:
    of = Hedging(3)
    assert [of.silent("a", 0, 1) for _ in range(40)].count(True) == BURST
    for _ in range(round(1 / SHARE)):
        of.came()
    assert [of.silent("a", 0, 1) for _ in range(3)].count(True) == 1


def test_a_node_that_answers_nobody_is_left_out_but_for_one_request_now_and_then() -> None:
    of = Hedging(3)
    of.answered("a", 1, 1, now_ns=100)
    of.silent("a", sent_ns=50, now_ns=200)
    assert of.left_out(201) == () == of.suspects, "it has answered others since"
    of.silent("a", sent_ns=150, now_ns=200)
    of.silent("b", sent_ns=150, now_ns=200)
    assert set(of.left_out(201)) == {"a", "b"} == set(of.suspects)
    later_ns = 200 + LEFT_OUT_NS
    assert of.left_out(later_ns) == (), "one request may find out"
    assert set(of.left_out(later_ns)) == {"a", "b"} == set(of.suspects)
    of.answered("a", 1, 1, later_ns)
    assert of.left_out(later_ns + 1) == ("b",) == of.suspects
    of.lost("b")
    assert of.suspects == ()


def test_a_node_that_lets_deadlines_pass_is_left_out_too() -> None:
    """The time until a deadline may be too short for anybody else to be asked."""
    of = Hedging(3)
    of.answered("a", 1, 1, now_ns=100)
    of.late("a", sent_ns=50, now_ns=200)
    of.late("b", sent_ns=50, now_ns=200)
    assert of.left_out(201) == ("b",)
    off = Hedging(0)
    off.late("b", sent_ns=50, now_ns=200)
    assert off.left_out(201) == ()


def test_no_more_nodes_are_remembered_than_a_bound() -> None:
    of = Hedging(3)
    for number in range(NODES + 5):
        of.silent(f"node-{number}", 0, 1)
    assert len(of.suspects) == NODES and "node-0" not in of.suspects
