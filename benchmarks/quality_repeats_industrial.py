# SPDX-License-Identifier: Apache-2.0
"""HSTU with weights for the history's items (train.repeats) against counting on Amazon Industrial and Scientific.

All else is as in benchmarks/quality_informed_industrial.py but for three settings that were chosen on validation users,
by ten trainings: twice the width, a lower temperature, and half the steps.

    JGR_DATA=FOLDER python -m benchmarks.quality_repeats_industrial   FOLDER holds amazon-industrial-minionerec
"""

from dataclasses import replace

from benchmarks import harness
from benchmarks.quality_counting import benchmark
from benchmarks.quality_informed_industrial import TASK as WITHOUT

TASK = replace(
    WITHOUT,
    name="informed-industrial_repeats",
    settings=(
        *WITHOUT.settings,
        "train.repeats=true",
        "train.hidden=256",
        "train.temperature=0.04",
        "train.steps=300",
    ),
)

if __name__ == "__main__":
    harness.main(benchmark("quality_repeats_industrial", TASK))
