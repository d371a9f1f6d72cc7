# SPDX-License-Identifier: Apache-2.0
"""A server or a fleet at a glance: what its replicas did between two looks at /metrics and /v1/models.

The one idea: a look keeps counters, and a view is the difference of two looks, so a view tells of its own seconds and
of nothing before. Answers count as in time: an accepted request that is late is no answer, see `jgr_deadline_expired`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from msgspec import UNSET, Struct, UnsetType, field
from prometheus_client.parser import text_string_to_metric_families

from jgr.serving.api import ModelList
from jgr.serving.fleet_api import Rollout

REPLICA = "replica"
"""The label of a series that says of which replica of a fleet it is."""
TOTAL = "all"
"""The name of the row of all replicas together."""
_SUMS = {
    "jgr_rejected_total": "refused",
    "jgr_deadline_expired_total": "late",
    "jgr_cancelled_total": "left",
    "jgr_device_seconds_total": "device_s",
    "jgr_queue_depth": "queue",
    "jgr_in_flight": "running",
    "process_resident_memory_bytes": "memory_bytes",
}
"""Series that are summed over all of their labels but the replica, and what they are here."""
_CHOSEN = {
    ("jgr_stage_seconds_count", "stage", "total"): "answered",
    ("jgr_prompt_tokens_total", "source", "cached"): "cached",
    ("jgr_prompt_tokens_total", "source", "computed"): "computed",
}
"""Series of which one value of a label counts."""
_TURNED_AWAY = ("jgr_fleet_held_off_total", "jgr_fleet_refused_total")
"""Series of a fleet's fronts."""


class Counts(Struct, kw_only=True):
    """What one replica has counted since it began. buckets: answers that took at most so many seconds."""

    node: str = ""
    state: str = "ready"
    versions: tuple[str, ...] = ()
    sums: dict[str, float] = field(default_factory=dict)
    buckets: dict[float, float] = field(default_factory=dict)


class Look(Struct):
    """One look. at_s: when, of a clock that does not go back. replicas: by their names. of, rollout: see ModelList.
    turned_away: requests that no replica of a fleet has seen, by the series and labels that count them."""

    at_s: float
    replicas: dict[str, Counts]
    rollout: Rollout | UnsetType | None = UNSET
    of: int | UnsetType = UNSET
    turned_away: dict[str, float] = field(default_factory=dict)


class Row(Struct, kw_only=True, frozen=True):
    """What a replica did, by the second, and what it holds. busy: runs on its lanes at the mean; cached: the share of
    prompt tokens that were not computed, null where there were none; p50_ms, p99_ms: null where nothing was answered.
    """

    replica: str
    node: str
    state: str
    versions: tuple[str, ...]
    requests_per_s: float
    goodput_per_s: float
    refused_per_s: float
    late_per_s: float
    queue: int
    running: int
    busy: float
    cached: float | None
    p50_ms: float | None
    p99_ms: float | None
    evicted_per_s: float
    memory_bytes: int


class View(Struct, kw_only=True, frozen=True):
    """All replicas over some seconds. time: UNIX time of its end, in seconds. seconds: how long it tells of. of,
    rollout: replicas there should be and the last change, at its end; see ModelList. turned_away_per_s: requests that a
    fleet's proxies and fronts refused."""

    time: float
    seconds: float
    total: Row
    replicas: list[Row]
    rollout: Rollout | UnsetType | None = UNSET
    of: int | UnsetType = UNSET
    turned_away_per_s: float = 0.0


def look(metrics: str, models: ModelList, at_s: float, name: str) -> Look:
    """A look from the text of /metrics. name: of a server that is no fleet. ValueError for what is no such text."""
    fleet = isinstance(models.replicas, list)
    replicas: dict[str, Counts] = {}
    turned_away: dict[str, float] = {}
    if isinstance(models.replicas, list):
        for one in models.replicas:
            versions = tuple(model.version for model in one.models)
            replicas[one.name] = Counts(node=one.node, state=one.state, versions=versions)
    else:
        state = next((info.state for info in models.data if info.state != "ready"), "ready")
        replicas[name] = Counts(state=state, versions=tuple(info.version for info in models.data))
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            counts = replicas.get(sample.labels.get(REPLICA, "") if fleet else name)
            if counts is not None:
                _count(counts, sample.name, sample.labels, sample.value)
            elif sample.name in _TURNED_AWAY:
                turned_away[f"{sample.name} {sample.labels}"] = sample.value
    return Look(at_s, replicas, models.rollout, models.of, turned_away)


