# SPDX-License-Identifier: Apache-2.0
"""What a wider beam costs and brings: `jgr evaluate --sweep=beam.width=...` on Amazon Industrial and Scientific.

Uses the model that benchmarks.quality_industrial trained. One engine with a compiled profile for each width; latency is
that of single requests, one after the other.

    JGR_DATA=FOLDER python -m benchmarks.beam_width      FOLDER holds amazon-industrial-minionerec
"""

import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import Benchmark, Claim, Measured, Missing, Quiet, Row
from benchmarks.quality import evaluated

CONFIG, RAW, MODEL = "configs/industrial.py", "amazon-industrial-minionerec", "runs/industrial"
WIDTHS = (5, 10, 20, 50, 100, 200, 400)


def measure(quick: bool, quiet: Quiet) -> Measured:
    raw = Path(os.environ.get("JGR_DATA") or harness.ROOT.parent / "shared" / "data") / RAW
    if not raw.is_dir() or not (harness.ROOT / MODEL).is_dir():
        raise Missing(
            f"needs {RAW} in the folder that JGR_DATA names, and {MODEL}: python -m benchmarks.quality_industrial"
        )
    fields = (
        f"--config={CONFIG}",
        f"--set=data.path={raw}",
        "--set=profiles.batch=1,8",
        "--set=profiles.candidates=1",
    )
    widths = ",".join(map(str, WIDTHS))
    while True:
        start = quiet.wait()
        points: list[Row] = evaluated(
            *fields, f"--sweep=beam.width={widths}", f"--limit={300 if quick else 4533}", "--k=5,10"
        )["points"]
        if quick or quiet.was_quiet_since(start):
            break
    at = {point["value"]: point for point in points}
    cost = at[str(WIDTHS[-1])]["latency_ms"]["p50"] / at["10"]["latency_ms"]["p50"]
    return Measured(
        [Claim("latency-of-beam-400-over-beam-10", harness.rounded(cost), "x", "lower", 10.0)], points
    )


def plot(rows: Sequence[Row], path: Path) -> None:
    """HR@10 and NDCG@10 against the p50 latency of one request."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    latency = [row["latency_ms"]["p50"] for row in rows]
    for metric in ("hr@10", "ndcg@10"):
        axes.plot(latency, [row["metrics"][metric] for row in rows], marker="o", label=metric)
    for row, x in zip(rows, latency, strict=True):
        axes.annotate(f"beam {row['value']}", (x, row["metrics"]["hr@10"]))
    axes.set_xlabel("p50 latency of one request, ms")
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    harness.main(
        Benchmark(
            name="beam_width",
            measure=measure,
            packages=("numpy", "jax", "jaxlib"),
            sources=(Path(__file__), harness.ROOT / CONFIG),
            plot=plot,
        )
    )
