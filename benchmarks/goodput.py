# SPDX-License-Identifier: Apache-2.0
"""Answers within their deadline under .5 to 3 times the load that a server can do, and what becomes of the others.

Live: `jgr serve` in a process of its own, over HTTP, with the open-loop client of `jgr bench serve`: a generator with
the sizes of configs/industrial.py, and SASRec with those of configs/sasrec_industrial.py; both after one step of
training, since weights do not change times. Capacity is the rate of answers of the same mix at twice the rate that a
first round could do, without deadlines, first come first served: batches are full, and nothing is refused. It is
measured anew for each set of deadlines. Goodput is the answers within their deadline, from the time at which the client
should have sent the request, a second.

A full batch may take most of a deadline, or more, and jobs that come while one runs must wait for its end. So rows of
the generator say besides what share of the capacity the best planner reaches that knows all arrivals (`any_planner`),
with the programs as fast as the server measured them at its start, alone. Client and server share the processor:
`cores` says how many of its cores each part took. The generator is also served with server.host_cores=1, which has a
capacity of its own.

Virtual: the same policies in virtual time (`jgr.simulation.serving`) over a device whose batch of n rows takes
10 + 2n ms. Bursts are compared with a planner that knows all arrivals and has a device that can be interrupted after
each 3.25 ms, a job's share of a full batch: no real planner reaches more. With two lengths, capacity is counted by full
batches, which long jobs do not fill in 100 ms; so rows say besides what share it is of the most that any planner could
answer in time (`most_in_time`).

Disturbed: the same with one length, but runs vary by a tenth, and one in a hundred takes three times as long. The
policy knows the times without that. Capacity is that of full batches which take as long as these do on average.

The orders fifo, lifo, edf and codel are those of batching.order.

    JGR_DATA=FOLDER python -m benchmarks.goodput [--quick]      FOLDER holds amazon-industrial-minionerec
"""

from __future__ import annotations

import heapq
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks import harness
from benchmarks.harness import Benchmark, Claim, Measured, Missing, Quiet, Row, rounded
from benchmarks.quality import run, server
from benchmarks.server_meters import device_s, processor_s
from jgr.catalog.catalog import load_catalog
from jgr.serving.engine import journal
from jgr.serving.policies.batching import Batcher
from jgr.serving.policies.jobs import Job, Profile, Start
from jgr.serving.policies.ordering import Order, Ordering
from jgr.serving.policies.run_costs import RunCosts
from jgr.simulation.serving import simulate
from jgr.traffic import arrivals, processes
from jgr.traffic.http_client import Target, target_of
from jgr.traffic.measures import after, summarize
from jgr.traffic.mixes import RequestClass, make_mix
from jgr.traffic.sources import ProcessSource

LOADS = (0.5, 0.9, 1.0, 1.1, 1.5, 2.0, 3.0)
DEADLINES: Mapping[str, tuple[int, ...]] = {"100": (100,), "200": (200,), "100 and 200": (100, 200)}
OTHERS: tuple[Order, ...] = ("fifo", "edf", "lifo", "codel")
MS = 1_000_000
ROWS = (1, 2, 4, 8)
VIRTUAL_S = 30
LIVE_S = 6.0
SLO_MS = 1e4
"""For requests without a deadline."""
SETTLE_S = 1.0
"""Seconds of a load that are sent before those that are measured, by the same client on the same connections."""

PROFILES = [Profile("recommend", rows, tokens, 32) for tokens in (64, 256) for rows in ROWS]
SHARE_NS = 3_250_000
VARIES, SLOW_SHARE, SLOW = 0.1, 0.01, 3.0
"""Of disturbed runs: the standard deviation of their times, and how many take how many times as long."""


def profile_ns(profile: Profile) -> int:
    """A row of 256 tokens takes twice as long as one of 64."""
    return (10 + 2 * profile.batch) * MS * (1 if profile.tokens == 64 else 2)


def batcher(order: Order, profiles: Sequence[Profile]) -> Batcher:
    costs = RunCosts({profile: profile_ns(profile) / 1e9 for profile in profiles})
    return Batcher(
        profiles,
        max_tokens=10**9,
        max_wait_ns=0,
        max_queue=1024,
        in_flight=2,
        ordering=Ordering(order),
        costs=costs,
    )


