# SPDX-License-Identifier: Apache-2.0
"""Bookings by hand: what is told twice, late or never."""

from __future__ import annotations

import pytest

from jgr.serving.policies.bookings import LOST_NS, Bookings


def booked(slots: int = 3) -> Bookings:
    bookings = Bookings()
    for _ in range(slots):
        bookings.add()
    return bookings


def at(bookings: Bookings) -> list[tuple[float, float]]:
    bookings.check()
    return list(zip(bookings.work.tolist(), bookings.running.tolist(), strict=True))


def test_an_end_that_is_told_twice_or_for_nobody_changes_nothing() -> None:
    bookings = booked()
    bookings.book("a", 0, 10, 0)
    bookings.book("b", 0, 5, 0)
    assert at(bookings) == [(15, 2), (0, 0), (0, 0)]
    for _ in range(2):
        bookings.end("a")
        bookings.end("never")
    assert at(bookings) == [(5, 1), (0, 0), (0, 0)]


def test_a_refused_attempt_is_booked_at_the_next_node_alone_whenever_its_end_is_told() -> None:
    early, late = booked(), booked()
    for bookings in (early, late):
        bookings.book("a", 0, 10, 0)
    early.end("a", 0)
    early.book("a", 1, 7, 1)
    late.book("a", 1, 7, 1)
    late.end("a", 0)
    assert at(early) == at(late) == [(0, 0), (7, 1), (0, 0)]
    late.end("a", 1)
    assert at(late) == [(0, 0)] * 3 and len(late) == 0


def test_what_nobody_ends_is_forgotten_and_what_was_sent_again_is_not() -> None:
    bookings = booked()
    bookings.book("a", 0, 1, 0)
    bookings.book("b", 1, 2, 5)
    bookings.book("a", 2, 3, 9)
    bookings.expire(LOST_NS + 4)
    assert at(bookings) == [(0, 0), (2, 1), (3, 1)]
    bookings.expire(LOST_NS + 5)
    assert at(bookings) == [(0, 0), (0, 0), (3, 1)]
    bookings.expire(LOST_NS + 9)
    assert at(bookings) == [(0, 0)] * 3 and len(bookings) == 0


@pytest.mark.parametrize(
    ("gone", "left"), [(0, [(4, 1), (2, 1)]), (1, [(1, 1), (4, 1)]), (2, [(1, 1), (2, 1)])]
)
def test_a_node_leaves_with_its_bookings_and_the_last_one_takes_its_slot(
    gone: int, left: list[object]
) -> None:
    bookings = booked()
    for slot, request in enumerate("abc"):
        bookings.book(request, slot, 2**slot, 0)
    bookings.remove(gone)
    assert at(bookings) == left
    for request in "abc":
        bookings.end(request)
    assert at(bookings) == [(0, 0)] * 2
