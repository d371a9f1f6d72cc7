# SPDX-License-Identifier: Apache-2.0
"""Profiles of programs, and the cost model that is fitted to them (SIM-10): one way for decoders and scorers.

A trial is a run that can be repeated. All trials run in turns, in another order each round, so that whatever disturbs
the machine hits all alike; each one's time is its median. The time of a run is what it takes alone, from its launch to
what its collect gives. Of that, the host works in the launch, which packs and dispatches, and in the part of the
collect that follows when the device is done. Its cost is fitted to runs and requests. On a device that computes within
the dispatch, as XLA's CPU does for tiny programs, the host's part holds that as well.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import msgspec
import numpy as np

from jgr.models.costs import Cost
from jgr.serving.engine.contract import Progress
from jgr.serving.policies import costs
from jgr.serving.policies.costs import CostModel, FittedCost, Point

ROUNDS = 7
_AT_LEAST_S, _MOST_CALLS = 2e-3, 5
"""A trial is called several times in a turn where it is that short: its first call finds others' data in the caches."""


@dataclass(frozen=True, eq=False)
class Trial:
    """A run of a warmed-up program. kind: of work, whose trials are fitted together. requests: that the run answers.

    outputs: the arrays to wait for in what `launch` gives.
    """

    kind: str
    label: str
    cost: Cost
    requests: int
    launch: Callable[[], Any]
    collect: Callable[[Any], Any]
    outputs: Callable[[Any], Any] = lambda pending: pending


class Timed(NamedTuple):
    """A trial's times. seconds: the median of its runs. spread: how far apart the quartiles are, as a share of it.
    host_s: the median of the host's part."""

    kind: str
    label: str
    cost: Cost
    requests: int
    seconds: float
    spread: float
    host_s: float


Clock = Callable[[], float]


def measure(
    trials: Sequence[Trial],
    progress: Progress = lambda done, total, label: None,
    rounds: int = ROUNDS,
    clock: Clock = time.perf_counter,
    seed: int = 0,
) -> list[Timed]:
    """Time the trials, in order. A round before those that count warms everything up."""
    runs: list[list[tuple[float, float]]] = [[] for _ in trials]
    calls = [1] * len(trials)
    order = np.random.default_rng(seed)
    total = (rounds + 1) * len(trials)
    for turn in range(rounds + 1):
        for done, at in enumerate(order.permutation(len(trials)).tolist(), 1):
            trial = trials[at]
            found = [_timed(trial, clock) for _ in range(calls[at])]
            if turn:
                runs[at] += found[-1:] if len(found) == 1 else found[1:]
            else:
                again = _timed(trial, clock)[0]
                calls[at] = max(1, min(_MOST_CALLS, math.ceil(_AT_LEAST_S / max(again, 1e-9))))
            progress(turn * len(trials) + done, total, f"{trial.kind} {trial.label}")
    return [_summary(trial, found) for trial, found in zip(trials, runs, strict=True)]


def _timed(trial: Trial, clock: Clock) -> tuple[float, float]:
    """Seconds of a run, and of the host in it."""
    start = clock()
    pending = trial.launch()
    launched = clock()
    jax.block_until_ready(trial.outputs(pending))
    ready = clock()
    trial.collect(pending)
    end = clock()
    return end - start, (launched - start) + (end - ready)


def _summary(trial: Trial, runs: Sequence[tuple[float, float]]) -> Timed:
    seconds, host = np.array(runs).T
    low, median, high = np.percentile(seconds, (25, 50, 75)).tolist()
    return Timed(
        trial.kind,
        trial.label,
        trial.cost,
        trial.requests,
        median,
        (high - low) / median,
        float(np.median(host)),
    )


def fit(timed: Sequence[Timed], family: str) -> CostModel:
    """The cost model of the points: for each kind, of the terms that its points tell apart.

    The constant of a host's part is seconds of a run, its coefficient seconds of each request.
    """
    kinds: dict[str, FittedCost] = {}
    hosts: dict[str, FittedCost] = {}
    for kind in dict.fromkeys(one.kind for one in timed):
        own = [one for one in timed if one.kind == kind]
        kinds[kind] = _fit([Point(one.cost._asdict(), one.seconds) for one in own], Cost._fields)
        hosts[kind] = _fit([Point({"requests": one.requests}, one.host_s) for one in own], ("requests",))
    return CostModel(family, _device(), kinds, hosts)


def _device() -> str:
    """The backend, and the kind of its devices where that says more."""
    backend, kind = jax.default_backend(), jax.devices()[0].device_kind
    return backend if kind == backend else f"{backend}: {kind}"


def _fit(points: Sequence[Point], terms: Sequence[str]) -> FittedCost:
    told = costs.telling(points, terms)[: max(0, len(points) - 2)]  # each fold has to tell them too
    return costs.fit(points, told, costs.FOLDS if len(points) > 1 else 0)


def choose(axes: Sequence[Sequence[int]], most: int, seed: int = 0) -> list[tuple[int, ...]]:
    """At most `most` combinations of the axes' values, ascending: the corners, and others by chance.

    A fit predicts between points far better than beyond them, so the corners come first.
    """
    every = {tuple(axis[i] for axis, i in zip(axes, at, strict=True)) for at in np.ndindex(*map(len, axes))}
    corners = sorted(x for x in every if all(v in (a[0], a[-1]) for v, a in zip(x, axes, strict=True)))
    others = sorted(every - set(corners))
    order = np.random.default_rng(seed).permutation(len(others)).tolist()
    return sorted([*corners, *(others[i] for i in order)][:most])


def spaced(most: int, number: int, least: int = 1, unit: int = 1) -> tuple[int, ...]:
    """At most `number` values up to `most`, each about twice the one before, multiples of `unit`, from `least` on."""
    values = {most}
    for halvings in range(1, number):
        values.add(max(least, (most >> halvings) // unit * unit, unit))
    return tuple(sorted(min(value, most) for value in values))


def report(timed: Sequence[Timed], model: CostModel) -> Mapping[str, Any]:
    """The model, as its file has it, and what was measured, ready for JSON.

    spread: the median of the trials', which says how quiet the machine was.
    """
    return {
        **msgspec.to_builtins(model),
        "spread": float(np.median([one.spread for one in timed])),
        "points": [{**one._asdict(), "cost": one.cost._asdict()} for one in timed],
    }
