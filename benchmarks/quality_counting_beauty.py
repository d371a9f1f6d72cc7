# SPDX-License-Identifier: Apache-2.0
"""HSTU by one recipe against counting on Amazon Beauty.

JGR_DATA=FOLDER python -m benchmarks.quality_counting_beauty      FOLDER holds amazon-beauty
"""

from benchmarks import harness
from benchmarks.quality_counting import Task, benchmark

TASK = Task(
    name="hstu-counting-beauty",
    raw="amazon-beauty",
    source="amazon-beauty",
    targets={"hr@10": 0.09, "ndcg@10": 0.055},
    fused_targets={"hr@10": 0.09, "ndcg@10": 0.055},
    published={"SASRec": (0.0605, 0.0318), "TIGER": (0.0648, 0.0384)},
)

if __name__ == "__main__":
    harness.main(benchmark("quality_counting_beauty", TASK))
