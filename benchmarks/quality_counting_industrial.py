# SPDX-License-Identifier: Apache-2.0
"""HSTU by one recipe against counting on Amazon Industrial and Scientific: MiniOneRec's split.

JGR_DATA=FOLDER python -m benchmarks.quality_counting_industrial      FOLDER holds amazon-industrial-minionerec
"""

from benchmarks import harness
from benchmarks.quality_counting import Task, benchmark

TASK = Task(
    name="hstu-counting-industrial",
    raw="amazon-industrial-minionerec",
    exclude_history=False,
    targets={"hr@10": 0.15, "ndcg@10": 0.105},
    fused_targets={"hr@10": 0.15, "ndcg@10": 0.105},
    published={"SASRec": (0.1088, 0.0806), "HSTU": (0.1163, 0.0958), "LC-Rec": (0.1332, 0.0952)},
)

if __name__ == "__main__":
    harness.main(benchmark("quality_counting_industrial", TASK))
