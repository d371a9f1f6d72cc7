# SPDX-License-Identifier: Apache-2.0
"""HSTU by one recipe against counting on Amazon Sports and Outdoors.

JGR_DATA=FOLDER python -m benchmarks.quality_counting_sports      FOLDER holds amazon-sports
"""

from benchmarks import harness
from benchmarks.quality_counting import Task, benchmark

TASK = Task(
    name="hstu-counting-sports",
    raw="amazon-sports",
    source="amazon-sports",
    targets={"hr@10": 0.05, "ndcg@10": 0.03},
    fused_targets={"hr@10": 0.05, "ndcg@10": 0.03},
    published={"SASRec": (0.035, 0.0192), "TIGER": (0.04, 0.0225), "LC-Rec": (0.0422, 0.0226)},
)

if __name__ == "__main__":
    harness.main(benchmark("quality_counting_sports", TASK))
