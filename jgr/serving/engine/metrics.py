# SPDX-License-Identifier: Apache-2.0
"""Prometheus series of a server's models, all named `jgr_*`.

The one idea: counters, never rates, so that any window can be computed later; and every label is resolved
once, because a request observes a dozen series. The registry belongs to the model, so two models in one
process do not mix; where there are several, their series are told apart by a label when they are read.
Label values come from fixed sets, so the number of series is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

import numpy as np
from msgspec import UNSET
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jgr.cache.meta import CacheMeta
from jgr.cache.neighbours import Copied, Neighbours
from jgr.features.cache import Counts
from jgr.prompt.layouts import LAYOUTS
from jgr.serving.api import ModelInfo, Timing, Usage
from jgr.serving.engine import paging_metrics
from jgr.serving.engine.paging_metrics import PagingCollector, PagingCounts
from jgr.serving.engine.ticket import Ticket
from jgr.serving.policies.fidelity import Watch
from jgr.serving.policies.jobs import KINDS, REASONS, Kind

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STAGES = ("queue", "prepare", "device", "total")
SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
ERRORS = (-1.0, -0.2, -0.1, -0.05, -0.02, -0.01, -0.005, 0.0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 1.0)
PHASES = ("load", "request")
OUTCOMES = ("done", "failed", "cancelled")
DRIFTS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
TAUS = (-0.5, 0.0, 0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
OVERLAPS = tuple(tenths / 10 for tenths in range(11))
DIVERGENCES = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0)
ENTRY_EVENTS = ("evicted", "stale", "refused")
FEATURE_STATES = ("fresh", "stale", "missing")
FEATURE_EVENTS = (
    "waits", "late", "fetched", "joined", "not_found", "invalid", "round_trips", "failures", "held", "bytes", "evicted",
)  # fmt: skip
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
REFUSALS = ("quota", "share", "unauthorized", "connections", "bodies")
HINTS = ("computed", "kept", "not_kept")
TEXTS = {
    "jgr_queue_depth": "Requests waiting for a batch.",
    "jgr_in_flight": "Runs that were started and have not ended.",
    "jgr_cache_pages": (
        "Pages of the pool, by holder: a kind of entries, nobody (free), other models and versions (others)."
    ),
    "jgr_cache_entries": "Cache entries on the device.",
    "jgr_cache_fragmentation": "Share of the pages of a kind of entries that no valid token fills.",
    "jgr_cache_events": "Events of cache entries since the engine's start, by kind of entry and event.",
    "jgr_device_item_bytes": "Bytes of cached items that a device read from another one, with data_parallel.devices.",
    "jgr_device_sent_bytes": "Bytes that went between devices for that, padding included.",
    "jgr_memory_bytes": (
        "Memory that the engine takes, by part; of the pool and the host tier, which models "
        "share, its own share."
    ),
    "jgr_features": "Feature records that requests were given, by state.",
    "jgr_feature_events": "Events of the feature cache since the engine's start.",
    "jgr_feature_entries": "Items in the feature cache.",
    "jgr_fleet_routed": "Attempts at requests that a replica of the fleet has taken, by the rule that chose it.",
    "jgr_fleet_attempts": (
        "Attempts at requests that have ended: answered by the replica, lost with it, or given up since the deadline "
        "had passed or another replica had answered (late)."
    ),
    "jgr_fleet_retries": "Attempts at requests that another replica was sent before.",
    "jgr_fleet_decision_seconds": "Time that the choice of a replica takes.",
    "jgr_fleet_report_age_seconds": "Time since the last report of a replica came to the front.",
    "jgr_fleet_tokens_in_flight": (
        "Tokens that a replica should compute of what this front has sent there and what has not ended."
    ),
    "jgr_fleet_held_off": "Requests that Ray's proxies refused, since more of them would have been late.",
    "jgr_fleet_refused": "Requests that a front refused since a key's quota was used up.",
}
"""What the families tell of that not every server has."""
OF_THE_PROCESS = ("jgr_requests", "jgr_refused", "jgr_compilations")
"""The families that count for the whole process; a server keeps them with its first model."""
PROCESS = CollectorRegistry()
"""The process's own series: memory, processor time, files, garbage collections, and its Python."""
ProcessCollector(registry=PROCESS)
GCCollector(registry=PROCESS)
PlatformCollector(registry=PROCESS)


