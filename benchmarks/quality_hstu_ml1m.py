# SPDX-License-Identifier: Apache-2.0
"""HSTU on MovieLens 1M, the 3,416 movies of the SASRec papers: leave-one-out, without the items of the history.

JGR_DATA=FOLDER python -m benchmarks.quality_hstu_ml1m      FOLDER holds ml-1m
"""

from benchmarks import harness
from benchmarks.quality_hstu import WIDE, Task, benchmark

ML1M = Task(
    name="hstu-ml1m",
    raw="ml-1m",
    config="hstu_ml1m",
    out="hstu_ml1m",
    source="movielens-1m-sasrec",
    data="ml1m",
    settings=WIDE,
    targets={"hr@10": 0.3003, "ndcg@10": 0.1726},
    published={"SASRec": (0.2392, 0.1259), "gSASRec": (0.3003, 0.1726)},
)

if __name__ == "__main__":
    harness.main(benchmark("quality_hstu_ml1m", ML1M))