def _count(counts: Counts, series: str, labels: Mapping[str, str], value: float) -> None:
    if series == "jgr_stage_seconds_bucket" and labels.get("stage") == "total":
        bound = float(labels["le"])
        counts.buckets[bound] = counts.buckets.get(bound, 0.0) + value
        return
    name = _SUMS.get(series)
    if name is None and series == "jgr_cache_events_total" and labels.get("event", "").endswith("_evicted"):
        name = "evicted"
    if name is None:
        chosen = ((series, label, value) for label, value in labels.items())
        name = next((_CHOSEN[one] for one in chosen if one in _CHOSEN), None)
    if name is not None:
        counts.sums[name] = counts.sums.get(name, 0.0) + value


def view(before: Look, after: Look, time: float) -> View:
    """What happened between two looks. A replica that only the later one knows, or whose metrics the earlier one lacks,
    since they came too late for it, has no rates yet."""
    seconds = max(after.at_s - before.at_s, 1e-9)
    changes = {}
    for name, counts in sorted(after.replicas.items()):
        then = before.replicas.get(name)
        changes[name] = _change(then if then is not None and then.sums else counts, counts)
    rows = [_row(name, change, seconds) for name, change in changes.items()]
    total = _row(TOTAL, _together(changes.values()), seconds)
    known = before.turned_away  # a front that was silent then would tell of its whole life
    turned_away = sum(_grown(known, name, n) for name, n in after.turned_away.items() if name in known)
    return View(
        time=time,
        seconds=seconds,
        total=total,
        replicas=rows,
        rollout=after.rollout,
        of=after.of,
        turned_away_per_s=turned_away / seconds,
    )


_HELD = ("queue", "running", "memory_bytes")
"""What is not counted, but held now."""


def _change(before: Counts, after: Counts) -> Counts:
    """What was counted since; all of it where a counter has gone back, since what counts began anew."""
    return Counts(
        node=after.node,
        state=after.state,
        versions=after.versions,
        sums={name: n if name in _HELD else _grown(before.sums, name, n) for name, n in after.sums.items()},
        buckets={bound: _grown(before.buckets, bound, n) for bound, n in after.buckets.items()},
    )


def _grown(before: Mapping[Any, float], name: Any, now: float) -> float:
    then = before.get(name, 0.0)
    return now if now < then else now - then


def _together(changes: Iterable[Counts]) -> Counts:
    whole, states = Counts(), set[str]()
    versions: dict[str, None] = {}
    nodes: set[str] = set()
    for change in changes:
        versions.update(dict.fromkeys(change.versions))
        nodes.add(change.node)
        for name, n in change.sums.items():
            whole.sums[name] = whole.sums.get(name, 0.0) + n
        for bound, n in change.buckets.items():
            whole.buckets[bound] = whole.buckets.get(bound, 0.0) + n
        states.add(change.state)
    if "ready" not in states:
        whole.state = states.pop() if len(states) == 1 else "failed"
    whole.versions, whole.node = tuple(versions), f"{len(nodes)} nodes" if len(nodes) > 1 else "".join(nodes)
    return whole


def _row(name: str, change: Counts, seconds: float) -> Row:
    def of(*names: str) -> float:
        return sum(change.sums.get(each, 0.0) for each in names)

    tokens = of("cached", "computed")
    return Row(
        replica=name,
        node=change.node,
        state=change.state,
        versions=change.versions,
        requests_per_s=of("answered", "refused", "late", "left") / seconds,
        goodput_per_s=of("answered") / seconds,
        refused_per_s=of("refused") / seconds,
        late_per_s=of("late") / seconds,
        queue=round(of("queue")),
        running=round(of("running")),
        busy=of("device_s") / seconds,
        cached=of("cached") / tokens if tokens else None,
        p50_ms=quantile(change.buckets, 0.5),
        p99_ms=quantile(change.buckets, 0.99),
        evicted_per_s=of("evicted") / seconds,
        memory_bytes=round(of("memory_bytes")),
    )


