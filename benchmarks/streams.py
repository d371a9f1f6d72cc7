# SPDX-License-Identifier: Apache-2.0
"""What a second stream gains (XGR-15): answers a second at saturation with one program at a time and with two.

`jgr serve` in a process of its own, over HTTP, first come first served, at twice the rate that it can do: batches are
full. A generator without a cache with the sizes of configs/industrial.py (`batching.streams`), and HSTU with those of
configs/hstu_industrial.py (`executors.streams`); both after one step of training. The two settings take turns. A claim
is the median of the rounds' ratios; below 1, a second stream costs something, which is why a decoder has one unless it
is told otherwise.

    JGR_DATA=FOLDER python -m benchmarks.streams [--quick]      FOLDER holds amazon-industrial-minionerec
"""

from __future__ import annotations

import os
import statistics
import tempfile
from pathlib import Path

from benchmarks import harness
from benchmarks.goodput import Live
from benchmarks.harness import Benchmark, Claim, Measured, Missing, Quiet, Row, rounded

ROUNDS = 5
MODELS = (
    ("industrial.py", "recommend", "batching.streams={}"),
    ("hstu_industrial.py", "rank", "executors.streams={}"),
)


def measure(quick: bool, quiet: Quiet) -> Measured:
    """A claim for each model, and a row for each round."""
    data = Path(os.environ.get("JGR_DATA", "")) / "amazon-industrial-minionerec"
    if not data.is_dir():
        raise Missing("needs the dataset: no amazon-industrial-minionerec in the folder that JGR_DATA names")
    claims: list[Claim] = []
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="jgr-streams-") as folder:
        for config, kind, setting in MODELS:
            live = Live(Path(folder), config, kind, data)
            gains = []
            for number in range(1 if quick else ROUNDS):
                quiet.wait()
                order = (1, 2) if number % 2 == 0 else (2, 1)
                found = {streams: live.capacity(setting.format(streams)) for streams in order}
                gains.append(found[2] / found[1])
                row = {"model": live.name, "round": number}
                rows.append(row | {f"per_s_{streams}": rounded(each) for streams, each in found.items()})
                harness.note(f"{live.name}: {found[1]:.0f}/s with one stream, {found[2]:.0f}/s with two")
            claims.append(
                Claim(f"second-stream-of-{live.name}", statistics.median(gains), "x", "higher", 1.0)
            )
    return Measured(claims, rows)


if __name__ == "__main__":
    goodput = harness.ROOT / "benchmarks/goodput.py"
    harness.main(Benchmark("streams", measure, ("jax", "numpy"), (Path(__file__), goodput)))
