# SPDX-License-Identifier: Apache-2.0
"""`jgr bench serve`: one run at a rate, a sweep of rates, or the search for the highest rate that is served in time."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from absl import flags

from jgr import extras
from jgr.cli import console
from jgr.client.errors import RequestFailed
from jgr.client.remote import Client
from jgr.config import Config, UserError
from jgr.fields import one_line
from jgr.traffic import capacity, load_lines, processes
from jgr.traffic.arrival_files import read_arrivals
from jgr.traffic.arrivals import parse_process
from jgr.traffic.http_client import Target, target_of
from jgr.traffic.measures import summarize
from jgr.traffic.mixes import RequestClass, make_mix, read_mix
from jgr.traffic.plots import check_picture, plot_rates
from jgr.traffic.schedule import Mix, Request, Schedule, read_trace
from jgr.traffic.sources import (
    DEFAULT_DURATION_S,
    DEFAULT_RATE,
    LogSource,
    ProcessSource,
    Source,
    TraceSource,
)

MAX_CONNECTIONS = 512
TIMEOUT_S = 30.0
WARM_UP_S = 1.0
LONGEST_ROUND_S = 300.0
"""No rate is tried whose round would take longer, unless --duration is longer, or --rate says so."""
REST_S = 0.5
"""A pause after a round with late answers, in which an overloaded server drops what nobody waits for."""
_log = logging.getLogger(__name__)
MIX_FLAGS = (
    "model", "kind", "history_length", "candidates", "top_k", "beam_width", "deadline_ms", "priority", "timed",
)  # fmt: skip


def serve(values: flags.FlagValues, argv: Sequence[str]) -> None:
    """Load a running server as the flags say, and print the report. argv: at most a model folder, for its catalog."""
    config = console.load_folder(values, argv)
    _check(values)
    bench = _Bench(values, config)
    if values.find_capacity:
        bench.find_capacity()
    elif values.rates:
        bench.sweep([float(rate) for rate in values.rates])
    else:
        bench.run()


def _check(values: flags.FlagValues) -> None:
    for name in ("rate", "duration", "slo_ms", "deadline_ms"):
        if not math.isfinite(values[name].value or 0.0):
            raise UserError(f"--{name} must be a finite number")
    try:
        wrong = [rate for rate in values.rates if not 1e-3 <= float(rate) < math.inf]
    except ValueError:
        wrong = values.rates
    if wrong:
        raise UserError(
            "--rates must be numbers of at least 0.001, separated by commas, as in --rates=10,20,50"
        )
    console.refuse_unused(values.find_capacity, ("share", "max_probes"), "--find_capacity")
    pairs = [("rates", "rate"), ("rates", "find_capacity"), ("trace", "arrivals_file"), ("trace", "mix")]
    pairs += [("trace", "arrivals"), ("arrivals_file", "arrivals"), *(("trace", name) for name in MIX_FLAGS)]
    pairs += [("mix", name) for name in MIX_FLAGS]
    for one, other in pairs:
        if values[one].present and values[other].present:
            raise UserError(f"--{one} and --{other} exclude each other: leave out one of them")
    if values.plot:
        if not (values.rates or values.find_capacity):
            raise UserError("--plot draws several rates: add --rates=10,20,50 or --find_capacity")
        extras.require("plot", "--plot")
        check_picture(Path(values.plot))


class _Bench:
    """One call of the command: the server, and the load that the flags describe."""

    def __init__(self, values: flags.FlagValues, config: Config) -> None:
        server = config.server
        host = f"[{server.host}]" if ":" in server.host else server.host
        scheme = "https" if server.tls_certificate else "http"
        self._url = values.url or f"{scheme}://{host}:{server.port}"
        key = server.api_key if values.api_key is None else values.api_key
        self._target: Target = target_of(self._url, key, values.ca_file)
        if not self._target.is_loopback and not values.allow_remote:
            raise UserError(
                f"{self._target.host} is not this machine; to load it all the same, add --allow_remote"
            )
        self._client = Client(self._url, key or None, timeout_s=TIMEOUT_S, ca_file=values.ca_file)
        self._values = values
        fit_to_models(values, self._client, config.model.name)
        self._load = _describe(values)
        self._source = self._make_source(config)
        self._runs = 0
        self._first: Request | None = None

    def _make_source(self, config: Config) -> Source:
        values, self._period_s = self._values, 0.0
        if values.trace:
            times_s, requests = read_trace(Path(values.trace), values.max_requests)
            return TraceSource(times_s, requests, values.max_requests)
        process = parse_process(values.arrivals)
        mix = _mix(values, config)
        if values.arrivals_file:
            self._load["format"], times_s = read_arrivals(Path(values.arrivals_file))
            return LogSource(times_s, mix, values.seed, values.max_requests)
        self._period_s = process.period_s
        return ProcessSource(process, mix, values.seed, values.max_requests)

    def run(self) -> None:
        values = self._values
        report = self._report(self._schedule(values.rate, values.duration), "requests answered")
        self._print(report, load_lines.run_lines(report))
        self._check_answers([report])

    def sweep(self, rates: Sequence[float]) -> None:
        duration_s = self._values.duration
        self._warm_up(rates[0])
        points = []
        for rate in rates:
            points.append(self._report(self._schedule(rate, duration_s), f"{rate:g} requests/s"))
            print(load_lines.point_line(points[-1]), flush=True)
        self._plot(points)
        self._print({"points": points}, [])
        self._check_answers(points)

    def find_capacity(self) -> None:
        values = self._values
        first = values.rate or DEFAULT_RATE
        least = capacity.requests_needed(values.share)
        self._warm_up(first)
        points: list[dict[str, Any]] = []

        def measure(rate: float) -> capacity.Round:
            wanted_s = max(values.duration or DEFAULT_DURATION_S, least / rate)
            if self._period_s:  # a part of it may have no crowd, or no night
                wanted_s = math.ceil(wanted_s / self._period_s) * self._period_s
            schedule = self._schedule(rate, min(wanted_s, self._source.longest_s(rate)))
            if len(schedule) < least / 2:
                raise UserError(
                    f"{len(schedule)} requests cannot show a share of {values.share:g}, which takes {least}: "
                    "take a longer log, a smaller --share, or a larger --max_requests"
                )
            if points and points[-1]["in_time"] < points[-1]["sent"]:
                time.sleep(REST_S)
            # What comes later than this is no answer in time; the server hears that nobody waits for it.
            patience_s = min(TIMEOUT_S, max(1.0, 5 * values.slo_ms / 1e3))
            points.append(self._report(schedule, f"{rate:.4g} requests/s", patience_s))
            print(load_lines.point_line(points[-1]), flush=True)
            return capacity.Round(points[-1]["sent"], points[-1]["in_time"], points[-1])

        lowest = least / max(LONGEST_ROUND_S, values.duration or 0.0)
        found = capacity.find(measure, first, values.share, most_probes=values.max_probes, lowest=lowest)
        self._plot([probe.rounds[-1].figures for probe in found.probes], found.capacity)
        report = {
            "slo_ms": values.slo_ms,
            "share": values.share,
            "capacity_per_s": found.capacity,
            "fails_at_per_s": found.fails_at,
            "client_limited": any(
                not p.holds and load_lines.is_late(p.rounds[-1].figures) for p in found.probes
            ),
            "probes": [
                {"rate": p.rate, "holds": p.holds, "rounds": [r.figures for r in p.rounds]}
                for p in found.probes
            ],
        }
        self._print(report, load_lines.capacity_lines(report))
        self._check_answers(points)

    def _drawn(self, rate: float | None, duration_s: float | None) -> Schedule:
        """The next schedule, which may be empty."""
        schedule = self._source.schedule(rate, duration_s, self._runs)
        self._runs += 1
        if len(schedule):
            self._first = self._first or schedule.requests[schedule.which[0]]
        return schedule

    def _schedule(self, rate: float | None, duration_s: float | None) -> Schedule:
        schedule = self._drawn(rate, duration_s)
        if not len(schedule):
            raise UserError("there is nothing to send: raise --rate or --duration, or check --trace")
        return schedule

    def _report(self, schedule: Schedule, label: str, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        with console.progress_bar(label) as bar:
            results = processes.run(
                schedule,
                self._target,
                processes=self._values.processes,
                max_connections=MAX_CONNECTIONS,
                timeout_s=timeout_s,
                progress=bar,
            )
        return summarize(schedule, results, self._values.slo_ms)

    def _warm_up(self, rate: float) -> None:
        """Send requests that are not measured, so that the first rate does not pay for cold caches."""
        seconds = min(max(WARM_UP_S, 1 / rate), self._source.longest_s(rate))
        schedule = self._drawn(rate, seconds)
        if not len(schedule):  # a low rate, and nothing came by chance
            return
        report = self._report(schedule, "warm-up")
        if "429" not in report["answered"]:  # else it answers, only not so many
            self._check_answers([report])

    def _plot(self, points: Sequence[Mapping[str, Any]], found: float | None = None) -> None:
        if self._values.plot:
            plot_rates(points, Path(self._values.plot), found)

    def _print(self, report: Mapping[str, Any], lines: Sequence[str]) -> None:
        for line in lines:
            print(line)
        console.print_json({"url": self._url, "load": self._load, **report})

    def _check_answers(self, reports: Sequence[Mapping[str, Any]]) -> None:
        if any("200" in report["answered"] for report in reports):
            return
        statuses = {status for report in reports for status in report["answered"]}
        if statuses and statuses <= {"429", "503", "504"}:
            raise UserError(
                "no request was answered 200: each was refused or came too late; take a lower --rate, or a longer "
                "--deadline_ms"
            )
        said = self._refusal()
        if statuses and statuses <= {"401", "403"}:
            raise UserError(
                f"no request was answered 200: the server asks for a key that it knows; see --api_key{said}"
            )
        raise UserError(
            f"no request was answered 200{said or ': try one by hand, the answer says why'} "
            "(a scorer needs --kind=rank, a model that reads times --timed, one that reads more a --trace)"
        )

    def _refusal(self) -> str:
        """What the server says of the first request, as the end of a line; "" where it answers it now."""
        assert self._first is not None
        try:
            self._client.fetch("POST", self._first.path, self._first.body, msgspec.Raw)
        except RequestFailed as error:
            return f"; of the first one it says: {one_line(error)}"
        return ""


def fit_to_models(values: flags.FlagValues, client: Client, name: str) -> None:
    """Have the load ask the model of this name where the server has several, rank where what is asked only ranks, and
    give times where the model that answers reads them, unless flags say otherwise. A server that does not tell of its
    models is asked as the flags say. Raises UserError for a --model that it has not."""
    if values.trace or values.mix:
        return
    try:
        models = client.models()
    except RequestFailed:
        return
    names = [model.id for model in models]
    if values.model is not None and values.model not in names:
        raise UserError(f"--model: the server has no '{values.model}'; it has {', '.join(names)}")
    if values.model is None and len(models) > 1:
        if name in names:
            values["model"].value = name
        else:
            _log.warning("the server chooses among its models, %s: name one by --model", ", ".join(names))
    models = [model for model in models if values.model in (None, model.id)]
    if not values["kind"].present and models and not any(model.max_beam_width for model in models):
        values["kind"].value = "rank"
    if values.kind == "rank" and not values["timed"].present:
        values["timed"].value = next((model.timed for model in models if model.max_candidates), False)


def _classes(values: flags.FlagValues) -> list[RequestClass]:
    if values.mix:
        return read_mix(Path(values.mix))
    laws = {name: getattr(values, name) for name in MIX_FLAGS if name != "model"}
    fields = {} if values.model is None else {"model": values.model}
    return [RequestClass(name=values.kind, fields=fields, **laws)]


def _mix(values: flags.FlagValues, config: Config) -> Mix:
    import numpy as np

    from jgr.catalog.catalog import load_catalog
    from jgr.models.manifest import own_catalog

    classes = _classes(values)
    if not (config.catalog.path or config.model.path):
        raise UserError(
            "say where item ids come from: a model folder, --set catalog.path=catalog.jsonl, or give a --trace"
        )
    path = config.catalog.path
    catalog = load_catalog(path) if path else own_catalog(Path(config.model.path))
    return make_mix(classes, catalog.item_ids, np.random.default_rng(values.seed))


def _number(value: Any) -> Any:
    """A law that is a single number as that number; all else as it is."""
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value


def _describe(values: flags.FlagValues) -> dict[str, Any]:
    """The flags that determine the load, for the report."""
    taken = functools.partial(getattr, values)
    if values.trace:
        names: tuple[str, ...] = ("trace", "rate")
    else:
        names = ("arrivals_file" if values.arrivals_file else "arrivals", "rate", "seed")
        names += ("mix",) if values.mix else MIX_FLAGS
    load = {name: _number(taken(name)) for name in names} | {
        "duration_s": values.duration,
        "processes": values.processes,
    }
    if not (values.trace or values.arrivals_file):
        load["rate"] = load["rate"] or DEFAULT_RATE
        load["duration_s"] = values.duration or DEFAULT_DURATION_S
    if values.rates:
        load["rate"] = [float(rate) for rate in values.rates]
    return load