def quantile(buckets: Mapping[float, float], share: float) -> float | None:
    """The milliseconds below which that share of the answers took, as Prometheus's histogram_quantile has it; None
    where there were none. buckets: answers that took at most so many seconds, the last bound infinite."""
    bounds = sorted(buckets)
    if not bounds or buckets[bounds[-1]] <= 0:
        return None
    wanted = share * buckets[bounds[-1]]
    low_s = low = 0.0
    for bound_s in bounds:
        high = buckets[bound_s]
        if high >= wanted:
            if math.isinf(bound_s):
                return 1e3 * low_s
            return 1e3 * (low_s + (bound_s - low_s) * (wanted - low) / (high - low))
        low_s, low = bound_s, high
    return 1e3 * low_s


COLUMNS = (
    "replica", "node", "state", "version", "req/s", "good/s", "refused/s", "late/s", "queue", "running", "busy",
    "cached", "P50 ms", "P99 ms", "evicted/s", "memory",
)  # fmt: skip
LEFT = 4
"""So many of the columns are texts, which begin at the left."""


def lines(shown: View) -> list[str]:
    """A view as a table: a line of names, one for each replica, and one for all where there are several; below it what
    else a fleet tells."""
    rows = [*shown.replicas, *([shown.total] if len(shown.replicas) != 1 else [])]
    cells = [COLUMNS, *(_cells(row) for row in rows)]
    widths = [max(len(line[at]) for line in cells) for at in range(len(COLUMNS))]
    table = [
        "  ".join(
            text.ljust(width) if at < LEFT else text.rjust(width)
            for at, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]
    told = list(_told(shown))
    return [*table, "", *told] if told else table


def _told(shown: View) -> Iterator[str]:
    """What is not as it should be in a fleet, and its last change."""
    ready = sum(row.state == "ready" for row in shown.replicas)
    if shown.of is not UNSET and ready < shown.of:
        yield f"{ready} of {shown.of} replicas are ready"
    if shown.turned_away_per_s:
        yield f"proxies and fronts refuse {shown.turned_away_per_s:.1f} requests a second more"
    if shown.rollout is not UNSET and (change := _change_told(shown.rollout)):
        yield change


def _change_told(last: Rollout | None) -> str:
    """How the last change of a fleet goes; "" where there was none."""
    if last is None:
        return "last change: not known, the coordinator does not answer"
    if last.state == "never":
        return ""
    text = f"last change: {last.path}: {last.state}, {len(last.done)} of {last.of} replicas"
    if last.state == "failed":
        text += f"; {len(last.back)} went back; at {last.replica}: {last.error}"
    return text


def _cells(row: Row) -> Sequence[str]:
    def number(value: float | None, unit: str = "") -> str:
        return "-" if value is None else f"{value:.1f}{unit}"

    cached = None if row.cached is None else 100 * row.cached
    return (
        row.replica,
        row.node or "-",
        row.state,
        ", ".join(row.versions) or "-",
        number(row.requests_per_s),
        number(row.goodput_per_s),
        number(row.refused_per_s),
        number(row.late_per_s),
        str(row.queue),
        str(row.running),
        number(100 * row.busy, "%"),
        number(cached, "%"),
        number(row.p50_ms),
        number(row.p99_ms),
        number(row.evicted_per_s),
        f"{row.memory_bytes / 2**20:.0f} MiB",
    )


def events(views: Sequence[View]) -> list[tuple[float, str, str]]:
    """What changed between views, in their order: (time, kind, replica). kind: "lost", "begun", or "changed" for a
    replica that serves another version than before, as after a reload."""
    found = []
    for before, after in pairwise(views):
        old, new = ({row.replica: row for row in each.replicas} for each in (before, after))
        found += [(after.time, "lost", name) for name in old.keys() - new.keys()]
        found += [(after.time, "begun", name) for name in new.keys() - old.keys()]
        both = old.keys() & new.keys()
        found += [(after.time, "changed", name) for name in both if old[name].versions != new[name].versions]
    return sorted(found)
