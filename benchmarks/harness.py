# SPDX-License-Identifier: Apache-2.0
"""What every benchmark shares: fair timing, and a result file that says what was measured, where, and of which code.

The one idea: a benchmark hands over a function that measures. The harness decides when the machine is quiet enough and
writes the result; nothing else writes results.

    python -m benchmarks.<name>                  measures, rewrites benchmarks/results/<name>.<device>.json (and .png)
    python -m benchmarks.<name> --quick          under a minute, fewer and shorter runs; writes only where --out says

Exit codes: 0 measured (claims may fail: the result says so), 2 something is missing, 3 the machine was not quiet.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
import platform
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from absl import app, flags
from absl import logging as absl_logging

import jgr
from benchmarks import pictures, sources
from jgr.evaluation import machine as machines
from jgr.evaluation.machine import BusyMachine as BusyMachine
from jgr.evaluation.machine import Quiet as Quiet

T = TypeVar("T")
Row = dict[str, Any]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

PATIENCE_S = 600.0
QUICK_PATIENCE_S = 20.0
"""Seconds that a run may lose to waiting for others and to rounds that they disturbed."""
_SETTLE_S = 0.05  # OpenMP's and XLA's idle threads spin for a while, on the cores that the next run needs


class Missing(Exception):
    """Something that the benchmark needs is not there; the message is one line that says how to get it."""


def holds(value: float, better: str, target: float, interval: Sequence[float] | None = None) -> bool:
    """Whether a value, or each value of an interval [low, high], is on the right side of the target, or on it."""
    low, high = interval if interval is not None else (value, value)
    return low >= target if better == "higher" else high <= target


@dataclass(frozen=True)
class Claim:
    """One figure that README quotes.

    id: words joined by hyphens, for programs. title: what was measured, in words for people who know nothing of the
    benchmark; empty: benchmarks/titles.py has it. interval: the ends of the value's 95 % interval, where it has one.
    """

    id: str
    value: float
    unit: str
    better: Literal["higher", "lower"]
    target: float
    title: str = ""
    interval: tuple[float, float] | None = None

    @property
    def holds(self) -> bool:
        """Whether the target is reached: by the whole interval, where there is one."""
        return holds(self.value, self.better, self.target, self.interval)

    def to_json(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in ("id", "value", "unit", "better", "target")}
        extra: dict[str, Any] = {"title": self.title} if self.title else {}
        if self.interval is not None:
            extra["interval"] = list(self.interval)
        return {**fields, "holds": self.holds, **extra}


class Measured(NamedTuple):
    """What a benchmark found: the claims, and the rows that they are drawn from."""

    claims: Sequence[Claim]
    rows: Sequence[Row]


@dataclass(frozen=True)
class Benchmark:
    """A runnable benchmark.

    name: the name of its file and of its results. measure: (quick, quiet) -> Measured. packages: those whose versions
    matter. sources: the files that do the measuring. plot: draws the rows into a PNG file; None: the claims are drawn.
    device: what computes.
    """

    name: str
    measure: Callable[[bool, Quiet], Measured]
    packages: Sequence[str]
    sources: Sequence[Path]
    plot: Callable[[Sequence[Row], Path], None] | None = None
    device: str = "cpu"


def interleave(
    variants: Mapping[str, Callable[[], T]],
    rounds: int,
    quiet: Quiet,
    sleep: Callable[[float], None] = time.sleep,
    once: Collection[str] = (),
) -> dict[str, list[T]]:
    """Run the variants in turns, A B C, A B C, ..., so that drift hits all alike: the results of each, one a round.

    A first round is not kept, and neither is a round in which other processes took part of the machine.
    once: variants whose calls take many seconds; they run in the first round that is kept, and in no other.
    """
    for name, run in variants.items():
        if name not in once:
            run()
    kept: list[dict[str, T]] = []
    while len(kept) < rounds:
        start = quiet.wait()
        results = {}
        for name, run in variants.items():
            if not kept or name not in once:
                sleep(_SETTLE_S)
                results[name] = run()
        if quiet.was_quiet_since(start):
            kept.append(results)
        note(f"round {len(kept)} of {rounds}: {', '.join(variants)}")
    return {name: [results[name] for results in kept if name in results] for name in variants}


def timed(
    run: Callable[[], T], at_least_s: float = 0.5, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, T]:
    """How long a call takes, in ms, and what it gives: the median over calls that go on for at least_s in all.

    So a short call is timed warm, as under load, and a long call is timed once.
    """
    calls_ms: list[float] = []
    while True:
        start = clock()
        result = run()
        calls_ms.append((clock() - start) * 1e3)
        if sum(calls_ms) >= at_least_s * 1e3:
            return float(np.median(calls_ms)), result


def rounded(value: float, digits: int = 4) -> float:
    """The value with so many significant digits, so that a result file does not pretend to more."""
    return float(f"{value:.{digits}g}")


def interval_of_median(values: Iterable[float], resamples: int = 5000) -> tuple[float, float]:
    """The 95 % interval of the median of values, by the percentile bootstrap."""
    rng, drawn = np.random.default_rng(0), np.array(list(values))
    medians = np.median(rng.choice(drawn, (resamples, len(drawn))), axis=1)
    low, high = np.quantile(medians, (0.025, 0.975))
    return rounded(float(low)), rounded(float(high))


def spread(values: Iterable[float]) -> dict[str, float]:
    """The median, the quartiles (by linear interpolation) and the number of the values."""
    runs = list(values)
    q1, median, q3 = (rounded(float(q)) for q in np.percentile(runs, (25, 50, 75)))
    return {"median": median, "q1": q1, "q3": q3, "runs": len(runs)}


def note(text: str) -> None:
    """Show how far a run has come, where somebody watches."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr)


