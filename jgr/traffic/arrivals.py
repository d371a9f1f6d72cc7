# SPDX-License-Identifier: Apache-2.0
"""When requests arrive: processes that are drawn, and the arrivals of a log at its own pace or at another rate.

The one idea: each process is a pure function of a random generator, a rate and a duration, and gives the times in
[0, duration), ascending. Its mean rate is the rate, from the first second on: none of them begins with an arrival that
it would not have later.

A text names a process with its numbers, separated by colons:

- `constant`: one every 1 / rate seconds.
- `poisson`: independent of each other, as of many users.
- `gamma:CV`: gaps of a Gamma law with this coefficient of variation: 1 is poisson, more is in bursts, less is regular.
- `diurnal:PERIOD_S:SWING`: the rate is rate x (1 + SWING x sin), over a period that stands for a day.
- `flash:EVERY_S:LENGTH_S:FACTOR`: flash crowds: in the middle of every EVERY_S seconds, LENGTH_S seconds at FACTOR
  times the rate. Here `rate` is the rate between the crowds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from jgr.traffic.schedule import Float64, LoadError

FORMS: Mapping[str, tuple[str, ...]] = {
    "constant": (),
    "poisson": (),
    "gamma": ("CV",),
    "diurnal": ("PERIOD_S", "SWING"),
    "flash": ("EVERY_S", "LENGTH_S", "FACTOR"),
}
MAX_FACTOR = 1000.0


def constant(rng: np.random.Generator, rate: float, duration_s: float) -> Float64:
    """A request every 1 / rate seconds; `rng` is not used."""
    times: Float64 = np.arange(math.ceil(rate * duration_s)) / rate
    return times[times < duration_s]


def poisson(rng: np.random.Generator, rate: float, duration_s: float) -> Float64:
    """A Poisson process: given their number, its arrivals are independent and uniform."""
    return np.sort(rng.uniform(0.0, duration_s, rng.poisson(rate * duration_s)))


def gamma(rng: np.random.Generator, rate: float, duration_s: float, cv: float) -> Float64:
    """A renewal process whose gaps have a Gamma law with mean 1 / rate and coefficient of variation cv.

    It has gone on for ever at time 0: the first gap is what is left of one that time 0 fell into, and such gaps are
    long ones (their law is that of a Gamma with shape + 1). So the mean rate is `rate` in every interval.
    """
    shape, scale = cv**-2, cv**2 / rate
    now = float(rng.uniform() * rng.gamma(shape + 1, scale))
    parts = [np.array([now])]
    block = max(64, math.ceil(rate * duration_s))
    while now < duration_s:
        parts.append(now + np.cumsum(rng.gamma(shape, scale, block)))
        now = float(parts[-1][-1])
    times = np.concatenate(parts)
    return times[times < duration_s]


def diurnal(
    rng: np.random.Generator, rate: float, duration_s: float, period_s: float, swing: float
) -> Float64:
    """A Poisson process with the rate: rate x (1 + swing x sin(2 pi t / period_s)); swing is from 0 to 1."""

    def share(times: Float64) -> Float64:
        return (1 + swing * np.sin(2 * math.pi * times / period_s)) / (1 + swing)

    return _thinned(rng, poisson(rng, rate * (1 + swing), duration_s), share)


def flash(
    rng: np.random.Generator, rate: float, duration_s: float, every_s: float, length_s: float, factor: float
) -> Float64:
    """A Poisson process at `rate`; in the middle of every every_s seconds, length_s seconds at factor x rate."""
    most = max(1.0, factor)
    begins_s = (every_s - length_s) / 2

    def share(times: Float64) -> Float64:
        since = np.mod(times, every_s) - begins_s
        crowd = (since >= 0) & (since < length_s)
        return np.where(crowd, factor, 1.0) / most

    return _thinned(rng, poisson(rng, rate * most, duration_s), share)


def _thinned(rng: np.random.Generator, times: Float64, share: Callable[[Float64], Float64]) -> Float64:
    """Keep each arrival with its probability: a Poisson process with that share of the rate (Lewis and Shedler)."""
    return times[rng.uniform(size=len(times)) < share(times)]


@dataclass(frozen=True)
class Process:
    """A process and its numbers. text: as it was written."""

    text: str
    name: str
    numbers: tuple[float, ...]

    def times(self, rng: np.random.Generator, rate: float, duration_s: float) -> Float64:
        """The times in [0, duration_s), ascending seconds, at a mean of `rate` per second; flash: see there."""
        return _DRAWN_BY[self.name](rng, rate, duration_s, *self.numbers)

    @property
    def period_s(self) -> float:
        """After so long the rate is as at the beginning; 0: it is always the same."""
        return self.numbers[0] if self.name in ("diurnal", "flash") else 0.0

    @property
    def mean_factor(self) -> float:
        """The mean rate over whole periods, divided by `rate`."""
        if self.name != "flash":
            return 1.0
        every_s, length_s, factor = self.numbers
        return 1 + (factor - 1) * length_s / every_s


def parse_process(text: str) -> Process:
    """Read a process as the file's docstring says. Raises LoadError, which says what is wrong."""
    name, *rest = text.split(":")
    if name not in FORMS:
        raise LoadError(f"there are no arrivals '{name}'; there are: {', '.join(map(_form, FORMS))}")
    try:
        numbers = tuple(float(number) for number in rest)
    except ValueError:
        numbers = (math.nan,)
    if len(numbers) != len(FORMS[name]) or not all(map(math.isfinite, numbers)):
        raise LoadError(
            f"arrivals '{text}' must look like {_form(name)}, with a number for each capital word"
        )
    if name in _ALLOWED:
        holds, rule = _ALLOWED[name]
        if not holds(*numbers):
            raise LoadError(f"arrivals '{text}': {rule}")
    return Process(text, name, numbers)


