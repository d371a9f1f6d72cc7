# SPDX-License-Identifier: Apache-2.0
"""How long a request and its answer are on their way between processes of one machine, by the clock that these share.

A deadline counts from when a request came to Ray's proxy. A proxy or a front that has too much to do keeps requests for
longer than a model needs, before it looks at them, and answers as well: so processes tell each other when they had
something, and what comes from another machine, whose clock is another one, counts from here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from jgr.boot import boot_id
from jgr.serving.errors import RequestError

ARRIVED, LEFT = b"x-jgr-arrived", b"x-jgr-left"
"""Headers between proxy and front: when the request came, how long answers take to be passed on, and how many requests
the proxy has refused since it told last; when the answer left the front, and whether its request was held up. Neither
comes from a client, nor goes to one."""
UNTOLD = -1.0
"""What an answer says where it does not tell whether its request was held up; else it says 0, or 1."""
RATE = 0.125
"""The weight of one measurement in a mean."""
HALF_NS = 250_000_000
"""Where nothing is measured, a mean is half of it after so long: it may be what keeps requests from being sent."""
LONGEST_NS = 3_600_000_000_000
"""What seems to have been longer on its way was not."""


class Stamp(NamedTuple):
    """A moment. machine: whose clock it is, as `boot_id` names it; "": it is none. at_ns: by that clock."""

    machine: str = ""
    at_ns: int = 0

    def __reduce__(self) -> Any:
        """It goes to other processes as a plain tuple, see `protocol`."""
        return tuple, (tuple(self),)


def stamp() -> Stamp:
    """Now."""
    return Stamp(boot_id(), time.monotonic_ns())


def since_ns(moment: Stamp) -> int | None:
    """How long ago that was; None where this machine cannot tell."""
    of, at_ns = moment
    passed_ns = time.monotonic_ns() - at_ns
    return passed_ns if of and of == boot_id() and 0 <= passed_ns < LONGEST_NS else None


class Way:
    """How long a way takes: a mean of late. clock: in ns."""

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock, self._mean_ns, self._told_ns = clock, 0.0, 0

    def took(self, took_ns: int | None) -> None:
        """One has taken so long; None: it is not known."""
        if took_ns is not None:
            mean_ns = self.mean_ns
            self._mean_ns, self._told_ns = mean_ns + RATE * (took_ns - mean_ns), self._clock()

    @property
    def mean_ns(self) -> float:
        return float(self._mean_ns * 0.5 ** ((self._clock() - self._told_ns) / HALF_NS))


def written(moment: Stamp, number: float = 0.0, count: int = 0) -> bytes:
    """A header's value."""
    return f"{moment.machine} {moment.at_ns} {number:.0f} {count}".encode()


def read(value: bytes) -> tuple[Stamp, float, int]:
    """What was written, or a moment that is none. Only a proxy of this fleet, or a front, has written it."""
    try:
        of, at_ns, number, count = value.decode().split(" ")
        return Stamp(of, int(at_ns)), float(number), int(count)
    except ValueError:
        return Stamp(), 0.0, 0


def refuse_late(waited_ns: float, back_ns: float, most_ns: float) -> None:
    """Raise RequestError for a request whose answer cannot be there within most_ns of its arrival, since it has waited
    too long already, or the way back takes too long: what is done for it would be in vain, and keep the others."""
    if waited_ns >= most_ns:
        raise RequestError("deadline_exceeded", "the deadline has passed")
    if waited_ns + back_ns >= most_ns:
        predicted_ms = round((waited_ns + back_ns) / 1e6, 1)
        said = f"the answer would take more than {predicted_ms} ms, which is past the deadline"
        raise RequestError("overloaded", said, predicted_ms=predicted_ms)
