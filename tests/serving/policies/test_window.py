# SPDX-License-Identifier: Apache-2.0
"""How many requests are let in at a time, by hand and beside a queue whose capacity is known."""

from __future__ import annotations

import pytest

from jgr.serving.policies.window import FIRST, FORGOTTEN_NS, HALF, HELD_NS, LEAST, LESS, MOST, Window, held_up

MS = 1_000_000


def test_who_is_held_up() -> None:
    assert not held_up(HELD_NS, 1 * MS), "a deadline that no fleet meets says nothing of this one"
    assert held_up(HELD_NS + 1, 100 * MS)
    assert not held_up(75 * MS, 300 * MS) and held_up(75 * MS + 1, 300 * MS)
    assert not held_up(1e12, float("inf"))


def test_the_window_becomes_smaller_once_for_all_that_were_inside() -> None:
    window = Window()
    assert sum(window.enter(0) for _ in range(100)) == FIRST == window.inside
    for came_ns in (5, 6, 7):
        window.answered(True, came_ns, 10)
    assert window.size == FIRST * HALF
    window.answered(True, 9, 11)
    window.answered(True, 10, 12)
    assert window.size == FIRST * HALF**2
    window.answered(False, 11, 13)
    window.answered(True, 11, 14)
    assert window.size == pytest.approx(FIRST * HALF**2 + 1 / 16), "these came before"
    window.answered(False, 12, 15)
    size = window.size
    window.answered(True, 12, 16)
    assert window.size == size * LESS, "the smaller one has held nobody up"
    for _ in range(55):
        window.leave()
    assert window.inside == 9 and window.enter(0)
    for now_ns in range(100, 300):
        window.answered(True, now_ns, now_ns)
    assert window.size == LEAST


def test_it_goes_back_to_what_a_burst_may_have_and_beyond_where_it_is_what_keeps_them_few() -> None:
    window = Window()
    window.answered(True, 0, 1)
    for now_ns in range(2, 2_000):
        window.answered(False, now_ns, now_ns)
    assert FIRST <= window.size < FIRST + 1, "one at a time, and nobody is refused for it"
    while window.enter(0):
        pass
    size = window.size
    for _ in range(round(size)):
        window.answered(False, 5_000, 5_000)
    assert window.size == pytest.approx(size + 1, abs=0.1)
    window.size = window.inside = MOST
    window.answered(False, 6_000, 6_000)
    assert window.size == MOST


def test_a_small_window_of_which_nobody_has_told_for_long_begins_anew() -> None:
    window = Window()
    for now_ns in range(1, 100):
        window.answered(True, now_ns, now_ns)
    assert window.size == LEAST
    assert [window.enter(99 + FORGOTTEN_NS) for _ in range(3)] == [True, True, False]
    assert sum(window.enter(100 + FORGOTTEN_NS) for _ in range(100)) == FIRST - 2
    window.size = 2 * FIRST
    assert window.enter(10 * FORGOTTEN_NS) and window.size == 2 * FIRST


@pytest.mark.parametrize("work_ms", [1, 5])
def test_it_finds_the_number_that_a_queue_serves_in_time(work_ms: int) -> None:
    """One server, first in first out; a request is held up where it waits for more than 75 ms. Callers ask all the
    time, so without a window all of them would wait for ever longer."""
    window, queue, now_ns, waits = Window(), list[int](), 0, list[int]()
    for _ in range(4000):
        while window.enter(0):
            queue.append(now_ns)
        came_ns = queue.pop(0)
        wait_ns = now_ns - came_ns
        now_ns += work_ms * MS
        waits.append(wait_ns)
        window.leave()
        window.answered(held_up(wait_ns, 300 * MS), came_ns, now_ns)
    late = waits[200:]
    assert 0.6 * 75 * MS < sum(late) / len(late) < 80 * MS
    assert max(late) < 100 * MS
