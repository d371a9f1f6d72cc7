# SPDX-License-Identifier: Apache-2.0
"""The highest rate at which a P99 limit holds: jgr against beams as sequences, `transformers` and vLLM's engine.

All serve the same random Qwen3 of 16 M parameters over 12,000 items (peers/workload.py) by HTTP from processes of their
own on the same two cores, and answer the same prompts with the same number of beams, normalized over the legal
continuations. All systems of a width see the same trace: Poisson arrivals drawn once, at a rate of 1, and divided by
the rate. Prompt lengths follow a power law up to the longest of LENGTHS that jgr answers alone in half of the least
limit.

    staged        jgr by its defaults
    copied        xGR's baseline in the same engine: beams are sequences with copies of the prompt (xgr_sequences.py)
    paged         the same, with pages that sequences share and each reads by itself
    transformers  a batching server around its model and cache (peers/transformers_server.py)
    vllm          its engine, driven by a loop over the catalog's tree (peers/vllm_server.py)

First comes one request in flight: what a system does not hold then, it never holds. Then rates are probed, systems in
turn, and each probe counts for every limit, since one run of requests has one P99: the brackets between the highest
rate that held and the lowest above it that did not are narrowed, that of the least limit first. A probe holds where
the P99 of its requests is within the limit; an answer other than 200 is late for every limit. Slow systems send few
requests (`requests`), which favours them: a backlog that a longer run would show is not seen.

What is claimed is the lower end of the ratio, at the least limit that both hold alone: jgr's highest rate at which the
share in time is shown (a lower bound of 95 % confidence is at least .99; see jgr.traffic.capacity), over the lowest
rate at which the other is shown to fail (the upper bound is below .99). Where there is no such limit, there is no
claim.

    JGR_PEERS_TORCH=PYTHON JGR_PEERS_VLLM=PYTHON python -m benchmarks.xgr_throughput [--quick]

Each PYTHON is that of a virtual environment with benchmarks/peers/requirements-*.txt.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np

from benchmarks import harness, xgr_probes, xgr_sequences
from benchmarks.harness import Benchmark, Claim, Measured, Missing, Quiet, Row
from benchmarks.peers import client, workload
from benchmarks.peers.client import Kind, Peer, PeerError
from benchmarks.peers.workload import DEPTH, Beams, Int32, agreement
from benchmarks.xgr_probes import LATE_CLIENT_S, SHARE, Bracket, Probe, bracket
from jgr.catalog.catalog import Catalog, save_catalog
from jgr.traffic import arrivals, open_loop
from jgr.traffic.http_client import Target
from jgr.traffic.measures import quantile
from jgr.traffic.mixes import parse_law
from jgr.traffic.schedule import Request, Schedule

T = TypeVar("T")

THREADS = 2
LIMITS_S = (0.2, 0.5, 1.0, 2.0, 5.0)
LENGTHS = (256, 512, 1024, 2048)
PROMPTS = 200
TIMEOUT_S = 60.0
LOST = (PeerError, OSError, http.client.HTTPException)
"""What asking a server raises that has ended."""
JGR = "staged"
KEPT_MEMORY = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}
"""The baselines in jgr's engine keep memory between runs: copies of a prompt take longer to map than to write."""
TARGETS: Mapping[str, float] = {"copied": 3.5, "paged": 3.5, "transformers": 1.0, "vllm": 8.0}
PEERS = (
    Kind("transformers", "transformers_server", "JGR_PEERS_TORCH", "requirements-torch.txt"),
    Kind("vllm", "vllm_server", "JGR_PEERS_VLLM", "requirements-vllm.txt"),
)


@dataclass(frozen=True)
class Setting:
    """How much is measured. seconds: that a probe lasts, with at least `least` requests and at most `most`.

    precision: of the brackets. probes: the most of a system and a width. shown: requests of a longer probe, which shows
    a rate; shows: the most of these for a limit, each at a rate of the last one's over `step`. alone, alone_s: requests
    with one in flight, and the seconds after which no more are sent. compared: requests whose beams are compared.
    """

    widths: tuple[int, ...] = (32, 128)
    lengths: tuple[int, ...] = LENGTHS
    batches: tuple[int, ...] = (1, 4)
    limits_s: tuple[float, ...] = LIMITS_S
    seconds: float = 14.0
    least: int = 20
    most: int = 500
    precision: float = 0.08
    probes: int = 6
    shown: int = 480
    shows: int = 8
    step: float = 1.12
    alone: int = 40
    alone_s: float = 10.0
    compared: int = 16


