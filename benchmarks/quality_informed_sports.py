# SPDX-License-Identifier: Apache-2.0
"""HSTU that knows the items' texts, short ones of IDGenRec, against counting on Amazon Sports and Outdoors.

The steps are ten passes over the users, as on Beauty; all else is Beauty's.

    JGR_DATA=FOLDER python -m benchmarks.quality_informed_sports      FOLDER holds amazon-sports
"""

from dataclasses import replace

from benchmarks import harness
from benchmarks.quality_counting import benchmark
from benchmarks.quality_counting_sports import TASK as PLAIN

TASK = replace(
    PLAIN,
    name="informed-sports",
    config="configs/hstu_text.py",
    texts=True,
    settings=("train.max_items=50", "train.steps=2800", "train.evaluate_every=280"),
)
NEAR = replace(TASK, name="informed-sports_near", near=True)
"""The same with vectors of what was taken near the items, for who asks what they bring."""

if __name__ == "__main__":
    harness.main(benchmark("quality_informed_sports", TASK))
