# SPDX-License-Identifier: Apache-2.0
"""HSTU on Amazon Industrial and Scientific: MiniOneRec's split, histories of ten items.

JGR_DATA=FOLDER python -m benchmarks.quality_hstu_industrial      FOLDER holds amazon-industrial-minionerec
"""

from benchmarks import harness
from benchmarks.quality_hstu import Task, benchmark

INDUSTRIAL = Task(
    name="hstu-industrial",
    raw="amazon-industrial-minionerec",
    config="hstu_industrial",
    out="hstu_industrial",
    exclude_history=False,
    targets={"hr@10": 0.1163, "ndcg@10": 0.0958},
    published={"SASRec": (0.1088, 0.0806), "HSTU": (0.1163, 0.0958)},
)

if __name__ == "__main__":
    harness.main(benchmark("quality_hstu_industrial", INDUSTRIAL))
