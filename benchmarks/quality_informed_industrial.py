# SPDX-License-Identifier: Apache-2.0
"""HSTU that knows the items' texts, against counting on Amazon Industrial and Scientific: MiniOneRec's split.

Three settings are not configs/hstu_text.py's: twice the width, a lower temperature and half the steps validated best in
twelve trainings of the model of benchmarks/quality_repeats_industrial.py.

JGR_DATA=FOLDER python -m benchmarks.quality_informed_industrial      FOLDER holds amazon-industrial-minionerec
"""

from dataclasses import replace

from benchmarks import harness
from benchmarks.quality_counting import benchmark
from benchmarks.quality_counting_industrial import TASK as PLAIN

TASK = replace(
    PLAIN,
    name="informed-industrial",
    config="configs/hstu_text.py",
    texts=True,
    settings=("train.hidden=256", "train.temperature=0.04", "train.steps=300"),
)

if __name__ == "__main__":
    harness.main(benchmark("quality_informed_industrial", TASK))
