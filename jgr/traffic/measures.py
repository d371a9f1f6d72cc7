# SPDX-License-Identifier: Apache-2.0
"""What a load showed: rates, goodput, latencies with their uncertainty, and refusals, as JSON values.

The one idea: a percentile is a claim about requests that were not sent too, so it is given only where the sample can
carry it. Of n answers that are alike, none is above the p-quantile with probability p^n; where that is over 1 %, the
sample may hold nothing of the tail, and there is no figure. So P99 needs 459 answers and P99.9 needs 4,603. The
intervals are those of order statistics: which two of the ranked answers have the quantile between them in 95 % of the
samples follows from the binomial law alone, whatever the latencies' law is. Both hold for answers that do not depend on
each other; those of one burst do, so that the true uncertainty is larger.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jgr.traffic.open_loop import Results
from jgr.traffic.schedule import Float64, Schedule

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}
CONFIDENCE = 0.95
TAIL_CONFIDENCE = 0.99

Mask = npt.NDArray[np.bool_]


def needed(share: float, confidence: float = TAIL_CONFIDENCE) -> int:
    """The least n with share^n < 1 - confidence: so many answers show what is above the quantile of this share."""
    return math.floor(math.log(1 - confidence) / math.log(share)) + 1


def quantile(ranked: Float64, share: float) -> float:
    """The least of the ranked values that this share of them does not exceed."""
    # What rounding adds to n x share must not make the next rank of a whole number.
    return float(ranked[max(0, math.ceil(len(ranked) * share - 1e-9) - 1)])


def interval(ranked: Float64, share: float, confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    """Two of the ranked values that have the quantile between them with at least this probability.

    None where the sample is too small for two such values.
    """
    from scipy.stats import binom

    n, outside = len(ranked), (1 - confidence) / 2
    low = int(binom.ppf(outside, n, share))  # 1 is the least value
    high = int(binom.ppf(1 - outside, n, share)) + 1
    if low < 1 or high > n:
        return None
    return float(ranked[low - 1]), float(ranked[high - 1])


def share_bounds(hits: int, n: int, confidence: float) -> tuple[float, float]:
    """Clopper and Pearson's bounds of a share, each of which holds with this probability."""
    from scipy.stats import beta

    low = 0.0 if hits == 0 else float(beta.ppf(1 - confidence, hits, n - hits + 1))
    high = 1.0 if hits == n else float(beta.ppf(confidence, hits + 1, n - hits))
    return low, high


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float] | None:
    """p50, p90, p99 (the least value that this share does not exceed) and max, in ms; None if there are no values."""
    if not len(seconds):
        return None
    ranked = np.sort(np.asarray(seconds, np.float64))
    values = {name: quantile(ranked, QUANTILES[name]) for name in ("p50", "p90", "p99")}
    return {name: _ms(value) for name, value in {**values, "max": float(ranked[-1])}.items()}


def in_time(schedule: Schedule, results: Results, slo_ms: float) -> Mask:
    """Which requests were answered 200 within their own deadline, or within slo_ms where they have none, [n]."""
    limits_ms = np.array([slo_ms if r.deadline_ms is None else r.deadline_ms for r in schedule.requests])
    latency_ms = (results.end_s - results.due_s) * 1e3
    return _answered(results) & (latency_ms <= limits_ms[schedule.which])


def after(schedule: Schedule, results: Results, start_s: float) -> tuple[Schedule, Results]:
    """A run without the requests that were due before so many seconds, while connections were opened; times count from
    then on."""
    kept = schedule.at_s >= start_s
    due_s, began_s, sent_s, end_s = (
        times[kept] - start_s for times in (results.due_s, results.began_s, results.sent_s, results.end_s)
    )
    return (
        Schedule(
            schedule.at_s[kept] - start_s,
            schedule.which[kept],
            schedule.requests,
            max(0.0, schedule.length_s - start_s),
        ),
        Results(due_s, began_s, sent_s, end_s, results.ended[kept], results.verdicts),
    )


