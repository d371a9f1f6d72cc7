# SPDX-License-Identifier: Apache-2.0
"""HSTU with weights for the history's items (train.repeats) against counting on Amazon Musical Instruments, LETTER's
version.

The settings are those of benchmarks/quality_repeats_sports.py, which were chosen on other sets. There are no texts, so
that items are learnt from their own events alone, which takes more passes over the users: as many as validation gains
from.

    JGR_DATA=FOLDER python -m benchmarks.quality_repeats_instruments      FOLDER holds amazon-instruments
"""

from dataclasses import replace

from benchmarks import harness
from benchmarks.quality_counting import benchmark
from benchmarks.quality_counting_instruments import TASK as WITHOUT
from benchmarks.quality_repeats_sports import TASK as CHOSEN

TASK = replace(
    WITHOUT,
    name="hstu-counting-instruments_repeats",
    config=CHOSEN.config,
    settings=(
        "train.max_items=50",
        "train.hidden=256",
        "train.temperature=0.04",
        "train.steps=2400",
        "train.evaluate_every=240",
        "train.repeats=true",
    ),
)

if __name__ == "__main__":
    harness.main(benchmark("quality_repeats_instruments", TASK))
