# SPDX-License-Identifier: Apache-2.0
"""How far the decoders and the beam search are from an independent implementation: the largest error of every array.

The arrays are those of tests/golden/hf, made by Hugging Face transformers in float32; tools/golden_parity.py says how
each is reproduced, and the tests assert on the same comparisons. Nothing is timed.

    python -m benchmarks.golden_parity [--quick]
"""

from __future__ import annotations

from pathlib import Path

from benchmarks import harness
from benchmarks.harness import Benchmark, Claim, Measured, Quiet, Row
from tools import golden_parity

TARGET = 1e-4  # what the golden set states for float32


def measure(quick: bool, quiet: Quiet) -> Measured:
    rows: list[Row] = []
    claims = []
    for family in golden_parity.FAMILIES[: 1 if quick else None]:
        found = list(golden_parity.comparisons(family))
        rows += [{"model": family, "file": c.file, "array": c.array, "largest_error": c.error} for c in found]
        worst = harness.rounded(max(c.error for c in found), 2)
        claims.append(
            Claim(f"{family}-largest-error-of-{len(found)}-golden-arrays", worst, "", "lower", TARGET)
        )
    return Measured(claims, rows)


if __name__ == "__main__":
    harness.main(
        Benchmark(
            name="golden_parity",
            measure=measure,
            packages=("numpy", "jax", "jaxlib"),
            sources=(Path(__file__), Path(golden_parity.__file__)),
        )
    )
