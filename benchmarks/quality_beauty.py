# SPDX-License-Identifier: Apache-2.0
"""Recommendation quality on Amazon Beauty (2014, 5-core), asked of a running server over HTTP.

Leave-one-out, ranked among all 12,101 items; once with semantic ids of our own, once with a published table of ids
(CollisionGenRec's rkmeans_zcr_cf). Targets: SASRec as the S3-Rec repository publishes it (.0605 / .0318; trained there
with one negative an item), and TIGER's .0648 of its paper for the better of the two.

    JGR_DATA=FOLDER python -m benchmarks.quality_beauty      FOLDER holds amazon-beauty
"""

from benchmarks import harness
from benchmarks.quality import Quality, benchmark

PREPARE = ("prepare", "--source=amazon-beauty", "--raw={raw}", "--out={data}")
COUNTS = (131_413, 22_363, 22_363)
PUBLISHED = {"SASRec": (0.0605, 0.0318), "TIGER": (0.0648, 0.0384)}
BEAUTY = Quality(
    name="beauty",
    raw="amazon-beauty",
    counts=COUNTS,
    config="beauty.py",
    sasrec="sasrec_beauty.py",
    targets={"recall@10": 0.0605, "ndcg@10": 0.0318},
    published=PUBLISHED,
    exclude_history=True,
    prepare=(
        PREPARE,
        ("ids", "--data={data}", "--method=balanced", "--sizes=128,128,128", "--collisions=reassign"),
    ),
)
GIVEN = Quality(
    name="beauty-given-ids",
    raw="amazon-beauty",
    counts=COUNTS,
    config="beauty.py",
    sasrec="sasrec_beauty.py",
    targets={"recall@10": 0.0605, "ndcg@10": 0.0318},
    published=PUBLISHED,
    exclude_history=True,
    prepare=(
        PREPARE,
        ("ids", "--data={data}", "--table={raw}/item_sids.tsv.gz", "--column=rkmeans_zcr_cf"),
    ),
    settings=(
        "data.path=runs/data/beauty_given",
        "model.path=runs/beauty_given",
        "train.out=runs/beauty_given",
        "train.steps=1200",
    ),
)

if __name__ == "__main__":
    harness.main(benchmark("quality_beauty", __file__, BEAUTY, GIVEN))
