# SPDX-License-Identifier: Apache-2.0
"""What routing does, as Prometheus series of a front's process, beside those of the replicas."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator

from prometheus_client import Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from jgr.serving.engine.metrics import TEXTS, Registry

DECISIONS = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 1e-1)
ENDS = ("answered", "lost", "late")


class Series:
    """The series of one front. front: its name. clock: seconds that never go back. Ray may run its router in a thread
    of its own, so all may be called from any thread."""

    def __init__(self, front: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._front, self._clock, self._lock = front, clock, threading.Lock()
        self._heard_s: dict[str, float] = {}
        self._tokens: dict[str, float] = {}
        self._pairs: set[tuple[str, str]] = set()  # replica and rule of each series of `_routed`
        registry = self._registry = Registry()

        def counter(name: str, *labels: str) -> Counter:
            return Counter(name, TEXTS[name], ("front", *labels), registry=registry)

        self._routed = counter("jgr_fleet_routed", "replica", "rule")
        attempts = counter("jgr_fleet_attempts", "outcome")
        self._attempts = {end: attempts.labels(front, end) for end in ENDS}
        self._retries = counter("jgr_fleet_retries").labels(front)
        self._refused = counter("jgr_fleet_refused").labels(front)
        self._held_off = counter("jgr_fleet_held_off").labels(front)
        name = "jgr_fleet_decision_seconds"
        self._decisions = Histogram(
            name, TEXTS[name], ("front",), registry=registry, buckets=DECISIONS
        ).labels(front)
        registry.register(_Gauges(self))

    def become(self, names: Collection[str]) -> None:
        """Tell of these replicas, which are there now, and of no others."""
        with self._lock:
            now_s = self._clock()
            self._heard_s = {name: self._heard_s.get(name, now_s) for name in names}
            self._tokens = {name: self._tokens.get(name, 0.0) for name in names}
            gone = {pair for pair in self._pairs if pair[0] not in names}
            self._pairs -= gone
        for replica, rule in gone:
            self._routed.remove(self._front, replica, rule)

    def heard(self, name: str) -> None:
        """A report of a replica has come."""
        with self._lock:
            self._heard_s[name] = self._clock()

    def flies(self, name: str, tokens: float) -> None:
        """So many tokens are in flight at a replica."""
        with self._lock:
            if name in self._tokens:
                self._tokens[name] = tokens

    def decided(self, seconds: float) -> None:
        """A choice took so long."""
        self._decisions.observe(seconds)

    def routed(self, name: str, rule: str) -> None:
        """A replica has taken an attempt."""
        with self._lock:
            self._pairs.add((name, rule))
        self._routed.labels(self._front, name, rule).inc()

    def began(self, number: int) -> None:
        """An attempt begins, after so many others at its request."""
        if number:
            self._retries.inc()

    def refused(self) -> None:
        """A key's quota was used up."""
        self._refused.inc()

    def held_off(self, count: int) -> None:
        """A proxy tells that it refused so many, since more would have been late."""
        self._held_off.inc(count)

    def ended(self, outcome: str) -> None:
        """An attempt has ended as one of ENDS."""
        self._attempts[outcome].inc()

    def ages(self) -> dict[str, float]:
        """Seconds since each replica's last report."""
        with self._lock:
            now_s = self._clock()
            return {name: now_s - heard_s for name, heard_s in self._heard_s.items()}

    def nodes(self) -> tuple[str, ...]:
        """The replicas that are there."""
        with self._lock:
            return tuple(self._heard_s)

    def tokens(self) -> dict[str, float]:
        """Tokens in flight at each replica."""
        with self._lock:
            return dict(self._tokens)

    @property
    def front(self) -> str:
        return self._front

    def families(self) -> list[Metric]:
        """All of them, as the client library has them."""
        return list(self._registry.collect())

    def text(self) -> str:
        """All of them, in the text format of Prometheus."""
        return generate_latest(self._registry).decode()


class _Gauges:
    """What is so when it is asked for: the ages of the reports, and the tokens in flight."""

    def __init__(self, series: Series) -> None:
        self._series = series

    def collect(self) -> Iterator[Metric]:
        for name, found in (
            ("jgr_fleet_report_age_seconds", self._series.ages()),
            ("jgr_fleet_tokens_in_flight", self._series.tokens()),
        ):
            family = GaugeMetricFamily(name, TEXTS[name], labels=["front", "replica"])
            for replica, value in sorted(found.items()):
                family.add_metric([self._series.front, replica], value)
            yield family
