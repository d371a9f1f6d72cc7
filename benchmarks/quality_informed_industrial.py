# SPDX-License-Identifier: Apache-2.0
"""HSTU that knows the items' texts, against counting on Amazon Industrial and Scientific: MiniOneRec's split.

JGR_DATA=FOLDER python -m benchmarks.quality_informed_industrial      FOLDER holds amazon-industrial-minionerec
"""

from dataclasses import replace

from benchmarks import harness
from benchmarks.quality_counting import benchmark
from benchmarks.quality_counting_industrial import TASK as PLAIN

TASK = replace(PLAIN, name="informed-industrial", config="configs/hstu_text.py", texts=True)

if __name__ == "__main__":
    harness.main(benchmark("quality_informed_industrial", TASK))