class Metrics:
    """The series of one model, over all its versions. Not thread-safe: the event loop alone writes."""

    def __init__(self, compilations: Callable[[], Mapping[str, int]] = lambda: {}) -> None:
        """compilations: reads the process's counts of compiled programs, by phase."""
        self.registry = Registry()
        self.registry.register(_Compilations(compilations))
        self.requests = self._counter("jgr_requests", "HTTP requests answered.", "endpoint", "status")
        refused = self._counter(
            "jgr_refused",
            "Requests, and connections, that the server's doors refused: a key's quota or share of the queue was used "
            "up, a key was missing or wrong, or there were too many connections, or too much of unfinished bodies.",
            "reason",
        )
        self.refused = {reason: refused.labels(reason) for reason in REFUSALS}
        stage = self._histogram(
            "jgr_stage_seconds",
            "Time that answered requests took, by stage; the stage total is all of it.",
            SECONDS,
            "kind",
            "stage",
        )
        size = self._histogram("jgr_batch_size", "Number of requests in a batch.", SIZES, "kind")
        rows = self._counter(
            "jgr_batch_rows", "Requests that the programs of the batches have room for.", "kind"
        )
        real = self._counter("jgr_real_tokens", "Token positions that requests asked for.", "kind")
        padded = self._counter(
            "jgr_padded_tokens", "Token positions that the device computed, padding included.", "kind"
        )
        self._stages = {kind: [stage.labels(kind, name) for name in STAGES] for kind in KINDS}
        self._batch_size = {kind: size.labels(kind) for kind in KINDS}
        self._batch_rows = {kind: rows.labels(kind) for kind in KINDS}
        self._real_tokens = {kind: real.labels(kind) for kind in KINDS}
        self._padded_tokens = {kind: padded.labels(kind) for kind in KINDS}
        self._dead_beams = self._counter("jgr_dead_beams", "Beams that ended without an item.")
        self.unknown_items = self._counter("jgr_unknown_items", "History items that the catalog lacks.")
        self.deadline_expired = self._counter("jgr_deadline_expired", "Accepted requests that came too late.")
        rejected = self._counter("jgr_rejected", "Requests that the queue did not take, by reason.", "reason")
        self.rejected = {reason: rejected.labels(reason) for reason in REASONS}
        self._device = self._counter(
            "jgr_device_seconds",
            "Time for which requests' runs had a lane of the device for themselves: the runs of a lane follow each "
            "other, those of several go on side by side.",
        )
        self._wasted = self._counter(
            "jgr_wasted_device_seconds",
            "The part of jgr_device_seconds that went to requests that got no answer in time.",
        )
        self._slack = self._histogram(
            "jgr_slack_seconds",
            "Time that requests with a deadline had left when their first run was planned.",
            SECONDS,
        )
        self._forecast = self._histogram(
            "jgr_forecast_error_seconds",
            "By how much requests with a deadline ended later than predicted when they came; below 0: earlier.",
            ERRORS,
        )
        hints = self._counter(
            "jgr_hints",
            "Hints that a user will be ranked, by outcome: its part was computed, kept already, or is not kept.",
            "outcome",
        )
        self.hints = {outcome: hints.labels(outcome) for outcome in HINTS}
        self.cancelled = self._counter("jgr_cancelled", "Accepted requests whose client went away.")
        reloads = self._counter("jgr_model_reloads", "Model reloads that ended, by outcome.", "outcome")
        activations = self._counter(
            "jgr_catalog_activations", "Catalog activations and rollbacks that ended, by outcome.", "outcome"
        )
        self.changes = {
            kind: {outcome: counter.labels(outcome) for outcome in OUTCOMES}
            for kind, counter in (("model", reloads), ("catalog", activations))
        }
        labels = ("model", "version")
        self._model = self._gauge("jgr_model_info", "1 for the version of the model that is served.", *labels)
        self._catalog = self._gauge("jgr_catalog_info", "1 for the catalog that is served.", *labels)
        self._items = self._gauge("jgr_catalog_items", "Items in the catalog.")
        tokens = self._counter(
            "jgr_prompt_tokens",
            "Tokens of answered requests' prompts, by where their KV came from.",
            "source",
        )
        self._cached_tokens, self._computed_tokens = tokens.labels("cached"), tokens.labels("computed")
        layouts = self._counter("jgr_layouts", "Answered requests by the prompt's layout.", "layout")
        self._layouts = {layout: layouts.labels(layout) for layout in LAYOUTS}
        self.drift = self._histogram(
            "jgr_shadow_drift",
            "Largest difference of an answer's scores to those computed again without the cache.",
            DRIFTS,
        )
        self.quantize_drift = self._histogram(
            "jgr_quantize_drift",
            "Largest difference of an answer's scores, with keys and values kept in 8 bits, to those computed again "
            "without the cache.",
            DRIFTS,
        )
        self.repair_drift = self._histogram(
            "jgr_repair_drift",
            "Largest difference of a repaired answer's scores to those with all item tokens in causal order.",
            DRIFTS,
        )
        self.repair_tau = self._histogram(
            "jgr_repair_kendall_tau",
            "Kendall's tau between the order of an approximate answer and that of its prompt computed whole.",
            TAUS,
        )
        self.repair_overlap = self._histogram(
            "jgr_repair_top10_overlap",
            "Share of the first ten candidates of a prompt computed whole that are an approximate answer's too.",
            OVERLAPS,
        )
        self.repair_divergence = self._histogram(
            "jgr_repair_kl",
            "KL divergence of an approximate answer's scores from those of its prompt computed whole, in nats, as "
            "distributions over its candidates.",
            DIVERGENCES,
        )
        self._disorder = self._gauge(
            "jgr_repair_disorder",
            "Mean of 1 - Kendall's tau over the last 200 samples of approximate answers.",
        )
        self._fell_back = self._gauge(
            "jgr_repair_fell_back",
            "1 while prompts are computed whole, since approximate answers differed by more than cache.max_drift.",
        )
        self.executor_failures = self._counter("jgr_executor_failures", "Batches that failed in an executor.")
        self.parts = self._counter(
            "jgr_parts",
            "Parts of scorers' requests, by the compiled number of candidates; size 0: users' parts.",
            "size",
        )
        pairs = self._counter(
            "jgr_pairs",
            "Pairs of a user and a candidate that scorers computed, by candidates and padding.",
            "of",
        )
        self.candidate_pairs, self.padding_pairs = pairs.labels("candidates"), pairs.labels("padding")
        self.executor_wait = self._histogram(
            "jgr_executor_wait_seconds",
            "Time that a part waited for an executor, once it had its inputs.",
            SECONDS,
        )
        self.item_bytes = self._counter(
            "jgr_fleet_item_bytes",
            "Bytes of items that this node got from another one: for requests, or for itself to hold.",
            "from",
            "to",
            "purpose",
        )
        self.items_held = self._gauge("jgr_fleet_items_held", "Items that this node holds for all nodes.")
        self.items_missing = self._counter(
            "jgr_fleet_items_missing",
            "Items of requests that were not here, by what became of them.",
            "outcome",
        )
        self.feature_counts: Callable[[], Counts] | None = None
        """Reads the counters of the feature cache in use; None: there is no such cache."""
        self.registry.register(_Features(lambda: self.feature_counts and self.feature_counts()))
        self.paging: Callable[[], PagingCounts | None] | None = None
        """Reads the counts of embeddings in pages; None: there are none."""
        self.registry.register(PagingCollector(lambda: self.paging and self.paging()))

    def watch_queue(self, depth: Callable[[], int]) -> None:
        """Export `depth()` as the number of requests waiting for a batch."""
        self._gauge("jgr_queue_depth", TEXTS["jgr_queue_depth"]).set_function(depth)

    def watch_flights(self, runs: Callable[[], int]) -> None:
        """Export `runs()` as the number of runs that were started and have not ended."""
        self._gauge("jgr_in_flight", TEXTS["jgr_in_flight"]).set_function(runs)

    def watch_cache(self, read: Callable[[], CacheMeta | Neighbours | None]) -> None:
        """Export the state of the cache that `read` gives; None: there is none."""
        self.registry.register(_Cache(read))

    def watch_drift(self, read: Callable[[], Watch | None]) -> None:
        """Export how far approximate answers are from whole ones, as `read` watches it; None: none are approximate."""
        self._disorder.set_function(lambda: 0.0 if (watch := read()) is None else watch.mean)
        self._fell_back.set_function(lambda: (watch := read()) is not None and watch.fell_back)

    def watch_memory(self, read: Callable[[], Mapping[str, int]]) -> None:
        """Export the bytes that each part of the engine takes, as `read` gives them."""
        self.registry.register(_Memory(read))

    def observe_answer(self, kind: Kind, ticket: Ticket, now_ns: int, usage: Usage) -> Timing:
        """Count one request that is answered now: its tokens, and where its time went, which is returned."""
        timing = Timing(
            queue=(ticket.begun_ns - ticket.submitted_ns) / 1e6,
            prepare=(ticket.submitted_ns - ticket.arrival_ns) / 1e6,
            device=(ticket.ended_ns - ticket.begun_ns) / 1e6,
            total=(now_ns - ticket.arrival_ns) / 1e6,
        )
        queue, prepare, device, total = self._stages[kind]
        queue.observe(timing.queue / 1e3)
        prepare.observe(timing.prepare / 1e3)
        device.observe(timing.device / 1e3)
        total.observe(timing.total / 1e3)
        self._cached_tokens.inc(usage.cached_tokens)
        self._computed_tokens.inc(usage.computed_tokens)
        self._layouts[usage.layout].inc()
        if usage.dead_beams is not UNSET:
            self._dead_beams.inc(usage.dead_beams)
        return timing

    def observe_run(self, seconds: float, wasted: float) -> None:
        """Record a run's time on its lane. wasted: the seconds of work that nobody will have of it."""
        self._device.inc(seconds)
        self._wasted.inc(wasted)

    def observe_waste(self, seconds: float) -> None:
        """Record the time of earlier runs for a request that ends without an answer."""
        self._wasted.inc(seconds)

    def observe_slack(self, seconds: float) -> None:
        """Record the time that is left until a request's deadline when its first run is planned."""
        self._slack.observe(max(0.0, seconds))

    def observe_forecast(self, error_s: float) -> None:
        """Record by how much a request ended later than was predicted."""
        self._forecast.observe(error_s)

    def show_model(self, info: ModelInfo) -> None:
        """Export which model and catalog are served."""
        self._model.labels(info.id, info.version).set(1)
        self._catalog.labels(info.id, info.catalog_version).set(1)
        self._items.set(info.catalog_items)

    def hide_model(self, info: ModelInfo) -> None:
        """Undo `show_model`; the version is served no more."""
        self._model.remove(info.id, info.version)
        self._catalog.remove(info.id, info.catalog_version)

    def observe_batch(
        self, kind: Kind, requests: int, rows: int, real_tokens: int, padded_tokens: int
    ) -> None:
        """Record a batch. rows: requests that its profile takes. real_tokens: prompt tokens plus widths of requests;
        padded_tokens: what its profile costs (`Profile.cost_tokens`)."""
        self._batch_size[kind].observe(requests)
        self._batch_rows[kind].inc(rows)
        self._real_tokens[kind].inc(real_tokens)
        self._padded_tokens[kind].inc(padded_tokens)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(name, text, labels, registry=self.registry, buckets=buckets)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)


