# SPDX-License-Identifier: Apache-2.0
"""HSTU that knows the items' texts, against counting on Amazon Beauty.

JGR_DATA=FOLDER python -m benchmarks.quality_informed_beauty      FOLDER holds amazon-beauty
"""

from dataclasses import replace

from benchmarks import harness
from benchmarks.quality_counting import benchmark
from benchmarks.quality_counting_beauty import TASK as PLAIN

TASK = replace(
    PLAIN,
    name="informed-beauty",
    config="configs/hstu_text.py",
    texts=True,
    settings=("train.max_items=50", "train.steps=1800", "train.evaluate_every=150"),
)

if __name__ == "__main__":
    harness.main(benchmark("quality_informed_beauty", TASK))
