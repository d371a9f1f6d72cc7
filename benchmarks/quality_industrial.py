# SPDX-License-Identifier: Apache-2.0
"""Recommendation quality on Amazon Industrial and Scientific, asked of a running server over HTTP.

Split, semantic ids and item texts are MiniOneRec's; all 4,533 test targets are predicted. Targets: TIGER as published
on this split (SASRec .1088 / .0806, HSTU .1163 / .0958, LC-Rec .1332 / .0952).

    JGR_DATA=FOLDER python -m benchmarks.quality_industrial      FOLDER holds amazon-industrial-minionerec
"""

from benchmarks import harness
from benchmarks.quality import Quality, benchmark

INDUSTRIAL = Quality(
    name="industrial",
    raw="amazon-industrial-minionerec",
    counts=(36_259, 4_532, 4_533),
    config="industrial.py",
    sasrec="sasrec_industrial.py",
    targets={"hr@10": 0.1321, "ndcg@10": 0.0908},
    published={
        "SASRec": (0.1088, 0.0806),
        "HSTU": (0.1163, 0.0958),
        "TIGER": (0.1321, 0.0908),
        "LC-Rec": (0.1332, 0.0952),
    },
    exclude_history=False,
)

if __name__ == "__main__":
    harness.main(benchmark("quality_industrial", __file__, INDUSTRIAL))
