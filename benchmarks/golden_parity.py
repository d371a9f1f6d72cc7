# SPDX-License-Identifier: Apache-2.0
"""How far the models and the beam search are from independent implementations: the largest error of every array.

The arrays are those of tests/golden/hf, made by Hugging Face transformers in float32, and of tests/golden/hstu, made by
the authors' own code in float32; tools/golden_parity.py and tools/hstu_parity.py say how each is reproduced, and the
tests assert on the same comparisons. Nothing is timed.

    python -m benchmarks.golden_parity [--quick]
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import Benchmark, Claim, Measured, Quiet, Row
from tools import golden_parity, hstu_golden, hstu_parity
from tools.golden_parity import Comparison

# Of each model its comparisons, and the target: what its golden set states for float32.
MODELS: dict[str, tuple[Callable[[], Iterable[Comparison]], float]] = {
    family: (functools.partial(golden_parity.comparisons, family), golden_parity.ATOL)
    for family in golden_parity.FAMILIES
}
MODELS["hstu"] = (
    lambda: itertools.chain.from_iterable(map(hstu_parity.comparisons, hstu_parity.FILES)),
    hstu_golden.ATOL,
)


def measure(quick: bool, quiet: Quiet) -> Measured:
    rows: list[Row] = []
    claims = []
    for model, (compare, target) in itertools.islice(MODELS.items(), 1 if quick else None):
        found = list(compare())
        rows += [{"model": model, "file": c.file, "array": c.array, "largest_error": c.error} for c in found]
        worst = harness.rounded(max(c.error for c in found), 2)
        claims.append(
            Claim(f"{model}-largest-error-of-{len(found)}-golden-arrays", worst, "", "lower", target)
        )
    return Measured(claims, rows)


if __name__ == "__main__":
    harness.main(
        Benchmark(
            name="golden_parity",
            measure=measure,
            packages=("numpy", "jax", "jaxlib"),
            sources=(
                Path(__file__),
                Path(golden_parity.__file__),
                Path(hstu_golden.__file__),
                Path(hstu_parity.__file__),
            ),
        )
    )
