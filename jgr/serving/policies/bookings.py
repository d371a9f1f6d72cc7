# SPDX-License-Identifier: Apache-2.0
"""The work that a router has sent to each node and that has not ended: exact, and known at once, unlike reports.

Work is in whole tokens to compute, so that sums come back to 0. A booking has its request's id, so that an attempt that
a node refuses, whose end is told as any other's, or an end that is told twice, changes nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
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

    def slot(self, request_id: str) -> int | None:
        """Where a request is booked; None: nowhere."""
        booking = self._by_id.get(request_id)
        return None if booking is None else booking.slot

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


class Work:
    """At a node: tokens in flight by the router that has sent them, and their mean over time, as it is reported."""

    def __init__(self) -> None:
        self._now: dict[str, float] = {}
        self._sum: dict[str, float] = {}  # token-ns since `_since_ns`
        self._at_ns: int | None = None
        self._since_ns = 0

    def begin(self, sender: str, tokens: float, now_ns: int) -> None:
        self._go_on(now_ns)
        self._now[sender] = self._now.get(sender, 0.0) + tokens

    def end(self, sender: str, tokens: float, now_ns: int) -> None:
        self._go_on(now_ns)
        left = self._now[sender] - tokens
        if left > 0.5:
            self._now[sender] = left
        else:
            del self._now[sender]

    def mean(self, now_ns: int) -> Mapping[str, float]:
        """The means since the last call."""
        self._go_on(now_ns)
        took = max(1, now_ns - self._since_ns)
        found = {sender: total / took for sender, total in self._sum.items() if total}
        self._sum, self._since_ns = {}, now_ns
        return found

    def _go_on(self, now_ns: int) -> None:
        if self._at_ns is None:
            self._at_ns = self._since_ns = now_ns
        for sender, tokens in self._now.items():
            self._sum[sender] = self._sum.get(sender, 0.0) + tokens * (now_ns - self._at_ns)
        self._at_ns = now_ns
