# SPDX-License-Identifier: Apache-2.0
"""HSTU with weights for the history's items (train.repeats) against counting on Amazon Industrial and Scientific.

All else is as in benchmarks/quality_informed_industrial.py, so the difference from its rows is what the weights bring.

    JGR_DATA=FOLDER python -m benchmarks.quality_repeats_industrial   FOLDER holds amazon-industrial-minionerec
"""

from dataclasses import replace

from benchmarks import harness
from benchmarks.quality_counting import benchmark
from benchmarks.quality_informed_industrial import TASK as WITHOUT

TASK = replace(
    WITHOUT,
    name="informed-industrial_repeats",
    settings=(*WITHOUT.settings, "train.repeats=true"),
)

if __name__ == "__main__":
    harness.main(benchmark("quality_repeats_industrial", TASK))
