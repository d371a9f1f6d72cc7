# SPDX-License-Identifier: Apache-2.0
"""HSTU-large as quality_hstu_whole.py measures HSTU, and compared with it user by user.

JGR_DATA=FOLDER python -m benchmarks.quality_hstu_large      FOLDER holds ml-1m
"""

from dataclasses import replace

from benchmarks import harness
from benchmarks.quality_hstu import benchmark
from benchmarks.quality_hstu_whole import WHOLE

LARGE = replace(
    WHOLE,
    name="hstu-large-ml1m-whole",
    config="hstu_large_ml1m",
    out="hstu_large_ml1m",
    baseline=WHOLE.out,
)

if __name__ == "__main__":
    harness.main(benchmark("quality_hstu_large", LARGE))