def render(models: Mapping[str, Metrics]) -> bytes:
    """The series of all models, by name, in the text exposition format, of type CONTENT_TYPE.

    Where there are several, each series has the label `model`, besides those of `OF_THE_PROCESS`.
    """
    first, *others = models.values()
    return generate_latest(_Labelled(models) if others else first.registry) + generate_latest(PROCESS)


@cache
def documentation() -> Mapping[str, str]:
    """What each family of series tells of, by its name."""
    always = (*Metrics().registry.collect(), *PROCESS.collect())
    return {**TEXTS, **paging_metrics.TEXTS, **{family.name: family.documentation for family in always}}


class _Labelled(Collector):
    """The series of several models as one family each."""

    def __init__(self, models: Mapping[str, Metrics]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for name, metrics in self._models.items():
            for family in metrics.registry.collect():
                if family.name not in OF_THE_PROCESS:
                    family.samples = [s._replace(labels={"model": name, **s.labels}) for s in family.samples]
                elif family.name in families:
                    continue
                if family is not families.setdefault(family.name, family):
                    families[family.name].samples += family.samples
        yield from families.values()


class Registry(CollectorRegistry):
    """Leaves out the `_created` series: one more for each counter and histogram, all telling of the start only."""

    def collect(self) -> Iterator[Metric]:
        for family in super().collect():
            family.samples = [s for s in family.samples if not s.name.endswith("_created")]
            yield family


class _Compilations(Collector):
    """Exports counts that somebody else keeps."""

    def __init__(self, read: Callable[[], Mapping[str, int]]) -> None:
        self._read = read

    def collect(self) -> Iterator[CounterMetricFamily]:
        text = "Programs compiled, while a model was loaded and warmed up or by a request; the latter stays at 0."
        family = CounterMetricFamily("jgr_compilations", text, labels=["phase"])
        for phase in PHASES:
            family.add_metric([phase], self._read().get(phase, 0))
        yield family


class _Cache(Collector):
    """Exports what a meta service holds, when it is asked."""

    def __init__(self, read: Callable[[], CacheMeta | Neighbours | None]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        meta = self._read()
        if meta is None:
            return
        pages = GaugeMetricFamily(
            "jgr_cache_pages",
            TEXTS["jgr_cache_pages"],
            labels=["holder"],
        )
        entries = GaugeMetricFamily("jgr_cache_entries", TEXTS["jgr_cache_entries"], labels=["kind"])
        waste = GaugeMetricFamily(
            "jgr_cache_fragmentation",
            TEXTS["jgr_cache_fragmentation"],
            labels=["kind"],
        )
        pages.add_metric(["free"], meta.pages.free)
        for kind in meta.kinds:
            pages.add_metric([kind], meta.used(kind))
            entries.add_metric([kind], meta.number(kind))
            waste.add_metric([kind], meta.fragmentation(kind))
        others = meta.pages.count - meta.pages.free - sum(map(meta.used, meta.kinds))
        pages.add_metric(["others"], others)
        events = CounterMetricFamily(
            "jgr_cache_events",
            TEXTS["jgr_cache_events"],
            labels=["event"],
        )
        names = [f"{kind}_{event}" for kind in meta.kinds for event in ENTRY_EVENTS]
        moves = ("to_host", "to_device", *(("from_device",) if isinstance(meta, Neighbours) else ()))
        for event in (*names, *moves):
            events.add_metric([event], meta.counts[event])
        yield from (pages, entries, waste, events)
        if isinstance(meta, Neighbours) and meta.reads is not None:
            yield from reads_of_devices(meta.reads)


def reads_of_devices(reads: Copied) -> Iterator[Metric]:
    """What devices read from each other, by link."""
    moved = CounterMetricFamily(
        "jgr_device_item_bytes", TEXTS["jgr_device_item_bytes"], labels=["from", "to"]
    )
    for source, to in np.argwhere(~np.eye(len(reads.bytes), dtype=bool)):
        moved.add_metric([str(source), str(to)], int(reads.bytes[source, to]))
    sent = CounterMetricFamily("jgr_device_sent_bytes", TEXTS["jgr_device_sent_bytes"])
    sent.add_metric([], reads.sent)
    yield from (moved, sent)


class _Memory(Collector):
    """Exports the bytes of an engine's parts, when it is asked."""

    def __init__(self, read: Callable[[], Mapping[str, int]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "jgr_memory_bytes",
            TEXTS["jgr_memory_bytes"],
            labels=["part"],
        )
        for part, size in self._read().items():
            family.add_metric([part], size)
        yield family


class _Features(Collector):
    """Exports what a feature cache counts, when it is asked."""

    def __init__(self, read: Callable[[], Counts | None]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        counts = self._read()
        if counts is None:
            return
        states = CounterMetricFamily("jgr_features", TEXTS["jgr_features"], labels=["state"])
        for state in FEATURE_STATES:
            states.add_metric([state], getattr(counts, state))
        events = CounterMetricFamily("jgr_feature_events", TEXTS["jgr_feature_events"], labels=["event"])
        for event in FEATURE_EVENTS:
            events.add_metric([event], getattr(counts, event))
        yield from (states, events)
        yield GaugeMetricFamily("jgr_feature_entries", TEXTS["jgr_feature_entries"], counts.entries)
