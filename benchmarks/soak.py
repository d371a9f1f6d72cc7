# SPDX-License-Identifier: Apache-2.0
"""An hour of a server's life: does it stay as large as it was, and right?

A server process over a decoder that caches and a scorer that keeps users is asked by several callers at once: both
endpoints, filters, deadlines, priorities, clients that leave or read slowly. Now and then a catalog is uploaded and
activated, a model reloaded, users erased (benchmarks/soak_world.py). Every ten seconds its memory, threads, files,
pages and compiled programs are noted.

The slope of the memory is that of a straight line through the means of each minute after the first ten; its interval is
Student's, of 95 %. A soak too short for three such means has no slope and no claim about it.

    python -m benchmarks.soak [--quick] [--minutes=60]
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from absl import flags
from scipy import stats

from benchmarks import harness
from benchmarks.harness import Benchmark, Claim, Measured, Quiet
from benchmarks.hostile_world import Server, make_models
from benchmarks.soak_world import Found, Row, Soak

WARM_UP_S, BLOCK_S = 600.0, 60.0
MAX_ROWS = 400
MAX_SLOPE = 1.0
"""Percent an hour."""
LEAST_COMPARED = 50
QUICK_MINUTES = 0.4


@dataclass(frozen=True)
class Slope:
    """Growth in percent an hour, with the ends of its 95 % interval."""

    per_hour: float
    low: float
    high: float


def slope(
    series: Sequence[Row], name: str, warm_up_s: float = WARM_UP_S, block_s: float = BLOCK_S
) -> Slope | None:
    """How a measured figure grows after the warm-up; None where there are fewer than three blocks.

    Neighbouring measurements are alike, so a line through all of them would seem surer than it is: it goes through
    the blocks' means.
    """
    late = [row for row in series if row["at_s"] >= warm_up_s]
    blocks: dict[int, list[Row]] = {}
    for row in late:
        blocks.setdefault(int(row["at_s"] // block_s), []).append(row)
    if len(blocks) < 3:
        return None
    hours = [float(np.mean([row["at_s"] for row in rows])) / 3600 for rows in blocks.values()]
    sizes = [float(np.mean([row[name] for row in rows])) for rows in blocks.values()]
    line = stats.linregress(hours, sizes)
    percent = 100 / (line.intercept + line.slope * hours[0])
    reach = float(stats.t.ppf(0.975, len(hours) - 2)) * line.stderr
    return Slope(*(float(x * percent) for x in (line.slope, line.slope - reach, line.slope + reach)))


def thinned(series: Sequence[Row], most: int = MAX_ROWS) -> list[Row]:
    """At most so many rows, the first and the last among them, evenly spread."""
    if len(series) <= most:
        return list(series)
    return [series[int(at)] for at in np.linspace(0, len(series) - 1, most).round()]


def measure(quick: bool, quiet: Quiet) -> Measured:
    minutes = QUICK_MINUTES if quick else flags.FLAGS.minutes
    with tempfile.TemporaryDirectory(prefix="jgr-soak-") as given:
        folder = Path(given)
        files = make_models(folder, f"model.compilation_cache={folder / 'programs'}")
        server = Server(files, folder / "log")
        with server:
            change_s, measure_s = (2.0, 1.0) if minutes < 5 else (60.0, 10.0)
            found = Soak(server.port, server.process, change_s=change_s, measure_s=measure_s).run(
                60 * minutes
            )
        tracebacks = server.tracebacks
    return Measured(_claims(found, tracebacks, slope(found.series, "rss_bytes")), _rows(found, minutes))


def _rows(found: Found, minutes: float) -> list[harness.Row]:
    grown = {name: slope(found.series, name) for name in ("rss_bytes", "threads", "descriptors")}
    told: dict[str, dict[str, float] | None] = {
        name: None if one is None else {end: harness.rounded(value) for end, value in vars(one).items()}
        for name, one in grown.items()
    }
    summary = {
        "minutes": minutes,
        "counts": dict(sorted(found.counts.items())),
        "compared": found.compared,
        "unasked": found.unasked[:5],
        "wrong": found.wrong[:5],
        "percent_an_hour": told,
    }
    return [summary, *(dict(row) for row in thinned(found.series))]


def _claims(found: Found, tracebacks: int, memory: Slope | None) -> list[Claim]:
    totals = {row["pages"] for row in found.series}
    lost = found.lost_pages + max(totals) - min(totals)
    claims = [
        Claim("soak-wrong-answers", float(len(found.wrong)), "answers", "lower", 0.0),
        Claim("soak-answers-compared", float(found.compared), "answers", "higher", float(LEAST_COMPARED)),
        Claim("soak-unasked-refusals", float(len(found.unasked)), "answers", "lower", 0.0),
        Claim("soak-pages-lost", lost, "pages", "lower", 0.0),
        Claim(
            "soak-programs-compiled-for-requests",
            float(found.compiled_for_requests),
            "programs",
            "lower",
            0.0,
        ),
        Claim("soak-programs-compiled-without-a-change", float(found.stray), "programs", "lower", 0.0),
        Claim("soak-tracebacks-in-the-log", float(tracebacks), "tracebacks", "lower", 0.0),
    ]
    if memory is not None:
        claims.insert(0, Claim("soak-memory-growth-upper-end", memory.high, "% an hour", "lower", MAX_SLOPE))
    return claims


if __name__ == "__main__":
    here = Path(__file__).parent
    flags.DEFINE_float("minutes", 60.0, "how long the server is asked")
    harness.main(
        Benchmark(
            name="soak",
            measure=measure,
            packages=("jax", "numpy", "scipy", "msgspec", "starlette", "uvicorn", "uvloop"),
            sources=(
                Path(__file__),
                here / "soak_world.py",
                here / "hostile_world.py",
                here / "hostile_requests.py",
            ),
        )
    )