def summarize(schedule: Schedule, results: Results, slo_ms: float) -> dict[str, Any]:
    """The report of a run of at least one request.

    latency_ms covers the answers with status 200, lateness_ms how late the client turned to requests. offered_per_s and
    goodput_per_s are over the seconds that the schedule stands for, achieved_per_s is the answers with status 200 over
    the time until the last of them. deadline_ms: the requests' own, where all have the same; slo_ms counts for those
    without one. latency_95_ms has the intervals. kinds and classes break the same figures down.
    """
    good, answered = in_time(schedule, results, slo_ms), _answered(results)
    elapsed_s = float(results.end_s.max())
    seconds = schedule.length_s or elapsed_s
    deadlines = {request.deadline_ms for request in schedule.requests}
    until_s = max(seconds, float(results.end_s[answered].max(initial=0.0)))
    return {
        **_figures(results, np.ones(len(schedule), bool), good, seconds),
        "deadline_ms": deadlines.pop() if len(deadlines) == 1 else None,
        "slo_ms": slo_ms,
        "elapsed_s": round(elapsed_s, 3),
        "offered_per_s": None if schedule.offered_per_s is None else round(schedule.offered_per_s, 3),
        "achieved_per_s": round(float(answered.sum()) / until_s, 3),
        "lateness_ms": percentiles_ms((results.began_s - results.due_s).clip(0.0).tolist()),
        "waited_for_connection": int((results.sent_s - results.began_s > 1e-3).sum()),
        "connection_wait_max_ms": _ms(float((results.sent_s - results.began_s).max())),
        "kinds": _by(schedule, results, good, seconds, "kind"),
        "classes": _by(schedule, results, good, seconds, "group"),
    }


def _answered(results: Results) -> Mask:
    is_200 = np.array([verdict.status == "200" for verdict in results.verdicts], bool)
    return is_200[results.ended]


def _by(schedule: Schedule, results: Results, good: Mask, seconds: float, field: str) -> dict[str, Any]:
    names = [getattr(request, field) for request in schedule.requests]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    of = np.array([numbers[name] for name in names])[schedule.which]
    masks = {name: of == number for name, number in numbers.items()}
    return {name: _figures(results, mask, good, seconds) for name, mask in masks.items() if mask.any()}


def _figures(results: Results, mask: Mask, good: Mask, seconds: float) -> dict[str, Any]:
    counts = Counter(results.ended[mask].tolist())
    ends = {results.verdicts[number]: count for number, count in counts.items()}
    answered, failed, errors = Counter[str](), Counter[str](), dict[str, dict[str, int]]()
    for (status, reason), count in sorted(ends.items()):
        (answered if status.isdigit() else failed)[status] += count
        if status.isdigit() and not status.startswith("2"):
            errors.setdefault(status, {})[reason or "unknown"] = count
    latencies_s = (results.end_s - results.due_s)[mask & _answered(results)]
    return {
        "sent": int(mask.sum()),
        "answered": dict(answered),
        "failed": dict(failed),
        "errors": errors,
        "in_time": int((mask & good).sum()),
        "goodput_per_s": round(float((mask & good).sum()) / seconds, 3),
        **_latencies(np.sort(latencies_s)),
    }


def _latencies(ranked: Float64) -> dict[str, Any]:
    """latency_ms and latency_95_ms of ranked latencies in seconds: null for a percentile that these cannot carry."""
    if not len(ranked):
        return {"latency_ms": None, "latency_95_ms": None}
    values: dict[str, float | None] = {}
    intervals: dict[str, list[float] | None] = {}
    for name, share in QUANTILES.items():
        carried = len(ranked) >= needed(share)
        values[name] = _ms(quantile(ranked, share)) if carried else None
        bounds = interval(ranked, share) if carried else None
        intervals[name] = None if bounds is None else [_ms(bound) for bound in bounds]
    return {"latency_ms": {**values, "max": _ms(float(ranked[-1]))}, "latency_95_ms": intervals}


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