QUICK = Setting(
    widths=(32,), lengths=(256, 512), batches=(1,), limits_s=(0.2, 1.0), seconds=3.0, most=60, precision=0.3, probes=3,
    shown=0, alone=8, alone_s=4.0, compared=4,
)  # fmt: skip


@dataclass(eq=False)
class Search:
    """The probes of one system at one width. alone: with one request in flight. limits_s: those that it held so."""

    system: str
    width: int
    alone: Probe
    limits_s: tuple[float, ...]
    probes: list[Probe] = field(default_factory=list)
    shown: list[Probe] = field(default_factory=list)
    """Longer ones, of rates that held."""

    def next_rate(self, setting: Setting) -> float | None:
        """The rate to try: for the least limit until its bracket is narrow, then for the widest; None: no more."""
        if len(self.probes) >= setting.probes or not self.limits_s:
            return None
        if not self.probes:
            return self.alone.rate
        brackets = [bracket(self.probes, limit_s) for limit_s in self.limits_s]
        first = brackets[0]
        found = first if first.ratio > 1 + setting.precision else max(brackets, key=lambda b: b.ratio)
        if found.ratio <= 1 + setting.precision:
            return None
        if found.failed == math.inf:
            return 2 * found.held
        return found.failed / 2 if not found.held else math.sqrt(found.held * found.failed)

    def of(self, limit_s: float) -> Bracket:
        return bracket([*self.probes, *self.shown], limit_s)


Prober = Callable[[Search, float, int], Probe]
"""Probes a search's system at a rate with so many requests."""


