# SPDX-License-Identifier: Apache-2.0
"""Runs the variants of a system in turns over the same requests: what each counted, answered, and took.

The one idea: counts and answers hold on any machine, times only where nobody else used it. So every variant's part of a
round is judged by what other processes did meanwhile, and a round counts for times only where all of its parts were
quiet. The first round fills caches and counts for no time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from jgr.ablation import counts
from jgr.ablation.system import ALL, NONE, System, Variant
from jgr.ablation.traffic import Request
from jgr.evaluation.bootstrap import interval, resampled_means
from jgr.evaluation.machine import CpuTimes, cpu_times, is_quiet, others_seconds
from jgr.serving.api import Answer

TOLERANCE = 1e-4
"""By how much a score may differ between variants whose answers must be the same: rounding, in float32."""
RESAMPLES = 2000
LEAST_WAVES = 6
"""With fewer there is no interval of 95 %: even the range of five values misses their law's median in 1 of 16 cases."""

Waves = Sequence[Sequence[Request]]
Progress = Callable[[int, int, str], None]


class Engine(Protocol):
    """The part of `jgr.Engine` that is used."""

    @property
    def rank(self) -> Callable[..., Any]: ...
    @property
    def recommend(self) -> Callable[..., Any]: ...
    def metrics(self) -> str: ...
    def close(self) -> None: ...


@dataclass
class Run:
    """What a variant did. answers: to all requests, in their order. seconds: of each wave of each round.

    quiet: whether each round was. counts: see counts.COUNTS.
    """

    variant: Variant
    answers: list[Answer] = field(default_factory=list)
    seconds: list[list[float]] = field(default_factory=list)
    quiet: list[bool] = field(default_factory=list)
    others_cores: list[float] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """How a variant's answers differ from those without any mechanism.

    largest: of two scores of one item, or, for recommend, of one place. items: answers with other items, or in another
    order. reordered: answers whose prompt had another order than with all on; they are compared with one in their own.
    """

    largest: float
    items: int
    reordered: int
    allowed: str

    @property
    def is_right(self) -> bool:
        """Whether the answers are what they must be."""
        return bool(self.allowed) or self.largest <= TOLERANCE


@dataclass(frozen=True)
class Times:
    """A variant's time for a request, in ms: the mean, and with the ends of its 95 % interval. over_all: of that with
    all on, from the same waves."""

    mean_ms: float
    interval_ms: tuple[float, float]
    over_all: float
    interval_over_all: tuple[float, float]


@dataclass(frozen=True)
class Found:
    """What an ablation found. times: by variant; None: not timed, for the reason in `untimed`. requests: of each
    variant; timed: of those, the ones that count for times."""

    system: System
    runs: Sequence[Run]
    differences: Mapping[str, Difference]
    times: Mapping[str, Times] | None
    untimed: str
    requests: int
    timed: int


def measure(
    system: System,
    variants: Sequence[Variant],
    make: Callable[[Variant], Engine],
    rounds: Sequence[Waves],
    progress: Progress = lambda done, total, status: None,
    sample: Callable[[], CpuTimes] = cpu_times,
    clock: Callable[[], float] = time.perf_counter,
) -> Found:
    """Make an engine of each variant and ask all the same. rounds: as traffic.waves gives them.

    Every engine is closed at the end, however that comes. sample: of the processors' time; an OSError says that the
    system does not tell.
    """
    waves = sum(map(len, rounds))
    total = len(variants) * (1 + waves) + 1
    done = 0

    def step(status: str, steps: int = 1) -> None:
        nonlocal done
        done += steps
        progress(done, total, status)

    progress(0, total, "")
    runs = {variant.name: Run(variant) for variant in variants}
    with ExitStack() as opened:
        engines = {}
        for variant in variants:
            engines[variant.name] = make(variant)
            opened.callback(engines[variant.name].close)
            step(f"{variant.name}: compiled")
        for number, parts in enumerate(rounds):
            order = list(variants) if number % 2 == 0 else list(reversed(variants))
            for variant in order:
                _round(system, engines[variant.name], runs[variant.name], parts, sample, clock)
                step(variant.name, len(parts))
        for name, run in runs.items():
            run.counts = counts.read(engines[name].metrics(), system.counts)
        asked = [request for parts in rounds for wave in parts for request in wave]
        differences = compare(system, list(runs.values()), engines[NONE], asked)
        step("compared")
    timed_rounds, untimed = _timed(list(runs.values()), rounds)
    times = None if untimed else _times(list(runs.values()), rounds, timed_rounds)
    timed = sum(len(wave) for number in timed_rounds for wave in rounds[number])
    return Found(system, list(runs.values()), differences, times, untimed, len(asked), timed)