_DRAWN_BY: Mapping[str, Callable[..., Float64]] = {
    "constant": constant,
    "poisson": poisson,
    "gamma": gamma,
    "diurnal": diurnal,
    "flash": flash,
}
_ALLOWED: Mapping[str, tuple[Callable[..., bool], str]] = {
    "gamma": (lambda cv: 0.01 <= cv <= 100, "CV is from 0.01 to 100"),
    "diurnal": (
        lambda period_s, swing: period_s > 0 and 0 <= swing <= 1,
        "PERIOD_S is above 0 and SWING from 0 to 1",
    ),
    "flash": (
        lambda every_s, length_s, factor: 0 < length_s < every_s and 0 < factor <= MAX_FACTOR,
        f"LENGTH_S is above 0 and below EVERY_S, and FACTOR above 0 and at most {MAX_FACTOR:g}",
    ),
}
"""Whether a process's numbers are allowed, and the rule in words."""


def _form(name: str) -> str:
    return ":".join((name, *FORMS[name]))


def replayed(
    times_s: Float64, rate: float | None, duration_s: float | None, max_requests: int
) -> tuple[Float64, float]:
    """The arrivals of a log, from 0 on, and the seconds that they stand for.

    times_s: [n >= 1] ascending. Without a rate the log keeps its pace and is cut at duration_s. With one, its first
    rate x duration_s arrivals (all, without a duration) are stretched or compressed alike, so that their mean gap is
    1 / rate: the offered rate is the rate, and the shape is the log's. Raises LoadError where they are more than
    max_requests, or have no two different times that could be scaled.
    """
    if rate is None:
        kept = times_s if duration_s is None else times_s[times_s < duration_s]
        gaps = len(kept) - 1
        length_s = float(kept[-1] - kept[0]) * (1 + 1 / gaps) if gaps > 0 else 0.0
        if duration_s is not None and times_s[-1] >= duration_s:
            length_s = duration_s
    else:
        wanted = len(times_s) if duration_s is None else max(1, round(rate * duration_s))
        kept = times_s[:wanted] - times_s[0]
        gaps = len(kept) - 1
        if gaps > 0 and kept[-1] <= 0:
            raise LoadError(f"the first {len(kept)} arrivals come at one time and cannot be scaled to a rate")
        length_s = len(kept) / rate
        kept = kept * (gaps / rate / kept[-1]) if gaps > 0 else kept
    if len(kept) > max_requests:
        raise LoadError(f"that holds more than {max_requests} requests: give a --duration or --max_requests")
    return kept, length_s