class Trace:
    """What all systems of a width are asked, and when: n arrivals at rate 1, and a prompt for each."""

    def __init__(self, sequences: Int32, longest: int, count: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        items = parse_law(f"power:1.2:16:{longest // DEPTH}").draw(rng, PROMPTS)
        self.rows = [rng.integers(0, len(sequences), n, np.int32) for n in items.tolist()]
        gaps = arrivals.poisson(rng, 1.0, 2.0 * count + 100)
        self._at, self._which = gaps[:count], rng.integers(0, PROMPTS, count).astype(np.int32)

    def schedule(self, rate: float, count: int, requests: Sequence[Request]) -> Schedule:
        return Schedule(self._at[:count] / rate, self._which[:count], requests, count / rate)


class System:
    """A server that answers beams. form: as its requests and answers are written."""

    def __init__(self, name: str, peer: Peer, sequences: Int32) -> None:
        self.name, self.versions, self._sequences = name, peer.versions, sequences
        self._peer = peer
        self._is_jgr = name in (JGR, *xgr_sequences.CONFIGS)
        self._target = Target("127.0.0.1", int(peer.ask(op="port")["port"]))

    def request(self, rows: Int32, width: int) -> Request:
        """A request for as many items as there are beams after a history of rows."""
        if self._is_jgr:
            body = {"history": [str(row) for row in rows.tolist()], "top_k": width, "beam_width": width}
            return Request("/v1/recommend", json.dumps(body).encode())
        prompt = self._sequences[rows].ravel().tolist()
        return Request("/v1/beams", json.dumps({"prompt": prompt, "width": width}).encode())

    def ask(self, request: Request) -> tuple[float, Beams]:
        """Seconds of one request on a connection of its own, and the beams."""
        connection = http.client.HTTPConnection(self._target.host, self._target.port, timeout=TIMEOUT_S)
        try:
            start = time.perf_counter()
            connection.request("POST", request.path, request.body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = json.loads(response.read())
            seconds = time.perf_counter() - start
        finally:
            connection.close()
        if response.status != 200:
            raise RuntimeError(f"{self.name} answered {response.status}: {answer}")
        return seconds, self._beams(answer)

    def _beams(self, answer: dict[str, list[dict[str, float]]]) -> Beams:
        if self._is_jgr:
            rows = [int(item["item_id"]) for item in answer["items"]]
            scores = [item["score"] for item in answer["items"]]
            return Beams(self._sequences[rows], np.array(scores, np.float32))
        found = np.array(answer["sequences"], np.int32).reshape(-1, DEPTH)
        return Beams(found, np.array(answer["scores"], np.float32))

    def probe(self, trace: Trace, requests: Sequence[Request], rate: float, count: int) -> Probe:
        schedule = trace.schedule(rate, count, requests)
        found = open_loop.run(
            schedule,
            self._target,
            max_connections=512,
            timeout_s=TIMEOUT_S,
            progress=lambda done, n, text: None,
        )
        self._peer.check()
        good = np.array([verdict.status == "200" for verdict in found.verdicts])[found.ended]
        latencies = np.sort(np.where(good, found.end_s - found.due_s, np.inf))
        late = quantile(np.sort(found.began_s - found.due_s), SHARE)
        return Probe(rate, latencies, late, int((found.sent_s - found.began_s > LATE_CLIENT_S).sum()))


def export(folder: Path, catalog: workload.Catalog) -> None:
    """Write the folder that all load: jgr's catalog too, whose items are named by their rows in the sequences."""
    workload.export(folder, catalog)
    sequences = [tuple(path) for path in catalog.sequences.tolist()]
    ids = [str(row) for row in range(len(sequences))]
    save_catalog(Catalog.build(ids, sequences, [{}] * len(ids)), folder / "catalog.jsonl")


def settings(setting: Setting) -> list[str]:
    """What jgr and the forms in its engine are told; all else is by default."""

    def listed(numbers: Sequence[int]) -> str:
        return ",".join(map(str, numbers))

    longest = max(setting.lengths)
    return [
        "prompt.template={history}",
        f"prompt.max_items={longest // DEPTH}",
        f"profiles.batch={listed(setting.batches)}",
        f"profiles.tokens={listed(setting.lengths)}",
        f"profiles.widths={listed(setting.widths)}",
        "profiles.candidates=1",
        f"batching.max_tokens={max(setting.batches) * (longest + 4 * max(setting.widths))}",
    ]


def start_all(
    folder: Path, sequences: Int32, setting: Setting, stack: ExitStack
) -> tuple[dict[str, System], dict[str, str]]:
    """The servers by name, which end with the stack, and why the others are missing."""
    systems, missing = {}, {}
    for name in (JGR, *xgr_sequences.CONFIGS):
        harness.note(f"starting {name}")
        command = [sys.executable, "-m", "benchmarks.xgr_sequences", str(folder), name, *settings(setting)]
        peer = Peer(Kind(name, "", "", ""), command, {} if name == JGR else KEPT_MEMORY, THREADS)
        systems[name] = System(name, stack.enter_context(peer), sequences)
    for kind in PEERS:
        try:
            systems[kind.name] = System(
                kind.name, stack.enter_context(client.start(kind, folder, THREADS)), sequences
            )
        except Missing as error:
            missing[kind.name] = str(error)
    return systems, missing


def longest_prompt(jgr: System, width: int, setting: Setting, limit_s: float) -> int:
    """The longest prompt that jgr alone answers in half of the limit, by the median of five; at least the shortest."""
    rng, found = np.random.default_rng(2), min(setting.lengths)
    for tokens in sorted(setting.lengths):
        request = jgr.request(rng.integers(0, workload.N_ITEMS, tokens // DEPTH, np.int32), width)
        if np.median([jgr.ask(request)[0] for _ in range(5)]) <= limit_s / 2:
            found = tokens
    return found


def alone(system: System, requests: Sequence[Request], setting: Setting) -> Probe:
    """One request in flight; the rate is what that gives."""
    system.ask(requests[0])
    seconds: list[float] = []
    for request in requests[: setting.alone]:
        seconds.append(system.ask(request)[0])
        if sum(seconds) >= setting.alone_s:
            break
    return Probe(len(seconds) / sum(seconds), np.sort(seconds))


def exact_share(jgr: System, system: System, trace: Trace, width: int, count: int) -> float:
    """The share of jgr's beams that a system returns, in jgr's order but for ties, with several requests in flight."""

    def beams(of: System) -> list[Beams]:
        with ThreadPoolExecutor(4) as pool:
            return [
                found for _, found in pool.map(of.ask, [of.request(r, width) for r in trace.rows[:count]])
            ]

    agreed = [agreement(*pair) for pair in zip(beams(jgr), beams(system), strict=True)]
    return sum(found.common for found in agreed if found.max_score_error <= workload.MAX_SCORE_ERROR) / (
        width * len(agreed)
    )


def undisturbed(quiet: Quiet, run: Callable[[], T]) -> T:
    """What a run gave in which the machine was left to us."""
    while True:
        start = quiet.wait()
        result = run()
        if quiet.was_quiet_since(start):
            return result


def measure(quick: bool, quiet: Quiet) -> Measured:
    setting = QUICK if quick else Setting()
    rows: list[Row] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        catalog = workload.make_catalog(np.random.default_rng(0))
        export(folder, catalog)
        systems, missing = start_all(folder, catalog.sequences, setting, stack)
        for width in setting.widths:
            rows += measure_width(systems, width, catalog.sequences, setting, quiet, missing)
        rows += [{"server": name, "versions": system.versions} for name, system in systems.items()]
        rows += [{"server": name, "missing": why} for name, why in missing.items()]
    return Measured(claims(rows), [*ratios(rows), *rows])


def measure_width(
    systems: dict[str, System],
    width: int,
    sequences: Int32,
    setting: Setting,
    quiet: Quiet,
    missing: dict[str, str],
) -> list[Row]:
    """The rows of one width. A system whose server ends has none, and moves from `systems` to `missing`."""
    longest = undisturbed(quiet, lambda: longest_prompt(systems[JGR], width, setting, setting.limits_s[0]))
    trace = Trace(sequences, longest, max(setting.most, setting.shown), seed=width)
    requests = {name: [of.request(rows, width) for rows in trace.rows] for name, of in systems.items()}
    searches, exact = [], dict[str, float]()

    def lost(name: str, error: Exception) -> None:
        if name == JGR:
            raise error
        harness.note(f"{name} is left out from now on: {error}")
        missing[name] = f"with a beam of {width}: {error}"
        del systems[name]

    def probe(search: Search, rate: float, count: int) -> Probe:
        system, asked = systems[search.system], requests[search.system]
        found = undisturbed(quiet, lambda: system.probe(trace, asked, rate, count))
        harness.note(f"{search.system} {width}: {rate:.2f}/s, {count} requests, P99 {found.p99_s:.3f} s")
        return found

    for name, of in list(systems.items()):
        try:
            exact[name] = exact_share(systems[JGR], of, trace, width, setting.compared)
            found = undisturbed(quiet, partial(alone, of, requests[name], setting))
        except LOST as error:
            lost(name, error)
        else:
            limits = tuple(limit_s for limit_s in setting.limits_s if found.p99_s <= limit_s)
            searches.append(Search(name, width, found, limits))
    left = list(searches)
    while left:
        for search in tuple(left):
            rate = search.next_rate(setting)
            if rate is None:
                left.remove(search)
                continue
            count = min(setting.most, max(setting.least, round(rate * setting.seconds)))
            try:
                search.probes.append(probe(search, rate, count))
            except LOST as error:
                lost(search.system, error)
                left.remove(search)
                searches.remove(search)
    for search in searches:
        if search.system == JGR and setting.shown:
            show(search, searches, probe, setting)
    return [row(s, limit_s, longest, exact[s.system]) for s in searches for limit_s in setting.limits_s]


def show(search: Search, others: Sequence[Search], probe: Prober, setting: Setting) -> None:
    """Send more requests at the rates that are claimed, and at lower ones where those are not shown."""
    limits = {max(search.limits_s[0], o.limits_s[0]) for o in others if o.limits_s and search.limits_s}
    for limit_s in sorted(limits):
        rate = search.of(limit_s).held
        for _ in range(setting.shows):
            if rate == 0 or search.of(limit_s).shown >= rate:
                break
            search.shown.append(probe(search, rate, setting.shown))
            rate /= setting.step


def row(search: Search, limit_s: float, longest: int, exact: float) -> Row:
    found, of = search.of(limit_s), {probe.rate: probe for probe in [*search.probes, *search.shown]}
    holds = limit_s in search.limits_s

    def number(value: float) -> float | None:
        return harness.rounded(value) if holds and 0 < value < math.inf else None

    at = of.get(found.held)
    return {
        "system": search.system,
        "beam_width": search.width,
        "limit_s": limit_s,
        "longest_prompt": longest,
        "exact_beams_share": harness.rounded(exact),
        "alone_ms": {
            "mean": harness.rounded(1e3 / search.alone.rate),
            "p99": harness.rounded(1e3 * search.alone.p99_s),
            "requests": len(search.alone.latencies_s),
        },
        "holds_alone": holds,
        "capacity_per_s": number(found.held),
        "fails_at_per_s": number(found.failed),
        "shown_per_s": number(found.shown),
        "refuted_at_per_s": number(found.refuted),
        "p99_ms_at_capacity": harness.rounded(1e3 * at.p99_s) if holds and at else None,
        "client_limited": at is not None and at.client_limited,
        "probes": [
            {
                "rate_per_s": harness.rounded(probe.rate),
                "requests": len(probe.latencies_s),
                "p99_ms": harness.rounded(1e3 * probe.p99_s) if probe.p99_s < math.inf else None,
                "client_late_ms": harness.rounded(1e3 * probe.late_s, 2),
            }
            for probe in [*search.probes, *search.shown]
        ],
    }


def ratios(rows: Sequence[Row]) -> list[Row]:
    """jgr's rate over each other's at each limit that both hold alone, ascending: the ends that were shown, or None."""
    points = {(r["system"], r["beam_width"], r["limit_s"]): r for r in rows if "system" in r}
    found = []
    for (system, width, limit_s), other in sorted(points.items(), key=lambda item: item[0][1:]):
        ours = points[JGR, width, limit_s]
        if system != JGR and ours["holds_alone"] and other["holds_alone"]:
            low, high = (
                harness.rounded(a / b, 3) if a and b else None
                for a, b in (
                    (ours["shown_per_s"], other["refuted_at_per_s"]),
                    (ours["fails_at_per_s"], other["capacity_per_s"]),
                )
            )
            found.append({"over": system, "beam_width": width, "limit_s": limit_s, "low": low, "high": high})
    return found


def claims(rows: Sequence[Row]) -> list[Claim]:
    """The ratios' lower ends, each at the least limit that both hold alone; 0 where an end was not shown."""
    missing = sum("missing" in r for r in rows)
    inexact = sum(r["exact_beams_share"] < 1 for r in rows if "system" in r)
    found = {
        id: Claim(id, value, "", "lower", 0)
        for id, value in (
            ("xgr-throughput-peers-missing", missing),
            ("xgr-throughput-rows-with-inexact-beams", inexact),
        )
    }
    for ratio in ratios(rows):
        id = f"rate-over-{ratio['over']}-at-least-common-p99-limit-beam-{ratio['beam_width']}"
        found.setdefault(id, Claim(id, ratio["low"] or 0.0, "x", "higher", TARGETS[ratio["over"]]))
    return list(found.values())


SOURCES = (
    Path(__file__),
    Path(xgr_probes.__file__),
    Path(xgr_sequences.__file__),
    *sorted(client.HERE.glob("*.py")),
    *sorted(client.HERE.glob("requirements-*.txt")),
)

if __name__ == "__main__":
    # Servers inherit it.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    jax.config.update("jax_platforms", "cpu")
    harness.main(
        Benchmark(
            name="xgr_throughput",
            measure=measure,
            packages=("jax", "jaxlib", "numpy"),
            sources=SOURCES,
        )
    )