def jobs_at(times_s: Sequence[float], deadlines_ms: Sequence[int], long: float, seed: int) -> list[Job]:
    """long: share of jobs of 256 tokens."""
    rng = random.Random(seed)
    made = []
    for number, at_s in enumerate(times_s):
        arrival_ns, tokens = int(at_s * 1e9), 256 if rng.random() < long else 64
        deadline_ns = arrival_ns + rng.choice(deadlines_ms) * MS
        made.append(Job(number, "recommend", tokens, 32, arrival_ns, deadline_ns))
    return made


def clairvoyant(jobs: Sequence[Job]) -> int:
    """The most jobs that are done in time where each takes SHARE_NS alone, in slots: the earliest deadline first."""
    waiting: list[int] = []
    at = done = now_ns = 0
    while at < len(jobs) or waiting:
        if not waiting:
            now_ns = max(now_ns, jobs[at].arrival_ns)
        while at < len(jobs) and jobs[at].arrival_ns <= now_ns:
            heapq.heappush(waiting, jobs[at].deadline_ns or 0)
            at += 1
        while waiting and waiting[0] < now_ns + SHARE_NS:
            heapq.heappop(waiting)
        if waiting:
            heapq.heappop(waiting)
            now_ns, done = now_ns + SHARE_NS, done + 1
    return done


def least_costs_ns(jobs: Sequence[Job]) -> dict[int, float]:
    """What each job takes of the device at least, by its id, whoever plans: of every batch that ends in time for all of
    its jobs, these are together no more than the batch takes.

    A short one takes its part of a full batch. Where k long ones can be in a batch of n rows, n - k short ones may be
    in it too, and the long ones share what is left. How many they can be at most follows from when they came and are
    due: they wait for the batch's beginning, and it must end in time.
    """
    long = [job for job in jobs if job.tokens == 256]
    found = {job.id: float(SHARE_NS) for job in jobs}
    found.update((job.id, float("inf")) for job in long)
    for profile in PROFILES:
        if profile.tokens == 256:
            takes_ns = profile_ns(profile)
            for job, most in zip(long, _together(long, takes_ns), strict=True):
                for k in range(1, min(most, profile.batch) + 1):
                    each_ns = (takes_ns - (profile.batch - k) * SHARE_NS) / k
                    found[job.id] = min(found[job.id], each_ns)
    return found


def _together(jobs: Sequence[Job], takes_ns: int) -> list[int]:
    """For each job, how many jobs, itself included, can be in a batch with it at most."""
    waits = [(job.arrival_ns, (job.deadline_ns or 0) - takes_ns) for job in jobs]
    begins = np.array([begin for begin, end in waits if begin <= end])
    ends = np.sort([end for begin, end in waits if begin <= end])
    # So many wait at each time at which one comes; between these they only become fewer.
    there = np.arange(1, len(begins) + 1) - np.searchsorted(ends, begins, side="left")
    most = []
    for begin, end in waits:
        first, last = np.searchsorted(begins, (begin, end + 1))
        most.append(int(there[first:last].max(initial=0)) if begin <= end else 0)
    return most


def most_in_time(jobs: Sequence[Job], seconds: float) -> tuple[float, float]:
    """No planner answers more of the jobs in time: as many as it likes of each length, and as large a share of each."""
    costs_ns = np.sort(list(least_costs_ns(jobs).values()))
    device_ns = seconds * 1e9 + max((job.deadline_ns or 0) - job.arrival_ns for job in jobs)
    spent_ns = np.cumsum(costs_ns)
    return float((spent_ns <= device_ns).sum()), len(jobs) * min(1.0, device_ns / float(spent_ns[-1]))


def most_in_batches(jobs: Sequence[Job], shapes: Sequence[tuple[int, int]], seconds: float) -> int:
    """No planner answers more of the jobs in time. shapes: (rows, ns) of each program, one of which runs at a time.

    Of a batch that ends in time for all of its jobs, what they take here is together no more than the batch takes: none
    of them can be in a batch of more jobs.
    """
    least_ns = np.full(len(jobs), np.inf)
    for rows, takes_ns in shapes:
        with np.errstate(divide="ignore"):
            each_ns = takes_ns / np.minimum(rows, _together(jobs, takes_ns))
        least_ns = np.minimum(least_ns, each_ns)
    device_ns = seconds * 1e9 + max((job.deadline_ns or 0) - job.arrival_ns for job in jobs)
    return int((np.cumsum(np.sort(least_ns)) <= device_ns).sum())


def _run_ns(start: Start) -> int:
    assert isinstance(start.shape, Profile)
    return profile_ns(start.shape)


