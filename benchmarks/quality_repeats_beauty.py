# SPDX-License-Identifier: Apache-2.0
"""HSTU with weights for the history's items (train.repeats) against counting on Amazon Beauty.

All else is as in benchmarks/quality_informed_beauty.py, so the difference from its rows is what the weights bring. The
claims are of the convention that allows items of the history as answers, where a model that was taught nothing about
them loses; the rows have both conventions.

    JGR_DATA=FOLDER python -m benchmarks.quality_repeats_beauty      FOLDER holds amazon-beauty
"""

from dataclasses import replace

from benchmarks import harness
from benchmarks.quality_counting import benchmark
from benchmarks.quality_informed_beauty import TASK as WITHOUT

TASK = replace(
    WITHOUT,
    name="informed-beauty_repeats",
    exclude_history=False,
    targets={},
    fused_targets={},
    published={},
    settings=(*WITHOUT.settings, "train.repeats=true"),
)

if __name__ == "__main__":
    harness.main(benchmark("quality_repeats_beauty", TASK))
