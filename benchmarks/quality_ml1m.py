# SPDX-License-Identifier: Apache-2.0
"""Recommendation quality on MovieLens 1M, asked of a running server over HTTP.

The 3,416 movies of the SASRec papers, leave-one-out, ranked among all movies, with semantic ids of our own. Targets:
SASRec as the gSASRec repository publishes it on this split (trained there with one negative an item).

    JGR_DATA=FOLDER python -m benchmarks.quality_ml1m      FOLDER holds ml-1m
"""

from benchmarks import harness
from benchmarks.quality import Quality, benchmark

ML1M = Quality(
    name="ml1m",
    raw="ml-1m",
    counts=(981_491, 6_040, 6_040),
    config="ml1m.py",
    sasrec="sasrec_ml1m.py",
    targets={"hr@10": 0.2392, "ndcg@10": 0.1259},
    published={"SASRec": (0.2392, 0.1259), "gSASRec": (0.3003, 0.1726)},
    exclude_history=True,
    prepare=(
        ("prepare", "--source=movielens-1m-sasrec", "--raw={raw}", "--out={data}"),
        ("ids", "--data={data}", "--method=balanced", "--sizes=64,64", "--collisions=reassign"),
    ),
)

if __name__ == "__main__":
    harness.main(benchmark("quality_ml1m", __file__, ML1M))
