# SPDX-License-Identifier: Apache-2.0
"""HSTU on MovieLens 1M by its authors' protocol (MODEL-11): all 3,706 movies; here by the order of events alone.

The published HSTU reads when the movie that is asked for was rated, which is known of half of the users here.

    JGR_DATA=FOLDER python -m benchmarks.quality_hstu_whole      FOLDER holds ml-1m
"""

from benchmarks import harness
from benchmarks.quality_hstu import TO_THE_END, Task, benchmark

WHOLE = Task(
    name="hstu-ml1m-whole",
    raw="ml-1m",
    config="hstu_ml1m",
    out="hstu_ml1m_whole",
    source="movielens-1m",
    data="ml1m_whole",
    settings=TO_THE_END,
    targets={"hr@10": 0.2853, "ndcg@10": 0.1603},
    published={"SASRec": (0.2853, 0.1603), "HSTU": (0.3097, 0.1720), "HSTU-large": (0.3294, 0.1893)},
)

if __name__ == "__main__":
    harness.main(benchmark("quality_hstu_whole", WHOLE))
