# SPDX-License-Identifier: Apache-2.0
"""What times are worth to HSTU on MovieLens 1M: the 2,999 users whose ratings have times here, with and without.

JGR_DATA=FOLDER python -m benchmarks.quality_hstu_times      FOLDER holds ml-1m
"""

from dataclasses import replace

from benchmarks import harness
from benchmarks.quality_hstu import TO_THE_END, Task, benchmark

# Half of the users: as many epochs as of all are half of the config's steps.
EPOCHS = (*TO_THE_END, "train.steps=8000")
ORDER = Task(
    name="hstu-ml1m-half",
    raw="ml-1m",
    config="hstu_ml1m",
    out="hstu_ml1m_half_order",
    source="movielens-1m-half",
    data="ml1m_half",
    settings=EPOCHS,
)
TIMES = replace(
    ORDER,
    name="hstu-ml1m-half-times",
    out="hstu_ml1m_half_times",
    settings=(*EPOCHS, "train.times=true"),
    baseline=ORDER.out,
)

if __name__ == "__main__":
    harness.main(benchmark("quality_hstu_times", ORDER, TIMES))