def require(package: str, version: str) -> Any:
    """Import a package that jgr itself does not need, in exactly this version; Missing says how to install it."""
    try:
        found = importlib.metadata.version(package).split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        found = "not there"
    if found != version:
        raise Missing(f"needs {package}=={version}, which is {found}: pip install {package}=={version}")
    return importlib.import_module(package)


def source_hash(files: Iterable[Path], root: Path = ROOT) -> str:
    """First 16 hex digits of the sha256 over jgr's sources and `files`: names and contents, in order of names."""
    digest = hashlib.sha256()
    for path in sorted({*(root / "jgr").rglob("*.py"), *(f.resolve() for f in files)}):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def commit(root: Path = ROOT) -> tuple[str | None, bool | None]:
    """The commit that is checked out, and whether files differ from it; None where git cannot tell.

    Results do not count as a difference: those of one benchmark must not mark the next one as dirty.
    """
    return machines.commit(root, "benchmarks/results")


def describe(benchmark: Benchmark, command: str, measured: Measured, seconds: float) -> dict[str, Any]:
    """The content of a result file. seconds: what the measuring took, waiting for a quiet machine included.

    sources: the digest of all code that the benchmark may run, by which a claim is known to be stale later.
    """
    measured_commit, dirty = commit()
    # Its kernels for CPUs, where they are installed: without them a decoder takes another time.
    packages = [*benchmark.packages, *(["jgr-native"] if find_spec("jgr_native") else [])]
    versions = {name: importlib.metadata.version(name) for name in packages}
    return {
        "benchmark": benchmark.name,
        "command": command,
        "measured_commit": measured_commit,
        "dirty": dirty,
        "source_hash": source_hash([Path(__file__), *benchmark.sources]),
        "sources": sources.checked_out().digest(f"benchmarks/{benchmark.name}.py"),
        "seconds": round(seconds),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machines.machine(),
        "versions": {"python": platform.python_version(), "jgr": jgr.__version__, **versions},
        "claims": [claim.to_json() for claim in measured.claims],
        "rows": list(measured.rows),
    }


def read_result(path: Path) -> dict[str, Any]:
    """A result file, whose claims hold as `holds` says: older files have another word where there is an interval."""
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for claim in result.get("claims", ()):
        claim["holds"] = holds(claim["value"], claim["better"], claim["target"], claim.get("interval"))
    return result


def main(benchmark: Benchmark) -> None:
    """Run a benchmark from the command line; does not return."""
    flags.DEFINE_bool("quick", False, "under a minute: fewer and shorter runs, written only where --out says")
    flags.DEFINE_string("out", "", "result file, in place of the one in benchmarks/results")
    app.run(lambda argv: _run(benchmark, argv))


def _run(benchmark: Benchmark, argv: Sequence[str]) -> int:
    absl_logging.set_verbosity(absl_logging.WARNING)  # of libraries, above all Orbax
    quick, out = flags.FLAGS.quick, flags.FLAGS.out
    began = time.monotonic()
    try:
        measured = benchmark.measure(quick, Quiet(QUICK_PATIENCE_S if quick else PATIENCE_S))
    except (Missing, BusyMachine) as e:
        print(f"{benchmark.name}: {e}", file=sys.stderr)
        return 3 if isinstance(e, BusyMachine) else 2
    command = f"python -m benchmarks.{benchmark.name}" + (" --quick" if quick else "")
    result = describe(benchmark, command, measured, time.monotonic() - began)
    for claim in measured.claims:
        sign, verdict = ("≥" if claim.better == "higher" else "≤"), ("holds" if claim.holds else "MISSED")
        print(f"{claim.id}: {claim.value:g} {claim.unit} (target {sign} {claim.target:g}: {verdict})")
    if out or not quick:
        path = Path(out) if out else RESULTS / f"{benchmark.name}.{benchmark.device}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
        if find_spec("matplotlib") is None:
            print(
                "no picture: matplotlib is not installed (python -m tools.pictures draws it)", file=sys.stderr
            )
        else:
            pictures.draw(result, path.with_suffix(".png"), benchmark.plot)
    print(json.dumps(result))
    return 0
