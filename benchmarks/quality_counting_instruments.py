# SPDX-License-Identifier: Apache-2.0
"""HSTU by one recipe against counting on Amazon Musical Instruments, LETTER's version: a set that no recipe has seen.

The recipe is that of Beauty and Sports with nothing changed but the data. There are no texts. No target is set, since
the figures that we know of this split are quoted from memory; what is asked is whether it is above sequential rules.

    JGR_DATA=FOLDER python -m benchmarks.quality_counting_instruments      FOLDER holds amazon-instruments
"""

from benchmarks import harness
from benchmarks.quality_counting import Task, benchmark

TASK = Task(
    name="hstu-counting-instruments",
    raw="amazon-instruments",
    source="amazon-instruments",
)

if __name__ == "__main__":
    harness.main(benchmark("quality_counting_instruments", TASK))
