# SPDX-License-Identifier: Apache-2.0
"""HSTU with weights for the history's items (train.repeats) against counting on Amazon Beauty, and against itself
without them.

The claims are of the convention that allows items of the history as answers, where a model that was taught nothing
about them loses; rows have both conventions of both models.

    JGR_DATA=FOLDER python -m benchmarks.quality_repeats_beauty      FOLDER holds amazon-beauty
"""

from dataclasses import replace

from benchmarks import harness
from benchmarks.harness import Measured, Quiet
from benchmarks.quality_counting import benchmark, measure
from benchmarks.quality_informed_beauty import TASK as WITHOUT

TASK = replace(
    WITHOUT,
    name="informed-beauty_repeats",
    exclude_history=False,
    targets={},
    fused_targets={},
    published={},
    settings=(*WITHOUT.settings, "train.repeats=true"),
)
NAME = "quality_repeats_beauty"


def both(quick: bool, quiet: Quiet) -> Measured:
    """The model with the weights and, for comparison, rows of the one without."""
    found = measure(TASK, quick)
    return Measured(found.claims, [*found.rows, *measure(WITHOUT, quick).rows])


BENCHMARK = replace(benchmark(NAME, TASK), measure=both)

if __name__ == "__main__":
    harness.main(BENCHMARK)