def _round(
    system: System,
    engine: Engine,
    run: Run,
    parts: Waves,
    sample: Callable[[], CpuTimes],
    clock: Callable[[], float],
) -> None:
    before = _sampled(sample)
    seconds = []
    for wave in parts:
        start = clock()
        run.answers += ask(system, engine, wave)
        seconds.append(clock() - start)
    after = _sampled(sample)
    run.seconds.append(seconds)
    if before is None or after is None:
        run.quiet.append(False)
        return
    run.quiet.append(is_quiet(before, after))
    run.others_cores.append(others_seconds(before, after) / max(after.at_s - before.at_s, 1e-9))


def _sampled(sample: Callable[[], CpuTimes]) -> CpuTimes | None:
    try:
        return sample()
    except OSError:
        return None


def ask(system: System, engine: Engine, wave: Sequence[Request]) -> list[Answer]:
    """The answers to requests that go out together."""
    call = engine.rank if system.kind == "rank" else engine.recommend
    return list(call([request.history for request in wave], **_columns(wave)))


def _columns(wave: Sequence[Request]) -> dict[str, Any]:
    """The fields of several requests as the engine takes them: one value for all, or a list of theirs."""
    each = [request.more() for request in wave]
    return {name: each[0][name] if name == "top_k" else [fields[name] for fields in each] for name in each[0]}


def compare(
    system: System, runs: Sequence[Run], without: Engine, asked: Sequence[Request]
) -> dict[str, Difference]:
    """Compare the answers of all variants with those of NONE, in the same order of the prompt.

    without: the engine of NONE, which is asked again where another variant chose the other order.
    """
    by_name = {run.variant.name: run for run in runs}
    references: list[dict[str, Answer]] = [{answer.usage.layout: answer} for answer in by_name[NONE].answers]
    found = {}
    for run in runs:
        largest, items, reordered = 0.0, 0, 0
        for at, answer in enumerate(run.answers):
            layout = answer.usage.layout
            reordered += layout != by_name[ALL].answers[at].usage.layout
            known = references[at]
            if not system.orders:
                reference = next(iter(known.values()))
            else:
                if layout not in known:
                    request = asked[at]
                    known[layout] = without.rank(request.history, layout=layout, **request.more())
                reference = known[layout]
            largest = max(largest, difference(system, answer, reference))
            items += [item.item_id for item in answer.items] != [item.item_id for item in reference.items]
        found[run.variant.name] = Difference(
            largest, items, reordered if system.orders else 0, run.variant.differs
        )
    return found


def difference(system: System, answer: Answer, reference: Answer) -> float:
    """The largest difference of two answers' scores: of each candidate (rank), or of each place (recommend), where
    items of equal score may change places. Infinity where one has other candidates, or more places, than the other,
    or a score is not finite."""
    if len(answer.items) != len(reference.items):
        return float("inf")
    if system.kind == "recommend":
        pairs = [(one.score, other.score) for one, other in zip(answer.items, reference.items, strict=True)]
    else:
        scores = {item.item_id: item.score for item in reference.items}
        if {item.item_id for item in answer.items} != set(scores):
            return float("inf")
        pairs = [(item.score, scores[item.item_id]) for item in answer.items]
    apart = [abs(one - other) for one, other in pairs]
    return max(apart, default=0.0) if all(map(math.isfinite, apart)) else float("inf")


def _timed(runs: Sequence[Run], rounds: Sequence[Waves]) -> tuple[list[int], str]:
    """The rounds that count for times, and why there is none."""
    later = range(1, len(runs[0].quiet))
    quiet = [number for number in later if all(run.quiet[number] for run in runs)]
    waves = sum(len(rounds[number]) for number in quiet)
    if waves >= LEAST_WAVES:
        return quiet, ""
    if quiet:
        return (
            [],
            f"not timed: {waves} quiet waves of requests (--concurrency), an interval takes {LEAST_WAVES}",
        )
    others = [cores for run in runs for cores in run.others_cores[1:]]
    if not later:
        return [], "not timed: a single round, which fills the caches"
    if not others:
        return [], "not timed: this system does not tell what other processes do"
    return [], f"not timed: busy (other processes kept {max(others):.1f} cores busy)"


def _times(runs: Sequence[Run], rounds: Sequence[Waves], timed: Sequence[int]) -> dict[str, Times]:
    sizes = np.array([len(wave) for number in timed for wave in rounds[number]], np.float64)
    per_request: npt.NDArray[np.float64] = np.stack(
        [np.array([s for number in timed for s in run.seconds[number]]) / sizes * 1e3 for run in runs], axis=1
    )  # [waves, variants]
    means = resampled_means(per_request, RESAMPLES, seed=0)
    base = next(at for at, run in enumerate(runs) if run.variant.name == ALL)
    ratios = means / means[:, base : base + 1]
    middle = per_request.mean(axis=0)
    (low, high), (ratio_low, ratio_high) = interval(means), interval(ratios)
    return {
        run.variant.name: Times(
            float(middle[at]),
            (float(low[at]), float(high[at])),
            float(middle[at] / middle[base]),
            (float(ratio_low[at]), float(ratio_high[at])),
        )
        for at, run in enumerate(runs)
    }