def disturbed(rng: np.random.Generator) -> Callable[[Start], int]:
    """What runs take on a machine that is not left alone."""

    def run_ns(start: Start) -> int:
        factor = max(0.5, rng.normal(1, VARIES)) * (SLOW if rng.random() < SLOW_SHARE else 1)
        return round(factor * _run_ns(start))

    return run_ns


def virtual_row(
    order: Order,
    load: float,
    name: str,
    jobs: Sequence[Job],
    per_s: float,
    run_ns: Callable[[Start], int] = _run_ns,
) -> Row:
    long = any(job.tokens == 256 for job in jobs)
    out = simulate(batcher(order, PROFILES if long else PROFILES[:4]), jobs, run_ns, launch_ns=MS // 2)
    ends = Counter(out.verdicts.values())
    offered = len(jobs) / VIRTUAL_S
    costs = {64: SHARE_NS, 256: 2 * SHARE_NS}
    work_ns = sum(costs[job.tokens] for job in jobs if out.verdicts[job.id] == "done")
    row: Row = {
        "world": "virtual",
        "order": order,
        "load": load,
        "deadlines_ms": name,
        "goodput_share": rounded(ends["done"] / VIRTUAL_S / min(offered, per_s)),
        "work_share": rounded(work_ns / 1e9 / VIRTUAL_S / min(load, 1.0)),
        "refused": ends["refused"],
        "accepted_and_late": rounded(ends["expired"] / max(1, ends["done"] + ends["expired"])),
        "wasted_device_time": rounded(out.wasted_ns / max(1, out.busy_ns)),
    }
    if long:
        most, most_alike = most_in_time(jobs, VIRTUAL_S)
        row["of_any_planner"] = rounded(ends["done"] / most)
        row["of_any_planner_that_refuses_lengths_alike"] = rounded(ends["done"] / most_alike)
        mean = 1 - ends["done"] / len(jobs)
        row["refused_over_mean"] = {
            str(tokens): rounded(
                sum(out.verdicts[job.id] != "done" for job in jobs if job.tokens == tokens)
                / sum(job.tokens == tokens for job in jobs)
                / max(mean, 1e-9)
            )
            for tokens in (64, 256)
        }
    return row


def virtual(quick: bool) -> list[Row]:
    rows: list[Row] = []
    loads = (0.9, 1.5, 3.0) if quick else LOADS
    rng = np.random.default_rng(0)
    for name, deadlines in DEADLINES.items():
        for load in loads:
            for long in (0.0, 0.3):
                per_s = 1e9 / SHARE_NS / (1 + long)
                times = arrivals.poisson(rng, load * per_s, VIRTUAL_S)
                jobs = jobs_at(times.tolist(), deadlines, long, seed=1)
                rows.append(virtual_row("deadline", load, name, jobs, per_s) | {"long_share": long})
                if load == 1.5:
                    rows += [virtual_row(o, load, name, jobs, per_s) | {"long_share": long} for o in OTHERS]
    per_s = 1e9 / SHARE_NS
    for process in ("gamma:3", "flash:5:1:5"):
        for load in (0.5, 0.9, 1.5):
            times = arrivals.parse_process(process).times(rng, load * per_s, VIRTUAL_S)
            jobs = jobs_at(times.tolist(), (100, 200), 0.0, seed=2)
            best = clairvoyant(jobs)
            row = virtual_row("deadline", load, "100 and 200", jobs, best / VIRTUAL_S)
            served = row["goodput_share"] * min(len(jobs) / VIRTUAL_S, best / VIRTUAL_S) * VIRTUAL_S
            rows.append(row | {"arrivals": process, "of_the_clairvoyant": rounded(served / best)})
    per_s /= 1 + SLOW_SHARE * (SLOW - 1)
    for name in ("100", "100 and 200"):
        for load in loads:
            rng = np.random.default_rng(5)
            jobs = jobs_at(
                arrivals.poisson(rng, load * per_s, VIRTUAL_S).tolist(), DEADLINES[name], 0.0, seed=6
            )
            row = virtual_row("deadline", load, name, jobs, per_s, disturbed(rng))
            rows.append(row | {"disturbed": True})
    return rows


def model(folder: Path, config: str, data: Path) -> list[str]:
    """Flags of `jgr serve` for a model of that configuration after one step of training."""
    out = folder / Path(config).stem
    run(
        "train",
        f"--config=configs/{config}",
        f"--set=data.path={data}",
        f"--set=train.out={out}",
        *(f"--set=train.{setting}" for setting in ("steps=1", "evaluate_every=0", "checkpoint_every=1")),
    )
    return [str(out)]


class Live:
    """A model that is served again and again, and the load that it is asked for."""

    def __init__(self, folder: Path, config: str, kind: str, data: Path) -> None:
        self.name, self._kind = Path(config).stem, kind
        self._flags = model(folder, config, data)
        catalog = load_catalog(Path(self._flags[0]) / "catalog.jsonl")
        self._items = catalog.item_ids
        self._runs = 0

    @contextmanager
    def serve(self, *settings: str) -> Iterator[Target]:
        flags = [*self._flags, *(f"--set={setting}" for setting in settings), "--log_level=warning"]
        with server(flags) as url:
            target = target_of(url)
            self.load(target, 20.0, 2.0, (None,))
            yield target

    def shapes(self, *settings: str) -> list[tuple[int, int]]:
        """(rows, ns) of each program of a generator, as the server measures them at its start."""
        with tempfile.TemporaryDirectory(prefix="jgr-goodput-") as folder:
            file = Path(folder) / "journal.jsonl"
            flags = [f"--set={setting}" for setting in (f"server.journal={file}", *settings)]
            with server([*self._flags, *flags, "--log_level=warning"]):
                opened = next(iter(journal.read(file))).event
        assert isinstance(opened, journal.Opened)
        costs = msgspec.json.decode(opened.measured, type=list[tuple[Profile, float]])
        return [(shape.batch, round(s * 1e9)) for shape, s in costs if shape.kind == self._kind]

    def load(
        self,
        target: Target,
        rate: float,
        seconds: float,
        deadlines: Sequence[int | None],
        settle_s: float = 0.0,
    ) -> dict[str, Any]:
        """The report of so many seconds of requests at a rate, which settle_s of them precede."""
        classes = [
            RequestClass(
                name=f"{deadline}",
                kind=self._kind,  # type: ignore[arg-type]
                history_length="uniform:3:10",
                candidates=128,
                deadline_ms=deadline,
            )
            for deadline in deadlines
        ]
        self._runs += 1
        rng = np.random.default_rng(7)
        source = ProcessSource(
            arrivals.parse_process("poisson"), make_mix(classes, self._items, rng), 7, 10**6
        )
        schedule = source.schedule(rate, settle_s + seconds, self._runs)
        before, device, began_s = processor_s(), device_s(target.host, target.port), time.monotonic()
        results = processes.run(
            schedule, target, processes=1, max_connections=512, timeout_s=10.0, progress=lambda *_: None
        )
        took_s, now = time.monotonic() - began_s, processor_s()
        used_s, wasted_s = np.subtract(device_s(target.host, target.port), device).tolist()
        cores = {part: rounded((now[part] - before[part]) / took_s) for part in now}
        return summarize(*after(schedule, results, settle_s), SLO_MS) | {
            "cores": cores,
            "wasted_device_time": wasted_s / used_s,
        }

    def capacity(self, *settings: str) -> float:
        """Answers a second at saturation."""
        with self.serve("batching.order=fifo", "batching.max_queue=100000", *settings) as target:
            first = self.load(target, 1500.0, 3.0, (None,))
            rate = 2 * first["answered"]["200"] / first["elapsed_s"]
            report = self.load(target, rate, LIVE_S / 2, (None,))
        return float(report["answered"]["200"] / report["elapsed_s"])


def live_row(
    live: Live, order: str, load: float, capacity: float, name: str, report: Mapping[str, Any]
) -> Row:
    offered = load * capacity
    return {
        "world": "live",
        "model": live.name,
        "order": order,
        "load": load,
        "capacity_per_s": rounded(capacity),
        "deadlines_ms": name,
        "goodput_share": rounded(report["goodput_per_s"] / min(offered, capacity)),
        "answered": report["answered"],
        "accepted_in_time": rounded(report["in_time"] / max(1, report["answered"].get("200", 0))),
        "cores": report["cores"],
        "wasted_device_time": rounded(report["wasted_device_time"]),
        "latency_ms": report["latency_ms"],
        "lateness_ms": report["lateness_ms"],
    }


def any_planner(
    shapes: Sequence[tuple[int, int]], load: float, capacity: float, deadlines: Sequence[int]
) -> float:
    """The share of min(offered, capacity) that the best planner reaches at such a load."""
    rng = np.random.default_rng(3)
    times = arrivals.poisson(rng, load * capacity, VIRTUAL_S)
    most = most_in_batches(jobs_at(times.tolist(), deadlines, 0.0, seed=4), shapes, VIRTUAL_S)
    return most / min(len(times), capacity * VIRTUAL_S)


def measure(quick: bool, quiet: Quiet) -> Measured:
    """Claims on goodput, waste and fairness, and the rows of all loads."""
    data = Path(os.environ.get("JGR_DATA", "")) / "amazon-industrial-minionerec"
    if not data.is_dir():
        raise Missing("needs the dataset: no amazon-industrial-minionerec in the folder that JGR_DATA names")
    rows = virtual(quick)
    seconds, loads = (4.0, (0.9, 2.0)) if quick else (LIVE_S, LOADS)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jgr-goodput-")))
        for config, kind in (("industrial.py", "recommend"), ("sasrec_industrial.py", "rank")):
            live = Live(folder, config, kind, data)
            # A scorer's model takes a tenth of a core: it need not leave one.
            for cores in (0, 1) if kind == "recommend" else (0,):
                host = f"server.host_cores={cores}"
                shapes = live.shapes(host) if kind == "recommend" else []
                blocks = [("deadline", name) for name in DEADLINES]
                blocks += [(order, "100") for order in OTHERS if not (quick or cores)]
                for order, name in blocks:
                    # Anew for each: a machine is not as fast as it was ten minutes ago.
                    if order == "deadline":
                        quiet.wait()
                        capacity = live.capacity(host)
                        harness.note(f"{live.name}, {host}: {capacity:.0f}/s at saturation")
                    with live.serve(f"batching.order={order}", host) as target:
                        for load in loads if order == "deadline" else (1.5,):
                            report = live.load(target, load * capacity, seconds, DEADLINES[name], SETTLE_S)
                            rows.append(live_row(live, order, load, capacity, name, report))
                            rows[-1]["host_cores"] = cores
                            if shapes:
                                most = any_planner(shapes, load, capacity, DEADLINES[name])
                                rows[-1]["any_planner"] = rounded(min(1.0, most))
                            share = rows[-1]["goodput_share"]
                            harness.note(f"{live.name} {order} {load} x {name} ms: {share:.3f} of capacity")
    return Measured(claims(rows), rows)


def claims(rows: Sequence[Row]) -> list[Claim]:
    ours = [row for row in rows if row["order"] == "deadline" and "disturbed" not in row]
    steady = [row for row in ours if "arrivals" not in row and not row.get("long_share")]
    mixed = [row for row in ours if row.get("long_share")]
    found = [
        _least("goodput-share-in-virtual-time", [r for r in steady if r["world"] == "virtual"], 0.95),
        _least("goodput-share-of-two-lengths-in-virtual-time", mixed, 0.95),
        Claim(
            "bursts-over-the-clairvoyant-planner",
            min(row["of_the_clairvoyant"] for row in ours if "arrivals" in row),
            "",
            "higher",
            0.95,
        ),
        _least("goodput-share-when-runs-are-disturbed", [row for row in rows if "disturbed" in row], 0.95),
        Claim(
            "wasted-device-time",
            max(row["wasted_device_time"] for row in ours if row["world"] == "virtual"),
            "",
            "lower",
            0.02,
        ),
        Claim(
            "accepted-and-late",
            max(row["accepted_and_late"] for row in steady if row["world"] == "virtual"),
            "",
            "lower",
            0.01,
        ),
        Claim(
            "refused-share-of-a-length-over-the-mean",
            max(max(row["refused_over_mean"].values()) for row in mixed if row["load"] > 0.5),
            "",
            "lower",
            1.5,
        ),
    ]
    live = [row for row in ours if row["world"] == "live"]
    for name, cores in dict.fromkeys((row["model"], row["host_cores"]) for row in live):
        of = [row for row in live if (row["model"], row["host_cores"]) == (name, cores)]
        how = "-with-a-core-for-the-host" if cores else ""
        found.append(_least(f"goodput-share-of-{name}-over-http{how}", of, 0.9))
        wasted = max(row["wasted_device_time"] for row in of)
        found.append(Claim(f"wasted-device-time-of-{name}-over-http{how}", wasted, "", "lower", 0.02))
        late = min(row["accepted_in_time"] for row in of)
        found.append(Claim(f"answers-of-{name}-that-are-in-time{how}", late, "", "higher", 0.99))
    return found


def _least(id: str, rows: Sequence[Row], target: float) -> Claim:
    return Claim(id, min(row["goodput_share"] for row in rows), "", "higher", target)


if __name__ == "__main__":
    harness.main(
        Benchmark(
            "goodput",
            measure,
            ("jax", "msgspec", "numpy"),
            (Path(__file__), harness.ROOT / "jgr/simulation/serving.py"),
        )
    )
