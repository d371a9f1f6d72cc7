# SPDX-License-Identifier: Apache-2.0
"""HSTU that knows the items' texts, with weights for the history's items (train.repeats), against counting on Amazon
Sports and Outdoors.

The width and the temperature are those of benchmarks/quality_repeats_industrial.py, which validated best there; the
length of a history is Beauty's. Steps are six passes over the users; validation was best before the last of them ended.

    JGR_DATA=FOLDER python -m benchmarks.quality_repeats_sports      FOLDER holds amazon-sports
"""

from dataclasses import replace

from benchmarks import harness
from benchmarks.quality_counting import benchmark
from benchmarks.quality_informed_sports import TASK as WITHOUT

TASK = replace(
    WITHOUT,
    name="informed-sports_repeats",
    settings=(
        "train.max_items=50",
        "train.hidden=256",
        "train.temperature=0.04",
        "train.steps=1600",
        "train.evaluate_every=160",
        "train.repeats=true",
    ),
)

if __name__ == "__main__":
    harness.main(benchmark("quality_repeats_sports", TASK))
