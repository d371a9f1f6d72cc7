# SPDX-License-Identifier: Apache-2.0
"""An HSTU as wide as gSASRec, as quality_hstu_whole.py measures that of its authors' width, and compared user by user.

JGR_DATA=FOLDER python -m benchmarks.quality_hstu_wide      FOLDER holds ml-1m
"""

from dataclasses import replace

from benchmarks import harness
from benchmarks.quality_hstu import TO_THE_END, WIDE, benchmark
from benchmarks.quality_hstu_whole import WHOLE

# By the order of events alone it is asked for what is published of the narrow one with times.
WIDE_WHOLE = replace(
    WHOLE,
    name="hstu-wide-ml1m-whole",
    out="hstu_wide_ml1m_whole",
    settings=(*TO_THE_END, *WIDE),
    targets={"hr@10": 0.3097, "ndcg@10": 0.1720},
    baseline=WHOLE.out,
)

if __name__ == "__main__":
    harness.main(benchmark("quality_hstu_wide", WIDE_WHOLE))
