# SPDX-License-Identifier: Apache-2.0
"""The highest rate at which a server answers a share of its requests in time, by bisection.

The one idea: noise is one-sided. Other work on the machine makes answers late and never early, so a round of requests
that holds is believed, and one that does not hold is sent again, once. A round holds where the *lower* bound of its
share in time (Clopper and Pearson, with .975, so that both rounds together have .95) is at least the share. So a rate
that is reported has shown the share with confidence; the price is that rates just below the true limit are refused.

The bracket grows by factors of 2 from the first rate, up or down, until one rate holds and one does not; then its
geometric middle is tried until the two are within the precision or the probes are used up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from jgr.traffic.measures import share_bounds
from jgr.traffic.schedule import LoadError

ROUNDS = 2
CONFIDENCE = 0.95
MISSES = 1
"""How many late answers the shortest round may have and still hold."""
GROWTH = 2.0


class Round(NamedTuple):
    """One round of requests at a rate. figures: what else a report tells of it."""

    sent: int
    in_time: int
    figures: dict[str, Any]


class Probe(NamedTuple):
    """A rate that was tried. holds: what the last round decided."""

    rate: float
    holds: bool
    rounds: tuple[Round, ...]


class Found(NamedTuple):
    """The outcome of a search. capacity: the highest rate that held; None if none did.

    fails_at: the lowest rate above it that did not hold; None where every rate held. probes: all that was tried.
    """

    capacity: float | None
    fails_at: float | None
    probes: tuple[Probe, ...]


def holds(round_: Round, share: float) -> bool:
    """Whether the round shows that at least this share of the requests is answered in time."""
    if round_.sent == 0:
        return False
    low, _ = share_bounds(round_.in_time, round_.sent, 1 - (1 - CONFIDENCE) / ROUNDS)
    return low >= share


def requests_needed(share: float) -> int:
    """The fewest requests of a round that can hold with MISSES late answers."""
    if not 0 < share < 1:
        raise LoadError(f"the share must be above 0 and below 1, not {share:g}")
    low, high = 1, 1
    while not holds(Round(high, high - MISSES, {}), share):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(Round(middle, middle - MISSES, {}), share) else (middle, high)
    return high


def find(
    measure: Callable[[float], Round],
    first: float,
    share: float,
    *,
    most_probes: int,
    precision: float = 0.05,
    lowest: float = 0.0,
) -> Found:
    """Search for the capacity. measure: sends one round at a rate. precision: the bracket's width over its lower end.

    Tries at most most_probes rates, and each of them in at most ROUNDS rounds. lowest: beside the first rate, none
    below this is tried: of a server that never holds, the rounds would become ever longer.
    """
    probes: list[Probe] = []
    held, failed = 0.0, math.inf
    while len(probes) < most_probes and not (held > 0 and failed / held <= 1 + precision):
        rate = first if not probes else _next(held, failed)
        if probes and rate < lowest:
            break
        probe = _probe(measure, rate, share)
        if probe.holds:
            held = rate
        else:
            failed = rate
        probes.append(probe)
    return Found(held or None, failed if failed < math.inf else None, tuple(probes))


def _probe(measure: Callable[[float], Round], rate: float, share: float) -> Probe:
    rounds: list[Round] = []
    while len(rounds) < ROUNDS and not (rounds and holds(rounds[-1], share)):
        rounds.append(measure(rate))
    return Probe(rate, holds(rounds[-1], share), tuple(rounds))


def _next(held: float, failed: float) -> float:
    """The rate to try after one held, or none (0), and one did not, or all did (infinity)."""
    if failed == math.inf:
        return held * GROWTH
    return failed / GROWTH if held == 0 else math.sqrt(held * failed)
