# SPDX-License-Identifier: Apache-2.0
"""The work that a router has sent to each node and that has not ended: exact, and known at once, unlike reports.

Work is in whole tokens to compute, so that sums come back to 0. A booking has its request's id, so that an attempt that
a node refuses, whose end is told as any other's, or an end that is told twice, changes nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

LOST_NS = 120 * 1_000_000_000
"""After so long a booking is forgotten: nobody will tell its end any more."""

MEMORY = 32
"""A node's bookings of late are about so many: with each of the fleet's bookings, older ones weigh less."""

Float64 = npt.NDArray[np.float64]


def without(array: Float64, slot: int) -> Float64:
    """A copy without one slot, [n - 1]; the last slot takes its place."""
    shorter = array[:-1].copy()
    if slot < len(shorter):
        shorter[slot] = array[-1]
    return shorter


@dataclass(slots=True)
class Booking:
    """Tokens that a request computes at the node in a slot."""

    slot: int
    work: int
    at_ns: int


class Bookings:
    """The bookings at the nodes in slots 0, 1, ...

    work: [slots] float64, tokens in flight; running: [slots] float64, requests in flight; recent: [slots] float64,
    tokens booked of late, whether they have ended or not.
    """

    def __init__(self) -> None:
        self.work: Float64 = np.zeros(0)
        self.running: Float64 = np.zeros(0)
        self.recent: Float64 = np.zeros(0)
        self._by_id: OrderedDict[str, Booking] = OrderedDict()  # the oldest first

    def add(self) -> None:
        """There is one more slot; nothing is booked there."""
        self.work, self.running = np.append(self.work, 0.0), np.append(self.running, 0.0)
        self.recent = np.append(self.recent, 0.0)

    def remove(self, slot: int) -> None:
        """The node in `slot` has left, with what it was sent; that of the last slot stands there from now on."""
        last = len(self.work) - 1
        for request_id, booking in [item for item in self._by_id.items() if item[1].slot in (slot, last)]:
            if booking.slot == slot:
                del self._by_id[request_id]
            else:
                booking.slot = slot
        self.work, self.running = without(self.work, slot), without(self.running, slot)
        self.recent = without(self.recent, slot)

    def book(self, request_id: str, slot: int, work: int, now_ns: int) -> None:
        """The request is on its way to that node, and no longer to another."""
        self.end(request_id)
        self._by_id[request_id] = Booking(slot, work, now_ns)
        self.work[slot] += work
        self.running[slot] += 1
        self.recent *= 1 - 1 / (MEMORY * len(self.recent))
        self.recent[slot] += work

    def end(self, request_id: str, slot: int | None = None) -> None:
        """The request has ended, at any node or, where one is named, at that one; a booking elsewhere stays."""
        booking = self._by_id.get(request_id)
        if booking is None or slot not in (None, booking.slot):
            return
        del self._by_id[request_id]
        self.work[booking.slot] -= booking.work
        self.running[booking.slot] -= 1

    def expire(self, now_ns: int) -> None:
        """Forget what was booked too long ago."""
        while self._by_id:
            request_id, booking = next(iter(self._by_id.items()))
            if now_ns - booking.at_ns < LOST_NS:
                return
            self.end(request_id)

    def __len__(self) -> int:
        return len(self._by_id)

    def check(self) -> None:
        """Audit: the sums are those of the bookings. AssertionError where they are not."""
        work, running = np.zeros(len(self.work)), np.zeros(len(self.running))
        for booking in self._by_id.values():
            work[booking.slot] += booking.work
            running[booking.slot] += 1
        assert np.array_equal(running, self.running), f"{self.running} running, {running} booked"
        assert np.array_equal(work, self.work), f"{self.work} tokens in flight, {work} booked"
